"""KV policies: what is left out, and the bits that the gate believes of the engine's codes."""

from __future__ import annotations

import pytest

from engine.cache.policy import parse_policy
from engine.errors import ConfigurationError
from evidence_format.policies import policy_of


@pytest.mark.parametrize(
    ("text", "layers", "values"),
    [
        ("affine", "all", ("4", "64")),
        ("rotated:3,128@full", "full", ("3", "128")),
        ("lattice", "inner:2", ("e8", "38")),
        ("lattice-packed:d4,2@1,3-4", "1,3-4", ("d4", "2")),
        ("sliding-bounded", "sliding", ("4", "64")),
        ("rotated:08/4,64", "all", ("8/4", "64")),
        ("affine:4/04,64", "all", ("4", "64")),
        ("auto", "inner:2", ("4",)),
        ("restored:noise:0,8", "full", ("0", "8")),
    ],
)
def test_what_is_left_out_is_the_default(text: str, layers: str, values: tuple[str, ...]) -> None:
    policy = parse_policy(text)
    assert (policy.layers, policy.values) == (layers, values)


def test_ranges_of_layers_are_counted_once_and_not_without_end() -> None:
    policy = parse_policy("affine@" + ",".join(["0-9999"] * 57))
    assert policy.numbers == frozenset(range(10_000))
    assert policy.numbers is policy.numbers
    assert policy_of("affine@" + ",".join(["0-9999"] * 58)) is None


@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256, 512])
@pytest.mark.parametrize(
    "text",
    [
        *(
            f"{kind}:{bits},{group}"
            for kind in ("affine", "rotated")
            for bits in (2, 8)
            for group in (32, 128)
        ),
        *("affine:8/2,64", "rotated:4/8,32", "lattice:e8,38/4", "lattice-packed:d4,2/8", "auto:2", "auto:7"),
        *(f"lattice:{lattice},{q}" for lattice in ("d4", "e8") for q in (1, 38, 127, 1023)),
        *(f"lattice-packed:{lattice},{bits}" for lattice in ("d4", "e8") for bits in (2, 5, 8)),
    ],
)
def test_the_bits_of_the_engines_codes_lie_within_the_gates_bounds(text: str, dim: int) -> None:
    policy = parse_policy(text)
    try:
        bits = sum(make(dim).bits_per_value() for make in policy.codecs) / 2
    except ConfigurationError:
        return  # no code of this kind for the dimension
    low, high = policy.stored_bits
    assert low <= bits <= high
