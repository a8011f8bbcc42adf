"""What a round costs: waits, transfers, forwards; and what it leaves at a yield."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

from engine import decode as loop
from engine import session as state
from engine.decode import Diagnosis, Step, decode
from engine.device import read_tail
from engine.draft_length import FixedDraftLength
from engine.drafters import autoregressive
from engine.session import Session
from engine.stops import Stops
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.families import FAMILIES
from tests.engine.identity import tokens_of
from tests.engine.random_drafters import KINDS, Helped, make
from tests.engine.waits import Log, transfers

PROMPT = [7, 8, 9, 50, 60, 70, 80, 90, 100, 110, 120, 130]
COUNT = 40


@cache
def target_of(family: str) -> Target:
    return Target(families.build(family))


@cache
def plain(family: str) -> list[int]:
    return tiny.plain_tokens(target_of(family).model, PROMPT, 64)


def helped(kind: str, family: str, right: float = 0.6) -> Helped:
    return Helped(make(kind, target_of(family)), [*PROMPT, *plain(family)], right)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


def per_step(log: Log, steps: Iterator[Step]) -> list[tuple[Step, list[str]]]:
    """Steps with what happened on the way to each."""
    log.take()
    return [(step, log.take()) for step in steps]


def test_the_log_sees_mlx_s_ways_to_wait_and_the_engine_s_own(log: Log):
    value = mx.array([1.0]) + 1
    ways = (
        mx.eval,
        mx.async_eval,
        mx.array.item,
        mx.array.tolist,
        bool,
        float,
        int,
        state.wait,
        loop.wait_for,
    )
    for wait in ways:
        log.take()
        wait(value)
        assert log.take(), wait


@pytest.mark.sampled(18, 8)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_waits_once_for_one_transfer(kind: str, compiled: bool, log: Log):
    family = "gemma3_text"
    diagnosis = Diagnosis(compiled=compiled)
    drafter = helped(kind, family)
    list(
        decode(
            target_of(family),
            drafter,
            PROMPT,
            max_tokens=COUNT,
            draft_length=FixedDraftLength(8),
            diagnosis=diagnosis,
        )
    )
    steps = decode(
        target_of(family),
        drafter,
        PROMPT,
        max_tokens=COUNT,
        draft_length=FixedDraftLength(8),
        diagnosis=diagnosis,
    )
    rounds = [(step, events) for step, events in per_step(log, steps) if step.round]
    assert len(rounds) > 5
    for step, events in rounds:
        own = int("autoregressive" in kind and step.round.block > 1)  # its drafts, known by then
        assert 1 <= transfers(events) <= 1 + own, events


def test_stages_are_told_apart_by_one_wait_a_block(log: Log):
    """The wait that other rounds do without, so the log would see it there."""
    drafter, diagnosis = helped("dflash", "llama"), Diagnosis(stage_times=True)
    steps = decode(
        target_of("llama"),
        drafter,
        PROMPT,
        max_tokens=COUNT,
        draft_length=FixedDraftLength(8),
        diagnosis=diagnosis,
    )
    blocks = [events for step, events in per_step(log, steps) if step.round and step.round.block > 1]
    assert len(blocks) > 5
    assert {events.count("wait_for") for events in blocks} == {1}


def test_the_reads_of_a_drafting_model_wait_for_nothing(monkeypatch: pytest.MonkeyPatch):
    """Its drafts are read after the verdict on them, so they have been computed."""
    order: list[str] = []
    for module, name in ((loop, "verdict"), (autoregressive, "drafts")):
        real = module.read_tokens

        def read(array: mx.array, real: Any = real, name: str = name) -> Any:
            order.append(name)
            return real(array)

        monkeypatch.setattr(module, "read_tokens", read)
    drafter = helped("autoregressive", "llama")
    list(decode(target_of("llama"), drafter, PROMPT, max_tokens=COUNT, draft_length=FixedDraftLength(8)))
    assert order[0] == "verdict"
    assert ("verdict", "drafts") in set(pairwise(order))
    assert ("drafts", "drafts") not in set(pairwise(order))


def test_draft_and_verify_are_two_graphs_or_one(log: Log):
    drafter = helped("dflash", "llama", right=1.0)
    list(
        decode(target_of("llama"), drafter, PROMPT, max_tokens=COUNT, draft_length=FixedDraftLength(8))
    )  # masks are made once
    launched = {}
    for single in (False, True):
        diagnosis = Diagnosis(single_graph=single)
        steps = decode(
            target_of("llama"),
            drafter,
            PROMPT,
            max_tokens=COUNT,
            draft_length=FixedDraftLength(8),
            diagnosis=diagnosis,
        )
        rounds = [events for step, events in per_step(log, steps) if step.round and not step.finish]
        launched[single] = {events.count("async_eval") for events in rounds[1:]}  # the first has two drafts
    assert launched == {False: {2}, True: {1}}  # draft and verify; both at once


def test_the_next_draft_is_launched_before_tokens_are_handed_out(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    drafter = helped("dflash", "llama")
    propose, launch, read = drafter.propose, loop.launch, loop.read_tokens

    def proposed(*args: Any) -> Any:
        order.append("propose")
        return propose(*args)

    def launched(*trees: Any) -> None:
        order.append("launch")
        launch(*trees)

    def transferred(array: mx.array) -> list[int]:
        order.append("read")
        return read(array)

    monkeypatch.setattr(drafter, "propose", proposed)
    monkeypatch.setattr(loop, "launch", launched)
    monkeypatch.setattr(loop, "read_tokens", transferred)
    for step in decode(
        target_of("llama"), drafter, PROMPT, max_tokens=COUNT, draft_length=FixedDraftLength(8)
    ):
        order.append("handed out" if step.finish is None else "the end")
    first, *rest = " ".join(order).split("handed out")
    assert "propose" not in first  # the first token comes before any draft
    assert rest[0].split() == ["propose", "launch", "launch", "read", "propose", "launch"]
    assert {tuple(part.split()) for part in rest[1:-1]} == {("launch", "read", "propose", "launch")}
    assert rest[-1].split() == ["launch", "read", "the", "end"]  # nothing is drafted in vain


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of all forwards of sessions."""
    lengths: list[int] = []
    real = Session.forward

    def forward(self: Session, tokens: mx.array) -> Any:
        lengths.append(tokens.shape[1])
        return real(self, tokens)

    monkeypatch.setattr(Session, "forward", forward)
    return lengths


