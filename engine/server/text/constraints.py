"""What the text of an answer has to follow: a response format, or a call of one of the tools.

Where a model reasons first, the reasoning is free and what follows it is bound.
"""

import json
from collections.abc import Sequence
from typing import Any

from engine.grammar import JSON_STYLE, Grammar, nameless
from engine.server.decoding.models import Model
from engine.server.refusals import Refusal, unsupported
from engine.server.text.prompting import Asked
from engine.server.wire.requests import (
    ChatRequest,
    ChosenTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    TextRequest,
    Tool,
)

ANYTHING = {"type": "object"}
# Families whose calls are JSON between two marks: {"name": …, "arguments": …}
JSON_CALLS = "mlx_lm.tool_parsers.json_tools"


def bound(request: ChatRequest | TextRequest) -> bool:
    """Whether the answer has to follow anything."""
    form = request.response_format
    if form is not None and form.type != "text":
        return True
    return isinstance(request, ChatRequest) and _call_demanded(request)


def grammar_of(request: ChatRequest | TextRequest, model: Model, asked: Asked) -> Grammar | None:
    """The grammar of an answer; None for free text.

    Raises:
        ConfigurationError: a schema that is none, or that cannot be followed.
        Refusal: a call is demanded of a model whose calls cannot be.
    """
    form, reasons = request.response_format, isinstance(request, ChatRequest)
    if isinstance(request, ChatRequest) and _call_demanded(request):
        if form is not None and form.type != "text":
            raise Refusal(
                400,
                "response_format and a tool_choice that demands a call cannot both hold; leave one out",
                param="response_format",
                code="invalid_value",
            )
        return Grammar.lark(model.vocabulary, _calls(request, model, asked))
    if isinstance(form, JsonSchemaFormat):
        return _json(form.json_schema.schema_, model, asked, reasons=reasons)
    if isinstance(form, JsonObjectFormat):
        return _json(ANYTHING, model, asked, reasons=reasons)
    return None


def _json(schema: dict[str, Any], model: Model, asked: Asked, *, reasons: bool) -> Grammar:
    """JSON by a schema, behind the reasoning if there may be any."""
    if not (reasons and model.target.tokenizer.has_thinking):
        return Grammar.json_schema(model.vocabulary, schema)
    return Grammar.lark(model.vocabulary, _after_reasoning(f"%json {_styled(schema)}", model, asked))


def _call_demanded(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, ChosenTool)


def _calls(request: ChatRequest, model: Model, asked: Asked) -> str:
    """The grammar of one call of the tools, or of several."""
    tokenizer = model.target.tokenizer
    if getattr(tokenizer.tool_parser, "__module__", None) != JSON_CALLS:
        raise unsupported(f"tool_choice other than auto and none with {model.entry.name}", "tool_choice")
    tools = request.tools or []
    if isinstance(request.tool_choice, ChosenTool):
        chosen = request.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == chosen]
    several = "call+" if request.parallel_tool_calls and request.tool_choice == "required" else "call"
    rules = [f"one_{index}: {_one(tool)}" for index, tool in enumerate(tools)]
    names = " | ".join(f"one_{index}" for index in range(len(tools)))
    begin = _mark(tokenizer.tool_call_start, tokenizer.tool_call_start_tokens)
    end = _mark(tokenizer.tool_call_end, tokenizer.tool_call_end_tokens)
    call = f'call: {begin} "\\n" ({names}) "\\n" {end}'
    return "\n".join([_after_reasoning(several, model, asked), call, *rules])


def _one(tool: Tool) -> str:
    """A call of one tool, as its family writes it."""
    head = f'{{"name": {_dump(tool.function.name)}, "arguments": '
    return f'{_dump(head)} %json {_styled(tool.function.parameters or ANYTHING)} "}}"'


def _after_reasoning(body: str, model: Model, asked: Asked) -> str:
    """The first rules of a grammar: reasoning, where the model does that, and then what is bound."""
    tokenizer = model.target.tokenizer
    if not tokenizer.has_thinking:
        return f"start: {body}"
    begin = _mark(tokenizer.think_start, tokenizer.think_start_tokens)
    end = _mark(tokenizer.think_end, tokenizer.think_end_tokens)
    rules = f"body: {body}\nthought: /(?s:.*)/ {end} /[ \\n]{{0,4}}/"
    if asked.state == "reasoning":
        return f"start: thought body\n{rules}"
    return f"start: ({begin} thought)? body\n{rules}"


def _mark(text: str, tokens: Sequence[int] | None) -> str:
    """A mark in a grammar: its token where it is one, which models write and no other text stands for."""
    return f"<[{tokens[0]}]>" if tokens is not None and len(tokens) == 1 else _dump(text)


def _styled(schema: dict[str, Any]) -> str:
    """A schema for a grammar, with our style of blanks, whatever it says itself."""
    return nameless(_dump(schema | {"x-guidance": JSON_STYLE}))


def _dump(value: Any) -> str:
    """A value as JSON, which is also how grammars quote strings."""
    return json.dumps(value, ensure_ascii=False)
