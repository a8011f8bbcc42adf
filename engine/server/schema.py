"""The JSON of the HTTP API: requests, replies, and the errors that refuse a request.

Fields that would change the output and that this server lacks are listed in `UNSUPPORTED` and refused by
name (501); they are not part of the published OpenAPI document. All other unknown fields are ignored, and
named in the answer (`x_kakeya.ignored`).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from engine import errors

Drafting = Literal["default", "none", "prompt-lookup"]  # the model's drafter, nothing, or look-ups alone
Finish = Literal["stop", "length", "tool_calls"]
MOST_STOPS = 16
LONGEST_STOP = 1000  # characters
MOST_BIASES = 1024
MOST_TOOLS = 128
MOST_LOGPROBS = 20
MOST_DECODED = 128  # choices of all prompts of a request, those that `best_of` drops included
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MOST_IGNORED = 64  # names in an answer
LONGEST_NAME = 100  # characters of one
LONGEST_SHOWN = 100  # characters of a value in a message

# status -> (OpenAI's type of the error, what it means here)
ERRORS = {
    400: ("invalid_request_error", "A value is wrong; `param` names the field"),
    401: ("authentication_error", "No API key, or another one"),
    403: ("permission_error", "A web page that is not allowed"),
    404: ("not_found_error", "No such model"),
    408: ("timeout_error", "The body took too long"),
    413: ("invalid_request_error", "The body is too large"),
    415: ("invalid_request_error", "The body is not JSON"),
    429: ("rate_limit_error", "As many requests are waiting as may"),
    500: ("server_error", "A bug, or a model that cannot be used"),
    501: ("not_implemented_error", "A feature of OpenAI's that is not here"),
    503: ("server_error", "The server is shutting down"),
}


@dataclass(eq=False)
class Refusal(errors.ConfigurationError):
    """Ends a request with a status and an error document; `param` is the request's wrong field."""

    status: int
    message: str
    param: str | None = None
    code: str = field(kw_only=True)
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    def document(self) -> dict[str, Any]:
        kind, _ = ERRORS.get(self.status, ERRORS[400])
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ShuttingDownError(errors.GenerationError):
    """The server shuts down before the request is complete."""


def invalid(param: str, message: str, *, code: str = "invalid_value") -> Refusal:
    return Refusal(400, message, param=param, code=code)


def unsupported(what: str, param: str | None = None) -> Refusal:
    text, never = f"{what} is not supported by this server", {"x-should-retry": "false"}
    return Refusal(501, text, param=param, code="unsupported_feature", headers=never)


def refusal_of(error: errors.EngineError, param: str | None = None) -> Refusal:
    """Turn an error of the engine into a refusal; `param` names the field where the error does not."""
    if isinstance(error, Refusal):
        return error
    for kind, status, wrong, code in (
        (ShuttingDownError, 503, None, "shutting_down"),
        (errors.MachineError, 503, None, "insufficient_memory"),
        (errors.UnknownModel, 404, "model", "model_not_found"),
        (errors.ModelError, 500, None, "model_unusable"),
        (errors.PromptError, 400, param or "messages", "invalid_prompt"),
        (errors.InputError, 400, param, "invalid_value"),
    ):
        if isinstance(error, kind):
            return Refusal(status, str(error), wrong, code=code)
    return Refusal(500, str(error), code="generation_failed")


@contextmanager
def refusing(param: str) -> Iterator[None]:
    try:
        yield
    except errors.EngineError as error:
        raise refusal_of(error, param) from error


