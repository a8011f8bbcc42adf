"""A request that is refused: its status, and the error document that OpenAI's clients make exceptions of.

400 invalid_request_error    a value, with ``param`` naming the field; a prompt that does not fit
401 authentication_error     no API key, or another one
403, 408, 413, 415, 421      what the guard in front of the routes does not let in, see `guard`
404 not_found_error          a model or a path that does not exist
405 invalid_request_error    a method that the path does not have
429 rate_limit_error         the queue is full
501 not_implemented_error    a feature of OpenAI's that this server does not have
500 server_error             our own fault, or a model folder that is broken
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engine.errors import (
    ConfigurationError,
    EngineError,
    GenerationError,
    InputError,
    ModelError,
    PromptError,
    UnknownModel,
)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "server_error",
}


class Refusal(Exception):
    """Ends a request with a status and an error document."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Refuse.

        Args:
            status: a key of `TYPES`.
            message: what was wrong, with which value, and what to do.
            param: the field of the request, such as ``messages.0.content``.
            code: a word for programs.
            headers: of the answer.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        error = {
            "message": self.message,
            "type": TYPES[self.status],
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class FieldError(ConfigurationError):
    """A field of a request does not go together with the model."""

    def __init__(self, field: str, message: str) -> None:
        """Say which field, and what is wrong."""
        super().__init__(message)
        self.field = field


class ShuttingDownError(GenerationError):
    """The server ends, and with it the request."""


class UnsupportedError(FieldError):
    """A field asks for what this model's engine does not have."""


def unsupported(what: str, param: str | None = None) -> Refusal:
    """The refusal of a feature that is OpenAI's and not ours."""
    return Refusal(501, f"{what} is not supported by this server", param=param, code="unsupported_feature")


def refusal_of(error: EngineError, param: str | None = None) -> Refusal:
    """How an error of the engine is told to a client.

    Args:
        error: what was raised.
        param: the field that most likely caused it, where the error is of input.
    """
    match error:
        case ShuttingDownError():
            return Refusal(503, str(error), code="shutting_down")
        case UnknownModel():
            return Refusal(404, str(error), param="model", code="model_not_found")
        case ModelError():
            return Refusal(500, str(error), code="model_unusable")
        case PromptError():
            return Refusal(400, str(error), param=param or "messages", code="invalid_prompt")
        case UnsupportedError():
            return Refusal(501, str(error), param=error.field, code="unsupported_feature")
        case FieldError():
            return Refusal(400, str(error), param=error.field, code="invalid_value")
        case ConfigurationError() | InputError():
            return Refusal(400, str(error), param=param, code="invalid_value")
    return Refusal(500, str(error), code="generation_failed")


# field -> (values that ask for nothing, what it would be)
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
# fields of an answer's message that may be sent back with it
ANSWERED = ("annotations", "audio", "function_call")
# kinds of content besides text
PARTS = ("image_url", "input_image", "image", "input_audio", "file", "video_url")
PATHS = (
    "/v1/responses",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/images",
    "/v1/audio",
    "/v1/files",
    "/v1/batches",
    "/v1/fine_tuning",
    "/v1/assistants",
    "/v1/threads",
)


def refuse_unsupported(fields: Any) -> Any:
    """The fields of a request without those that ask for nothing.

    Raises:
        Refusal: 501, of the first field that asks for what is not there.
    """
    if not isinstance(fields, Mapping):
        return fields
    for name, (nothing, what) in UNSUPPORTED.items():
        value = fields.get(name)
        if name in {"n", "best_of"} and value is not None and (type(value) is not int or value < 1):
            shown = ascii(value)[:100]
            raise Refusal(
                400, f"{name} must be a number from 1, not {shown}", param=name, code="invalid_value"
            )
        if not any(value is each or (type(value) is type(each) and value == each) for each in nothing):
            raise unsupported(what, name)
    taken = {name: value for name, value in fields.items() if name not in UNSUPPORTED}
    if isinstance(messages := fields.get("messages"), list):
        taken["messages"] = [_message(message, index) for index, message in enumerate(messages)]
    if (
        isinstance(prompts := fields.get("prompt"), list)
        and any(isinstance(each, str | list) for each in prompts)
        and len(prompts) != 1
    ):
        raise Refusal(
            400, f"a request takes one prompt, not {len(prompts)}", param="prompt", code="invalid_value"
        )
    return taken


def _message(message: Any, index: int) -> Any:
    """A message without the fields of answers that say nothing, which come back with a conversation."""
    if not isinstance(message, Mapping):
        return message
    _refuse_parts(message, f"messages.{index}.content")
    for name in ANSWERED:
        if message.get(name):
            raise unsupported(f"{name} in a message", f"messages.{index}.{name}")
    return {name: value for name, value in message.items() if name not in ANSWERED}


def _refuse_parts(message: Mapping[str, Any], param: str) -> None:
    content = message.get("content")
    for index, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in PARTS:
            raise unsupported(f"content of the type {kind}", f"{param}.{index}")


Drafting = Literal["default", "none", "prompt-lookup"]  # the model's own, nothing, or look-ups alone
MOST_STOPS = 16
LONGEST_STOP = 1000  # characters
MOST_BIASES = 1024
MOST_TOOLS = 128
MOST_LOGPROBS = 20


def _encodable(text: str) -> str:
    """Raise ValueError for half a surrogate pair, which no encoding can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half a character at {error.start}") from None
    return text


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for what cannot be written as JSON again: half characters, and too deep a nesting."""
    try:
        _encodable(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return value


Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]  # of a million mistakes the first one is enough
Text = Annotated[str, AfterValidator(_encodable)]
Json = Annotated[dict[str, Any], AfterValidator(_plain)]
StopText = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[Many[TokenId], Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class RequestPart(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(RequestPart):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


Content = Text | Many[TextPart] | None


class FunctionCall(RequestPart):
    """A call as the assistant made it; ``arguments`` is JSON as text."""

    name: Name
    arguments: Text


class ToolCall(RequestPart):
    """One of an assistant turn's calls."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(RequestPart):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Text | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = Field(None, description="What the assistant's turn said while reasoning.")
    refusal: None = None


class Function(RequestPart):
    """A function the model may call; ``parameters`` is a JSON Schema."""

    name: Name
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(RequestPart):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class ChosenFunction(RequestPart):
    """The name of a function."""

    name: Name


class ChosenTool(RequestPart):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(RequestPart):
    """A named JSON Schema."""

    name: Name
    description: Text | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class TextFormat(RequestPart):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(RequestPart):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(RequestPart):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(RequestPart):
    """What a stream holds besides the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class CompletionRequest(RequestPart):
    """What both kinds of request have in common."""

    model: Text | None = Field(
        None, description="`NAME` or `NAME@CHANNEL` of /v1/models; the default one if left out."
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0, the default, is greedy."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MOST_BIASES),
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    user: Text | None = Field(None, description="Without effect, and so are the next ones.")
    metadata: Json | None = None
    store: bool | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    kv_channel: Text | None = Field(None, description="How keys and values are kept; one the model allows.")
    block: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None, description="Tokens a verification; 1 is plain decoding."
    )
    drafter: Drafting | None = Field(None, description="What drafts; `none` is plain decoding.")
    return_token_ids: bool | None = Field(None, description="Put the tokens into `x_kakeya`.")
    return_rounds: bool | None = Field(
        None, description="Put every round, and what the caches hold at the end, into `x_kakeya`."
    )

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, fields: Any) -> Any:
        return refuse_unsupported(fields)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of its own for the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def _apart(field: str, message: str) -> Refusal:
    """Fields that do not go together; pydantic's own errors of a whole body would name none of them."""
    return Refusal(400, message, param=field, code="invalid_value")


class ChatRequest(CompletionRequest):
    """A chat completion."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: Json | None = Field(
        None, description="Switches of the model's chat template, such as `enable_thinking`."
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _apart("top_logprobs", "top_logprobs needs logprobs: true")
        if self.tool_choice not in {None, "none", "auto"} and not self.tools:
            raise _apart("tool_choice", "tool_choice needs tools")
        if isinstance(self.tool_choice, ChosenTool):
            name = self.tool_choice.function.name
            if name not in [tool.function.name for tool in self.tools or []]:
                raise _apart("tool_choice", f"tool_choice names {name!r}, which is none of the tools")
        return self


class TextRequest(CompletionRequest):
    """A text completion: one prompt, as text or as token ids, or a list that holds it."""

    prompt: Text | TokenIds | Annotated[Many[Text | TokenIds], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt, out of its list."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        return [token for token in self.prompt if isinstance(token, int)] if isinstance(first, int) else first


Finish = Literal["stop", "length", "tool_calls"]


def _left_out() -> Any:
    """A field that is not sent while it says nothing."""
    return Field(default=None, exclude_if=lambda value: value is None)


class Reply(BaseModel):
    """Base of everything that is sent."""

    model_config = ConfigDict(frozen=True)


class ErrorBody(Reply):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """The body of every refusal."""

    error: ErrorBody


class CachedTokens(Reply):
    """Details of the prompt's tokens."""

    cached_tokens: int


class ReasoningTokens(Reply):
    """Details of the answer's tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Reply):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = _left_out()


class CodedValues(Reply):
    """What coded layers store: the numbers of these layers, how many values, in how many bytes."""

    layers: list[int]
    values: int
    bytes: int


class Provenance(Reply):
    """How an answer came about: ``x_kakeya``.

    Attributes:
        model: of the registry.
        kv_channel: how keys and values were kept.
        kv_policy: the same, written out.
        drafter: what drafted; None for plain decoding.
        block: tokens a verification, or auto.
        speculation: whether drafts were verified.
        why_off: why none were; None where they were.
        verify_rounds: forwards over a block.
        plain_steps: forwards over one token.
        drafted: tokens that were proposed.
        accepted: … of these confirmed.
        acceptance_length: tokens emitted a verify round; None without one.
        drafter_forwards: of the drafter's network.
        cached_tokens: of the prompt, that were not computed again.
        queue_s: until the first work on it.
        prefill_s: from there to the first token.
        decode_s: from the first token to the last.
        decode_tokens_per_s: None for a single token.
        resident_bytes: of keys and values at the end.
        cache_classes: of the layers' caches, with their counts.
        cache_strategy: how a foreign engine was given the channel's caches.
        token_ids: of the answer, where asked for.
        prompt_token_ids: of the prompt, likewise.
        rounds: [block, accepted, draft_s, verify_s] of every forward after the prompt's, where asked for.
        kept_positions: the most that a layer with a window still sees, likewise; None without such layers.
        coded: what coded layers store, likewise; None without such layers.
    """

    model: str
    kv_channel: str
    kv_policy: str
    drafter: str | None
    block: int | str | None
    speculation: bool
    why_off: str | None
    verify_rounds: int
    plain_steps: int
    drafted: int
    accepted: int
    acceptance_length: float | None
    drafter_forwards: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    decode_tokens_per_s: float | None
    resident_bytes: int
    cache_classes: dict[str, int]
    cache_strategy: str | None = _left_out()
    token_ids: list[int] | None = _left_out()
    prompt_token_ids: list[int] | None = _left_out()
    rounds: list[tuple[int, int, float, float]] | None = _left_out()
    kept_positions: int | None = _left_out()
    coded: CodedValues | None = _left_out()


class TopLogprob(Reply):
    """A token that might have stood there."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    """A token that stands there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Of the answer's tokens, the one that ended it excepted."""

    content: list[ContentLogprob]


class TextLogprobs(Reply):
    """The same as the older endpoint says it."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CalledFunction(Reply):
    """A function and its arguments, JSON as text."""

    name: str
    arguments: str


class ToolCallReply(Reply):
    """A tool call."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = _left_out()


class ChatMessage(Reply):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: str | None = _left_out()
    tool_calls: list[ToolCallReply] | None = _left_out()


class ChatChoice(Reply):
    """The one answer."""

    index: Literal[0] = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class Head(Reply):
    """What every completion object begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Head):
    """The answer to a chat completion."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    x_kakeya: Provenance


class Delta(Reply):
    """What a chunk adds to the assistant's turn."""

    role: Literal["assistant"] | None = _left_out()
    content: str | None = _left_out()
    reasoning: str | None = _left_out()
    tool_calls: list[ToolCallReply] | None = _left_out()


class ChunkChoice(Reply):
    """The one answer, so far."""

    index: Literal[0] = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(Head):
    """A piece of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = _left_out()
    x_kakeya: Provenance | None = _left_out()


class TextChoice(Reply):
    """The one continuation, whole or a piece of it."""

    index: Literal[0] = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None


class TextCompletion(Head):
    """The answer to a text completion, or a piece of it."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = _left_out()
    x_kakeya: Provenance | None = _left_out()


class ModelReply(Reply):
    """One of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kakeya-mac"] = "kakeya-mac"
    x_kakeya: dict[str, Any]


class ModelList(Reply):
    """All of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelReply]


class Health(Reply):
    """Whether requests are served."""

    status: Literal["ok", "unavailable"]
    reason: str | None = None
    version: str
    active: int
    waiting: int
