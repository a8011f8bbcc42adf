"""Log-probabilities of the tokens are a plain forward's, whatever is drafted and where it is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.transaction import new_caches
from engine.decode import Processor, Step, decode
from engine.draft_length import FixedDraftLength
from engine.drafters.prompt_lookup import PromptLookup
from engine.errors import ConfigurationError
from engine.sampling import Sampler, Sampling
from engine.stops import Stops
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.test_decode_processors import PROCESSORS
from tests.engine.waits import Log, transfers

PROMPT = [7, 8, 9, 50, 7, 8, 60, 70, 9, 50, 7]
COUNT, TOP = 30, 4
DRAFTED = ("llama", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_5")
CHOICES: dict[str, Callable[[], Any]] = {
    "plain": lambda: FixedDraftLength(1),
    "blocks": lambda: FixedDraftLength(6),
    "seams": lambda: tiny.Alternating(3),
}


@cache
def target_of(family: str) -> Target:
    return Target(families.build(family))


def one_at_a_time(family: str, tokens: Sequence[int], processors: Sequence[Processor]) -> list[list[float]]:
    """Log-softmax before each of the tokens after PROMPT, by forwards of one token."""
    model = target_of(family).model
    caches = new_caches(model, 1)
    logits = model(mx.array([PROMPT]), cache=caches)[:, -1]
    rows = []
    for count, token in enumerate(tokens):
        for processor in processors:
            logits = processor(mx.array([*PROMPT, *tokens[:count]]), logits)
        rows.append((logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0].tolist())
        logits = model(mx.array([[token]]), cache=caches)[:, -1]
    return rows


def assert_plain(steps: Sequence[Step], family: str, processors: Sequence[Processor] = ()) -> None:
    """Every token of the steps has its record, and it is that of a plain forward."""
    tokens = [token for step in steps for token in step.tokens]
    records = [record for step in steps for record in step.logprobs or ()]
    assert [len(step.logprobs or ()) for step in steps] == [len(step.tokens) for step in steps]
    assert [record.token for record in records] == tokens
    for record, row in zip(records, one_at_a_time(family, tokens, processors), strict=True):
        assert record.logprob == pytest.approx(row[record.token], abs=1e-4)
        assert [value for _, value in record.top] == pytest.approx(
            sorted((value for value in row if value > -mx.inf), reverse=True)[:TOP], abs=1e-4
        )
        assert all(value == pytest.approx(row[index], abs=1e-4) for index, value in record.top)


def run(family: str, drafter: Any, **more: Any) -> list[Step]:
    return list(decode(target_of(family), drafter, PROMPT, max_tokens=COUNT, logprobs=TOP, **more))


@pytest.mark.sampled(10, 8)
@pytest.mark.parametrize("name", [None, "all"])
@pytest.mark.parametrize("draft_length", CHOICES)
@pytest.mark.parametrize("family", DRAFTED)
def test_each_token_has_the_log_probability_of_a_plain_forward(
    family: str, draft_length: str, name: str | None
):
    processors = PROCESSORS[name]() if name else []
    truth = [
        token
        for step in decode(target_of(family), None, PROMPT, max_tokens=COUNT, processors=processors)
        for token in step.tokens
    ]
    drafter = tiny.ScriptedDrafter(PROMPT + truth, 0.3)
    steps = run(family, drafter, draft_length=CHOICES[draft_length](), processors=processors)
    assert [token for step in steps for token in step.tokens] == truth
    assert_plain(steps, family, processors)


@pytest.mark.parametrize("draft_length", CHOICES)
def test_drawn_tokens_have_the_log_probability_before_temperature_and_filters(draft_length: str):
    sampler = Sampler(Sampling(temperature=0.5, top_p=0.9, seed=4))
    assert_plain(run("llama", PromptLookup(), draft_length=CHOICES[draft_length](), sampler=sampler), "llama")


@pytest.mark.parametrize("position", [0, 2, 5, 9])
def test_a_block_cut_at_a_stop_has_records_for_what_is_left(position: int):
    truth = tiny.plain_tokens(target_of("llama").model, PROMPT, COUNT)
    steps = run(
        "llama",
        tiny.ScriptedDrafter(PROMPT + truth),
        draft_length=FixedDraftLength(8),
        stops=Stops({truth[position]}),
    )
    assert steps[-1].finish == "stop"
    assert_plain(steps, "llama")


def test_none_are_worked_out_unless_asked_for():
    assert {step.logprobs for step in decode(target_of("llama"), None, PROMPT, max_tokens=4)} == {None}
    [step] = decode(target_of("llama"), None, PROMPT, max_tokens=1, logprobs=0)
    assert step.logprobs is not None
    assert step.logprobs[0].top == ()


@pytest.mark.parametrize("draft_length", ["plain", "blocks"])
def test_they_come_with_the_rounds_one_transfer(draft_length: str, monkeypatch: pytest.MonkeyPatch):
    truth = tiny.plain_tokens(target_of("llama").model, PROMPT, COUNT)
    drafter = tiny.ScriptedDrafter(PROMPT + truth, hidden_states=())
    log = Log(monkeypatch)
    steps = decode(
        target_of("llama"),
        drafter,
        PROMPT,
        max_tokens=COUNT,
        logprobs=TOP,
        draft_length=CHOICES[draft_length](),
    )
    next(steps)
    log.take()
    for _ in steps:
        assert transfers(log.take()) == 1


def test_a_wrong_number_is_refused_before_any_work():
    with pytest.raises(ConfigurationError, match="logprobs must be from 0 to 20, not 21"):
        next(decode(target_of("llama"), None, PROMPT, max_tokens=4, logprobs=21))
