"""What a client gets: OpenAI's completion objects and stream chunks, with ``x_kakeya`` beside the usage.

Names and nesting are OpenAI's; ``reasoning`` beside ``content`` is mlx-lm's.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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


class Call(Reply):
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
    tool_calls: list[Call] | None = _left_out()


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
    tool_calls: list[Call] | None = _left_out()


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


class ModelCard(Reply):
    """One of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kakeya-mac"] = "kakeya-mac"
    x_kakeya: dict[str, Any]


class ModelList(Reply):
    """All of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Reply):
    """Whether requests are served."""

    status: Literal["ok", "unavailable"]
    reason: str | None = None
    version: str
    active: int
    waiting: int