# Fields that would change the output, of OpenAI's API and of other servers -> values that ask for nothing,
# which clients send by default. An endpoint that has a field of this name reads it.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "verbosity": (None, "medium"),
    "moderation": (None,),
    # vLLM, SGLang
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "prompt_logprobs": (None,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "add_special_tokens": (None,),
    "return_tokens_as_token_ids": (None, False),
    "include_reasoning": (None, True),
    "separate_reasoning": (None, True),
    "chat_template": (None, ""),
    "documents": (None, []),
    "logits_processors": (None, []),
    "prompt_embeds": (None, []),
    "guided_grammar": (None, ""),
    "guided_whitespace_pattern": (None, ""),
    "structural_tag": (None, ""),
    "structured_outputs.grammar": (None, ""),
    "structured_outputs.structural_tag": (None, ""),
    "structured_outputs.whitespace_pattern": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "min_new_tokens": (None, 0),
    "stop_regex": (None, "", []),
    "no_stop_trim": (None, False),
    "lora_path": (None, ""),
    "custom_logit_processor": (None, ""),
    "sampling_seed": (None,),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None, {}),
    # llama.cpp
    "grammar": (None, ""),
    "json_schema": (None, {}),
    "n_predict": (None, -1),
    "n_probs": (None, 0),
    "repeat_penalty": (None, 1, 1.0),
    "repeat_last_n": (None,),
    "mirostat": (None, 0),
    "typical_p": (None, 1, 1.0),
    "tfs_z": (None, 1, 1.0),
    "top_n_sigma": (None, -1, -1.0),
    "dynatemp_range": (None, 0, 0.0),
    "xtc_probability": (None, 0, 0.0),
    "t_max_predict_ms": (None, -1, 0),
    "dry_multiplier": (None, 0, 0.0),
    "samplers": (None,),
    "lora": (None, []),
    "reasoning_format": (None, "auto", "deepseek"),
    # mlx-lm
    "adapters": (None, ""),
    # what the penalties look back at here too
    **dict.fromkeys(
        ("repetition_context_size", "presence_context_size", "frequency_context_size"), (None, 20)
    ),
    # Ollama, transformers, routers
    "think": (None,),
    "num_predict": (None, -1),
    "no_repeat_ngram_size": (None, 0),
    "options": (None, {}),
    "format": (None, ""),
    "images": (None, []),
    "do_sample": (None, False),
    "max_new_tokens": (None,),
    "max_length": (None,),
    "top_a": (None, 0, 0.0),
    "enable_thinking": (None,),  # it goes into chat_template_kwargs
    "thinking": (None,),
    "reasoning": (None, {}),
}
INSTEAD = {  # an unsupported field -> the one that asks for the same here
    "functions": "tools",
    "function_call": "tool_choice",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "sampling_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "regex": "guided_regex",
    "json_schema": "response_format",
    "think": "chat_template_kwargs",
    "enable_thinking": "chat_template_kwargs",
    "thinking": "chat_template_kwargs",
    "reasoning": "reasoning_effort",
}
# OpenAI's and Anthropic's fields without effect here, which `serve --strict` accepts too
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction", "stream_options.include_obfuscation"),
    # of Responses and of Messages
    *("client_metadata", "max_tool_calls", "prompt_cache_options", "stream_options", "truncation"),
    *("cache_control", "context_management", "diagnostics", "inference_geo", "speed", "user_profile_id"),
}
# fields of an answer's message that clients send back with the conversation
ANSWER_FIELDS = ("annotations", "audio", "function_call", "prefix")
CONTENT_TYPES = (
    *("image_url", "input_image", "image", "input_audio", "file", "video_url"),
    *("input_file", "document", "search_result", "container_upload"),
)
UNSUPPORTED_PATHS = re.compile(
    r"/v1/((embeddings|moderations|images|audio|files|batches|fine_tuning|assistants|threads)(/|\Z)"
    r"|responses/(compact|input_tokens)\Z|responses/[^/]+/(cancel|input_items)\Z|messages/batches(/|\Z))"
)


def unsupported_value(param: str, value: Any, neutral: Sequence[Any]) -> Refusal:
    """Refuse a field's value, and say which values pass."""
    passing = [each for index, each in enumerate(neutral) if each is not None and each not in neutral[:index]]
    remedy = " or ".join(["leave it out", *(f"send {json.dumps(each)}" for each in passing)])
    if param in INSTEAD:
        remedy = f"{remedy}; {INSTEAD[param]} asks for it here"
    refusal = unsupported(f"{param}: {shown(value)}", param)
    return replace(refusal, message=f"{refusal}; {remedy}")


def shown(value: Any) -> str:
    """A request's value as JSON, for a message, which a long one shortens."""
    try:
        text = json.dumps(value, ensure_ascii=True, default=str)
    except RecursionError:
        text = "a value that is nested too deeply"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} …"


