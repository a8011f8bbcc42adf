"""KV policies as the gate reads them are those that the engine can be given."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.evidence.policies import parse_policy
from engine.cache.policy import KINDS
from engine.cache.policy import parse_policy as engines
from engine.errors import ConfigurationError

NAMES = [
    "native",
    "sliding-bounded",
    "sink-window",
    "affine",
    "rotated",
    "lattice",
    "lattice-packed",
    "restored",
]
VALUES = [
    "4,64",
    "0,1",
    "8,32",
    "7,64",
    "4,48",
    "e8,38",
    "d4,5",
    "e8,9",
    "e9,5",
    "04,064",
    "4",
    "4,64,1",
    "-1,64",
    "",
]
LAYERS = ["all", "full", "sliding", "inner:2", "inner:", "2,5", "2-6", "1,3-4", "2-", "every", "٣", ""]


@pytest.mark.parametrize(
    ("text", "layers", "values"),
    [
        ("affine", "all", ("4", "64")),
        ("rotated:3,128@full", "full", ("3", "128")),
        ("lattice", "inner:2", ("e8", "38")),
        ("lattice-packed:d4,2@1,3-4", "1,3-4", ("d4", "2")),
        ("sliding-bounded", "sliding", ("4", "64")),
        ("restored:noise:0,8", "full", ("0", "8")),
    ],
)
def test_what_is_left_out_is_the_default(text: str, layers: str, values: tuple[str, str]) -> None:
    policy = parse_policy(text)
    assert policy is not None
    assert (policy.layers, policy.values) == (layers, values)


def test_ranges_of_layers_are_counted_once_and_not_without_end() -> None:
    policy = parse_policy("affine@" + ",".join(["0-9999"] * 57))
    assert policy is not None
    assert policy.numbers == frozenset(range(10_000))
    assert policy.numbers is policy.numbers
    assert parse_policy("affine@" + ",".join(["0-9999"] * 58)) is None


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    source=st.sampled_from(["", ":exact", ":learned", ":zeros", ":noise", ":magic"]),
    values=st.none() | st.sampled_from(VALUES),
    layers=st.none() | st.sampled_from(LAYERS),
)
def test_engine_and_gate_read_every_text_alike(
    name: str, source: str, values: str | None, layers: str | None
) -> None:
    text = name + source + ("" if values is None else f":{values}") + ("" if layers is None else f"@{layers}")
    ours = parse_policy(text)
    try:
        theirs = engines(text)
    except ConfigurationError:
        assert ours is None
        return
    assert ours is not None
    assert (ours.kind, ours.values, ours.layers, ours.source) == (
        theirs.kind,
        theirs.values,
        theirs.layers,
        theirs.source,
    )
    assert parse_policy(theirs.spec) == ours
    assert ours.coded == theirs.coded


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
        *(f"lattice:{lattice},{q}" for lattice in ("d4", "e8") for q in (1, 38, 127, 1023)),
        *(f"lattice-packed:{lattice},{bits}" for lattice in ("d4", "e8") for bits in (2, 5, 8)),
    ],
)
def test_the_bits_of_the_engines_codes_lie_within_the_gates_bounds(text: str, dim: int) -> None:
    policy, made = parse_policy(text), engines(text)
    make = KINDS[made.kind].codec
    assert policy is not None
    assert make is not None
    try:
        bits = make(made.values, dim).bits_per_value()
    except ConfigurationError:
        return  # no code of this kind for the dimension
    low, high = policy.stored_bits
    assert low <= bits <= high
