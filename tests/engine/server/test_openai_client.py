"""What OpenAI's own client sees of the server: answers, streams, tools, schemas, and errors as exceptions."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import jsonschema
import openai
import pytest

from engine.target.loading import SHIPPED_TARGET
from tests.engine.server import by_heart
from tests.engine.server.conftest import KEY, Running

LIST = [{"role": "user", "content": "Make a numbered list of: table, window, river."}]
PROMPT = "class BaseProject:"


def asked(client: openai.OpenAI, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": "demo", "messages": LIST, "max_tokens": 60} | fields
    return client.chat.completions.create(**given)


def completed(client: openai.OpenAI, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 40} | fields
    return client.completions.create(**given)


def test_a_chat_completion_has_text_usage_and_how_it_came_about(client: openai.OpenAI):
    reply = asked(client, extra_body={"block": 4})  # what `auto` does depends on the clock
    choice, usage, how = reply.choices[0], reply.usage, reply.x_kakeya
    assert choice.message.content.startswith("Here is the list:")
    assert choice.finish_reason == "stop"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert how["speculation"]
    assert how["why_off"] is None
    assert how["acceptance_length"] > 1
    assert (how["model"], how["kv_channel"], how["drafter"]) == ("demo", "native", "prompt-lookup+dflash")


def test_a_stream_gives_the_same_text_and_ends_with_how_it_came_about(client: openai.OpenAI):
    whole = asked(client)
    for options in (None, {}, {"include_usage": False}, {"include_usage": True}):
        chunks = list(asked(client, stream=True, stream_options=options, extra_body={"block": 4}))
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(parts) == whole.choices[0].message.content
        assert len(parts) > 2  # the role, text, the end
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[-1].x_kakeya["speculation"]
        assert not any(hasattr(chunk, "x_kakeya") for chunk in chunks[:-1])


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("ask", [asked, completed], ids=["chat", "text"])
def test_a_stream_tells_the_usage_where_it_is_asked_for_and_nowhere_else(client: openai.OpenAI, ask: Any):
    whole = ask(client)
    for options in (None, {}, {"include_usage": False}):
        chunks = list(ask(client, stream=True, stream_options=options))
        assert not any("usage" in chunk.model_fields_set for chunk in chunks), options
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    *before, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert not any(chunk.usage for chunk in before)


@pytest.mark.slow
def test_a_stream_comes_while_the_text_is_made(client: openai.OpenAI):
    endless = {"max_tokens": 200, "logit_bias": {"2": -100, "7": -100}, "extra_body": {"block": 1}}
    began = time.monotonic()
    times = [time.monotonic() - began for _ in completed(client, stream=True, **endless)]
    assert len(times) > 8
    assert times[0] < times[-1] / 2


@pytest.mark.slow
def test_text_completions_stream_too(client: openai.OpenAI):
    whole = completed(client)
    chunks = list(completed(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


@pytest.mark.slow
def test_a_prompt_of_token_ids_is_the_same_prompt(client: openai.OpenAI):
    whole = completed(client, extra_body={"return_token_ids": True})
    tokens = whole.x_kakeya["prompt_token_ids"]
    assert completed(client, prompt=tokens).choices[0].text == whole.choices[0].text
    assert len(whole.x_kakeya["token_ids"]) == whole.usage.completion_tokens


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("stop", [["zzz", "\n    "], "what", " Sort"])
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(client: openai.OpenAI, stop: Any):
    free = completed(client, max_tokens=80).choices[0].text
    texts = [stop] if isinstance(stop, str) else stop
    cut = min([at for at in map(free.find, texts) if at >= 0], default=None)
    reply = completed(client, max_tokens=80, stop=stop)
    assert reply.choices[0].text == (free if cut is None else free[:cut])
    assert reply.choices[0].finish_reason == ("length" if cut is None else "stop")
    chunks = completed(client, max_tokens=80, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == reply.choices[0].text


@pytest.mark.slow
def test_a_seed_gives_the_same_text_again_and_another_one_another(client: openai.OpenAI):
    def drawn(seed: int) -> str:
        return str(completed(client, temperature=1.0, seed=seed).choices[0].text)

    assert drawn(7) == drawn(7)
    assert drawn(-7) == drawn(-7)
    assert len({drawn(seed) for seed in range(5)}) > 1


def test_log_probabilities_are_told_for_every_token(client: openai.OpenAI):
    reply = asked(client, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert "".join(each.token for each in content) == reply.choices[0].message.content
    for each in content:
        assert len(each.top_logprobs) == 3
        assert each.logprob == each.top_logprobs[0].logprob <= 0  # greedy
        assert each.bytes == list(each.token.encode())
    parts = [
        part
        for chunk in asked(client, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for part in chunk.choices[0].logprobs.content
    ]
    assert [part.token for part in parts] == [each.token for each in content]
    assert [part.logprob for part in parts] == pytest.approx([each.logprob for each in content], abs=1e-3)


def test_the_older_endpoint_tells_log_probabilities_its_own_way(client: openai.OpenAI):
    reply = completed(client, logprobs=2)
    told = reply.choices[0].logprobs
    assert "".join(told.tokens) == reply.choices[0].text
    assert len(told.token_logprobs) == len(told.top_logprobs) == 40
    assert told.text_offset[:2] == [0, len(told.tokens[0])]


def always(word: str) -> dict[str, Any]:
    """Fields of a request that is answered with three times this word and the space before it."""
    vocabulary = json.loads((SHIPPED_TARGET / "tokenizer.json").read_text())["model"]["vocab"]
    return {"logit_bias": {str(vocabulary[f"Ġ{word}"]): 100}, "max_tokens": 3, "temperature": 0}


@pytest.mark.slow
def test_the_space_between_the_prompt_and_the_text_is_part_of_the_text(client: openai.OpenAI):
    whole = completed(client, logprobs=2, **always("the")).choices[0]
    assert whole.text == " the the the"
    assert whole.logprobs.tokens == [" the"] * 3
    assert whole.logprobs.text_offset == [0, 4, 8]
    chunks = [chunk.choices[0] for chunk in completed(client, stream=True, logprobs=2, **always("the"))]
    told = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for each in told for token in each.tokens] == whole.logprobs.tokens
    assert [begin for each in told for begin in each.text_offset] == [0, 4, 8]
    said = asked(client, logprobs=True, **always("the")).choices[0]
    assert said.message.content == whole.text
    assert [each.token for each in said.logprobs.content] == whole.logprobs.tokens
    parts = [chunk.choices[0].delta.content or "" for chunk in asked(client, stream=True, **always("the"))]
    assert "".join(parts) == whole.text


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize(
    ("stop", "text"),
    [(" the", ""), ("the", " "), ("e t", " th"), (["zz", "he the"], " t"), ("thethe", " the the the")],
)
def test_a_stop_string_may_hold_the_first_space(client: openai.OpenAI, stop: Any, text: str):
    fields = always("the") | {"stop": stop}
    whole = completed(client, **fields).choices[0]
    assert (whole.text, whole.finish_reason) == (text, "stop" if text != " the the the" else "length")
    assert "".join(chunk.choices[0].text for chunk in completed(client, stream=True, **fields)) == text


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["tree", "river", "stone"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
    },
    "required": ["kind", "size", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_structured_output_follows_its_schema(client: openai.OpenAI, temperature: float):
    for seed in range(3):
        reply = asked(client, response_format=FORMAT, temperature=temperature, seed=seed, max_tokens=200)
        assert reply.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)


@pytest.mark.slow
def test_speculation_does_not_change_structured_output(client: openai.OpenAI):
    def tokens(drafter: str) -> Any:
        body = {"drafter": drafter, "return_token_ids": True} | ({} if drafter == "none" else {"block": 4})
        return asked(client, response_format=FORMAT, max_tokens=200, extra_body=body).x_kakeya

    fast, plain = tokens("default"), tokens("none")
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["speculation"]
    assert plain["why_off"] == "the request asked for no drafter"


def test_a_model_calls_a_tool_and_uses_what_it_says(client: openai.OpenAI):
    first = [{"role": "user", "content": by_heart.ASKED}]
    reply = asked(client, model="heart", messages=first, tools=[by_heart.WEATHER])
    choice = reply.choices[0]
    call = choice.message.tool_calls[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    told = [*first, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    after = asked(client, model="heart", messages=told, tools=[by_heart.WEATHER])
    assert after.choices[0].message.content == by_heart.ANSWER
    assert after.choices[0].finish_reason == "stop"


def test_the_arguments_of_a_call_are_streamed_as_they_come(client: openai.OpenAI):
    first = [{"role": "user", "content": by_heart.ASKED}]
    chunks = list(asked(client, model="heart", messages=first, tools=[by_heart.WEATHER], stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {call.index for call in calls} == {0}
    assert [(call.function.name, call.function.arguments) for call in calls[:1]] == [("weather", "")]
    assert calls[0].id.startswith("call_")
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Oslo"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_max_tokens_cuts_off_is_no_text(client: openai.OpenAI, *, stream: bool):
    asking = {"messages": [{"role": "user", "content": by_heart.ASKED}], "tools": [by_heart.WEATHER]}
    whole = asked(client, model="heart", **asking).usage.completion_tokens
    for most in (whole // 3, whole // 2, whole - 12, whole - 8, whole - 6):
        reply = asked(client, model="heart", max_tokens=most, stream=stream, **asking)
        parts = [chunk.choices[0] for chunk in reply] if stream else reply.choices
        messages = [part.delta if stream else part.message for part in parts]
        calls = [call.function for message in messages for call in message.tool_calls or []]
        assert parts[-1].finish_reason == "length"
        assert not "".join(message.content or "" for message in messages)
        arguments = "".join(call.arguments for call in calls)
        assert '{"city": "Oslo"}'.startswith(arguments)
    assert calls[0].name == "weather"
    assert arguments


@pytest.mark.slow
def test_a_call_with_arguments_that_are_no_json_can_be_sent_back(client: openai.OpenAI):
    for arguments in ("", '{"city": "Os', '{"city": Oslo}', "[1]"):
        told = copy.deepcopy(by_heart.TOLD)
        told[1]["tool_calls"][0]["function"]["arguments"] = arguments
        assert asked(client, model="heart", messages=told, tools=[by_heart.WEATHER], max_tokens=2).choices
    told[1]["tool_calls"][0]["function"]["arguments"] = "[" * 100_000
    with pytest.raises(openai.BadRequestError):
        asked(client, model="heart", messages=told, tools=[by_heart.WEATHER], max_tokens=2)


def test_a_demanded_call_of_a_tool_without_parameters_has_no_arguments(client: openai.OpenAI):
    now = {"name": "now", "description": "Tells the time."}
    named = {"type": "function", "function": {"name": "now"}}
    for parameters in (None, {}, {"type": "object", "properties": {}, "required": [], "title": "Now"}):
        tools = [{"type": "function", "function": now | {"parameters": parameters}}]
        for choice in ("required", named) if parameters is None else ("required",):
            call = asked(client, tools=tools, tool_choice=choice).choices[0].message.tool_calls[0].function
            assert (call.name, json.loads(call.arguments)) == ("now", {})


@pytest.mark.slow
def test_allowed_tools_restrict_the_choice(client: openai.OpenAI):
    tools = [by_heart.WEATHER, {"type": "function", "function": {"name": "now"}}]
    named = [{"type": "function", "function": {"name": "now"}}]
    for mode, most in (("required", 60), ("auto", 3)):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        reply = asked(client, tools=tools, tool_choice=choice, max_tokens=most)
        fewer = asked(client, tools=tools[1:], max_tokens=3)
        assert reply.usage.prompt_tokens == fewer.usage.prompt_tokens
        calls = [call.function.name for call in reply.choices[0].message.tool_calls or []]
        assert calls == (["now"] if mode == "required" else [])
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "later"}}]
    with pytest.raises(openai.BadRequestError, match="'later'"):
        asked(client, tools=tools, tool_choice=choice)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "custom", "custom": {"name": "shell"}}]},
        {"tools": [by_heart.WEATHER], "tool_choice": {"type": "custom", "custom": {"name": "shell"}}},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "shell", "input": "ls"}}],
                }
            ]
        },
    ],
)
def test_custom_tools_are_not_implemented(client: openai.OpenAI, fields: Any):
    with pytest.raises(openai.InternalServerError, match="custom tool") as caught:
        asked(client, **fields)
    assert caught.value.status_code == 501


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_call_can_be_demanded_of_any_model(client: openai.OpenAI, choice: Any):
    reply = asked(client, tools=[by_heart.WEATHER], tool_choice=choice, max_tokens=200)
    call = reply.choices[0].message.tool_calls[0]
    assert reply.choices[0].finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), by_heart.WEATHER["function"]["parameters"])


def test_a_format_beside_a_demanded_call_binds_nothing(client: openai.OpenAI):
    reply = asked(
        client, tools=[by_heart.WEATHER], tool_choice="required", response_format=FORMAT, max_tokens=200
    )
    call = reply.choices[0].message.tool_calls[0]
    jsonschema.validate(json.loads(call.function.arguments), by_heart.WEATHER["function"]["parameters"])


def test_a_format_leaves_the_model_free_to_call_a_tool(client: openai.OpenAI):
    asking = {"model": "heart", "tools": [by_heart.WEATHER], "response_format": FORMAT, "max_tokens": 200}
    first = asked(client, messages=[{"role": "user", "content": by_heart.ASKED}], **asking).choices[0]
    assert [call.function.name for call in first.message.tool_calls] == ["weather"]
    told = copy.deepcopy(by_heart.TOLD)
    told[1]["tool_calls"][0]["function"]["arguments"] = first.message.tool_calls[0].function.arguments
    last = asked(client, messages=told, **asking).choices[0].message
    assert last.content.startswith("{")
    assert not last.tool_calls


def test_strict_of_a_tool_is_not_shown_to_the_model(client: openai.OpenAI):
    strict = copy.deepcopy(by_heart.WEATHER)
    strict["function"]["strict"] = True
    told, untold = (
        asked(client, tools=[tool], max_tokens=1, extra_body={"return_token_ids": True}).x_kakeya
        for tool in (strict, by_heart.WEATHER)
    )
    assert told["prompt_token_ids"] == untold["prompt_token_ids"]


def test_reasoning_is_separate_from_content(client: openai.OpenAI):
    riddle = [{"role": "user", "content": by_heart.RIDDLE}]
    message = asked(client, model="heart", messages=riddle).choices[0].message
    assert (message.reasoning.strip(), message.content.strip()) == (by_heart.THOUGHT, by_heart.WORD)
    deltas = [chunk.choices[0].delta for chunk in asked(client, model="heart", messages=riddle, stream=True)]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content


@pytest.mark.slow
def test_what_follows_the_reasoning_keeps_to_the_schema(client: openai.OpenAI):
    riddle = [{"role": "user", "content": by_heart.RIDDLE}]
    reply = asked(client, model="heart", messages=riddle, response_format=FORMAT, max_tokens=200)
    assert reply.choices[0].message.reasoning.strip() == by_heart.THOUGHT
    jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)


@pytest.mark.slow
def test_the_next_turn_reuses_the_prompt_cache(client: openai.OpenAI):
    long = "Make a numbered list of: " + ", ".join(["table", "window", "river"] * 120) + "."
    talk = [{"role": "user", "content": long}]
    first = asked(client, messages=talk, max_tokens=30)
    talk += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Make a numbered list of: river."},
    ]
    second = asked(client, messages=talk, max_tokens=30)
    before, after = first.usage, second.usage
    assert after.prompt_tokens_details.cached_tokens >= before.prompt_tokens - 5 > 500
    assert second.x_kakeya["cached_tokens"] == after.prompt_tokens_details.cached_tokens
    assert second.x_kakeya["prefill_s"] < first.x_kakeya["prefill_s"] / 2
    other = asked(client, model="demo@rotated4", messages=talk, max_tokens=30)
    # another channel's caches are no use, and a prompt of its own begins with the same token at most
    assert other.usage.prompt_tokens_details.cached_tokens <= 1


def test_the_same_question_again_is_not_computed_again(client: openai.OpenAI):
    once = asked(client, max_tokens=33)
    again = asked(client, max_tokens=33)
    assert again.choices[0].message.content == once.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens - 2


def test_a_request_chooses_channel_block_and_drafter(client: openai.OpenAI):
    how = asked(
        client, extra_body={"kv_channel": "rotated4", "block": 4, "drafter": "prompt-lookup"}
    ).x_kakeya
    assert (how["kv_channel"], how["block"], how["drafter"]) == ("rotated4", 4, "prompt-lookup")
    assert how["cache_classes"] == {"CodedKV": 9}
    assert how["drafter_resident_bytes"] > 0
    named = asked(client, model="demo@rotated4").x_kakeya
    assert (named["kv_channel"], named["kv_policy"]) == ("rotated4", "rotated:4,64@all")
    plain = asked(client, extra_body={"block": 1}).x_kakeya
    assert (plain["speculation"], plain["why_off"]) == (False, "the request asked for a block of 1")


@pytest.mark.slow
def test_an_external_engine_decodes_with_the_channels_caches(client: openai.OpenAI):
    ours = completed(client, model="demo@rotated4", extra_body={"drafter": "none"})
    guest = completed(client, model="guest@rotated4")
    assert guest.choices[0].text == ours.choices[0].text
    assert (guest.x_kakeya["cache_strategy"], guest.x_kakeya["cache_classes"]) == ("keyword", {"CodedKV": 9})


def test_models_are_listed_with_their_channels(client: openai.OpenAI):
    here = {model.id for model in client.models.list()}
    assert {"demo", "demo@native", "demo@rotated4", "heart", "guest@rotated4"} <= here
    assert not {"away", "gone"} & here
    listed = {model.id: model for model in client.models.list(extra_query={"all": "true"})}
    assert listed.keys() > here
    assert client.models.retrieve("demo@rotated4").x_kakeya["kv_channel"] == "rotated4"
    assert listed["demo"].x_kakeya["default"]
    for name, where in (("away", "~/kakeya-models/no-such-folder"), ("gone", "/no-such-folder is not a")):
        assert not listed[name].x_kakeya["here"]
        assert where in listed[name].x_kakeya["why_not"]


@pytest.mark.slow
def test_log_probabilities_end_where_the_text_does(client: openai.OpenAI):
    for stream in (False, True):
        reply = asked(client, stop="table", logprobs=True, stream=stream)
        chunks = [chunk.choices[0] for chunk in reply if chunk.choices] if stream else reply.choices
        told = [each.token for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content]
        said = "".join((chunk.delta.content or "") if stream else chunk.message.content for chunk in chunks)
        assert "".join(told).startswith(said)
        assert "".join(told[:-1]) in said  # no token more than the one in which the stop begins


@pytest.mark.slow
def test_what_the_client_makes_of_an_answer_can_be_sent_back(client: openai.OpenAI):
    first = asked(client)
    again = asked(
        client,
        messages=[*LIST, first.choices[0].message.model_dump(), {"role": "user", "content": "And river?"}],
    )
    assert again.usage.prompt_tokens_details.cached_tokens > 20


def test_without_a_model_the_default_one_answers(server: Running):
    import requests

    reply = requests.post(
        f"{server.url}/completions",
        json={"prompt": [PROMPT], "max_tokens": 3},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=60,
    ).json()
    assert (reply["model"], reply["usage"]["completion_tokens"]) == ("demo", 3)


def test_a_text_completion_of_a_reasoning_model_is_bound_from_its_beginning(client: openai.OpenAI):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    reply = completed(client, model="heart", prompt="Name a word.", extra_body={"response_format": form})
    assert json.loads(reply.choices[0].text) in ("yes", "no")


NOT_HERE: tuple[type[Exception], int] = (openai.InternalServerError, 501)
WRONG: list[tuple[dict[str, Any], type[Exception], int, str | None]] = [
    ({"model": "nobody"}, openai.NotFoundError, 404, "model"),
    ({"model": "demo@nothing"}, openai.NotFoundError, 404, "model"),
    ({"model": "away"}, openai.NotFoundError, 404, "model"),
    ({"model": "gone"}, openai.NotFoundError, 404, "model"),
    ({"model": "demo@affine8"}, openai.BadRequestError, 400, "model"),
    ({"temperature": 9}, openai.BadRequestError, 400, "temperature"),
    ({"temperature": "hot"}, openai.BadRequestError, 400, "temperature"),
    ({"max_tokens": 0}, openai.BadRequestError, 400, "max_tokens"),
    ({"logit_bias": {"99999": 1}}, openai.BadRequestError, 400, "logit_bias"),
    ({"top_logprobs": 3}, openai.BadRequestError, 400, "top_logprobs"),
    ({"messages": []}, openai.BadRequestError, 400, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, openai.BadRequestError, 400, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, openai.BadRequestError, 400, "messages"),
    ({"tool_choice": "required"}, openai.BadRequestError, 400, "tool_choice"),
    ({"extra_body": {"kv_channel": "no"}}, openai.BadRequestError, 400, "kv_channel"),
    ({"extra_body": {"kv_channel": "affine8"}}, openai.BadRequestError, 400, "kv_channel"),
    ({"extra_body": {"block": 99}}, openai.BadRequestError, 400, "block"),
    ({"extra_body": {"block": 4, "drafter": "none"}}, openai.BadRequestError, 400, "block"),
    ({"extra_body": {"drafter": "/etc/passwd"}}, openai.BadRequestError, 400, "drafter"),
    ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, openai.BadRequestError, 400, None),
    (
        {"extra_body": {"chat_template_kwargs": {"enable_thinkin": True}}},
        openai.BadRequestError,
        400,
        "chat_template_kwargs.enable_thinkin",
    ),
    ({"n": "2"}, openai.BadRequestError, 400, "n"),
    ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, openai.APIStatusError, 413, None),
    ({"n": 129}, openai.BadRequestError, 400, "n"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, *NOT_HERE, "messages.0.role"),
    ({"n": 0}, openai.BadRequestError, 400, "n"),
    ({"extra_body": {"best_of": 2}}, openai.InternalServerError, 501, "best_of"),
    ({"extra_body": {"echo": True}}, openai.InternalServerError, 501, "echo"),
    ({"extra_body": {"mirostat": 2}}, openai.InternalServerError, 501, "mirostat"),
    ({"extra_body": {"guided_grammar": "root ::= x"}}, openai.InternalServerError, 501, "guided_grammar"),
    (
        {"extra_body": {"structured_outputs": {"grammar": "x"}}},
        openai.InternalServerError,
        501,
        "structured_outputs.grammar",
    ),
    ({"extra_body": {"guided_regex": "("}}, openai.BadRequestError, 400, "guided_regex"),
    ({"extra_body": {"guided_json": "{"}}, openai.BadRequestError, 400, "guided_json"),
    (
        {"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}},
        openai.BadRequestError,
        400,
        "guided_regex",
    ),
    ({"extra_body": {"guided_regex": "a", "min_tokens": 3}}, openai.BadRequestError, 400, "min_tokens"),
    ({"extra_body": {"stop_token_ids": [99999]}}, openai.BadRequestError, 400, "stop_token_ids"),
    ({"extra_body": {"continue_final_message": True}}, openai.BadRequestError, 400, "continue_final_message"),
    ({"model": "guest", "extra_body": {"ignore_eos": True}}, openai.InternalServerError, 501, "ignore_eos"),
    ({"functions": [{"name": "f"}]}, openai.InternalServerError, 501, "functions"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        openai.InternalServerError,
        501,
        "messages.0.content.0",
    ),
    ({"model": "guest", "temperature": 1}, openai.InternalServerError, 501, "temperature"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nothing"}},
            }
        },
        openai.BadRequestError,
        400,
        "response_format",
    ),
]


@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "kind", "status", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_errors_are_typed_exceptions_that_name_the_field(
    client: openai.OpenAI, fields: Any, kind: type[Exception], status: int, param: str | None, *, stream: bool
):
    with pytest.raises(kind) as caught:
        asked(client, **(copy.deepcopy(fields) | {"stream": stream}))
    error: Any = caught.value
    assert error.status_code == status
    assert (error.response.headers.get("x-should-retry") == "false") == (status == 501)
    assert error.body["message"]
    if param is not None:
        assert error.param == param


def test_requests_without_the_key_are_refused(server: Running):
    with pytest.raises(openai.AuthenticationError) as caught:
        asked(server.client("a-key-of-somebody-else-0123"))
    assert caught.value.status_code == 401
    with pytest.raises(openai.AuthenticationError):
        server.client("-").models.list()


def test_missing_openai_endpoints_are_not_implemented(client: openai.OpenAI):
    with pytest.raises(openai.InternalServerError) as caught:
        client.embeddings.create(model="demo", input="x")
    assert caught.value.status_code == 501