@pytest.mark.sampled(20, 1)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_forward_beyond_prompt_and_rounds(family: str, forwards: list[int]):
    steps = list(
        decode(
            target_of(family),
            helped("dflash", family),
            PROMPT,
            max_tokens=COUNT,
            draft_length=FixedDraftLength(8),
            prefill_chunk=4,
        )
    )
    rounds = [step.round for step in steps if step.round]
    assert forwards == [4, 4, 3, 1, *(record.block for record in rounds)]
    assert tokens_of(steps) == plain(family)[:COUNT]


@pytest.mark.slow
def test_the_model_itself_is_called_no_more_often(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    target, kind = target_of("qwen3_5"), type(target_of("qwen3_5").model)
    real = kind.__call__

    def call(self: Any, tokens: mx.array, *args: Any, **kwargs: Any) -> Any:
        calls.append(tokens.shape[1])
        return real(self, tokens, *args, **kwargs)

    drafter = helped("prompt-lookup+dflash", "qwen3_5")
    monkeypatch.setattr(kind, "__call__", call)
    steps = list(decode(target, drafter, PROMPT, max_tokens=COUNT, draft_length=FixedDraftLength(8)))
    assert calls == [len(PROMPT) - 1, 1, *(step.round.block for step in steps if step.round)]


def test_plain_steps_run_one_forward_a_token_and_one_ahead_at_a_stop(forwards: list[int]):
    target, truth = target_of("llama"), plain("llama")
    list(decode(target, None, PROMPT, max_tokens=COUNT))
    assert forwards == [len(PROMPT) - 1] + [1] * COUNT
    forwards.clear()
    end = truth.index(truth[20])
    list(decode(target, None, PROMPT, max_tokens=COUNT, stops=Stops({truth[20]})))
    assert forwards == [len(PROMPT) - 1] + [1] * (end + 2)  # launched before the stop was known


@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("family", "kind"), list(zip(FAMILIES, [*KINDS, None] * 2, strict=False)))
def test_a_caller_may_leave_at_any_yield_and_go_on_later(
    family: str, kind: str | None, compiled: bool, forwards: list[int]
):
    target, truth = target_of(family), plain(family)
    drafter = helped(kind, family) if kind else None
    block = 5 if kind else 1
    with Session(target, drafter, headroom=block, compiled=compiled) as session:
        emitted: list[int] = []
        for leave_after in (1, 2, 3, 1, 4, 2):
            held = bool(emitted)
            forwards.clear()
            steps = decode(
                target,
                drafter,
                [*PROMPT, *emitted],
                max_tokens=64,
                draft_length=FixedDraftLength(block),
                session=session,
            )
            for _, step in zip(range(leave_after), steps, strict=False):
                emitted += step.tokens
                assert session.tokens == [*PROMPT, *emitted[:-1]]
                assert session.transaction.uncached == 0
            steps.close()
            assert emitted == truth[: len(emitted)]
            if held:  # nothing is computed again
                assert forwards[0] == 1
                assert max(forwards) <= block
        assert len(emitted) >= 13


@pytest.mark.parametrize("block", [1, 6])
def test_the_forward_runs_while_processors_read_the_tokens_before_their_row(
    block: int, monkeypatch: pytest.MonkeyPatch
):
    """What is read was launched (L) before the forward, and that before the first row is read (R)."""
    order: list[str] = []
    launch = loop.launch

    def launched(*trees: Any) -> None:
        order.append("L")
        launch(*trees)

    def reading(tokens: mx.array, logits: mx.array) -> mx.array:
        order.append("R")
        assert read_tail(tokens, 0)[: len(PROMPT)] == PROMPT
        return logits

    monkeypatch.setattr(loop, "launch", launched)
    drafter = helped("dflash", "llama", right=1.0)
    processors = [reading]
    list(
        decode(
            target_of("llama"),
            drafter,
            PROMPT,
            max_tokens=14,
            draft_length=FixedDraftLength(block),
            processors=processors,
        )
    )
    prompt, plain_step, round_ = "LLRL", "LLRL", "LLLR{6}L"  # tokens, forward, rows, verdict; a draft first
    wanted = f"{prompt}({plain_step}){{13}}" if block == 1 else f"{prompt}({round_})+({plain_step})?"
    assert re.fullmatch(wanted, "".join(order)), order
