"""A request's conversation or text → token ids, through the model's own chat template.

Messages are brought into the form templates expect by mlx-lm's own function: parts joined, arguments of tool
calls as objects. Images were refused before.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.server import process_message_content

from engine.errors import PromptError
from engine.evaluation.templates import THINKING_NAMES
from engine.foreign import foreign
from engine.grammar import JSON_STYLE, Grammar, nameless
from engine.server.schema import (
    ChatRequest,
    ChosenTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    Refusal,
    TextRequest,
    Tool,
    unsupported,
)
from engine.server.sessions import LoadedModel

# arguments of mlx-lm's and transformers' functions that are no variables of a template
OURS = frozenset(
    {"conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask", "messages"}
)

SHOWN = 80  # characters of a name in a message


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt, and where the answer begins.

    Attributes:
        tokens: of the prompt.
        lasting: so many of them are likely to begin the next prompt of the conversation, too: all that stands
            before the beginning of the answer, which may be written otherwise when it is history.
        state: of mlx-lm's text machine: normal or reasoning.
    """

    tokens: list[int]
    lasting: int
    state: str = "normal"


def chat_prompt(request: ChatRequest, model: LoadedModel) -> RenderedPrompt:
    """The tokens of a conversation, with the beginning of the assistant's turn.

    Raises:
        PromptError: the template refuses the conversation, or there is none.
        Refusal: 501, tools for a model whose template has no place for them.
    """
    tokenizer = model.target.tokenizer
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
    if request.tool_choice == "none":
        tools = []
    if tools and not tokenizer.has_tool_calling:
        raise unsupported(
            f"tools with {model.entry.name}, whose chat template has no place for them,", "tools"
        )
    if isinstance(request.tool_choice, ChosenTool):
        chosen = request.tool_choice.function.name
        tools = [tool for tool in tools if tool["function"]["name"] == chosen]
    switches = _switches(request, model)
    turns = [_turn(message.model_dump(exclude_none=True)) for message in request.messages]
    _refuse_endless((text for turn in turns for text in _texts(turn)), model, "messages")
    refused = f"{model.entry.name}: the conversation does not go through the chat template"
    with foreign(lambda reason: PromptError(f"{refused}: {reason}")):
        process_message_content(turns)

        def render(*, begun: bool) -> list[int]:
            rendered = tokenizer.apply_chat_template(
                turns, add_generation_prompt=begun, tokenize=True, tools=tools or None, **switches
            )
            return [int(token) for token in rendered]

        tokens, history = render(begun=True), render(begun=False)
    asked = RenderedPrompt(tokens, _common(tokens, history), _state(tokens, tokenizer))
    return _checked(asked, model, "messages")


