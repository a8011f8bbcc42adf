"""The JSON of the HTTP API: requests, replies, and the errors that refuse a request.

Unknown fields are errors. OpenAI's fields without effect here (``user``, ``metadata`` …) are accepted, for
clients that always send them. OpenAI's features that this server lacks are refused by name (501), and are
not part of the published OpenAPI document.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engine import errors

Drafting = Literal["default", "none", "prompt-lookup"]  # the model's drafter, nothing, or look-ups alone
Finish = Literal["stop", "length", "tool_calls"]
MOST_STOPS = 16
LONGEST_STOP = 1000  # characters
MOST_BIASES = 1024
MOST_TOOLS = 128
MOST_LOGPROBS = 20

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
    return Refusal(501, f"{what} is not supported by this server", param=param, code="unsupported_feature")


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


# field -> (values that ask for nothing, which clients send by default; the feature)
UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), "more than one choice"),
    "best_of": ((None, 1), "more than one choice"),
    "echo": ((None, False), "echo of the prompt"),
    "suffix": ((None, ""), "insertion before a suffix"),
    "functions": ((None, []), "functions, replaced by tools,"),
    "function_call": ((None, "none"), "function_call, replaced by tool_choice,"),
    "audio": ((None,), "audio"),
    "modalities": ((None, ["text"]), "output other than text"),
    "prediction": ((None,), "predicted output"),
    "web_search_options": ((None,), "web search"),
    "verbosity": ((None, "medium"), "verbosity"),
}
# fields of an answer's message that clients send back with the conversation
ANSWER_FIELDS = ("annotations", "audio", "function_call")
CONTENT_TYPES = (
    *("image_url", "input_image", "image", "input_audio", "file", "video_url"),
    *("input_file", "document", "search_result", "container_upload"),
)
UNSUPPORTED_PATHS = re.compile(
    r"/v1/((embeddings|moderations|images|audio|files|batches|fine_tuning|assistants|threads)(/|\Z)"
    r"|responses/(compact|input_tokens)\Z|responses/[^/]+/(cancel|input_items)\Z|messages/batches(/|\Z))"
)


def refuse_unsupported(fields: Any) -> Any:
    """Return a request's fields without those that ask for nothing; raise Refusal for unsupported ones."""
    if not isinstance(fields, Mapping):
        return fields
    for name, (defaults, what) in UNSUPPORTED.items():
        value = fields.get(name)
        if name in {"n", "best_of"} and value is not None and (type(value) is not int or value < 1):
            raise invalid(name, f"{name} must be a number from 1, not {ascii(value)[:100]}")
        if not any(value is each or (type(value) is type(each) and value == each) for each in defaults):
            raise unsupported(what, name)
    kept = {name: value for name, value in fields.items() if name not in UNSUPPORTED}
    if isinstance(messages := fields.get("messages"), list):
        kept["messages"] = [_supported_message(message, index) for index, message in enumerate(messages)]
    _refuse_custom_tools(fields)
    prompts: Any = fields.get("prompt")
    several = isinstance(prompts, list) and any(isinstance(each, str | list) for each in prompts)
    if several and len(prompts) != 1:
        raise invalid("prompt", f"a request has one prompt, not {len(prompts)}")
    return kept


def _refuse_custom_tools(fields: Mapping[str, Any]) -> None:
    choice = fields.get("tool_choice")
    allowed = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    named = {"tool_choice": choice, "tools": fields.get("tools")}
    named["tool_choice.allowed_tools.tools"] = allowed.get("tools") if isinstance(allowed, Mapping) else None
    for param, value in named.items():
        for index, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, Mapping) and each.get("type") == "custom":
                raise unsupported("a custom tool", f"{param}.{index}" if isinstance(value, list) else param)


