"""The tokens are mlx-lm's: every family, every kind of drafter at work, every way to run the loop.

The slow part runs each drafter on each family, with the other settings chosen so that every two values of
any two settings meet somewhere. The fast part is a share of it with shorter texts, the exhaustive one is the
product.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import mlx.core as mx
import pytest

from engine.decode import Diagnosis, decode
from engine.draft_length import AdaptiveDraftLength, FixedDraftLength
from engine.drafters.base import Drafter
from engine.drafters.mtp import DEPTH
from engine.stops import Stops
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.families import FAMILIES, QUANTIZED
from tests.engine.identity import Tie, compare, measure, tokens_of
from tests.engine.random_drafters import KINDS, Helped, make

SCRIPTED = "scripted"
DRAFTERS = (*KINDS, SCRIPTED)
AUTO = 0  # as a block: the adaptive draft length
BLOCKS = (2, 8, 16, AUTO)
PROMPTS = (3, tiny.WINDOW, 21)  # below, at and beyond the window
SETTINGS: dict[str, tuple[Any, ...]] = {
    "right": (None, 0.6, 1.0),  # chance of a draft to be made true; None: the drafter as it is
    "block": BLOCKS,
    "length": PROMPTS,
    "compiled": (True, False),
    "single_graph": (False, True),
    "chunk": (5, 2048),
}
COUNT, LONG = 56, 128  # tokens of a fast run and of a slow one: seven and sixteen windows
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}
SHORT = 24  # tokens of a run in 16 bits, which the CPU is slow at; experts it cannot run at all


def prompt_of(length: int) -> tuple[int, ...]:
    random = tiny.seeded(length)
    return tuple(random.randrange(5, 60) for _ in range(length))


@cache
def target_of(family: str, variant: str = "") -> Target:
    """A target of the table; the variant is ``quantized``, or the name of a dtype."""
    model = families.build(family, variant == "quantized")
    if variant in DTYPES:
        model.set_dtype(DTYPES[variant])
        mx.eval(model.parameters())
    return Target(model)


@cache
def plain(family: str, length: int, variant: str = "", count: int = COUNT) -> list[int]:
    """mlx-lm's continuation of a prompt."""
    return tiny.plain_tokens(target_of(family, variant).model, prompt_of(length), count)


def known(count: int) -> int:
    """Tokens to decode plainly for a run of so many: few lengths, so that they are decoded once."""
    return next(length for length in (SHORT, COUNT, LONG) if count <= length)


@cache
def drafter_of(kind: str, family: str, variant: str = "") -> Drafter:
    """One drafter a target: starting over is part of what is tested."""
    return make(kind, target_of(family, variant))


def run(
    family: str,
    kind: str,
    variant: str = "",
    *,
    right: float | None = 0.6,
    block: int = 8,
    length: int = 21,
    count: int = COUNT,
    chunk: int = 2048,
    compiled: bool = True,
    single_graph: bool = False,
    **more: Any,
) -> list[Any]:
    """The steps of one decoding run."""
    prompt, target = prompt_of(length), target_of(family, variant)
    text = [*prompt, *plain(family, length, variant, known(count))]
    drafter: Any = tiny.ScriptedDrafter(text, 1 - (right or 0.0))
    if kind != SCRIPTED:
        drafter = drafter_of(kind, family, variant)
        drafter = drafter if right is None else Helped(drafter, text, right)
    draft_length = AdaptiveDraftLength(drafter.block_size) if block == AUTO else FixedDraftLength(block)
    diagnosis = Diagnosis(compiled=compiled, single_graph=single_graph)
    steps = decode(
        target,
        drafter,
        prompt,
        max_tokens=count,
        draft_length=draft_length,
        prefill_chunk=chunk,
        diagnosis=diagnosis,
        **more,
    )
    return list(steps)


def check(family: str, kind: str, variant: str = "", **settings: Any) -> Tie | None:
    """Run and compare; float32 leaves no excuse."""
    steps = run(family, kind, variant, **settings)
    length, count = settings.get("length", 21), settings.get("count", COUNT)
    truth = plain(family, length, variant, known(count))[:count]
    target = target_of(family, variant)
    tie = compare(target, prompt_of(length), truth, steps, settings.get("chunk", 2048))
    assert tie is None or variant in DTYPES, f"a tie of {tie} in float32"
    return tie


