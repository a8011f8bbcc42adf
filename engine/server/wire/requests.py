"""What a client may ask: OpenAI's chat and text completions, with fields of our own behind them.

Unknown fields are errors, and so are values out of bounds; what OpenAI has and this server has not is named
in `engine.server.wire.unsupported`. Fields without effect here (``user``, ``metadata`` …) are taken, so that
clients that always send them work.
"""

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engine.server.decoding.work import Drafting
from engine.server.refusals import Refusal
from engine.server.wire.unsupported import refuse_unsupported

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


class Wire(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(Wire):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


Content = Text | Many[TextPart] | None


class FunctionCall(Wire):
    """A call as the assistant made it; ``arguments`` is JSON as text."""

    name: Name
    arguments: Text


class ToolCall(Wire):
    """One of an assistant turn's calls."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Wire):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Text | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = Field(None, description="What the assistant's turn said while reasoning.")
    refusal: None = None


class Function(Wire):
    """A function the model may call; ``parameters`` is a JSON Schema."""

    name: Name
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Wire):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Wire):
    """The name of a function."""

    name: Name


class ChosenTool(Wire):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Wire):
    """A named JSON Schema."""

    name: Name
    description: Text | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Wire):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(Wire):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Wire):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(Wire):
    """What a stream holds besides the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Completion(Wire):
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


class ChatRequest(Completion):
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


class TextRequest(Completion):
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
