"""What OpenAI's own client sees of Responses: items, events, tools, and turns that follow each other."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.engine.server import by_heart
from tests.engine.server.conftest import KEY, Running, start
from tests.engine.server.raw_server import KEY as RAW_KEY
from tests.engine.server.raw_server import RawServer

LIST = "Make a numbered list of: table, window, river."
WEATHER = by_heart.WEATHER["function"] | {"type": "function"}
OTHER_KEY = "another-key-of-the-tests-012345"


def responded(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**({"model": "demo", "input": LIST, "max_output_tokens": 60} | fields))


def called(client: openai.OpenAI, **fields: Any) -> Any:
    return responded(client, **({"model": "heart", "input": by_heart.ASKED, "tools": [WEATHER]} | fields))


def test_a_response_has_text_usage_and_how_it_came_about(client: openai.OpenAI):
    reply = responded(client, instructions="Be short.", metadata={"a": "b"})
    assert reply.output_text
    assert (reply.status, reply.output[0].type) == ("completed", "message")
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.usage.input_tokens_details.cached_tokens == reply.x_kakeya["cached_tokens"]
    assert (reply.instructions, reply.metadata, reply.store) == ("Be short.", {"a": "b"}, True)
    assert reply.x_kakeya["ignored"] == []


def test_the_text_is_that_of_a_chat_completion(client: openai.OpenAI):
    asked = {"model": "demo", "messages": [{"role": "user", "content": LIST}], "max_tokens": 60}
    chat = client.chat.completions.create(**asked)
    parts = [{"type": "input_text", "text": LIST}]
    for given in (LIST, [{"role": "user", "content": LIST}], [{"role": "user", "content": parts}]):
        assert responded(client, input=given).output_text == chat.choices[0].message.content


EVENTS = [
    *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
    *("output_text.done", "content_part.done", "output_item.done", "completed"),
]


def kinds(events: list[Any]) -> list[str]:
    """Types of events, each of several that follow each other once."""
    names = [event.type.removeprefix("response.") for event in events]
    return [name for index, name in enumerate(names) if names[index - 1 : index] != [name]]


def test_a_stream_has_the_events_of_openais(client: openai.OpenAI):
    whole, events = responded(client), list(responded(client, stream=True))
    assert kinds(events) == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.x_kakeya["engine"] == "kakeya"
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])


def test_the_clients_own_stream_helper_follows(client: openai.OpenAI):
    with client.responses.stream(model="heart", input=by_heart.ASKED, tools=[WEATHER]) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert json.loads("".join(deltas)) == json.loads(final.output[0].arguments) == {"city": "Oslo"}


def test_a_call_and_its_result_make_an_answer(client: openai.OpenAI):
    first = called(client)
    call = first.output[0]
    assert (first.status, call.type, call.name, json.loads(call.arguments)) == (
        *("completed", "function_call", "weather"),
        {"city": "Oslo"},
    )
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    sent_back = [{"role": "user", "content": by_heart.ASKED}, call.model_dump(), result]
    assert called(client, input=sent_back, store=False).output_text == by_heart.ANSWER
    follows = called(client, input=[result], previous_response_id=first.id)
    assert (follows.output_text, follows.previous_response_id) == (by_heart.ANSWER, first.id)
    assert follows.usage.input_tokens_details.cached_tokens > 100
    reference = {"type": "item_reference", "id": call.id}
    assert called(client, input=[sent_back[0], reference, result]).output_text == by_heart.ANSWER


def test_the_events_of_a_call(client: openai.OpenAI):
    events = list(called(client, stream=True))
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds(events) == [*EVENTS[:3], *arguments, *EVENTS[-2:]]
    assert (events[2].item.name, events[2].item.arguments) == ("weather", "")
    assert json.loads(events[-3].arguments) == {"city": "Oslo"}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_is_an_item_of_its_own(client: openai.OpenAI, summary: Any):
    asked = {"model": "heart", "input": by_heart.RIDDLE, "reasoning": {"summary": summary}}
    events = list(responded(client, stream=True, **asked))
    thought, said = events[-1].response.output
    part = (thought.summary if summary else thought.content)[0]
    assert (thought.type, part.text.strip(), said.content[0].text.strip()) == (
        *("reasoning", by_heart.THOUGHT),
        by_heart.WORD,
    )
    kind = "reasoning_summary_text" if summary else "reasoning_text"
    assert "".join(e.delta for e in events if e.type == f"response.{kind}.delta") == part.text
    outer = "reasoning_summary_part" if summary else "content_part"
    assert kinds(events)[2:7] == [
        "output_item.added",
        *(f"{outer}.added", f"{kind}.delta", f"{kind}.done", f"{outer}.done"),
    ]
    items = [{"role": "user", "content": by_heart.RIDDLE}, thought.model_dump(), said.model_dump()]
    again = responded(client, **asked | {"input": [*items, {"role": "user", "content": by_heart.RIDDLE}]})
    assert again.status == "completed"


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI):
    reply = responded(client, max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"
    whole = called(client)
    events = list(called(client, stream=True, max_output_tokens=whole.usage.output_tokens - 12))
    assert events[-1].type == "response.incomplete"
    call = events[-1].response.output[0]
    assert (call.type, call.status, call.name) == ("function_call", "incomplete", "weather")
    assert whole.output[0].arguments.startswith(call.arguments)
    assert whole.output[0].arguments != call.arguments


class Thing(pydantic.BaseModel):
    """What is asked for."""

    model_config = pydantic.ConfigDict(extra="forbid")
    size: int = pydantic.Field(ge=0, le=99)
    wet: bool


def test_structured_output_follows_its_schema(client: openai.OpenAI):
    parsed = client.responses.parse(model="demo", input=LIST, text_format=Thing, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Thing)
    form = {"type": "json_schema", "name": "thing", "schema": Thing.model_json_schema(), "strict": True}
    reply = responded(client, text={"format": form})
    jsonschema.validate(json.loads(reply.output_text), Thing.model_json_schema())
    assert reply.text.format.name == "thing"


@pytest.mark.slow
def test_tool_choice(client: openai.OpenAI):
    tools = [WEATHER, {"type": "function", "name": "now", "parameters": None}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    for choice, name in (({"type": "function", "name": "weather"}, "weather"), (allowed, "now")):
        reply = responded(client, tools=tools, tool_choice=choice, max_output_tokens=200)
        assert reply.output[0].name == name
        assert reply.tool_choice.type == choice["type"]
    assert called(client, tool_choice="none").output[0].type == "message"


def test_functions_of_a_namespace_are_called_by_both_names(client: openai.OpenAI):
    function = {"type": "function", "name": "now", "parameters": None}
    space = {"type": "namespace", "name": "clock", "description": "Clocks.", "tools": [function]}
    reply = responded(client, tools=[space], tool_choice="required")
    call = reply.output[0]
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("clock", "now", {})
    items = [{"role": "user", "content": LIST}, call.model_dump(exclude_none=True)]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"}]
    assert responded(client, input=items, tools=[space]).output


def test_tools_of_openais_own_are_left_out_beside_functions(client: openai.OpenAI):
    search = {"type": "web_search", "external_web_access": False}
    reply = called(client, tools=[WEATHER, search])
    assert reply.output[0].name == "weather"
    assert reply.x_kakeya["ignored"] == ["tools.web_search"]
    for fields in (
        {"tools": [search]},
        {"tools": [WEATHER, search], "tool_choice": {"type": "web_search"}},
        {"tools": [WEATHER, {"type": "custom", "name": "shell"}]},
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            responded(client, **fields)
        assert caught.value.status_code == 501


def test_without_a_length_an_answer_may_be_as_long_as_the_server_allows(raw_server: RawServer):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{raw_server.port}/v1", api_key=RAW_KEY, max_retries=0)
    reply = client.responses.create(model="demo", input=LIST)
    asked = {"model": "demo", "messages": [{"role": "user", "content": LIST}]}
    assert (reply.status, client.chat.completions.create(**asked).usage.completion_tokens) == ("completed", 2)
    assert "max_tokens_clamped_to" not in reply.x_kakeya


def test_fields_without_effect_are_listed(client: openai.OpenAI):
    body = {"client_metadata": {"a": "b"}, "colour": 1}
    reply = responded(client, include=["reasoning.encrypted_content"], prompt_cache_key="x", extra_body=body)
    assert set(reply.x_kakeya["ignored"]) == {"client_metadata", "colour", "prompt_cache_key"}


def test_an_effort_without_a_switch_is_listed_as_the_request_has_it(client: openai.OpenAI):
    reply = responded(client, reasoning={"effort": "max"}, max_output_tokens=1)
    assert (reply.x_kakeya["ignored"], reply.reasoning.effort) == (["reasoning.effort"], "max")


def test_fields_of_chats_that_ask_for_nothing_are_ignored(client: openai.OpenAI):
    body = {"stop": None, "n": 1, "presence_penalty": 0, "max_tokens": None, "logprobs": False}
    reply = responded(client, max_output_tokens=2, extra_body=body)
    assert set(reply.x_kakeya["ignored"]) == {"n", "presence_penalty", "logprobs"}
    for fields in ({"n": 2}, {"n": True}, {"presence_penalty": 0.5}, {"max_tokens": 9}):
        with pytest.raises(openai.BadRequestError, match="is a field of chat completions") as caught:
            responded(client, extra_body=fields)
        assert caught.value.param == next(iter(fields))


def test_an_assistants_refusal_is_its_text(client: openai.OpenAI):
    def read(part: Any) -> int:
        turns = [{"role": "user", "content": LIST}, {"role": "assistant", "content": [part]}]
        reply = responded(client, input=[*turns, {"role": "user", "content": "Why?"}], max_output_tokens=1)
        return int(reply.usage.input_tokens)

    refused = read({"type": "refusal", "refusal": "No, no, no."})
    assert refused == read({"type": "output_text", "text": "No, no, no."})
    assert refused > read({"type": "output_text", "text": "No."})


def test_log_probabilities_are_told_where_they_are_included(client: openai.OpenAI):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = responded(client, **asked).output[0].content[0]
    assert "".join(each.token for each in part.logprobs) == part.text
    assert len(part.logprobs[0].top_logprobs) == 2
    deltas = [e for e in responded(client, stream=True, **asked) if e.type == "response.output_text.delta"]
    assert [each.token for e in deltas for each in e.logprobs] == [each.token for each in part.logprobs]


def test_a_stored_response_can_be_read_followed_and_forgotten(client: openai.OpenAI):
    first = responded(client, instructions="Be short.")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = responded(client, input="And river?", previous_response_id=first.id)
    third = responded(client, input="And window?", previous_response_id=second.id)
    items = [{"role": "user", "content": LIST}, *first.output, {"role": "user", "content": "And river?"}]
    same = responded(client, input=[*items, *second.output, {"role": "user", "content": "And window?"}])
    assert third.output_text == same.output_text
    assert third.usage.input_tokens == same.usage.input_tokens  # without the first turn's instructions
    client.responses.delete(first.id)
    for gone in (first.id, responded(client, store=False).id):
        with pytest.raises(openai.NotFoundError, match="send the conversation's items") as caught:
            responded(client, previous_response_id=gone)
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)


@pytest.mark.slow
def test_a_response_belongs_to_its_key(tmp_path: Any):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n{OTHER_KEY}\n")
    keys.chmod(0o600)
    server = start(tmp_path / "server", "--api-key-file", str(keys), key=None)
    try:
        mine, other = server.client(), server.client(OTHER_KEY)
        first = responded(mine)
        assert mine.responses.retrieve(first.id).id == first.id
        for ask in (other.responses.retrieve, lambda gone: responded(other, previous_response_id=gone)):
            with pytest.raises(openai.NotFoundError):
                ask(first.id)
    finally:
        server.stop()


WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "nobody"}, 404, "model"),
    ({"input": []}, 400, "input"),
    ({"input": [{"role": "king", "content": "x"}]}, 400, "input.0.role"),
    ({"input": [{"type": "dream", "content": "x"}]}, 400, "input.0"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 404, "input.0"),
    ({"input": "word " * 3000}, 400, "input"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"temperature": 9}, 400, "temperature"),
    ({"extra_body": {"stop": "x"}}, 400, "stop"),
    ({"tools": [{"type": "hammer", "name": "x"}]}, 400, "tools.0"),
    ({"tools": [WEATHER], "tool_choice": {"type": ["x"], "tools": [1]}}, 400, "tool_choice.tools.0"),
    ({"text": {"verbosity": []}}, 501, "text.verbosity"),
    ({"background": True}, 501, "background"),
    ({"conversation": "conv_1"}, 501, "conversation"),
    ({"text": {"verbosity": "low"}}, 501, "text.verbosity"),
    ({"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}, 501, "input.0"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        501,
        "input.0.content.0",
    ),
]


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "status", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_errors_name_the_field(client: openai.OpenAI, fields: Any, status: int, param: Any, *, stream: bool):
    with pytest.raises(openai.APIStatusError) as caught:
        responded(client, **fields, stream=stream)
    error: Any = caught.value
    assert (error.status_code, error.param) == (status, param)


def test_the_version_may_be_left_out_of_the_path(server: Running):
    bare = server.client().with_options(base_url=server.url.removesuffix("/v1"))
    assert responded(bare).output_text
    assert bare.models.retrieve("demo").id == "demo"
    asked = {"model": "demo", "messages": [{"role": "user", "content": LIST}], "max_tokens": 3}
    assert bare.chat.completions.create(**asked).usage.completion_tokens == 3
    assert bare.completions.create(model="demo", prompt="class", max_tokens=3).usage.completion_tokens == 3
    with pytest.raises(openai.AuthenticationError):
        responded(bare.with_options(api_key="a-key-of-somebody-else-0123"))