def refuse_unsupported(fields: Any, known: Mapping[str, Any]) -> Any:
    """Return a request's fields without those that ask for nothing; raise Refusal for unsupported ones."""
    if not isinstance(fields, Mapping):
        return fields
    kept = dict(fields)
    for name, neutral in UNSUPPORTED.items():
        outer, _, inner = name.partition(".")
        if outer not in fields or (outer in known and not inner):
            continue
        value = fields[outer]
        if inner:
            value = value.get(inner) if isinstance(value, Mapping) else None
        else:
            del kept[outer]
        if not any(value is each or (type(value) is type(each) and value == each) for each in neutral):
            raise unsupported_value(name, value, neutral)
    if isinstance(messages := fields.get("messages"), list):
        kept["messages"] = [_supported_message(message, index) for index, message in enumerate(messages)]
    return kept


def unknown_fields(part: BaseModel, given: Any, place: str = "") -> Iterator[str]:
    """Yield the dotted names of fields given that a parsed part does not have, without positions in lists.

    Those that are null are left out.
    """
    if not isinstance(given, Mapping):
        return
    fields = {field.alias or name: name for name, field in type(part).model_fields.items()}
    for name, value in given.items():
        if name not in fields:
            if value is not None:
                yield f"{place}{ascii(name)[1:-1][:LONGEST_NAME]}"
            continue
        parsed = getattr(part, fields[name])
        pairs = zip(parsed, value, strict=False) if isinstance(parsed, list) else [(parsed, value)]
        for each, raw in pairs:
            if isinstance(each, RequestPart):
                yield from unknown_fields(each, raw, f"{place}{name}.")


def _refuse_custom_tools(fields: Any) -> None:
    if not isinstance(fields, Mapping):
        return
    choice = fields.get("tool_choice")
    allowed = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    named = {"tool_choice": choice, "tools": fields.get("tools")}
    named["tool_choice.allowed_tools.tools"] = allowed.get("tools") if isinstance(allowed, Mapping) else None
    for param, value in named.items():
        for index, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, Mapping) and each.get("type") == "custom":
                raise unsupported("a custom tool", f"{param}.{index}" if isinstance(value, list) else param)


def refuse_media(content: Any, param: str) -> None:
    """Raise Refusal for a part of a message that is no text."""
    for place, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in CONTENT_TYPES:
            raise unsupported(f"content of the type {kind}", f"{param}.{place}")


def _supported_message(message: Any, index: int) -> Any:
    if not isinstance(message, Mapping):
        return message
    refuse_media(message.get("content"), f"messages.{index}.content")
    if message.get("role") == "function":
        raise unsupported("the role function, replaced by tool,", f"messages.{index}.role")
    calls = message.get("tool_calls")
    for place, call in enumerate(calls if isinstance(calls, list) else []):
        if isinstance(call, Mapping) and call.get("type") == "custom":
            raise unsupported("a call of a custom tool", f"messages.{index}.tool_calls.{place}")
    for name in ANSWER_FIELDS:
        if message.get(name):
            raise unsupported_value(f"messages.{index}.{name}", message[name], (None,))
    kept = {name: value for name, value in message.items() if name not in ANSWER_FIELDS}
    if "reasoning" not in kept and "reasoning_content" in kept:  # as other servers call it
        kept["reasoning"] = kept.pop("reasoning_content")
    if isinstance(kept.get("refusal"), str):  # what the assistant said instead of content
        said = kept.pop("refusal")
        kept["content"] = said if kept.get("content") is None else kept["content"]
    if kept.get("role") == "assistant" and isinstance(kept.get("content"), list):
        kept["content"] = [_as_text(part) for part in kept["content"]]
    return kept


def _as_text(part: Any) -> Any:
    """A part in which the assistant refused as the text that it is."""
    if isinstance(part, Mapping) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        others = {name: value for name, value in part.items() if name != "refusal"}
        return others | {"type": "text", "text": part["refusal"]}
    return part


# --- requests -------------------------------------------------------------------------------------------


