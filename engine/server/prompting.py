"""A request's conversation or text → token ids, through the model's chat template, and the answer's grammar.

The grammar holds the answer to a response format, or to a call of one of the tools. Where a model reasons
first, the reasoning is free and what follows it is bound.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.server import process_message_content

from engine.errors import PromptError, wrap_errors
from engine.generate import THINKING_NAMES
from engine.grammar import JSON_STYLE, Grammar, nameless, regex_rule
from engine.server import schema
from engine.server.parsing import has_json_calls
from engine.server.schema import invalid, refusing, unsupported
from engine.server.sessions import LoadedModel
from engine.session import common_length

# arguments of mlx-lm's and transformers' functions, which are not variables of a template
RESERVED_SWITCHES = {
    *("conversation", "tools", "documents", "chat_template", "add_generation_prompt", "messages"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "tokenizer_kwargs", "return_assistant_tokens_mask"),
}
LONGEST_SHOWN = 80  # characters of a name in a message
ANY_OBJECT = {"type": "object"}
BINDING: Any = {"function": {"strict"}}  # of a tool: says how a call is bound, and describes nothing
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# keys of a JSON schema that allow no properties besides those it lists
LISTING_KEYS = {"type", "properties", "required", "title", "description", "$schema"}


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt, and where the answer begins."""

    tokens: list[int]
    # how many of them probably begin the conversation's next prompt too: templates may render the beginning
    # of the answer differently when it is history
    stable_prefix: int
    state: str = "normal"  # of mlx-lm's text machine: normal or reasoning
    text: str | None = None  # as it was given; None of token ids and conversations
    ignored: tuple[str, ...] = ()  # fields of the request that mean nothing to this model


@refusing("messages")
def chat_prompt(request: schema.ChatRequest, model: LoadedModel) -> RenderedPrompt:
    """Render a conversation with the beginning of the assistant's turn; raise Refusal."""
    tokenizer = model.target.tokenizer
    described = [tool.model_dump(exclude_none=True, exclude=BINDING) for tool in _callable(request)]
    if described and not tokenizer.has_tool_calling:
        what = f"tools with {model.entry.name}, whose chat template has no place for them,"
        raise unsupported(what, "tools")
    switches, ignored = _switches(request, model)
    turns = [message.model_dump(exclude_none=True) for message in request.messages]
    for turn in turns:  # in the form that templates expect
        turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
        if "reasoning" in turn:
            turn["reasoning_content"] = turn["reasoning"]
        turn.setdefault("content", None)
    refused = f"{model.entry.name}: the conversation does not go through the chat template"
    with wrap_errors(lambda reason: PromptError(f"{refused}: {reason}")):
        for call in (call for turn in turns for call in turn.get("tool_calls", ())):
            call["function"]["arguments"] = _readable(call["function"]["arguments"])
        process_message_content(turns)  # all contents are texts now
        _refuse_long(sum(len(turn["content"]) for turn in turns), "characters", model, "messages")

        def render(**options: bool) -> list[int]:
            rendered = tokenizer.apply_chat_template(
                turns, tokenize=True, tools=described or None, **options, **switches
            )
            return [int(token) for token in rendered]

        history = render(add_generation_prompt=False)
        if request.continue_final_message:
            tokens = render(add_generation_prompt=False, continue_final_message=True)
        else:
            tokens = render(add_generation_prompt=request.add_generation_prompt is not False)
    state = "normal"  # whether the template opens the reasoning, as mlx-lm's server finds out
    if tokenizer.has_thinking and tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens):
        state = "reasoning"
    state = str(tokenizer.response_initial_state or state)
    stable = common_length(tokens, history)
    return _checked(RenderedPrompt(tokens, stable, state, ignored=ignored), model, "messages")


@refusing("prompt")
def text_prompts(request: schema.TextRequest, model: LoadedModel) -> list[RenderedPrompt]:
    """Tokenize texts, or check the token ids that were given; raise Refusal."""
    return [_text_prompt(prompt, model) for prompt in request.prompts]


