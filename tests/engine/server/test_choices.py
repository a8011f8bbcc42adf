"""Several choices of one request: prompts, `n`, `best_of`; and prompts that are echoed."""

from __future__ import annotations

import json
import time
from typing import Any

import mlx.core as mx
import openai
import pytest
import requests

from engine.decode import decode
from engine.logprobs import Logprobs
from engine.server.sequence import prefill_with_logprobs
from engine.session import Session
from engine.target.loading import SHIPPED_TARGET, LoadedTarget, load_target
from tests.engine.server import by_heart
from tests.engine.server.conftest import KEY, Running
from tests.engine.server.test_openai_client import LIST, PROMPT, asked, completed

PROMPTS = [PROMPT, "def sort_by(self", "import os\n"]
DRAWN = {"temperature": 1.0, "seed": 11, "max_tokens": 12}


def texts(reply: Any) -> list[str]:
    assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
    return [choice.text for choice in reply.choices]


def streamed(chunks: Any) -> dict[int, str]:
    """The text of each choice; each has one end, and the stream has one too."""
    found: dict[int, str] = {}
    ends: list[int] = []
    for chunk in (chunks := list(chunks)):
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            found[choice.index] = found.get(choice.index, "") + (text or "")
            ends += [choice.index] if choice.finish_reason else []
    assert sorted(ends) == sorted(found)
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk for chunk in chunks if "x_kakeya" in chunk.model_extra] == chunks[-1:]
    return found


@pytest.mark.slow
def test_several_prompts_give_the_texts_of_each_alone(client: openai.OpenAI):
    alone = [completed(client, prompt=prompt, max_tokens=12) for prompt in PROMPTS]
    whole = completed(client, prompt=PROMPTS, max_tokens=12)
    assert texts(whole) == [reply.choices[0].text for reply in alone]
    assert whole.usage.prompt_tokens == sum(reply.usage.prompt_tokens for reply in alone)
    assert whole.usage.completion_tokens == sum(reply.usage.completion_tokens for reply in alone)
    found = streamed(completed(client, prompt=PROMPTS, max_tokens=12, stream=True))
    assert [found[index] for index in range(3)] == texts(whole)
    assert whole.x_kakeya["verify_rounds"] == sum(
        choice.x_kakeya["verify_rounds"] for choice in whole.choices
    )


@pytest.mark.slow
def test_prompts_of_token_ids_are_the_same_prompts(client: openai.OpenAI):
    fields = {"max_tokens": 12, "extra_body": {"return_token_ids": True}}
    whole = completed(client, prompt=PROMPTS, **fields)
    ids = [choice.x_kakeya["prompt_token_ids"] for choice in whole.choices]
    assert texts(completed(client, prompt=ids, **fields)) == texts(whole)


@pytest.mark.slow
def test_choices_come_behind_one_another_prompt_by_prompt(client: openai.OpenAI):
    alone = [texts(completed(client, prompt=prompt, n=3, **DRAWN)) for prompt in PROMPTS[:2]]
    assert len({text for found in alone for text in found}) > 3
    whole = completed(client, prompt=PROMPTS[:2], n=3, **DRAWN)
    assert texts(whole) == [*alone[0], *alone[1]]
    found = streamed(completed(client, prompt=PROMPTS[:2], n=3, stream=True, **DRAWN))
    assert [found[index] for index in range(6)] == texts(whole)


@pytest.mark.slow
def test_the_first_choice_has_the_seed_itself(client: openai.OpenAI):
    one = texts(completed(client, **DRAWN))
    three = texts(completed(client, n=3, **DRAWN))
    assert three[:1] == one
    assert len(set(three)) > 1
    assert texts(completed(client, n=3, **DRAWN)) == three


@pytest.mark.slow
def test_a_chat_has_several_choices_too(client: openai.OpenAI):
    whole = asked(client, n=2, temperature=1.0, seed=3, max_tokens=20)
    assert [choice.index for choice in whole.choices] == [0, 1]
    alone = asked(client, temperature=1.0, seed=3, max_tokens=20)
    assert whole.choices[0].message.content == alone.choices[0].message.content
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    options = {"include_usage": True}
    chunks = list(
        asked(client, n=2, temperature=1.0, seed=3, max_tokens=20, stream=True, stream_options=options)
    )
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], whole.usage.total_tokens)
    assert streamed(chunks) == {choice.index: choice.message.content for choice in whole.choices}


