"""OpenAI's Python client: chat completions, text completions and Responses."""

from __future__ import annotations

import json
from typing import Any

import openai
from features import *

version("openai")
client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
USER: list[Any] = [{"role": "user", "content": LIST}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA, "strict": True}}


@feature("chat", "text")
def chat_text():
    reply = client.chat.completions.create(model="demo", messages=USER, max_tokens=60)
    return check_listed(reply.choices[0].message.content)


@feature("chat", "stream")
def chat_stream():
    with client.chat.completions.stream(model="demo", messages=USER, max_tokens=60) as stream:
        check_parts([event.delta for event in stream if event.type == "content.delta"])
        return check_listed(stream.get_final_completion().choices[0].message.content)


@feature("chat", "tools")
def chat_tools():
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    first = client.chat.completions.create(model="heart", messages=messages, tools=[WEATHER])
    call = first.choices[0].message.tool_calls[0]
    check_same(json.loads(call.function.arguments), OSLO)
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": TOLD}]
    last = client.chat.completions.create(model="heart", messages=messages, tools=[WEATHER])
    return check_same(last.choices[0].message.content, ANSWER)


@feature("chat", "streamed calls")
def chat_streamed_calls():
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    with client.chat.completions.stream(model="heart", messages=messages, tools=[WEATHER]) as stream:
        parts = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
    return check_same(json.loads("".join(parts)), OSLO)


@feature("chat", "schema")
def chat_schema():
    reply = client.chat.completions.create(model="demo", messages=USER, response_format=FORMAT)
    return check_schema(reply.choices[0].message.content)


@feature("chat", "reasoning")
def chat_reasoning():
    riddle: list[Any] = [{"role": "user", "content": RIDDLE}]
    message = client.chat.completions.create(model="heart", messages=riddle).choices[0].message
    return check_same((message.reasoning.strip(), message.content.strip()), (THOUGHT, WORD))


@feature("chat", "n")
def chat_n():
    reply = client.chat.completions.create(
        model="demo", messages=USER, n=3, temperature=1, seed=4, max_tokens=12
    )
    return check_same([choice.index for choice in reply.choices], [0, 1, 2])


@feature("chat", "logprobs")
def chat_logprobs():
    reply = client.chat.completions.create(
        model="demo", messages=USER, logprobs=True, top_logprobs=2, max_tokens=8
    )
    content = reply.choices[0].logprobs.content
    check_same("".join(each.token for each in content), reply.choices[0].message.content)
    return check_same({len(each.top_logprobs) for each in content}, {2})


@feature("completions", "text")
def completions_text():
    return client.completions.create(model="demo", prompt="import os", max_tokens=8).choices[0].text


@feature("completions", "stream")
def completions_stream():
    chunks = client.completions.create(model="demo", prompt="import os", max_tokens=24, stream=True)
    return "".join(check_parts([chunk.choices[0].text for chunk in chunks]))


@feature("completions", "n")
def completions_n():
    reply = client.completions.create(
        model="demo", prompt=["import os", "import"], n=2, temperature=1, max_tokens=4
    )
    return check_same([choice.index for choice in reply.choices], [0, 1, 2, 3])


@feature("completions", "logprobs")
def completions_logprobs():
    reply = client.completions.create(model="demo", prompt="import os", logprobs=1, max_tokens=0, echo=True)
    found = reply.choices[0].logprobs
    check_same("".join(found.tokens).removeprefix("<bos>"), "import os")
    return check_same([each is None for each in found.token_logprobs][:2], [True, False])


@feature("responses", "text")
def responses_text():
    return check_listed(client.responses.create(model="demo", input=LIST, max_output_tokens=60).output_text)


@feature("responses", "stream")
def responses_stream():
    with client.responses.stream(model="demo", input=LIST, max_output_tokens=60) as stream:
        check_parts([event.delta for event in stream if event.type == "response.output_text.delta"])
        return check_listed(stream.get_final_response().output_text)


FUNCTION: Any = {"type": "function", **WEATHER["function"]}


@feature("responses", "tools")
def responses_tools():
    first = client.responses.create(model="heart", input=ASKED, tools=[FUNCTION])
    call = first.output[0]
    check_same(json.loads(call.arguments), OSLO)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": TOLD}
    last = client.responses.create(
        model="heart", input=[result], tools=[FUNCTION], previous_response_id=first.id
    )
    return check_same(last.output_text, ANSWER)


@feature("responses", "streamed calls")
def responses_streamed_calls():
    with client.responses.stream(model="heart", input=ASKED, tools=[FUNCTION]) as stream:
        parts = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
    return check_same(json.loads("".join(parts)), OSLO)


@feature("responses", "schema")
def responses_schema():
    text: Any = {"format": {"type": "json_schema", "name": "pick", "schema": SCHEMA, "strict": True}}
    return check_schema(client.responses.create(model="demo", input=LIST, text=text).output_text)


@feature("responses", "reasoning")
def responses_reasoning():
    thought, said = client.responses.create(model="heart", input=RIDDLE).output
    return check_same((thought.content[0].text.strip(), said.content[0].text.strip()), (THOUGHT, WORD))


@feature("responses", "logprobs")
def responses_logprobs():
    reply = client.responses.create(
        model="demo",
        input=LIST,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        max_output_tokens=8,
    )
    found = reply.output[0].content[0].logprobs
    return check_same("".join(each.token for each in found), reply.output_text)
