"""What decoding together waits for, the order it works in, what it says it held and what it leaves behind."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest

from engine import batch_decode
from engine.batch_decode import Request, decode_batch
from engine.draft_length import FixedDraftLength
from tests.engine import tiny
from tests.engine.batches import (
    CHOICES,
    COUNT,
    LENGTHS,
    SCRIPTED,
    classes_of,
    drafter_of,
    plain,
    prompt_of,
    run,
    target_of,
    tokens_of,
)
from tests.engine.cache.invariants import failing
from tests.engine.waits import Log, transfers


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize("draft_length", ["block 1", "block 8"])
@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "qwen3_next"])
def test_whoever_stops_listening_leaves_the_model_as_it_was(family: str, draft_length: str):
    target = target_of(family)
    before = classes_of(target.model)
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    for rounds_taken in (1, 4, 5, 6):
        rounds = decode_batch(
            target, drafter_of("dflash", family), requests, draft_length=CHOICES[draft_length]()
        )
        for _ in range(rounds_taken):
            next(rounds)
        rounds.close()
        assert classes_of(target.model) == before, f"after {rounds_taken} yields"
    found = run(family, "dflash", CHOICES[draft_length](), requests)
    assert [tokens_of(steps) for steps in found] == [plain(family, length) for length in LENGTHS]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("draft_length", ["block 1", "block 8"])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5"])
def test_an_exception_in_a_round_leaves_the_model_as_it_was(family: str, draft_length: str):
    target = target_of(family)
    before = classes_of(target.model)
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    for rounds_taken in (2, 4, 5):  # before a prompt, before a round, between rounds
        rounds = decode_batch(
            target, drafter_of("dflash", family), requests, draft_length=CHOICES[draft_length]()
        )
        for _ in range(rounds_taken):
            next(rounds)
        layer = target.model.layers[1]
        with failing(layer), pytest.raises(RuntimeError):
            list(rounds)
        assert classes_of(target.model) == before, f"after {rounds_taken} yields"
    assert tokens_of(run(family, "dflash", CHOICES[draft_length](), requests)[1]) == plain(family, LENGTHS[1])


@pytest.mark.slow
def test_an_unfinished_generator_gives_the_model_back():
    target = target_of("qwen3_5")
    before = classes_of(target.model)
    rounds = decode_batch(
        target, drafter_of("dflash", "qwen3_5"), [Request(prompt_of(3), 9)], draft_length=FixedDraftLength(4)
    )
    next(rounds)
    next(rounds)
    assert classes_of(target.model) != before
    del rounds
    gc.collect()
    assert classes_of(target.model) == before


def test_the_prompts_are_handed_out_one_by_one_and_rounds_as_one():
    requests = [Request(prompt_of(length), 12) for length in LENGTHS]
    rounds = list(decode_batch(target_of("gemma3_text"), None, requests))
    assert [[each.request for each in emitted] for emitted in rounds[:4]] == [[0], [1], [2], [3]]
    assert [[each.request for each in emitted] for emitted in rounds[4:]] == [[0, 1, 2, 3]] * 11


@pytest.mark.slow
def test_what_a_sequence_held_is_told_when_it_ends():
    counts = (12, 28, 1, 20)
    requests = [Request(prompt_of(length), count) for length, count in zip(LENGTHS, counts, strict=True)]
    found = run("gemma3_text", SCRIPTED, FixedDraftLength(8), requests)
    for steps in found:
        assert [each.share is not None for each in steps] == [False] * (len(steps) - 1) + [True]
        share = steps[-1].share
        assert share is not None
        assert share.classes == {"RaggedKV": 6}
        rings, full = 4 * (tiny.WINDOW + 8), 2 * 256  # positions a sequence
        assert share.nbytes == (rings + full) * 2 * 2 * 8 * 4  # keys and values, heads, width, bytes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("kind", ["dflash", "prompt-lookup", "autoregressive"])
def test_a_round_of_all_waits_once_for_one_transfer(kind: str, block: int, monkeypatch: pytest.MonkeyPatch):
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    log, seen = Log(monkeypatch), 0
    for emitted in decode_batch(
        target_of("gemma3_text"),
        drafter_of(kind, "gemma3_text"),
        requests,
        draft_length=FixedDraftLength(block),
    ):
        events = log.take()
        if all(each.step.round for each in emitted):
            own = len(emitted) if kind == "autoregressive" and block > 1 else 0  # drafts, known by then
            assert 1 <= transfers(events) <= 1 + own, events
            seen += 1
    assert seen > 5


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("kind", [None, "dflash", "prompt-lookup"])
def test_the_model_runs_for_prompts_and_once_a_round(kind: str | None, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    target = target_of("qwen3_5")  # not compiled: every forward calls it
    drafter, model = drafter_of(kind, "qwen3_5") if kind else None, type(target.model)
    real = model.__call__

    def call(self: Any, tokens: mx.array, *args: Any, **kwargs: Any) -> Any:
        calls.append(tokens.shape[1])
        return real(self, tokens, *args, **kwargs)

    monkeypatch.setattr(model, "__call__", call)
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    rounds = list(decode_batch(target, drafter, requests, draft_length=FixedDraftLength(8 if kind else 1)))
    prompts = [count for length in LENGTHS for count in (length - 1, 1) if count]
    blocks = [[each.step.round.block for each in emitted if each.step.round] for emitted in rounds]
    assert calls == [*prompts, *(max(of_each) for of_each in blocks if of_each)]


def test_plain_steps_are_launched_before_the_last_ones_are_read(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    launch, read = batch_decode.launch, batch_decode.read_tokens
    monkeypatch.setattr(batch_decode, "launch", lambda *trees: (events.append("launch"), launch(*trees))[1])
    monkeypatch.setattr(batch_decode, "read_tokens", lambda array: (events.append("read"), read(array))[1])
    requests = [Request(prompt_of(3), 12), Request(prompt_of(1), 7)]
    for _ in decode_batch(target_of("llama"), None, requests):
        events.append("yield")
    spell = events[2:]  # two prompts
    assert spell == ["launch", *["launch", "read", "yield"] * 10, "read", "yield"]


def test_the_next_drafts_are_launched_before_tokens_are_handed_out(monkeypatch: pytest.MonkeyPatch):
    proposals: list[int] = []
    drafter = drafter_of("dflash", "gemma3_text")
    propose = type(drafter).propose
    monkeypatch.setattr(
        type(drafter), "propose", lambda self, *given: (proposals.append(1), propose(self, *given))[1]
    )
    requests = [Request(prompt_of(3), 20), Request(prompt_of(1), 20)]
    rounds = decode_batch(target_of("gemma3_text"), drafter, requests, draft_length=FixedDraftLength(4))
    next(rounds), next(rounds)
    assert not proposals
    next(rounds)
    assert len(proposals) == 4  # of the round just handed out, and of the next one
    rounds.close()
