"""Points of D4 and E8 in exactly b bits a coordinate: eight coordinates to b bytes.

    word = u0 | u1 << b | … | u7 << 7b        0 <= u < 2^b; of the 64 bits the b low bytes are kept

The coordinates of an E8 point, counted from the lowest of its coset, have an even sum. So the lowest bit of
u7 follows from the lowest bits of the other seven; the coset stands in its place.
"""

import mlx.core as mx

WORD = 8  # coordinates of a word, and its bytes before it is cut


def pack(codes: mx.array, bits: int, is_half: mx.array | None = None) -> mx.array:
    """Pack coordinates.

    Args:
        codes: whole numbers 0 … 2^bits - 1 of any type, [..., W, 8].
        bits: b, 2 … 8.
        is_half: for E8, whether a point is of the half coset, bool [..., W, 1].

    Returns:
        uint8 [..., W·b].
    """
    codes = codes.astype(mx.uint64)
    word = codes[..., :1]
    for place in range(1, WORD):
        word = word | (codes[..., place : place + 1] << _number(place * bits))
    if is_half is not None:
        spare = (WORD - 1) * bits
        word = (word & ~_number(1 << spare)) | (is_half.astype(mx.uint64) << _number(spare))
    kept = word.view(mx.uint8)[..., :bits]
    return kept.reshape(*kept.shape[:-2], kept.shape[-2] * bits)


def unpack(packed: mx.array, bits: int, *, cosets: bool) -> tuple[mx.array, mx.array | None]:
    """The coordinates, and for E8 whether a point is of the half coset, as given to `pack`.

    Args:
        packed: uint8 [..., W·b].
        bits: b.
        cosets: whether the words say so.

    Returns:
        uint64 [..., W, 8], and bool [..., W, 1] or None.
    """
    kept = packed.reshape(*packed.shape[:-1], packed.shape[-1] // bits, bits)
    word = mx.pad(kept, [(0, 0)] * (kept.ndim - 1) + [(0, WORD - bits)]).view(mx.uint64)
    is_half = None
    if cosets:
        spare = (WORD - 1) * bits
        coset = word >> _number(spare) & _number(1)
        is_half = coset.astype(mx.bool_)
        parity = word & _number(sum(1 << place * bits for place in range(WORD - 1)))
        for step in (4, 2, 1):  # fold the seven lowest bits onto the first
            parity = parity ^ (parity >> _number(step * bits))
        word = word ^ (((parity ^ coset) & _number(1)) << _number(spare))
    shifts = mx.arange(0, WORD * bits, bits, dtype=mx.uint64)
    return word >> shifts & _number((1 << bits) - 1), is_half


def _number(value: int) -> mx.array:
    return mx.array(value, dtype=mx.uint64)