@pytest.mark.slow
def test_tools_and_reasoning_are_told_apart_in_every_choice(client: openai.OpenAI):
    first = [{"role": "user", "content": by_heart.ASKED}]
    fields: dict[str, Any] = {"model": "heart", "messages": first, "tools": [by_heart.WEATHER], "n": 2}
    for choice in asked(client, **fields).choices:
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    calls = [
        (choice.index, call.function.name)
        for chunk in asked(client, stream=True, **fields)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
        if call.id  # its first delta
    ]
    assert sorted(calls) == [(0, "weather"), (1, "weather")]


@pytest.mark.slow
def test_best_of_returns_the_choices_whose_tokens_were_likeliest(client: openai.OpenAI):
    def mean(choice: Any) -> float:
        # greedy text ends with a stop token seldom, and a drawn one of so few tokens not at all
        return float(sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs))

    every = completed(client, n=4, logprobs=0, **DRAWN).choices
    expected = sorted(every, key=mean, reverse=True)[:2]
    best = completed(client, n=2, logprobs=0, **DRAWN, best_of=4)
    assert texts(best) == [choice.text for choice in expected]
    assert best.usage.completion_tokens == 48
    silent = completed(client, n=2, **DRAWN, best_of=4)
    assert texts(silent) == texts(best)
    assert silent.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 129}, "n", "128"),
        ({"n": 3, "best_of": 2}, "best_of", "less than n 3"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"prompt": ["a"] * 9, "n": 16}, "prompt", "more than 128"),
        ({"prompt": ["a"] * 129}, "prompt", "128"),
        ({"prompt": [[1], [99999]]}, "prompt", "99999"),
    ],
)
def test_too_many_choices_are_refused_by_name(client: openai.OpenAI, fields: Any, param: str, says: str):
    with pytest.raises(openai.BadRequestError) as caught:
        completed(client, **fields)
    assert caught.value.param == param
    assert says in str(caught.value)


@pytest.mark.slow
def test_a_client_that_leaves_ends_all_choices(server: Running, client: openai.OpenAI):
    def active() -> float:
        lines = requests.get(
            f"{server.url.removesuffix('/v1')}/metrics",
            headers={"authorization": f"Bearer {KEY}"},
            timeout=30,
        ).text.splitlines()
        return float(next(line for line in lines if line.startswith("kakeya_requests_admitted ")).split()[1])

    endless = {"max_tokens": 300, "extra_body": {"ignore_eos": True}, "stream": True, "n": 8}
    with completed(client, **endless) as stream:
        next(iter(stream))
        assert active() == 1
    until = time.monotonic() + 20
    while active() and time.monotonic() < until:
        time.sleep(0.1)
    assert active() == 0


