"""A request's conversation or text → token ids, through the model's own chat template.

Messages are brought into the form templates expect by mlx-lm's own function: parts joined, arguments of tool
calls as objects. Images were refused before.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_lm.server import process_message_content

from engine.errors import PromptError, wrap_errors
from engine.generate import THINKING_NAMES
from engine.server.decoding.models import Model
from engine.server.refusals import Refusal, unsupported
from engine.server.wire.requests import ChatRequest, ChosenTool, TextRequest

# arguments of mlx-lm's and transformers' functions that are no variables of a template
OURS = frozenset(
    {"conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask", "messages"}
)

SHOWN = 80  # characters of a name in a message


@dataclass(frozen=True)
class Asked:
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


def chat_prompt(request: ChatRequest, model: Model) -> Asked:
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
    with wrap_errors(lambda reason: PromptError(f"{refused}: {reason}")):
        process_message_content(turns)

        def render(*, begun: bool) -> list[int]:
            rendered = tokenizer.apply_chat_template(
                turns, add_generation_prompt=begun, tokenize=True, tools=tools or None, **switches
            )
            return [int(token) for token in rendered]

        tokens, history = render(begun=True), render(begun=False)
    asked = Asked(tokens, _common(tokens, history), _state(tokens, tokenizer))
    return _checked(asked, model, "messages")


def text_prompt(request: TextRequest, model: Model) -> Asked:
    """The tokens of a text, or the ids that were given.

    Raises:
        PromptError: there is nothing to continue, or an id is none of the model's.
    """
    prompt = request.one_prompt
    if isinstance(prompt, list):
        most = model.target.target.vocab_size
        if odd := [token for token in prompt if token >= most]:
            raise PromptError(f"prompt: {odd[0]} is no token of this model, whose ids end at {most - 1}")
        return _checked(Asked(prompt, len(prompt) - 1), model, "prompt")
    _refuse_endless([prompt], model, "prompt")
    with wrap_errors(lambda reason: PromptError(f"the prompt cannot be turned into tokens: {reason}")):
        tokens = [int(token) for token in model.target.tokenizer.encode(prompt)]
    return _checked(Asked(tokens, len(tokens) - 1), model, "prompt")


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


def _switches(request: ChatRequest, model: Model) -> Mapping[str, Any]:
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


def knows(model: Model, switches: Iterable[str]) -> bool:
    """Whether a chat template has a variable of one of these names; of a program, nobody knows."""
    template = model.target.tokenizer.chat_template
    return not isinstance(template, str) or any(name in template for name in switches)


def _no_switch(param: str, model: Model) -> Refusal:
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


def _refuse_endless(texts: Iterable[str], model: Model, param: str) -> None:
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


def _checked(asked: Asked, model: Model, param: str) -> Asked:
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
