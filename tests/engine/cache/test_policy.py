"""What a ``--kv`` text says, and which layers of a model it changes."""

from __future__ import annotations

import pytest

from engine.cache.coded import CodedKV
from engine.cache.policy import NATIVE, parse_policy
from engine.cache.ring import SlidingRing
from engine.errors import ConfigurationError
from tests.engine import families, tiny

PLAIN, SLIDING = "KVCache", "SlidingRing"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("native", "native"),
        ("full-kv", "full-kv"),
        ("sliding-bounded", "sliding-bounded:4,64@sliding"),
        ("sink-window", "sink-window:4,64@all"),
        ("sink-window:0,8", "sink-window:0,8@all"),
        ("affine", "affine:4,64@all"),
        ("affine:08,128@full", "affine:8,128@full"),
        ("rotated:3,32@inner:1", "rotated:3,32@inner:1"),
        ("lattice", "lattice:e8,38@inner:2"),
        ("lattice:d4,152@2-4,7", "lattice:d4,152@2-4,7"),
        ("lattice-packed", "lattice-packed:e8,5@inner:2"),
        ("restored:noise", "restored:noise:4,64@full"),
        ("restored:exact:0,16@3", "restored:exact:0,16@3"),
    ],
)
def test_a_text_is_read_with_its_defaults_written_out(text, spec):
    assert parse_policy(text).spec == spec
    assert parse_policy(spec) == parse_policy(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is none of native"),
        ("kivi", "'kivi' is none of native"),
        ("Affine", "'Affine' is none of"),
        ("native:1", "takes nothing"),
        ("native@all", "takes nothing"),
        ("full-kv:4", "full-kv takes nothing"),
        ("full-kv@sliding", "full-kv takes nothing"),
        ("affine:4", "takes two values"),
        ("affine:", "takes two values"),
        ("affine:4,64,1", "takes two values"),
        ("affine:7,64", "not 7"),
        ("affine:8/7,64", "not 7"),
        ("rotated:8/4/2,64", "neither a number nor two"),
        ("rotated:8/,64", "'' is no whole number"),
        ("sink-window:4/2,64", "'4/2' is no whole number"),
        ("auto:4,64", "takes one value"),
        ("auto:9", "not 9"),
        ("auto:4/2", "'4/2' is no whole number"),
        ("affine:4,48", "not 48"),
        ("affine:-4,64", "'-4' is no whole number"),
        ("affine:4.0,64", "'4.0' is no whole number"),
        ("affine:٤,64", "is no whole number"),
        ("lattice:e7,38", "'e7' is no lattice"),
        ("lattice:e8,0", "not 0"),
        ("lattice:e8,99999", "not 99999"),
        ("lattice-packed:e8,9", "not 9"),
        ("sink-window:4,0", "not 0"),
        ("sink-window:99999999,4", "'99999999' is no whole number"),
        ("restored", "'' is no source"),
        ("restored:guess", "'guess' is no source"),
        ("restored:exact:4", "takes two values"),
        ("affine@", "'' names no layers"),
        ("sink-window:2,8@0", "share a mask"),
        ("affine@inner:04", "names no layers"),
        ("sliding-bounded:2,8@inner:1", "not @inner:1"),
        ("affine@some", "'some' names no layers"),
        ("affine@inner", "'inner' names no layers"),
        ("affine@1,,2", "names no layers"),
    ],
)
def test_what_is_no_policy_is_refused_with_the_part_that_is_wrong(text, says):
    with pytest.raises(ConfigurationError, match=r"^--kv ") as refusal:
        parse_policy(text)
    assert says in str(refusal.value)


def layers(text: str, family: str = "gemma3_text", head_dim: int = 32, headroom: int = 4) -> list[str]:
    """What the caches of a model's layers are under a policy: a class, and for codes C and its stores'."""
    caches = parse_policy(text).new_caches(families.build(family, head_dim=head_dim), headroom)
    return [
        f"C{type(cache.stores[0]).__name__}" if type(cache) is CodedKV else type(cache).__name__
        for cache in caches
    ]


def test_a_policy_changes_the_layers_it_names_and_no_others():
    native = layers("native")
    assert set(native) == {PLAIN, SLIDING}
    assert len(native) == 6
    coded = [f"C{name}" for name in native]
    assert layers("sliding-bounded:1,64") == native  # their own window is narrower
    assert layers("full-kv") == ["WindowedKV" if name == SLIDING else name for name in native]
    assert layers("sink-window:1,4") == [SLIDING] * 6
    assert layers("affine") == coded
    assert layers("affine@full") == [f"C{name}" if name == PLAIN else name for name in native]
    assert layers("rotated@sliding") == [f"C{name}" if name == SLIDING else name for name in native]
    assert layers("affine@inner:2") == [*native[:2], *coded[2:4], *native[4:]]
    assert layers("affine@0,2-3") == [coded[0], native[1], *coded[2:4], *native[4:]]
    assert layers("restored:zeros") == ["RestoredKV" if name == PLAIN else name for name in native]


def test_boundary_layers_shrink_until_a_layer_is_left_between_them():
    for outer in (3, 50):
        assert sum(name.startswith("C") for name in layers(f"affine@inner:{outer}")) == 2


def test_bounds_are_those_asked_for_unless_the_layer_sees_less():
    model = families.build("gemma3_text")
    for cache in parse_policy("sink-window:3,100").new_caches(model, 4):
        own = cache.window == tiny.WINDOW
        assert (cache.sink, cache.window) == ((0, tiny.WINDOW) if own else (3, 100))
    for cache in parse_policy("sliding-bounded:2,5").new_caches(model, 4):
        assert type(cache) is not SlidingRing or (cache.sink, cache.window) == (2, 5)


@pytest.mark.parametrize(
    ("text", "family", "says"),
    [
        ("sliding-bounded", "llama", "applies to no layer"),
        ("full-kv", "llama", "applies to no layer"),
        ("affine@9", "llama", "layer 9 is no attention layer"),
        ("affine@0", "qwen3_5", "layer 0 is no attention layer"),
        ("restored:exact@all", "gemma3_text", "slides"),
    ],
)
def test_layers_a_model_does_not_have_are_refused(text, family, says):
    with pytest.raises(ConfigurationError, match=says):
        parse_policy(text).new_caches(families.build(family), 4)


def test_recurrent_layers_keep_their_state_under_every_policy():
    for text in ("sink-window:1,4", "affine@all"):
        names = layers(text, "qwen3_5")
        assert "ArraysCache" in names
        assert set(names) - {"ArraysCache"}


def test_the_native_policy_chooses_no_layer():
    assert NATIVE.chosen_layers(families.build("llama")) == []