def text_prompt(request: TextRequest, model: LoadedModel) -> RenderedPrompt:
    """The tokens of a text, or the ids that were given.

    Raises:
        PromptError: there is nothing to continue, or an id is none of the model's.
    """
    prompt = request.one_prompt
    if isinstance(prompt, list):
        most = model.target.target.vocab_size
        if odd := [token for token in prompt if token >= most]:
            raise PromptError(f"prompt: {odd[0]} is no token of this model, whose ids end at {most - 1}")
        return _checked(RenderedPrompt(prompt, len(prompt) - 1), model, "prompt")
    _refuse_endless([prompt], model, "prompt")
    with foreign(lambda reason: PromptError(f"the prompt cannot be turned into tokens: {reason}")):
        tokens = [int(token) for token in model.target.tokenizer.encode(prompt)]
    return _checked(RenderedPrompt(tokens, len(tokens) - 1), model, "prompt")


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates know it."""
    if message["role"] == "developer":
        message["role"] = "system"
    if "reasoning" in message:
        message["reasoning_content"] = message["reasoning"]
    message.setdefault("content", None)
    return message


def _knows(tokenizer: Any, names: Iterable[str]) -> bool:
    """Whether a chat template has one of these variables; of one that is a program, nobody knows."""
    template = tokenizer.chat_template
    return not isinstance(template, str) or any(name in template for name in names)


def _texts(turn: dict[str, Any]) -> Iterator[str]:
    """What a turn says."""
    content = turn["content"]
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else []:
        yield part["text"]


def _switches(request: ChatRequest, model: LoadedModel) -> Mapping[str, Any]:
    """Switches of the template: the registry's, then the request's.

    Raises:
        Refusal: the template knows no such switch, or it is none of a template's.
    """
    effort, given = request.reasoning_effort, request.chat_template_kwargs or {}
    switches = dict(model.entry.chat_template_kwargs)
    if effort is not None:
        if not knows(model, ("reasoning_effort", *THINKING_NAMES)):
            raise _no_switch("reasoning_effort", model)
        switches |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    for name in given:
        if name in OURS or not knows(model, THINKING_NAMES if name in THINKING_NAMES else (name,)):
            raise _no_switch(f"chat_template_kwargs.{ascii(name)[1:-1][:SHOWN]}", model)
    return switches | given


def knows(model: LoadedModel, switches: Iterable[str]) -> bool:
    """Whether a chat template has a variable of one of these names; of a program, nobody knows."""
    template = model.target.tokenizer.chat_template
    return not isinstance(template, str) or any(name in template for name in switches)


def _no_switch(param: str, model: LoadedModel) -> Refusal:
    return Refusal(
        400,
        f"{param}: the chat template of {model.entry.name} has no such switch; leave it out",
        param=param,
        code="invalid_value",
    )


def _common(left: list[int], right: list[int]) -> int:
    """Length of the longest common beginning."""
    shorter = min(len(left), len(right))
    return next((at for at in range(shorter) if left[at] != right[at]), shorter)


def _state(tokens: list[int], tokenizer: Any) -> str:
    """Whether the template has begun the reasoning, as mlx-lm's server tells it."""
    state = "normal"
    if tokenizer.has_thinking and tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens):
        state = "reasoning"
    return str(tokenizer.response_initial_state or state)


def _refuse_endless(texts: Iterable[str], model: LoadedModel, param: str) -> None:
    """Refuse texts that cannot fit, before they are turned into tokens, which takes seconds for long ones."""
    size = sum(map(len, texts))
    if model.context is not None and size > model.context * model.longest_token:
        raise Refusal(
            400,
            f"the prompt has {size} characters; {model.entry.name} takes {model.context} tokens, "
            "those of the answer included",
            param=param,
            code="context_length_exceeded",
        )


def _checked(asked: RenderedPrompt, model: LoadedModel, param: str) -> RenderedPrompt:
    """Refuse what is empty or does not fit."""
    if not asked.tokens:
        raise Refusal(400, f"{param}: the prompt is empty", param=param, code="invalid_prompt")
    if model.context is not None and len(asked.tokens) >= model.context:
        raise Refusal(
            400,
            f"the prompt has {len(asked.tokens)} tokens; {model.entry.name} takes {model.context}, "
            "those of the answer included",
            param=param,
            code="context_length_exceeded",
        )
    return asked


ANYTHING = {"type": "object"}
# Families whose calls are JSON between two marks: {"name": …, "arguments": …}
JSON_CALLS = "mlx_lm.tool_parsers.json_tools"


def bound(request: ChatRequest | TextRequest) -> bool:
    """Whether the answer has to follow anything."""
    form = request.response_format
    if form is not None and form.type != "text":
        return True
    return isinstance(request, ChatRequest) and _call_demanded(request)


def grammar_of(
    request: ChatRequest | TextRequest, model: LoadedModel, asked: RenderedPrompt
) -> Grammar | None:
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


def _json(schema: dict[str, Any], model: LoadedModel, asked: RenderedPrompt, *, reasons: bool) -> Grammar:
    """JSON by a schema, behind the reasoning if there may be any."""
    if not (reasons and model.target.tokenizer.has_thinking):
        return Grammar.json_schema(model.vocabulary, schema)
    return Grammar.lark(model.vocabulary, _after_reasoning(f"%json {_styled(schema)}", model, asked))


def _call_demanded(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, ChosenTool)


def _calls(request: ChatRequest, model: LoadedModel, asked: RenderedPrompt) -> str:
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


def _after_reasoning(body: str, model: LoadedModel, asked: RenderedPrompt) -> str:
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
