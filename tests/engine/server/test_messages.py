"""What Anthropic's own client sees of Messages: content blocks, events, tools, and errors as exceptions."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema
import pytest
import requests

from tests.engine.server import by_heart
from tests.engine.server.conftest import KEY, Running

LIST = "Make a numbered list of: table, window, river."
SCHEMA = by_heart.WEATHER["function"]["parameters"]
WEATHER = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.fixture
def claude(server: Running) -> anthropic.Anthropic:
    """The official client."""
    return anthropic.Anthropic(
        base_url=server.url.removesuffix("/v1"), api_key=KEY, max_retries=0, timeout=60
    )


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def asked(claude: anthropic.Anthropic, **fields: Any) -> Any:
    given = {"model": "demo", "messages": [user(LIST)], "max_tokens": 60} | fields
    own = {name: given.pop(name) for name in ("temperature", "top_k", "top_p", "block") if name in given}
    return claude.messages.create(**given, extra_body=own)


def called(claude: anthropic.Anthropic, **fields: Any) -> Any:
    return asked(
        claude, **({"model": "heart", "messages": [user(by_heart.ASKED)], "tools": [WEATHER]} | fields)
    )


def test_a_message_has_text_usage_and_how_it_came_about(claude: anthropic.Anthropic, client: Any):
    message = asked(claude)
    chat = client.chat.completions.create(model="demo", messages=[user(LIST)], max_tokens=60)
    assert [block.text for block in message.content] == [chat.choices[0].message.content]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    assert message.x_kakeya["cached_tokens"] == usage.cache_read_input_tokens


def test_a_stream_has_the_events_of_anthropics(claude: anthropic.Anthropic):
    whole, events = asked(claude), list(asked(claude, stream=True, block=4))
    kinds = [event.type for event in events]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(deltas) == whole.content[0].text
    ended = events[-2]
    assert (ended.delta.stop_reason, ended.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    assert ended.x_kakeya["speculation"]


def test_a_call_and_its_result_make_an_answer(claude: anthropic.Anthropic):
    first = called(claude)
    use = first.content[0]
    assert (first.stop_reason, use.type, use.name, use.input) == (
        "tool_use",
        "tool_use",
        "weather",
        {"city": "Oslo"},
    )
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [user(by_heart.ASKED), {"role": "assistant", "content": first.content}, user([result])]
    second = called(claude, messages=turns)
    assert (second.content[0].text, second.stop_reason) == (by_heart.ANSWER, "end_turn")
    assert second.usage.cache_read_input_tokens > 100


def test_the_clients_own_stream_helper_follows(claude: anthropic.Anthropic):
    asking = {"model": "heart", "max_tokens": 60, "messages": [user(by_heart.ASKED)], "tools": [WEATHER]}
    with claude.messages.stream(**asking) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(parts)) == final.content[0].input == {"city": "Oslo"}
    assert final.stop_reason == "tool_use"


def test_reasoning_is_a_thinking_block(claude: anthropic.Anthropic):
    riddle = {"model": "heart", "messages": [user(by_heart.RIDDLE)]}
    thought, said = asked(claude, **riddle).content
    assert (thought.type, thought.thinking.strip(), said.text.strip()) == (
        *("thinking", by_heart.THOUGHT),
        by_heart.WORD,
    )
    events = list(asked(claude, stream=True, **riddle))
    parts = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(part.thinking for part in parts if part.type == "thinking_delta") == thought.thinking
    turns = [user(by_heart.RIDDLE), {"role": "assistant", "content": [thought, said]}, user(by_heart.RIDDLE)]
    redacted = {"type": "redacted_thinking", "data": "x"}
    turns.append({"role": "assistant", "content": [redacted, {"type": "text", "text": "A"}]})
    assert asked(claude, model="heart", messages=[*turns, user("Go on.")]).content


def test_a_call_that_max_tokens_cuts_off_is_a_tool_use(claude: anthropic.Anthropic):
    whole = called(claude)
    for cut in (20, 12, 6):
        most = whole.usage.output_tokens - cut
        message = called(claude, max_tokens=most)
        assert (message.stop_reason, [block.type for block in message.content]) == (
            "max_tokens",
            ["tool_use"],
        )
        assert message.content[0].input in ({}, {"city": "Oslo"})
        events = list(called(claude, max_tokens=most, stream=True))
        assert events[-2].delta.stop_reason == "max_tokens"
    assert asked(claude, max_tokens=3).stop_reason == "max_tokens"


def test_a_stop_sequence_is_told(claude: anthropic.Anthropic):
    message = asked(claude, stop_sequences=["zzz", "window", "the window"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "the window")
    assert message.content[0].text.endswith("2. ")
    ended = list(asked(claude, stop_sequences=["window"], stream=True))[-2]
    assert (ended.delta.stop_reason, ended.delta.stop_sequence) == ("stop_sequence", "window")


@pytest.mark.slow
def test_tool_choice(claude: anthropic.Anthropic):
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        message = asked(claude, tools=[WEATHER], tool_choice=choice, max_tokens=200)
        assert message.stop_reason == "tool_use"
        jsonschema.validate(message.content[0].input, SCHEMA)
    assert called(claude, tool_choice={"type": "none"}).stop_reason != "tool_use"
    assert called(claude, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).content[0].input


def test_structured_output_follows_its_schema(claude: anthropic.Anthropic):
    form = {"type": "json_schema", "schema": SCHEMA}
    message = asked(claude, output_config={"format": form, "effort": "low"})
    jsonschema.validate(json.loads(message.content[0].text), SCHEMA)
    assert message.x_kakeya["ignored"] == ["output_config.effort"]  # the model has no such switch
    message = asked(claude, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1)
    assert message.x_kakeya["ignored"] == ["thinking"]


def test_a_prefilled_answer_is_continued(claude: anthropic.Anthropic):
    whole = asked(claude).content[0].text
    begun = {"role": "assistant", "content": "Here is the list:\n1."}
    assert asked(claude, messages=[user(LIST), begun]).content[0].text == whole.removeprefix(begun["content"])


def test_system_texts_and_users_turns_are_joined(claude: anthropic.Anthropic):
    def tokens(**fields: Any) -> int:
        given = {"model": "demo", "messages": [user(LIST)]} | fields
        return claude.messages.count_tokens(**given).input_tokens

    cached = {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}
    assert tokens(system=[cached]) == tokens(system="Be short.") > tokens()
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    joined = tokens(messages=[user("A\n\nB")])
    assert tokens(messages=[user([])]) < tokens(messages=[user("A")])
    assert tokens(messages=[user(parts)]) == tokens(messages=[user("A"), user("B")]) == joined
    assert tokens(messages=[user("A"), {"role": "system", "content": "B"}]) == joined


def test_counted_tokens_are_those_of_the_message(claude: anthropic.Anthropic):
    asking = {"model": "heart", "messages": [user(by_heart.ASKED)], "tools": [WEATHER]}
    usage = claude.messages.create(max_tokens=2, **asking).usage
    counted = claude.messages.count_tokens(**asking).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_fields_that_ask_for_nothing_are_ignored(claude: anthropic.Anthropic):
    given: dict[str, Any] = {"model": "demo", "messages": [user(LIST)], "max_tokens": 2}
    reply: Any = claude.messages.create(**given, extra_body={"frequency_penalty": 0, "n": None})
    assert reply.x_kakeya["ignored"] == ["frequency_penalty"]
    with pytest.raises(anthropic.BadRequestError, match="is a field of chat completions"):
        claude.messages.create(**given, extra_body={"frequency_penalty": 1})


def test_a_count_takes_every_field_of_a_message(claude: anthropic.Anthropic):
    given: dict[str, Any] = {"model": "demo", "messages": [user(LIST)]}
    more = {"max_tokens": 12, "stop_sequences": ["x"], "stream": True, "temperature": 1, "metadata": {}}
    counted = claude.messages.count_tokens(**given, extra_body=more)
    assert counted == claude.messages.count_tokens(**given)


def test_what_claude_code_sends_is_accepted(claude: anthropic.Anthropic):
    message = claude.beta.messages.create(
        model="heart",
        max_tokens=60,
        messages=[user([{"type": "text", "text": by_heart.ASKED, "cache_control": {"type": "ephemeral"}}])],
        tools=[WEATHER | {"cache_control": {"type": "ephemeral"}}, SEARCH],
        thinking={"type": "adaptive"},
        metadata={"user_id": "x"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        betas=["context-management-2025-06-27"],
    )
    assert message.content[0].input == {"city": "Oslo"}
    assert set(message.x_kakeya["ignored"]) == {
        *("tools.web_search_20250305", "metadata"),
        "context_management",
    }


def test_a_name_for_the_api_key_of_either_client(server: Running):
    url, body = f"{server.url}/messages", {"model": "demo", "messages": [user(LIST)], "max_tokens": 2}
    bare = f"{server.url.removesuffix('/v1')}/messages?beta=true"
    for where, headers in ((url, {"x-api-key": KEY}), (bare, {"authorization": f"Bearer {KEY}"})):
        assert requests.post(where, json=body, headers=headers, timeout=60).status_code == 200
    for headers in ({}, {"x-api-key": "-"}, {"x-api-key": KEY, "authorization": "Bearer -"}):
        refused = requests.post(url, json=body, headers=headers, timeout=60)
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        assert refused.json()["error"]["type"] == "authentication_error"


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
WRONG: list[tuple[dict[str, Any], type[Exception], int, str]] = [
    ({"model": "nobody"}, anthropic.NotFoundError, 404, "not_found_error"),
    ({"temperature": 9}, anthropic.BadRequestError, 400, "invalid_request_error"),
    ({"messages": []}, anthropic.BadRequestError, 400, "invalid_request_error"),
    ({"messages": [user("word " * 3000)]}, anthropic.BadRequestError, 400, "invalid_request_error"),
    ({"messages": [user("x" * 2_000_000)]}, anthropic.RequestTooLargeError, 413, "request_too_large"),
    ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, 400, "invalid_request_error"),
    ({"tools": [{"type": "hammer", "name": "x"}]}, anthropic.BadRequestError, 400, "invalid_request_error"),
    ({"tools": [{"type": ["x"]}]}, anthropic.BadRequestError, 400, "invalid_request_error"),
    (
        {"messages": [user([{"type": "thinking", "thinking": "", "signature": ""}])]},
        anthropic.BadRequestError,
        400,
        "invalid_request_error",
    ),
    ({"messages": [user([{"type": []}])]}, anthropic.BadRequestError, 400, "invalid_request_error"),
    ({"messages": [user([IMAGE])]}, anthropic.InternalServerError, 501, "invalid_request_error"),
    ({"tools": [SEARCH]}, anthropic.InternalServerError, 501, "invalid_request_error"),
]


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "kind", "status", "name"), WRONG, ids=lambda value: str(value)[:40])
def test_errors_are_documents_of_anthropics(
    claude: anthropic.Anthropic, fields: Any, kind: type[Exception], status: int, name: str, *, stream: bool
):
    with pytest.raises(kind) as caught:
        asked(claude, **fields, stream=stream)
    error: Any = caught.value
    assert (error.status_code, error.body["type"], error.body["error"]["type"]) == (status, "error", name)
    assert error.body["error"]["message"]
    if "word" in str(fields):
        assert "prompt is too long: " in error.body["error"]["message"]