def _supported_message(message: Any, index: int) -> Any:
    if not isinstance(message, Mapping):
        return message
    refuse_media(message.get("content"), f"messages.{index}.content")
    calls = message.get("tool_calls")
    for place, call in enumerate(calls if isinstance(calls, list) else []):
        if isinstance(call, Mapping) and call.get("type") == "custom":
            raise unsupported("a call of a custom tool", f"messages.{index}.tool_calls.{place}")
    for name in ANSWER_FIELDS:
        if message.get(name):
            raise unsupported(f"{name} in a message", f"messages.{index}.{name}")
    return {name: value for name, value in message.items() if name not in ANSWER_FIELDS}


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


Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]  # one error suffices for a million wrong items
Text = Annotated[str, AfterValidator(_encodable)]
Json = Annotated[dict[str, Any], AfterValidator(_serializable)]
StopText = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]
Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[Many[TokenId], Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedToken = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


class RequestPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


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
    refusal: None = None


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
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class PlainFormat(RequestPart):
    """No constraint, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(RequestPart):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(RequestPart):
    include_usage: bool = Field(False, description="In a last chunk without choices.")
    include_obfuscation: bool = False


class EngineFields(RequestPart):
    """What a request of any protocol may say about how it is decoded."""

    kv_channel: Text | None = Field(None, description="How keys and values are kept; one the model allows.")
    block: Count | Literal["auto"] | None = Field(None, description="Tokens a forward; 1 is plain decoding.")
    drafter: Drafting | None = Field(None, description="What drafts; `none` is plain decoding.")
    return_token_ids: bool | None = Field(None, description="Put the tokens into `x_kakeya`.")
    return_rounds: bool | None = Field(None, description="Put every round and the caches into `x_kakeya`.")


class CompletionRequest(EngineFields):
    model: Text | None = Field(None, description="`NAME` or `NAME@CHANNEL`; the default model if left out.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="Greedy by default.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[BiasedToken, Bias], Field(max_length=MOST_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    user: Text | None = Field(None, description="Without effect, as are the following ones.")
    metadata: Json | None = None
    store: bool | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, fields: Any) -> Any:
        return refuse_unsupported(fields)


class ChatRequest(CompletionRequest):
    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: Json | None = Field(None, description="Switches of the model's chat template.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Raise Refusal, because pydantic's own errors of a whole body name no field."""
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        if self.tool_choice not in {None, "none", "auto"} and not self.tools:
            raise invalid("tool_choice", "tool_choice needs tools")
        offered = {tool.function.name for tool in self.tools or []}
        for name in self.chosen_tools or ():
            if name not in offered:
                raise invalid("tool_choice", f"tool_choice names {name!r}, which is none of the tools")
        return self

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
    """A text completion: one prompt, as text or as token ids, or a list that holds it."""

    prompt: Text | TokenIds | Annotated[Many[Text | TokenIds], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None


AnyRequest = ChatRequest | TextRequest


class TranslatedRequest(EngineFields):
    """A request of another protocol, which is answered as a chat request that asks for the same."""

    # fields that would change the answer and are not here -> values that ask for nothing
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: Text | None = Field(None, description="`NAME` or `NAME@CHANNEL`; the default model if left out.")
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="Greedy by default.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    chat_template_kwargs: Json | None = Field(None, description="Switches of the model's chat template.")

    @classmethod
    def supported(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's fields without those that ask for nothing; raise Refusal for others."""
        kept = dict(fields)
        for name, defaults in cls.unsupported.items():
            if name in kept and not any(_same(kept.pop(name), each) for each in defaults):
                raise unsupported(name, name)
        for name in kept:
            if name in ChatRequest.model_fields and name not in cls.model_fields:
                text = f"{name!a} is a field of chat completions, which this endpoint does not have"
                raise invalid(name, f"{text}; leave it out", code="unknown_parameter")
        return kept

    def shared(self) -> dict[str, Any]:
        """Return the fields that a chat request has by the same name."""
        return {name: getattr(self, name) for name in TranslatedRequest.model_fields}


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def refuse_media(content: Any, param: str) -> None:
    """Raise Refusal for a part of a message that is no text."""
    for place, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in CONTENT_TYPES:
            raise unsupported(f"content of the type {kind}", f"{param}.{place}")


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
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
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
    index: Literal[0] = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


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
    index: Literal[0] = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(Head):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = omitted()
    x_kakeya: Provenance | None = omitted()


class TextChoice(Reply):
    index: Literal[0] = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None


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
    active: int
    waiting: int
