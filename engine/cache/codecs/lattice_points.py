"""Closest points of the lattices D4, D8 and E8, without bounds and within them.

    D_n = {x in Z^n: the sum of x is even}        E8 = D8 and D8 + ½ together

The closest point of D_n rounds every coordinate; where the sum comes out odd, the coordinate that was
rounded furthest goes the other way (Conway and Sloane, "Fast quantizing and decoding algorithms for lattice
quantizers and codes", 1982). The closest point of E8 is the nearer of those of its two cosets, on a tie the
integer one.

Cutting such a point off at a bound afterwards leaves the lattice: the sum turns odd, or a coordinate of the
half coset becomes whole. `closest_within` cuts off first and then turns the coordinate that costs least among
those that may turn.
"""

import mlx.core as mx

BLOCK = {"d4": 4, "e8": 8}
"""Coordinates of a point of each lattice."""


def closest(lattice: str, values: mx.array) -> mx.array:
    """Closest points of a lattice to float32 values [..., n], n its block."""
    if lattice == "d4":
        return _closest_even(values)
    whole = _closest_even(values)
    half = _closest_even(values - 0.5) + 0.5
    nearer = _squared(values - whole) <= _squared(values - half)
    return mx.where(nearer, whole, half)


def closest_within(lattice: str, values: mx.array, bound: int) -> tuple[mx.array, mx.array]:
    """Closest points of a lattice with coordinates within ±q, those of the half coset within ±(q + ½).

    Args:
        lattice: ``d4`` or ``e8``.
        values: float32 [..., n], n its block.
        bound: q, at least 1.

    Returns:
        The coordinates less the lowest of their coset, whole numbers from 0, float32 [..., n]: a point is
        that less q, and less another ½ in the half coset. And whether it is one of that coset, bool [..., 1].
    """
    whole = _even_within(values, -bound, bound)
    if lattice == "d4":
        return whole + bound, mx.zeros((*values.shape[:-1], 1), dtype=mx.bool_)
    shifted = values - 0.5
    half = _even_within(shifted, -bound - 1, bound)
    is_half = _squared(shifted - half) < _squared(values - whole)
    return mx.where(is_half, half + (bound + 1), whole + bound), is_half


def _closest_even(values: mx.array) -> mx.array:
    """Closest points of D_n, as far from the origin as need be."""
    near = mx.round(values)
    rest = values - near
    turned = near + mx.where(rest >= 0, 1.0, -1.0)
    return mx.where(_is_odd(near) & _first(mx.argmax(mx.abs(rest), -1, keepdims=True), rest), turned, near)


def _even_within(values: mx.array, low: int, high: int) -> mx.array:
    """Closest points of D_n with coordinates low … high, both in Z."""
    near = mx.clip(mx.round(values), low, high)
    rest = values - near
    # A step of ±1 away from the rounded coordinate makes its squared error 1 ∓ 2·rest larger.
    up = mx.where(near < high, 1 - 2 * rest, mx.inf)
    down = mx.where(near > low, 1 + 2 * rest, mx.inf)
    turned = near + mx.where(up <= down, 1.0, -1.0)
    cheapest = _first(mx.argmin(mx.minimum(up, down), -1, keepdims=True), rest)
    return mx.where(_is_odd(near) & cheapest, turned, near)


def _is_odd(points: mx.array) -> mx.array:
    """Whether the sum of each point is odd, bool [..., 1]."""
    total = mx.sum(points, -1, keepdims=True)
    return total != 2 * mx.round(total / 2)


def _first(index: mx.array, values: mx.array) -> mx.array:
    """An index [..., 1] along the last axis of values as bool [..., n]."""
    return mx.arange(values.shape[-1], dtype=index.dtype) == index


def _squared(difference: mx.array) -> mx.array:
    return mx.sum(mx.square(difference), -1, keepdims=True)
