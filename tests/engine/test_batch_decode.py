"""Sequences decoded together get the tokens they would have got alone, and bad requests are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engine.batch_decode import Request, decode_batch
from engine.decode import decode
from engine.detokenize import text_of
from engine.draft_length import FixedDraftLength
from engine.errors import ConfigurationError, ModelError, PromptError
from engine.stops import Stops
from engine.target.loading import tokenizer_of
from engine.target.model import Target
from tests.engine import tiny
from tests.engine.batches import (
    CHOICES,
    COUNT,
    DRAFTERS,
    FAMILIES,
    LENGTHS,
    SCRIPTED,
    Silent,
    classes_of,
    drafter_of,
    gather,
    mostly_slow,
    plain,
    prompt_of,
    run,
    target_of,
    tokens_of,
)


@pytest.mark.sampled(56, 28)
@pytest.mark.parametrize(("family", "kind", "draft_length"), mostly_slow(FAMILIES, DRAFTERS, CHOICES))
def test_every_sequence_gets_the_tokens_it_gets_alone(family: str, kind: str, draft_length: str):
    before = classes_of(target_of(family).model)
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    found = run(family, kind, CHOICES[draft_length](), requests, chunk=5)
    for length, steps in zip(LENGTHS, found, strict=True):
        assert tokens_of(steps) == plain(family, length), f"the prompt of {length}"
        assert [each.step.finish for each in steps] == [None] * (len(steps) - 1) + ["length"]
    if kind == SCRIPTED and draft_length == "block 8":
        accepted = [[each.step.round.accepted for each in steps if each.step.round] for steps in found]
        assert len({tuple(row) for row in accepted}) == len(LENGTHS), "acceptance is not each one's own"
    assert classes_of(target_of(family).model) == before


@pytest.mark.sampled(12, 1)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_plain_steps_in_turn_change_nothing(family: str):
    requests = [Request(prompt_of(length), COUNT - 3 * i) for i, length in enumerate(LENGTHS)]
    found = run(family, SCRIPTED, tiny.Alternating(2, (1, 1, 1, 2, 6)), requests)
    for length, request, steps in zip(LENGTHS, requests, found, strict=True):
        assert tokens_of(steps) == plain(family, length)[: request.max_tokens]
    blocks = [each.step.round.block for steps in found for each in steps if each.step.round]
    assert blocks.count(1) > 4
    assert max(blocks) > 2


def test_a_plain_step_tells_its_cost_where_it_was_launched_during_the_one_before():
    class Noting(tiny.Alternating):
        told: ClassVar[list[float]] = []

        def record(self, block: int, accepted: Any, seconds: float, *_: object, **__: object) -> None:
            self.told.append(seconds)

    requests = [Request(prompt_of(length), 6) for length in LENGTHS]
    run("llama", SCRIPTED, Noting(1, (1,)), requests)
    first, *others = Noting.told
    assert first == 0.0  # in its time two forwards were launched
    assert len(others) > 1
    assert min(others) > 0.0


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5"])
def test_drafters_that_fall_silent_and_speak_again_change_nothing(family: str):
    requests = [Request(prompt_of(length), COUNT) for length in LENGTHS]
    found = gather(
        decode_batch(target_of(family), Silent(), requests, draft_length=FixedDraftLength(4)),
        len(requests),
    )
    assert [tokens_of(steps) for steps in found] == [plain(family, length) for length in LENGTHS]
    blocks = [each.step.round.block for steps in found for each in steps if each.step.round]
    assert blocks.count(1) > len(blocks) / 2
    assert max(blocks) == 4


@pytest.mark.sampled(16, 5)
@pytest.mark.parametrize(("family", "draft_length"), mostly_slow(FAMILIES, ("block 1", "block 8")))
def test_the_limit_of_each_is_exact(family: str, draft_length: str):
    drafter = drafter_of(SCRIPTED, family)
    for counts in (
        (1, 23, 7, 16),
        (9, 2, 22, 3),
        (4, 8, 5, 10),
        (13, 6, 19, 11),
        (12, 17, 15, 14),
        (18, 20, 21, 1),
    ):
        requests = [Request(prompt_of(length), count) for length, count in zip(LENGTHS, counts, strict=True)]
        rounds = decode_batch(target_of(family), drafter, requests, draft_length=CHOICES[draft_length]())
        for length, count, steps in zip(LENGTHS, counts, gather(rounds, 4), strict=True):
            assert tokens_of(steps) == plain(family, length)[:count]
            assert steps[-1].step.finish == "length"


@pytest.mark.sampled(7, 1)
@pytest.mark.parametrize(("family", "draft_length"), mostly_slow(FAMILIES, CHOICES))
def test_a_stop_token_ends_its_sequence_alone(family: str, draft_length: str):
    places = (0, 9, 17, 3)  # the first of them ends with its first token
    requests, expected = [], []
    for length, place in zip(LENGTHS, places, strict=True):
        truth = plain(family, length)
        requests.append(Request(prompt_of(length), COUNT, Stops({truth[place]})))
        expected.append(truth[: truth.index(truth[place]) + 1])
    found = run(family, SCRIPTED, CHOICES[draft_length](), requests)
    assert [tokens_of(steps) for steps in found] == expected
    assert [steps[-1].step.finish for steps in found] == ["stop"] * 4


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("draft_length", ["block 1", "block 8"])
def test_a_stop_string_ends_its_sequence_alone(tmp_path: Path, draft_length: str):
    tiny.save_tokenizer(tmp_path)
    tokenizer, family = tokenizer_of(tmp_path, None), "gemma3_text"

    def request(length: int, truth: list[int]) -> Request:
        readable = re.search("[!-~]{2}", text_of(tokenizer, truth, Stops())[3:])
        assert readable is not None
        return Request(prompt_of(length), COUNT, Stops((), (readable[0],), tokenizer))

    requests = [request(length, plain(family, length)) for length in LENGTHS]
    found = run(family, SCRIPTED, CHOICES[draft_length](), requests)
    for length, steps in zip(LENGTHS, found, strict=True):
        one = request(length, plain(family, length))
        alone = decode(target_of(family), None, one.prompt, max_tokens=COUNT, stops=one.stops)
        assert tokens_of(steps) == tokens_of(list(alone))
        assert len(tokens_of(steps)) < COUNT
        assert steps[-1].step.finish == "stop"


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("kind", [None, *DRAFTERS])
def test_one_sequence_is_a_batch_too(kind: str | None):
    draft_length = FixedDraftLength(8) if kind else FixedDraftLength(1)
    [steps] = run("gemma3_text", kind, draft_length, [Request(prompt_of(LENGTHS[1]), COUNT)])
    assert tokens_of(steps) == plain("gemma3_text", LENGTHS[1])


def test_a_batch_may_end_with_its_first_tokens():
    requests = [Request(prompt_of(length), 1) for length in LENGTHS]
    found = run("qwen3_5", "dflash", FixedDraftLength(8), requests)
    assert [tokens_of(steps) for steps in found] == [plain("qwen3_5", length)[:1] for length in LENGTHS]
    assert all(steps[0].share and steps[0].share.nbytes for steps in found)


@pytest.mark.slow
def test_the_same_prompt_may_be_there_several_times():
    requests = [Request(prompt_of(3), COUNT), Request(prompt_of(3), COUNT), Request(prompt_of(3), 11)]
    found = run("gemma3_text", "dflash", FixedDraftLength(4), requests)
    truth = plain("gemma3_text", 3)
    assert [tokens_of(steps) for steps in found] == [truth, truth, truth[:11]]


def test_bad_requests_are_refused_before_any_work():
    target = target_of("llama")
    with pytest.raises(ConfigurationError, match="nothing to decode"):
        next(decode_batch(target, None, []))
    with pytest.raises(PromptError, match="empty"):
        next(decode_batch(target, None, [Request([5], 3), Request([], 3)]))
    with pytest.raises(ConfigurationError, match="at least 1, not 0"):
        next(decode_batch(target, None, [Request([5], 0)]))
    with pytest.raises(ConfigurationError, match="block of 4 needs a drafter"):
        next(decode_batch(target, None, [Request([5], 3)], draft_length=FixedDraftLength(4)))


def test_a_model_whose_caches_cannot_be_merged_is_refused_by_name():
    from tests.engine.cache import models

    model = models.model("rwkv7")
    with pytest.raises(ModelError, match="rwkv7"):
        list(decode_batch(Target(model), None, [Request([5, 6], 3), Request([7], 3)]))