def _encodable(text: str) -> str:
    """Raise ValueError for half a surrogate pair, which no encoding can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half a character at {error.start}") from None
    return text


def _serializable(value: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for half characters and for too deep a nesting."""
    try:
        _encodable(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return value


def _without_empty(stop: Any) -> Any:
    """Leave out empty stop strings, which OpenAI allows."""
    if isinstance(stop, list) and len(stop) <= MOST_STOPS:
        return [each for each in stop if each != ""] or None
    return None if stop == "" else stop


def _read_json(value: Any) -> Any:
    """Read a schema that is given as text, as vLLM's clients do."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("is no JSON") from None
    return value


Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]  # one error suffices for a million wrong items
Text = Annotated[str, AfterValidator(_encodable)]
Json = Annotated[dict[str, Any], AfterValidator(_serializable)]
StopText = Annotated[Text, Field(max_length=LONGEST_STOP)]
StopTexts = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None, BeforeValidator(_without_empty)
]
Count = Annotated[int, Field(ge=1)]
Effort = Annotated[
    Text,
    Field(description=f"One of {', '.join(EFFORTS)}; without effect where the chat template has no switch."),
]
TopK = Annotated[int, Field(ge=-1), AfterValidator(lambda most: max(most, 0))]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[Many[TokenId], Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedToken = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


JsonSchemaText = Annotated[Json, BeforeValidator(_read_json, json_schema_input_type=dict[str, Any] | str)]
ChoiceTexts = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=1024)]


class RequestPart(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(RequestPart):
    type: Literal["text"]
    text: Text


class FunctionCall(RequestPart):
    name: Name
    arguments: Text = Field(description="JSON as text.")


class ToolCall(RequestPart):
    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(RequestPart):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Many[TextPart] | None = None
    name: Text | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = Field(None, description="The reasoning of the assistant's turn.")
    refusal: Text | None = Field(None, description="The content of a turn that has none.")


class Function(RequestPart):
    name: Name
    description: Text | None = None
    parameters: Json | None = Field(None, description="A JSON Schema.")
    strict: bool | None = None


class Tool(RequestPart):
    type: Literal["function"]
    function: Function


class ChosenFunction(RequestPart):
    name: Name


class ChosenTool(RequestPart):
    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(RequestPart):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedToolsChoice(RequestPart):
    """Some of the tools; the others are left out of the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(RequestPart):
    name: Name
    description: Text | None = None
    schema_: Json = Field({"type": "object"}, alias="schema")
    strict: bool | None = None


class PlainFormat(RequestPart):
    """No constraint, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(RequestPart):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(RequestPart):
    """vLLM's way to bind an answer; one of these."""

    json_: JsonSchemaText | None = Field(None, alias="json", description="A JSON Schema.")
    json_object: bool | None = None
    regex: Text | None = None
    choice: ChoiceTexts | None = None


class StreamOptions(RequestPart):
    include_usage: bool = Field(False, description="In a last chunk without choices.")
    continuous_usage_stats: bool = Field(False, description="With include_usage: in every chunk, too.")


class EngineFields(RequestPart):
    """What a request of any protocol may say about how it is decoded."""

    kv_channel: Text | None = Field(None, description="How keys and values are kept; one the model allows.")
    block: Count | Literal["auto"] | None = Field(None, description="Tokens a forward; 1 is plain decoding.")
    drafter: Drafting | None = Field(None, description="What drafts; `none` is plain decoding.")
    return_token_ids: bool | None = Field(None, description="Put the tokens into `x_kakeya`.")
    return_rounds: bool | None = Field(None, description="Put every round and the caches into `x_kakeya`.")
    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of the request that nothing here reads."""
        return self._ignored


class CompletionRequest(EngineFields):
    model: Text | None = Field(None, description="`NAME` or `NAME@CHANNEL`; the default model if left out.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = Field(None, description="More than there may be is clamped.")
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="Before which nothing stops it.")
    n: Annotated[int, Field(ge=1, le=MOST_DECODED)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="Greedy by default.")
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: TopK | None = Field(None, description="All tokens for 0, and for -1, as vLLM says it.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopTexts = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = Field(None, description="Go on past the model's stop tokens.")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[BiasedToken, Bias], Field(max_length=MOST_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaText | None = Field(None, description="As structured_outputs has it.")
    guided_regex: Text | None = None
    guided_choice: ChoiceTexts | None = None
    _open_ended: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _tolerant(cls, fields: Any, parse: Callable[[Any], Self]) -> Self:
        kept = refuse_unsupported(fields, cls.model_fields)
        _refuse_custom_tools(kept)
        request = parse(kept)
        request._ignored = tuple(dict.fromkeys(unknown_fields(request, kept)))
        return request

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens of an answer, where the request says."""
        return self.max_tokens

    @property
    def open_ended(self) -> bool:
        """Whether an answer may be as long as the server allows, where the request does not say."""
        return self._open_ended

    @property
    def tells_logprobs(self) -> bool:
        given = getattr(self, "logprobs", None)
        return given is not None and given is not False

    @property
    def kept_choices(self) -> int:
        """Choices a prompt in the answer."""
        return self.n or 1

    @property
    def decoded_choices(self) -> int:
        """Choices a prompt that are decoded."""
        return self.kept_choices

    @property
    def prompt_count(self) -> int:
        return 1


class ChatRequest(CompletionRequest):
    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="Continue the assistant's last turn.")
    chat_template_kwargs: Json | None = Field(None, description="Switches of the model's chat template.")
    _effort_fields: tuple[str, ...] = PrivateAttr(("reasoning_effort",))

    @property
    def effort_fields(self) -> tuple[str, ...]:
        """Where the request, perhaps of another protocol, says `reasoning_effort`."""
        return self._effort_fields

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Raise Refusal, because pydantic's own errors of a whole body name no field."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise invalid("tool_choice", "tool_choice needs tools")
        offered = {tool.function.name for tool in self.tools or []}
        for name in self.chosen_tools or ():
            if name not in offered:
                raise invalid("tool_choice", f"tool_choice names {name!r}, which is none of the tools")
        if self.continue_final_message:
            last = self.messages[-1]
            if self.add_generation_prompt:
                text = "add_generation_prompt and continue_final_message cannot both hold; leave one out"
                raise invalid("add_generation_prompt", text)
            if last.role != "assistant" or not last.content:
                text = "continue_final_message needs a last message of the assistant with content"
                raise invalid("continue_final_message", text)
        return self

    @property
    def wanted_tokens(self) -> int | None:
        most = self.max_completion_tokens
        return self.max_tokens if most is None else most

    @property
    def demands_call(self) -> bool:
        """Whether the answer has to be a call of a tool."""
        choice = self.tool_choice
        if isinstance(choice, AllowedToolsChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, ChosenTool)

    @property
    def chosen_tools(self) -> tuple[str, ...] | None:
        """The names that tool_choice restricts calls to, none for ``none``; None for no restriction."""
        match self.tool_choice:
            case "none":
                return ()
            case ChosenTool(function=function):
                return (function.name,)
            case AllowedToolsChoice(allowed_tools=allowed):
                return tuple(tool.function.name for tool in allowed.tools)
        return None


