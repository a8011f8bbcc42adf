"""instructor: typed answers, by a schema and by a demanded tool call."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from features import *
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

version("instructor")
USER: list[Any] = [{"role": "user", "content": LIST}]


class Pick(BaseModel):
    """A color and a count."""

    model_config = ConfigDict(extra="forbid")  # the shipped pair would go on with fields of its own

    color: Literal["red", "blue"]
    count: int = Field(ge=1, le=9)


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)


def asked(mode: instructor.Mode, method: str = "create") -> Any:
    create = getattr(client(mode).chat.completions, method)
    return create(model="demo", messages=USER, response_model=Pick, max_tokens=200, max_retries=0)


@feature("chat", "schema")
def schema():
    return check_schema(asked(instructor.Mode.JSON_SCHEMA).model_dump())


@feature("chat", "tools")
def tools():
    return check_schema(asked(instructor.Mode.TOOLS).model_dump())


@feature("chat", "stream")
def stream():
    parts = list(asked(instructor.Mode.JSON_SCHEMA, "create_partial"))
    return check_schema(parts[-1].model_dump())


@feature("chat", "streamed calls")
def streamed_calls():
    parts = list(asked(instructor.Mode.TOOLS, "create_partial"))
    return check_schema(parts[-1].model_dump())


@feature("responses", "tools")
def responses_tools():
    return check_schema(
        client(instructor.Mode.RESPONSES_TOOLS)
        .chat.completions.create(
            model="demo", messages=USER, response_model=Pick, max_output_tokens=200, max_retries=0
        )
        .model_dump()
    )
