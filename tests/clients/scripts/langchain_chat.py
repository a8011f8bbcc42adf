"""langchain-openai: `ChatOpenAI` over chat completions and over Responses."""

from __future__ import annotations

import json
from typing import Any

from features import *
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

version("langchain-openai")


def tried(protocol: str, **settings: Any) -> None:
    """Try every feature over one protocol."""

    def model(name: str, **fields: Any) -> ChatOpenAI:
        given: dict[str, Any] = {"max_tokens": 60} | settings | fields
        return ChatOpenAI(model=name, base_url=URL, api_key=KEY, max_retries=0, **given)

    @feature(protocol, "text")
    def text():
        return check_listed(model("demo").invoke(LIST).text)

    @feature(protocol, "stream")
    def stream():
        return check_listed("".join(check_parts([chunk.text for chunk in model("demo").stream(LIST)])))

    @feature(protocol, "tools")
    def tools():
        bound = model("heart").bind_tools([WEATHER])
        first = bound.invoke([HumanMessage(ASKED)])
        (call,) = first.tool_calls
        check_same(call["args"], OSLO)
        last = bound.invoke([HumanMessage(ASKED), first, ToolMessage(TOLD, tool_call_id=call["id"])])
        return check_same(last.text, ANSWER)

    @feature(protocol, "streamed calls")
    def streamed_calls():
        chunks = list(model("heart").bind_tools([WEATHER]).stream(ASKED))
        parts = [call["args"] or "" for chunk in chunks for call in chunk.tool_call_chunks]
        check_same(json.loads("".join(parts)), OSLO)
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        return check_same([call["args"] for call in whole.tool_calls], [OSLO])

    @feature(protocol, "schema")
    def schema():
        titled = SCHEMA | {"title": "pick"}
        return check_schema(model("demo").with_structured_output(titled, method="json_schema").invoke(LIST))


tried("chat")


@feature("chat", "n")
def n():
    given: Any = {"n": 3, "temperature": 1, "seed": 4, "max_tokens": 12}
    found = ChatOpenAI(model="demo", base_url=URL, api_key=KEY, **given).generate([[HumanMessage(LIST)]])
    return check_same(len(found.generations[0]), 3)


@feature("chat", "logprobs")
def logprobs():
    found = ChatOpenAI(model="demo", base_url=URL, api_key=KEY, logprobs=True, max_tokens=8).invoke(LIST)
    tokens = found.response_metadata["logprobs"]["content"]
    return check_same("".join(each["token"] for each in tokens), found.text)


absent("chat", "reasoning", "it reads OpenAI's own fields alone")
tried("responses", use_responses_api=True)


@feature("responses", "reasoning")
def reasoning():
    settings: Any = {"use_responses_api": True, "reasoning": {"summary": "auto"}}
    found = ChatOpenAI(model="heart", base_url=URL, api_key=KEY, **settings).invoke(RIDDLE)
    thoughts = [block["reasoning"] for block in found.content_blocks if block["type"] == "reasoning"]
    return check_same(("".join(thoughts).strip(), found.text.strip()), (THOUGHT, WORD))