# --- echo -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_echoed_prompt_comes_first_with_its_log_probabilities(client: openai.OpenAI):
    plain = completed(client, logprobs=2, max_tokens=5).choices[0]
    reply = completed(client, logprobs=2, max_tokens=5, echo=True)
    choice, told = reply.choices[0], reply.choices[0].logprobs
    assert choice.text == PROMPT + plain.text
    count = reply.usage.prompt_tokens
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == count + 5
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    assert all(value <= 0 for value in told.token_logprobs[1:])
    assert told.tokens[count:] == plain.logprobs.tokens
    assert told.token_logprobs[count:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    assert told.text_offset[0] == 0
    assert told.text_offset == sorted(told.text_offset)
    assert told.text_offset[count:] == [len(PROMPT) + at for at in plain.logprobs.text_offset]
    spans = zip(told.text_offset, [*told.text_offset[1:], None], strict=True)
    assert [choice.text[begin:end] for begin, end in spans][1:] == told.tokens[1:]
    chunks = list(completed(client, logprobs=2, max_tokens=5, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [at for part in parts for at in part.text_offset] == told.text_offset
    assert [value for part in parts for value in part.token_logprobs][1:] == pytest.approx(
        told.token_logprobs[1:], abs=1e-4
    )


def test_echo_needs_neither_log_probabilities_nor_an_answer(client: openai.OpenAI):
    text = completed(client, max_tokens=4).choices[0].text
    assert texts(completed(client, max_tokens=4, echo=True)) == [PROMPT + text]
    reply = completed(client, max_tokens=0, echo=True, logprobs=1)
    assert (texts(reply), reply.choices[0].finish_reason) == ([PROMPT], "length")
    assert (reply.usage.completion_tokens, len(reply.choices[0].logprobs.tokens)) == (
        0,
        reply.usage.prompt_tokens,
    )
    silent = completed(client, max_tokens=0)
    assert (texts(silent), silent.choices[0].finish_reason) == ([""], "length")
    assert silent.usage.completion_tokens == 0
    chunks = list(completed(client, max_tokens=0, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT


@pytest.mark.slow
def test_an_echo_is_the_same_whatever_was_cached(client: openai.OpenAI):
    def values() -> Any:
        reply = completed(client, max_tokens=0, echo=True, logprobs=0)
        assert reply.usage.prompt_tokens_details.cached_tokens == 0
        return reply.choices[0].logprobs.token_logprobs[1:]

    completed(client)
    first = values()
    completed(client)
    assert values() == pytest.approx(first, abs=1e-6)


def loglikelihoods(server: Running, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """As lm-eval's `local-completions` asks for them and reads the answer."""
    sent = {
        "model": "demo",
        "prompt": [context + continuation for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = requests.post(f"{server.url}/completions", json=sent, headers=headers, timeout=60).json()
    found = []
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    for (context, _), choice in zip(pairs, choices, strict=True):
        told = choice["logprobs"]
        values = told["token_logprobs"][len(context) : -1]
        tops = told["top_logprobs"][len(context) : -1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), greedy))
    return found


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target(SHIPPED_TARGET)


def exact(target: LoadedTarget, tokens: list[int]) -> list[list[float]]:
    """Log-probabilities of all tokens behind each, by mlx-lm's own forward without a cache."""
    model: Any = target.target.model
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    values: Any = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    return values  # type: ignore[no-any-return]


def test_lm_evals_loglikelihood_is_that_of_mlx_lms_forward(server: Running, target: LoadedTarget):
    context = [int(token) for token in target.tokenizer.encode(PROMPT)]
    step = next(iter(decode(target.target, None, context, max_tokens=1)))
    likely = [*step.tokens]
    eos = [min(target.stops)]  # a continuation behind which nothing comes
    pairs = [(context, likely), (context, [11, 12, 13]), (context[:1], context[1:]), (context, likely + eos)]
    for (before, after), (value, greedy) in zip(pairs, loglikelihoods(server, pairs), strict=True):
        rows = exact(target, before + after)[len(before) - 1 : -1]
        assert value == pytest.approx(
            sum(row[token] for row, token in zip(rows, after, strict=True)), abs=2e-3
        )
        assert greedy == all(row[token] == max(row) for row, token in zip(rows, after, strict=True))


def test_a_record_of_the_prompt_is_that_of_the_generated_token(target: LoadedTarget):
    """In chunks of any size, and as the loop reports the same tokens."""
    prompt = [int(token) for token in target.tokenizer.encode(PROMPT)]
    steps = list(decode(target.target, None, prompt, max_tokens=20, logprobs=3))
    tokens = prompt + [token for step in steps for token in step.tokens]
    generated = [record for step in steps for record in step.logprobs or ()]
    for size in (4, 128):
        records = []
        with Session(target.target, None, headroom=1) as session:
            last = len(tokens) - 1
            for begin in range(0, last, size):
                end = min(begin + size, last)
                records += prefill_with_logprobs(
                    session, tokens, begin, end, Logprobs(3, target.target.vocab_size)
                )
        assert [record.token for record in records] == tokens[1:]
        for record, other in zip(records[len(prompt) - 1 :], generated, strict=True):
            assert record.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in record.top] == [token for token, _ in other.top]


@pytest.mark.slow
def test_an_echo_of_coded_keys_and_values_is_theirs(client: openai.OpenAI):
    def values(model: str) -> Any:
        return completed(client, model=model, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs

    native, coded = values("demo"), values("demo@rotated4")
    assert native.tokens == coded.tokens
    assert native.token_logprobs != coded.token_logprobs
    with pytest.raises(openai.InternalServerError) as caught:
        completed(client, model="guest", max_tokens=0, echo=True, logprobs=0)
    assert caught.value.param == "echo"


def test_the_chat_of_a_client_of_ours_is_what_it_was(client: openai.OpenAI):
    reply = json.loads(asked(client, messages=LIST, max_tokens=3).model_dump_json(exclude_none=True))
    assert "x_kakeya" not in reply["choices"][0]