def pairs(row: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Every two settings of a run."""
    return set(combinations(sorted(row.items()), 2))


def chosen() -> list[dict[str, Any]]:
    """Each drafter on each family once, each time with the settings that meet the most others first."""
    random, seen = tiny.seeded(1), set[tuple[Any, ...]]()
    rows = []
    for family, kind in product(FAMILIES, DRAFTERS):
        draws = [{name: random.choice(values) for name, values in SETTINGS.items()} for _ in range(24)]
        combined = ({"family": family, "kind": kind, **draw} for draw in draws)
        row = max(combined, key=lambda row: len(pairs(row) - seen))
        seen |= pairs(row)
        rows.append(row)
    return rows


CHOSEN = chosen()


def label(row: dict[str, Any]) -> str:
    return "-".join(str(value) for value in row.values())


def test_every_two_settings_meet_in_some_run():
    axes = {"family": tuple(FAMILIES), "kind": DRAFTERS, **SETTINGS}
    wanted = {
        pair
        for (one, ones), (two, twos) in combinations(sorted(axes.items()), 2)
        for pair in product([(one, value) for value in ones], [(two, value) for value in twos])
    }
    assert wanted <= set().union(*(pairs(row) for row in CHOSEN))


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("row", CHOSEN[::28], ids=label)
def test_drafters_give_the_plain_tokens(row: dict[str, Any]):
    check(**row)


@pytest.mark.sampled(0, 24)
@pytest.mark.parametrize("row", CHOSEN, ids=label)
def test_every_drafter_on_every_family_gives_the_plain_tokens_far_past_the_window(row: dict[str, Any]):
    check(**row, count=LONG)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_drafter_on_every_family_with_every_block_on_both_sides_of_the_window(family: str, kind: str):
    for block, length, right in product(BLOCKS, (3, 21), (None, 0.7)):
        check(family, kind, block=block, length=length, right=right, count=LONG)


@pytest.mark.sampled(10, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_helped_drafts_are_confirmed_in_part_and_fully(kind: str):
    settings: dict[str, Any] = {"block": 8, "length": 21}
    some = [step.round for step in run("gemma3_text", kind, right=0.6, **settings) if step.round]
    every = [step.round for step in run("gemma3_text", kind, right=1.0, **settings) if step.round]
    assert any(0 < record.accepted < record.block - 1 for record in some if record.block > 2)
    assert all(record.accepted == record.block - 1 for record in every)
    assert max(record.block for record in every) == (1 + DEPTH if kind == "mtp" else 8)


LIMITS = [
    (count, family, DRAFTERS[(count + 4 * index) % len(DRAFTERS)])
    for count in range(1, 24)
    for index, family in enumerate(FAMILIES)
    if (count + index) % 12 == 0
]


@pytest.mark.sampled(27, 5)
@pytest.mark.parametrize(("count", "family", "kind"), LIMITS)
def test_the_limit_is_exact_inside_a_block(count: int, family: str, kind: str):
    for block in (8, AUTO):
        steps = run(family, kind, block=block, count=count, right=1.0)
        assert tokens_of(steps) == plain(family, 21)[:count]
        assert [step.finish for step in steps] == [None] * (len(steps) - 1) + ["length"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_limit_with_every_drafter(family: str, kind: str):
    for count in range(1, 24):
        steps = run(family, kind, count=count, right=0.9)
        assert (tokens_of(steps), steps[-1].finish) == (plain(family, 21)[:count], "length")


def stopped(family: str, kind: str, position: int, block: int) -> None:
    truth = plain(family, 21)
    end = truth.index(truth[position])
    steps = run(family, kind, block=block, right=0.9, stops=Stops({truth[position], tiny.EOS}))
    expected = truth[: min([end, *(i for i, token in enumerate(truth) if token == tiny.EOS)]) + 1]
    assert (tokens_of(steps), steps[-1].finish) == (expected, "stop")


STOPS = [
    (position, family, DRAFTERS[(index + 2 * turn) % len(DRAFTERS)])
    for turn, position in enumerate((0, 1, 3, 7, 8, 9, 15, 30))
    for index, family in enumerate(FAMILIES)
    if (turn + index) % 4 == 0
]


@pytest.mark.sampled(27, 5)
@pytest.mark.parametrize(("position", "family", "kind"), STOPS)
def test_a_stop_token_ends_the_text_inside_a_block(position: int, family: str, kind: str):
    stopped(family, kind, position, (8, 16)[position % 2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stop_token_anywhere_with_every_drafter(family: str, kind: str):
    for position, block in product(range(0, 20, 2), (2, 8, 16)):
        stopped(family, kind, position, block)


HALVES = [
    (family, variant, DRAFTERS[(3 * index + turn) % len(DRAFTERS)])
    for turn, variant in enumerate(DTYPES)
    for index, family in enumerate(("llama", "mistral", "qwen3", "gemma3_text", "qwen3_5"))
]


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize(("family", "variant", "kind"), HALVES)
def test_sixteen_bits_differ_at_ties_alone(family: str, variant: str, kind: str):
    check(family, kind, variant, right=0.7, count=SHORT)


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("family", QUANTIZED)
def test_quantized_weights_change_nothing_in_the_comparison(family: str):
    kind = DRAFTERS[QUANTIZED.index(family) % len(DRAFTERS)]
    check(family, kind, "quantized", right=0.7)


def test_a_difference_that_is_no_tie_is_told_with_its_margin():
    steps = run("llama", SCRIPTED)
    truth, target = plain("llama", 21)[:COUNT], target_of("llama")
    broken = [*truth[:20], truth[20] + 1, *truth[21:]]
    with pytest.raises(AssertionError, match=r"token 20 is .* apart, .* no tie"):
        compare(target, prompt_of(21), broken, steps)
    with pytest.raises(AssertionError, match=f"{COUNT} tokens, not {COUNT - 1}"):
        compare(target, prompt_of(21), truth[:-1], steps)


def test_a_tie_is_what_rounding_explains():
    truth, steps = plain("llama", 21), run("llama", SCRIPTED, right=0.7)
    tie = measure(target_of("llama"), prompt_of(21), truth[:20], steps, 2048)
    assert tie.place == 20
    assert 0 <= tie.error < 1e-3  # on some machines the same block rounds the same way
    assert not tie.explained
    rounded = replace(tie, error=1e-6)
    assert replace(rounded, gap=0.0).explained
    assert not replace(rounded, gap=1e-6).explained