def _text_prompt(prompt: str | list[int] | None, model: LoadedModel) -> RenderedPrompt:
    text = None
    if prompt is None:
        first = model.target.tokenizer.bos_token_id
        if first is None:
            why = f"texts of {model.entry.name} begin with no token of their own"
            raise invalid("prompt", f"prompt is null, and {why}; send a text, or token ids")
        tokens = [int(first)]
    elif isinstance(prompt, str):
        text = prompt
        _refuse_long(len(text), "characters", model, "prompt")
        with wrap_errors(lambda reason: PromptError(f"the prompt cannot be turned into tokens: {reason}")):
            tokens = [int(token) for token in model.target.tokenizer.encode(text)]
    else:
        tokens = prompt
        model.refuse_tokens("prompt", tokens, code="invalid_prompt")
    return _checked(RenderedPrompt(tokens, len(tokens) - 1, text=text), model, "prompt")


def _readable(arguments: str) -> str:
    """A call's arguments as JSON, also those of a call that was cut off or that the model wrote wrongly."""
    try:
        json.loads(arguments or "{}")
    except ValueError:
        return json.dumps({"invalid_json": arguments}, ensure_ascii=False)
    return arguments or "{}"


def _callable(request: schema.ChatRequest) -> list[schema.Tool]:
    chosen = request.chosen_tools
    return [tool for tool in request.tools or [] if chosen is None or tool.function.name in chosen]


def _switches(request: schema.ChatRequest, model: LoadedModel) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The chat template's variables, and fields that the template does not read."""
    effort, given = request.reasoning_effort, request.chat_template_kwargs or {}
    ignored: tuple[str, ...] = ()
    switches = dict(model.entry.chat_template_kwargs)
    if effort is not None and has_switch(model, ("reasoning_effort", *THINKING_NAMES)):
        if effort not in schema.EFFORTS:
            text = f"{ascii(effort)[:LONGEST_SHOWN]} is none of {', '.join(schema.EFFORTS)}"
            raise invalid(request.effort_fields[-1], f"{request.effort_fields[-1]}: {text}")
        switches |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    elif effort is not None:
        ignored = request.effort_fields
    for name in given:
        names = THINKING_NAMES if name in THINKING_NAMES else (name,)
        if RESERVED_SWITCHES.intersection(names) or not has_switch(model, names):
            param = f"chat_template_kwargs.{ascii(name)[1:-1][:LONGEST_SHOWN]}"
            why = f"the chat template of {model.entry.name} has no such switch; leave it out"
            raise invalid(param, f"{param}: {why}")
    return switches | given, ignored


def has_switch(model: LoadedModel, names: Iterable[str]) -> bool:
    """Whether a chat template has a variable of one of these names; assumed of one that is a program."""
    template = model.target.tokenizer.chat_template
    return not isinstance(template, str) or any(name in template for name in names)


def _refuse_long(size: int, unit: str, model: LoadedModel, param: str) -> None:
    """Refuse what does not fit, characters before they are tokenized, which takes seconds for long texts."""
    if model.context is None:
        return
    most = model.context - 1 if unit == "tokens" else model.context * model.longest_token
    if size > most:  # in these words, since agents look for them, to make their conversation shorter
        takes = f"{model.entry.name} takes {model.context} tokens, those of the answer included"
        text = f"prompt is too long: {size} {unit} > {most} maximum; {takes}"
        raise invalid(param, text, code="context_length_exceeded")


def _checked(prompt: RenderedPrompt, model: LoadedModel, param: str) -> RenderedPrompt:
    if not prompt.tokens:
        raise invalid(param, f"{param}: the prompt is empty", code="invalid_prompt")
    _refuse_long(len(prompt.tokens), "tokens", model, param)
    return prompt


# --- grammars -------------------------------------------------------------------------------------------


def needs_grammar(request: schema.AnyRequest) -> bool:
    """Whether the answer is bound to a format or a call."""
    return bool(_constraints(request)) or _demands_call(request)


def _constraints(request: schema.AnyRequest) -> dict[str, str]:
    """What the answer has to be, as right sides of rules in Lark, by the fields that say so."""
    form, bound = request.response_format, request.structured_outputs or schema.StructuredOutputs()
    wanted = None
    if form is not None and form.type != "text":
        wanted = form.json_schema.schema_ if isinstance(form, schema.JsonSchemaFormat) else ANY_OBJECT
    schemas = {
        "response_format": wanted,
        "guided_json": request.guided_json,
        "structured_outputs.json": bound.json_,
        "structured_outputs.json_object": ANY_OBJECT if bound.json_object else None,
    }
    found = {name: f"%json {_styled(given)}" for name, given in schemas.items() if given is not None}
    if regex := request.guided_regex or bound.regex:
        found["guided_regex" if request.guided_regex else "structured_outputs.regex"] = regex_rule(regex)
    if texts := request.guided_choice or bound.choice:
        name = "guided_choice" if request.guided_choice else "structured_outputs.choice"
        found[name] = " | ".join(_dump(text) for text in texts)
    return found