class TextRequest(CompletionRequest):
    """A text completion: one or several prompts, each a text or a list of token ids."""

    prompt: (
        Text
        | TokenIds
        | Annotated[Many[Text | TokenIds], Field(min_length=1, json_schema_extra={"maxItems": MOST_DECODED})]
        | None
    ) = Field(description="Null: the token with which the model's texts begin.")
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="0: the prompt alone is computed."
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | Literal[False] | None = None
    echo: bool | None = Field(None, description="Begin with the prompt, and its log-probabilities.")
    best_of: Annotated[int, Field(ge=1, le=MOST_DECODED)] | None = Field(
        None, description="Decode so many choices, and return the `n` whose tokens were likeliest."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.decoded_choices < self.kept_choices:
            raise invalid("best_of", f"best_of {self.best_of} is less than n {self.kept_choices}")
        if self.stream and self.decoded_choices > self.kept_choices:
            raise invalid("best_of", "best_of above n cannot be streamed; leave stream or best_of out")
        if (count := self.prompt_count * self.decoded_choices) > MOST_DECODED:
            text = f"{self.prompt_count} prompts with {self.decoded_choices} choices each are {count} choices"
            raise invalid("prompt", f"{text}, more than {MOST_DECODED} in one request")
        return self

    @property
    def prompts(self) -> list[str | list[int] | None]:
        given: Any = self.prompt
        return [given] if given is None or isinstance(given, str) or isinstance(given[0], int) else given

    @property
    def prompt_count(self) -> int:
        return len(self.prompts)

    @property
    def decoded_choices(self) -> int:
        return self.kept_choices if self.best_of is None else self.best_of


AnyRequest = ChatRequest | TextRequest

# fields of chats -> values that ask for nothing, with which other endpoints ignore them
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ("", []),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "parallel_tool_calls": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


class TranslatedRequest(EngineFields):
    """A request of another protocol, which is answered as a chat request that asks for the same."""

    # fields that would change the answer and are not here -> values that ask for nothing
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: Text | None = Field(None, description="`NAME` or `NAME@CHANNEL`; the default model if left out.")
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="Greedy by default.")
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: TopK | None = Field(None, description="All tokens for 0, and for -1, as vLLM says it.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    chat_template_kwargs: Json | None = Field(None, description="Switches of the model's chat template.")

    @model_validator(mode="wrap")
    @classmethod
    def _tolerant(cls, fields: Any, parse: Callable[[Any], Self]) -> Self:
        if not isinstance(fields, Mapping):
            return parse(fields)
        kept, dropped = cls.supported(fields)
        request = parse(kept)
        request._ignored = tuple(dict.fromkeys((*dropped, *unknown_fields(request, kept))))
        return request

    @classmethod
    def supported(cls, fields: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields that are read, and names of what is ignored; raise Refusal for others."""
        kept: dict[str, Any] = refuse_unsupported(fields, cls.model_fields)
        for name, neutral in cls.unsupported.items():
            if name in kept and not any(_same(kept[name], each) for each in neutral):
                raise unsupported_value(name, kept[name], neutral)
        for name in ChatRequest.model_fields:
            if name in cls.model_fields or name in WITHOUT_EFFECT:
                continue
            if not any(_same(kept.get(name), each) for each in (None, *NEUTRAL.get(name, ()))):
                text = f"{name} is a field of chat completions, which this endpoint does not have"
                raise invalid(name, f"{text}; leave it out", code="unknown_parameter")
        return {name: value for name, value in kept.items() if name not in cls.unsupported}, ()

    def as_chat(
        self, *, effort_fields: tuple[str, ...], open_ended: bool = False, **fields: Any
    ) -> ChatRequest:
        """Make the chat request, with the fields that have the same name here and there.

        `effort_fields` are the names of this request's fields that `reasoning_effort` was made of.
        """
        shared = {name: getattr(self, name) for name in TranslatedRequest.model_fields}
        request = ChatRequest.model_validate(shared | fields)
        request._ignored, request._open_ended = self._ignored, open_ended
        request._effort_fields = effort_fields
        return request


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


# --- replies: names and nesting are OpenAI's, ``reasoning`` next to ``content`` is mlx-lm's -------------


def omitted(description: str | None = None) -> Any:
    """A field that is not sent while it is None."""
    return Field(default=None, exclude_if=lambda value: value is None, description=description)


class Reply(BaseModel):
    model_config = ConfigDict(frozen=True)


class ErrorBody(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    error: ErrorBody


class CachedTokens(Reply):
    cached_tokens: int


class ReasoningTokens(Reply):
    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = omitted()


class CodedValues(Reply):
    layers: list[int]
    values: int
    bytes: int


UNTOLD = "Null where an external engine drafts, which does not tell."
UNSEEN = "Null where an external engine keeps its own."


CacheTier = Literal["memory", "disk"]


class Provenance(Reply):
    """How an answer was made."""

    model: str
    kv_channel: str
    kv_policy: str = Field(description="The channel, written out.")
    engine: str = Field(description="Which decoded: `kakeya`, or the model's external engine.")
    fallback_from: str | None = omitted("The model's external engine, which cannot decode this request.")
    drafter: str | None = Field(description="Null for plain decoding.")
    block: int | str | None = Field(description="Tokens of a verify forward, or `auto`; null without drafts.")
    speculation: bool = Field(description="Whether drafts were verified.")
    why_off: str | None = Field(description="Why no drafts were verified; null where they were.")
    verify_rounds: int = Field(description="Forwards over a block, as the engine counts them.")
    plain_steps: int | None = Field(description=f"Forwards over one token. {UNTOLD}")
    drafted: int | None = Field(description=f"Drafts that were verified. {UNTOLD}")
    accepted: int = Field(description="Drafts that were confirmed, as the engine counts them.")
    acceptance_length: float | None = Field(description="Tokens a verify round; null without one.")
    drafter_forwards: int | None = Field(description=f"Forwards of the drafter's network. {UNTOLD}")
    cached_tokens: int = Field(description="Tokens of the prompt that were not computed again.")
    batch: int = Field(description="Sequences of the largest batch that it was decoded in; 1: by itself.")
    cached_from: CacheTier | None = Field(default=None, description="Where they were; null for none.")
    queue_s: float = Field(description="Until the first work on it.")
    prefill_s: float = Field(description="From there to the first token.")
    decode_s: float = Field(description="From the first token to the last.")
    decode_tokens_per_s: float | None = Field(description="Null for a single token.")
    resident_bytes: int | None = Field(description=f"What target and drafter hold at the end. {UNSEEN}")
    drafter_resident_bytes: int | None = Field(description=f"The drafter's part of resident_bytes. {UNSEEN}")
    cache_classes: dict[str, int] = Field(description="Classes of the layers' caches, with their counts.")
    cache_strategy: str | None = omitted("How an external engine was given the channel's caches.")
    token_ids: list[int] | None = omitted()
    prompt_token_ids: list[int] | None = omitted()
    rounds: list[tuple[int, int, float, float, bool]] | None = omitted(
        "Block, accepted, draft_s, verify_s, looked_up."
    )
    kept_positions: int | None = omitted("The most that a layer with a window still sees.")
    coded: CodedValues | None = omitted()
    ignored: list[str] = Field([], description="Fields of the request that nothing here reads.")
    max_tokens_clamped_to: int | None = omitted("Where the request asked for more tokens than there may be.")


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """The answer's tokens, without the one that ended it."""

    content: list[ContentLogprob]


class TextLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="Null for the first token of an echoed prompt.")
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CalledFunction(Reply):
    name: str
    arguments: str = Field(description="JSON as text; cut off where the answer has as many tokens as it may.")


class ToolCallReply(Reply):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDelta(Reply):
    name: str | None = omitted()
    arguments: str


class ToolCallDelta(Reply):
    """The beginning of a call, with id and name, or more of its arguments."""

    index: int
    id: str | None = omitted()
    type: Literal["function"] | None = omitted()
    function: FunctionDelta


class Delta(Reply):
    role: Literal["assistant"] | None = omitted()
    content: str | None = omitted()
    reasoning: str | None = omitted()
    tool_calls: list[ToolCallDelta] | None = omitted()


class ChatMessage(Reply):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: str | None = omitted()
    tool_calls: list[ToolCallReply] | None = omitted()


class ChatChoice(Reply):
    index: int = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish
    x_kakeya: Provenance | None = omitted("Where there are several choices: of this one.")


class Head(Reply):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Head):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    x_kakeya: Provenance


class ChunkChoice(Reply):
    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    x_kakeya: Provenance | None = omitted("Where there are several choices: of this one.")


class ChatChunk(Head):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = omitted()
    x_kakeya: Provenance | None = omitted()


class TextChoice(Reply):
    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None
    x_kakeya: Provenance | None = omitted("Where there are several choices: of this one.")


class TextCompletion(Head):
    """The answer to a text completion, or a chunk of it."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = omitted()
    x_kakeya: Provenance | None = omitted()


class ModelReply(Reply):
    """An id that requests may name; `x_kakeya` describes the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kakeya-mac"] = "kakeya-mac"
    x_kakeya: dict[str, Any]


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[ModelReply]


class Health(Reply):
    status: Literal["ok", "unavailable"]
    reason: str | None = None
    version: str
