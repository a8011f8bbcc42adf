"""litellm's Python library: chat completions, and Anthropic's Messages through it."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched

import litellm
from features import *

version("litellm")
USER: list[Any] = [{"role": "user", "content": LIST}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA, "strict": True}}


def asked(model: str, **fields: Any) -> Any:
    given: dict[str, Any] = {"messages": USER, "max_tokens": 60} | fields
    return litellm.completion(model=f"openai/{model}", api_base=URL, api_key=KEY, num_retries=0, **given)


@feature("chat", "text")
def text():
    return check_listed(asked("demo").choices[0].message.content)


@feature("chat", "stream")
def stream():
    parts = [chunk.choices[0].delta.content or "" for chunk in asked("demo", stream=True)]
    return check_listed("".join(check_parts(parts)))


@feature("chat", "tools")
def tools():
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    message = asked("heart", messages=messages, tools=[WEATHER]).choices[0].message
    call = message.tool_calls[0]
    check_same(json.loads(call.function.arguments), OSLO)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": TOLD}]
    last = asked("heart", messages=messages, tools=[WEATHER])
    return check_same(last.choices[0].message.content, ANSWER)


@feature("chat", "streamed calls")
def streamed_calls():
    chunks = asked("heart", messages=[{"role": "user", "content": ASKED}], tools=[WEATHER], stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    return check_same(json.loads("".join(each.function.arguments for each in calls)), OSLO)


@feature("chat", "schema")
def schema():
    return check_schema(asked("demo", response_format=FORMAT).choices[0].message.content)


@feature("chat", "reasoning")
def reasoning():
    message = asked("heart", messages=[{"role": "user", "content": RIDDLE}]).choices[0].message
    return check_same((message.reasoning_content.strip(), message.content.strip()), (THOUGHT, WORD))


@feature("chat", "n")
def n():
    reply = asked("demo", n=3, temperature=1, seed=4, max_tokens=12)
    return check_same([choice.index for choice in reply.choices], [0, 1, 2])


@feature("chat", "logprobs")
def logprobs():
    choice = asked("demo", logprobs=True, top_logprobs=2, max_tokens=8).choices[0]
    return check_same("".join(each.token for each in choice.logprobs.content), choice.message.content)


def messaged(model: str, **fields: Any) -> Any:
    given: dict[str, Any] = {"messages": USER, "max_tokens": 60} | fields
    return litellm.completion(model=f"anthropic/{model}", api_base=ROOT, api_key=KEY, num_retries=0, **given)


@feature("messages", "text")
def messages_text():
    return check_listed(messaged("demo").choices[0].message.content)


@feature("messages", "stream")
def messages_stream():
    parts = [chunk.choices[0].delta.content or "" for chunk in messaged("demo", stream=True)]
    return check_listed("".join(check_parts(parts)))


@feature("messages", "tools")
def messages_tools():
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    message = messaged("heart", messages=messages, tools=[WEATHER]).choices[0].message
    call = message.tool_calls[0]
    check_same(json.loads(call.function.arguments), OSLO)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": TOLD}]
    last = messaged("heart", messages=messages, tools=[WEATHER])
    return check_same(last.choices[0].message.content, ANSWER)


def responded(model: str, **fields: Any) -> Any:
    given: dict[str, Any] = {"input": LIST, "max_output_tokens": 60} | fields
    return litellm.responses(model=f"openai/{model}", api_base=URL, api_key=KEY, num_retries=0, **given)


@feature("responses", "text")
def responses_text():
    return check_listed(responded("demo").output[0].content[0].text)


@feature("responses", "stream")
def responses_stream():
    events = list(responded("demo", stream=True))
    parts = [event.delta for event in events if event.type == "response.output_text.delta"]
    return check_listed("".join(check_parts(parts)))