def grammar_of(request: schema.AnyRequest, model: LoadedModel, prompt: RenderedPrompt) -> Grammar:
    """Compile the grammar of an answer that needs one; raise Refusal."""
    constraints = _constraints(request)
    if _demands_call(request):
        constraints.pop("response_format", None)  # it binds text, of which a demanded call has none
    names = [*constraints, *(["tool_choice"] if _demands_call(request) else [])]
    name = names[0]
    if len(names) > 1:
        raise invalid(name, f"{' and '.join(names)} cannot all hold; leave all but one out")
    if request.min_tokens:
        raise invalid("min_tokens", f"min_tokens and {name} cannot both hold; leave one out")
    with refusing(name):
        if not isinstance(request, schema.ChatRequest):
            return Grammar.lark(model.vocabulary, f"start: {constraints[name]}")
        if name == "tool_choice":
            calls, rules = _call_rules(request, model)
            return Grammar.lark(model.vocabulary, "\n".join([_after_reasoning(calls, model, prompt), *rules]))
        if name == "response_format" and _callable(request) and has_json_calls(model.target.tokenizer):
            # what binds the text leaves the model free to call a tool instead, as OpenAI's do
            calls, rules = _call_rules(request, model)
            body = _after_reasoning(f"answer | {calls}", model, prompt)
            rules = [body, f"answer: {constraints[name]}", *rules]
            return Grammar.lark(model.vocabulary, "\n".join(rules))
        return Grammar.lark(model.vocabulary, _after_reasoning(constraints[name], model, prompt))


def _demands_call(request: schema.AnyRequest) -> bool:
    return isinstance(request, schema.ChatRequest) and request.demands_call


def _call_rules(request: schema.ChatRequest, model: LoadedModel) -> tuple[str, list[str]]:
    """The right side that stands for as many calls as the request allows, and the rules that it needs."""
    tokenizer = model.target.tokenizer
    if not has_json_calls(tokenizer):
        raise unsupported(f"tool_choice other than auto and none with {model.entry.name}", "tool_choice")
    rules = []
    for index, tool in enumerate(_callable(request)):
        head = _dump(f'{{"name": {_dump(tool.function.name)}, "arguments": ')
        wanted = _arguments(tool.function.parameters or {})
        rules.append(f'one_{index}: {head} %json {_styled(wanted)} "}}"')
    one = not request.parallel_tool_calls or isinstance(request.tool_choice, schema.ChosenTool)
    several = "call" if one else "call+"
    names = " | ".join(f"one_{index}" for index in range(len(rules)))
    begin = _mark(tokenizer.tool_call_start, tokenizer.tool_call_start_tokens)
    end = _mark(tokenizer.tool_call_end, tokenizer.tool_call_end_tokens)
    call = f'call: {begin} "\\n" ({names}) "\\n" {end}'
    return several, [call, *rules]


def _arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments: a tool that names no properties takes none."""
    named = parameters.get("properties") or parameters.get("required")
    empty = "properties" in parameters and not named and parameters.keys() <= LISTING_KEYS
    return NO_ARGUMENTS if empty or not parameters else parameters


def _after_reasoning(body: str, model: LoadedModel, prompt: RenderedPrompt) -> str:
    tokenizer = model.target.tokenizer
    if not tokenizer.has_thinking:
        return f"start: {body}"
    begin = _mark(tokenizer.think_start, tokenizer.think_start_tokens)
    end = _mark(tokenizer.think_end, tokenizer.think_end_tokens)
    rules = f"body: {body}\nthought: /(?s:.*)/ {end} /[ \\n]{{0,4}}/"
    if prompt.state == "reasoning":
        return f"start: thought body\n{rules}"
    return f"start: ({begin} thought)? body\n{rules}"


def _mark(text: str, tokens: Sequence[int] | None) -> str:
    """A mark in a grammar: its token where it has one, which models write and no other text equals."""
    return f"<[{tokens[0]}]>" if tokens is not None and len(tokens) == 1 else _dump(text)


def _styled(wanted: dict[str, Any]) -> str:
    return nameless(_dump(wanted | {"x-guidance": JSON_STYLE}))


def _dump(value: Any) -> str:
    """A value as JSON, which is also how grammars quote strings."""
    return json.dumps(value, ensure_ascii=False)
