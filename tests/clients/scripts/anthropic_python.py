"""Anthropic's Python client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from features import *

version("anthropic")
client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0, timeout=60)
TOOL: Any = {
    "name": "weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


@feature("messages", "text")
def text():
    reply = client.messages.create(model="demo", messages=[user(LIST)], max_tokens=60)
    counted = client.messages.count_tokens(model="demo", messages=[user(LIST)])
    check_same(counted.input_tokens, reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0))
    return check_listed(reply.content[0].text)


@feature("messages", "stream")
def stream():
    with client.messages.stream(model="demo", messages=[user(LIST)], max_tokens=60) as events:
        return check_listed("".join(check_parts(list(events.text_stream))))


@feature("messages", "tools")
def tools():
    asking: Any = {"model": "heart", "tools": [TOOL], "max_tokens": 60}
    first = client.messages.create(messages=[user(ASKED)], **asking)
    use = first.content[0]
    check_same(use.input, OSLO)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": TOLD}
    turns = [user(ASKED), {"role": "assistant", "content": first.content}, user([result])]
    return check_same(client.messages.create(messages=turns, **asking).content[0].text, ANSWER)


@feature("messages", "streamed calls")
def streamed_calls():
    with client.messages.stream(model="heart", tools=[TOOL], max_tokens=60, messages=[user(ASKED)]) as events:
        parts = [event.partial_json for event in events if event.type == "input_json"]
        final = events.get_final_message()
    check_same(json.loads("".join(parts)), OSLO)
    return check_same(final.content[0].input, OSLO)


@feature("messages", "schema")
def schema():
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    reply = client.messages.create(model="demo", messages=[user(LIST)], max_tokens=60, output_config=form)
    return check_schema(reply.content[0].text)


@feature("messages", "reasoning")
def reasoning():
    reply = client.messages.create(model="heart", messages=[user(RIDDLE)], max_tokens=60)
    thought, said = reply.content
    return check_same((thought.thinking.strip(), said.text.strip()), (THOUGHT, WORD))
