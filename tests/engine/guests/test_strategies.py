"""Each way of handing caches over, and that nothing is left of it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from engine.errors import GenerationError
from engine.guests.base import ForeignEngine
from engine.guests.strategies import STRATEGIES, UnusableStrategyError, attribute, instance, keyword, replaced
from tests.engine import families, tiny
from tests.engine.guests import small

BARE = ForeignEngine("bare", "m", "nothing", lambda *_: small.Loop(None), drafter=False, trims=False)
NAMED = ForeignEngine(
    "named",
    "m",
    "nothing",
    lambda *_: small.Loop(None),
    drafter=False,
    trims=False,
    keyword="kv",
    makers=((small.__name__, "make_caches"),),
)


@pytest.fixture
def model() -> Any:
    return tiny.build("llama")  # it has no make_cache


def test_the_order_is_from_the_most_open_door_to_none():
    assert list(STRATEGIES) == ["keyword", "instance", "attribute", "native"]


def test_a_keyword_gets_the_caches_in_a_list_of_its_own(model):
    caches = [KVCache()]
    with keyword(NAMED, model, caches) as named:
        assert named == {"kv": caches}
        named["kv"].clear()
    assert len(caches) == 1
    with pytest.raises(UnusableStrategyError, match="bare takes no caches"), keyword(BARE, model, caches):
        pass


def test_an_instance_hands_out_once_even_where_it_had_no_make_cache(model):
    caches, before = [KVCache()], dict(vars(model))
    with instance(BARE, model, caches):
        assert make_prompt_cache(model)[0] is caches[0]
        with pytest.raises(GenerationError, match="bare made caches for more than one sequence"):
            make_prompt_cache(model)
    assert vars(model) == before
    assert len(make_prompt_cache(model)) == 3


def test_an_instance_with_a_make_cache_of_its_own_gets_it_back(model):
    def own() -> list[Any]:
        return ["its own"]

    model.make_cache = own
    for broken in (False, True):
        entered = instance(BARE, model, [KVCache()])
        entered.__enter__()
        assert make_prompt_cache(model) != ["its own"]
        error = KeyboardInterrupt() if broken else None
        with suppress(KeyboardInterrupt):
            entered.__exit__(type(error) if error else None, error, None)
        assert vars(model)["make_cache"] is own


def test_the_class_is_not_touched(gemma):
    before = dict(vars(type(gemma)))
    with instance(BARE, gemma, [KVCache()]):
        assert dict(vars(type(gemma))) == before
        assert len(make_prompt_cache(tiny.build())) == 6
    assert "make_cache" not in vars(gemma)


def test_nested_ones_are_undone_one_by_one(model):
    outer, inner = [KVCache()], [KVCache()]
    with instance(BARE, model, outer):
        with instance(BARE, model, inner):
            assert make_prompt_cache(model)[0] is inner[0]
        assert make_prompt_cache(model)[0] is outer[0]
    assert "make_cache" not in vars(model)
    original = small.make_caches
    with attribute(NAMED, model, outer):
        with attribute(NAMED, model, inner):
            assert small.make_caches(model)[0] is inner[0]
        assert small.make_caches(model)[0] is outer[0]
    assert small.make_caches is original


def test_a_text_model_inside_is_asked_too():
    model = families.build("gemma4")
    caches = [KVCache()]
    with instance(BARE, model, caches):
        assert model.language_model.make_cache()[0] is caches[0]
    assert "make_cache" not in vars(model.language_model) | vars(model)


def test_a_maker_serves_this_model_alone_and_comes_back(model):
    caches, other, original = [KVCache()], tiny.build("qwen3"), small.make_caches
    with attribute(NAMED, model, caches):
        assert len(small.make_caches(other)) == 3
        assert small.make_caches(model=model)[0] is caches[0]
    assert small.make_caches is original


def test_a_method_can_be_the_maker(model):
    engine = ForeignEngine(
        "m",
        "m",
        "",
        lambda *_: small.Loop(None),
        drafter=False,
        trims=False,
        makers=((__name__, "Maker.make"),),
    )
    before = vars(Maker)["make"]
    with attribute(engine, model, ["ours"]):
        assert Maker().make(model) == ["ours"]
        assert Maker().make("another") == "made"
    assert vars(Maker)["make"] is before


class Maker:
    def make(self, model: Any) -> str:
        return "made"


def test_a_maker_that_is_not_there_is_said(model):
    with pytest.raises(UnusableStrategyError, match="makes caches by no name"), attribute(BARE, model, []):
        pass
    gone = ForeignEngine(
        "g", "m", "", lambda *_: small.Loop(None), drafter=False, trims=False, makers=((__name__, "gone"),)
    )
    with (
        pytest.raises(UnusableStrategyError, match=r"g has no .*test_strategies\.gone"),
        attribute(gone, model, []),
    ):
        pass


def test_replaced_takes_away_what_was_not_there():
    owner = Maker()
    with replaced(owner, "make", 1):
        assert owner.make == 1
    assert not vars(owner)
