"""Anthropic's Messages: a request → a chat request, and its answer → content blocks, events and errors."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import from_json

from engine.server import schema
from engine.server.response import Block, BlockBuilder
from engine.server.responses import merged
from engine.server.schema import (
    MOST_STOPS,
    MOST_TOOLS,
    Json,
    Many,
    Name,
    Refusal,
    Reply,
    RequestPart,
    Text,
    invalid,
    omitted,
    unsupported,
)
from engine.server.sequence import DecodeFinished

MESSAGES_PATH = "/v1/messages"
# status here -> status and type of Anthropic's error; a status that is not here stays
ERRORS = {
    401: (401, "authentication_error"),
    403: (403, "permission_error"),
    404: (404, "not_found_error"),
    408: (408, "timeout_error"),
    413: (413, "request_too_large"),
    421: (421, "permission_error"),
    429: (429, "rate_limit_error"),
    500: (500, "api_error"),
    503: (529, "overloaded_error"),
}
OWN_TOOL = re.compile(r"[a-z0-9_]{1,60}_[0-9]{8}|mcp_toolset")  # the type of a tool of Anthropic's own
BLOCKS = {  # that a turn may have
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}
KEPT_EDITS = "clear_thinking_"  # of context_management: what templates do with earlier reasoning anyway

# --- requests -------------------------------------------------------------------------------------------


class CacheControl(RequestPart):
    """Without effect: every prompt is cached."""

    type: Literal["ephemeral"]
    ttl: Text | None = None


class TextBlock(RequestPart):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: list[Any] | None = Field(None, description="Without effect.")


class ToolUseBlock(RequestPart):
    type: Literal["tool_use"]
    id: Text
    name: Name
    input: Json
    cache_control: CacheControl | None = None


class ToolResultBlock(RequestPart):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Many[TextBlock] = ""
    is_error: bool | None = Field(None, description="The model is told `Error: ` before the content.")
    cache_control: CacheControl | None = None


class ThinkingBlock(RequestPart):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = Field(None, description="Without effect.")


InputBlock = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")
]


class InputMessage(RequestPart):
    role: Literal["user", "assistant", "system"]
    content: Text | Many[InputBlock]


class MessagesTool(RequestPart):
    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: Json = Field(description="A JSON Schema.")
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(RequestPart):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(RequestPart):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestPart):
    """Switches the model's reasoning on or off, where its chat template has a switch."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: schema.Count | None = Field(None, description="Without effect.")
    display: Literal["summarized", "omitted"] | None = Field(None, description="Without effect.")


class OutputFormat(RequestPart):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(RequestPart):
    effort: schema.Effort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(schema.TranslatedRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (None,),
        "mcp_servers": (None, []),
        "fallbacks": (None, []),
    }

    messages: Annotated[Many[InputMessage], Field(min_length=1)]
    system: Text | Many[TextBlock] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @classmethod
    def supported(cls, fields: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        others = MessagesRequest.model_fields.keys() - cls.model_fields.keys()  # a count needs none of them
        kept, _ = super().supported({name: fields[name] for name in fields if name not in others})
        _refuse_edits(kept.get("context_management"))
        if isinstance(kept.get("messages"), list):
            kept["messages"] = [
                _supported_message(each, index) for index, each in enumerate(kept["messages"])
            ]
        kept["tools"], ignored = _client_tools(kept.get("tools"))
        return kept, ignored

    def chat(self) -> schema.ChatRequest:
        """The same question as a chat request; raise Refusal."""
        choice = self.tool_choice
        wanted: Any = None
        if choice is not None:
            wanted = "required" if choice.type == "any" else choice.type
        if isinstance(choice, NamedToolChoice):
            wanted = {"type": "function", "function": {"name": choice.name}}
        alone = choice is not None and choice.disable_parallel_tool_use
        form = self.output_config.format if self.output_config else None
        named = {"name": "answer", "schema": form.schema_} if form else None
        turns = merged([*self._turns()])
        effort, effort_fields = self._effort()
        return self.as_chat(
            messages=turns,
            continue_final_message=(turns[-1]["role"] == "assistant" and bool(turns[-1]["content"])) or None,
            tools=[_function(tool) for tool in self.tools or []] or None,
            tool_choice=wanted,
            parallel_tool_calls=False if alone else None,
            response_format={"type": "json_schema", "json_schema": named} if named else None,
            reasoning_effort=effort,
            effort_fields=effort_fields,
            **self._limits(),
        )

    def _limits(self) -> dict[str, Any]:
        return {}

    def _effort(self) -> tuple[str | None, tuple[str, ...]]:
        """The effort of a chat request, and the names of the fields that ask for it."""
        thinking = self.thinking.type if self.thinking else None
        effort = self.output_config.effort if self.output_config else None
        switched = {"disabled": "none", "enabled": effort or "medium"}.get(thinking or "", effort)
        given = {"thinking": thinking in {"disabled", "enabled"}, "output_config.effort": effort is not None}
        return switched, tuple(name for name, asks in given.items() if asks)

    def _turns(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": _text_of(self.system)}
        for index, message in enumerate(self.messages):
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
                continue
            for place, block in enumerate(message.content):
                if block.type not in BLOCKS[message.role]:
                    text = f"a turn of the role {message.role} has no block of the type {block.type}"
                    raise invalid(f"messages.{index}.content.{place}", text)
            if message.role == "assistant":
                yield _answer(message.content)
            else:
                yield from _turns_of(message.role, message.content)


class MessagesRequest(CountTokensRequest):
    max_tokens: schema.Count
    stop_sequences: Annotated[list[schema.StopText], Field(max_length=MOST_STOPS)] | None = None

    def _limits(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "stop": self.stop_sequences}


def _text_of(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _function(tool: MessagesTool) -> dict[str, Any]:
    own = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": own}


def _answer(blocks: Sequence[Any]) -> dict[str, Any]:
    """An assistant's turn."""
    turn: dict[str, Any] = {"role": "assistant", "content": None}
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    turn["content"] = "".join(texts) if texts else None
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        turn["reasoning"] = "".join(thoughts)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return turn | ({"tool_calls": calls} if calls else {})


def _turns_of(role: str, blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """A user's turn: what tools said, each as a turn of its own, and the user's text."""
    if not blocks:
        yield {"role": role, "content": ""}
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            said = _text_of(block.content)
            content = f"Error: {said}" if block.is_error else said
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        elif isinstance(block, TextBlock):
            yield {"role": role, "content": block.text}


def _supported_message(message: Any, index: int) -> Any:
    """Leave out encrypted reasoning; raise Refusal for what is no text, and for calls of server tools."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    param = f"messages.{index}.content"
    schema.refuse_media(content, param)
    for place, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            schema.refuse_media(block.get("content"), f"{param}.{place}.content")
        elif isinstance(kind, str) and kind.endswith(("_tool_result", "server_tool_use")):
            raise unsupported(f"content of the type {ascii(kind)[1:-1]}", f"{param}.{place}")
    readable = [each for each in content if not _is_redacted(each)]
    return {**message, "content": readable}


def _is_redacted(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "redacted_thinking"


def _refuse_edits(management: Any) -> None:
    edits = management.get("edits") if isinstance(management, Mapping) else None
    for index, edit in enumerate(edits if isinstance(edits, list) else []):
        kind = str(edit.get("type")) if isinstance(edit, Mapping) else ""
        if not kind.startswith(KEPT_EDITS):
            raise unsupported(f"the edit {ascii(kind)[:100]}", f"context_management.edits.{index}")


def _client_tools(tools: Any) -> tuple[Any, tuple[str, ...]]:
    """Leave out tools of Anthropic's own, which a model may leave; raise Refusal for them alone."""
    if not isinstance(tools, list):
        return tools, ()
    kinds = [str(each.get("type")) if isinstance(each, Mapping) else "" for each in tools]
    own = [index for index, kind in enumerate(kinds) if OWN_TOOL.fullmatch(kind)]
    if own and len(own) == len(tools):
        raise unsupported(f"a tool of the type {kinds[0]!a}", "tools.0")
    kept = [each for index, each in enumerate(tools) if index not in own]
    return kept, tuple(f"tools.{kinds[index]}" for index in own)


# --- replies --------------------------------------------------------------------------------------------


class TextReply(Reply):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingReply(Reply):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseReply(Reply):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(Reply):
    input_tokens: int = Field(description="Without the cached ones.")
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
Content = TextReply | ThinkingReply | ToolUseReply


class MessageReply(Reply):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    x_kakeya: schema.Provenance | None = omitted()


class TokenCount(Reply):
    input_tokens: int


class AnthropicErrorBody(Reply):
    type: str
    message: str


class AnthropicError(Reply):
    type: Literal["error"] = "error"
    error: AnthropicErrorBody


class BlockDelta(Reply):
    type: Literal["text_delta", "thinking_delta", "input_json_delta"]
    text: str | None = omitted()
    thinking: str | None = omitted()
    partial_json: str | None = omitted()


class MessageDelta(Reply):
    stop_reason: StopReason
    stop_sequence: str | None


class MessagesEvent(Reply):
    """One event of a stream; its `type` says which of the fields it has."""

    type: str
    message: MessageReply | None = omitted()
    index: int | None = omitted()
    content_block: Content | None = omitted()
    delta: BlockDelta | MessageDelta | None = omitted()
    usage: MessagesUsage | None = omitted()
    error: AnthropicErrorBody | None = omitted()
    x_kakeya: schema.Provenance | None = omitted()


def anthropic_error(refusal: Refusal) -> tuple[AnthropicError, int]:
    """Return a refusal as Anthropic's error document, and its status."""
    status, kind = ERRORS.get(refusal.status, (refusal.status, "invalid_request_error"))
    return AnthropicError(error=AnthropicErrorBody(type=kind, message=str(refusal))), status


# --- the answer -----------------------------------------------------------------------------------------


class MessagesBuilder(BlockBuilder):
    """An answer as Anthropic's Messages have it."""

    prefix = "msg_"
    waiting = b'event: ping\ndata: {"type": "ping"}\n\n'

    def frame(self, reply: Reply) -> bytes:
        assert isinstance(reply, MessagesEvent)  # noqa: S101 - all that this builder makes for a stream
        return f"event: {reply.type}\ndata: {reply.model_dump_json()}\n\n".encode()

    def begin(self) -> Iterator[Reply]:
        yield MessagesEvent(type="message_start", message=self._message(self._usage(0)))

    def opened(self, block: Block) -> Iterator[Reply]:
        yield MessagesEvent(
            type="content_block_start", index=block.index, content_block=self._content(block, empty=True)
        )

    def grown(self, block: Block, text: str, _: list[schema.ContentLogprob]) -> Iterator[Reply]:
        match block.piece.kind:
            case "content":
                delta = BlockDelta(type="text_delta", text=text)
            case "reasoning":
                delta = BlockDelta(type="thinking_delta", thinking=text)
            case _:
                delta = BlockDelta(type="input_json_delta", partial_json=text)
        yield MessagesEvent(type="content_block_delta", index=block.index, delta=delta)

    def closed(self, block: Block) -> Iterator[Reply]:
        yield MessagesEvent(type="content_block_stop", index=block.index)

    def end(self, ended: DecodeFinished) -> Iterator[Reply]:
        yield from self.finish_blocks(ended, streamed=True)
        yield MessagesEvent(
            type="message_delta",
            delta=MessageDelta(stop_reason=self._reason(ended), stop_sequence=self.stopped_by),
            usage=self._usage(ended.cached_tokens),
            x_kakeya=self.provenance(ended),
        )
        yield MessagesEvent(type="message_stop")

    def complete(self, ended: DecodeFinished) -> Reply:
        for _ in self.finish_blocks(ended, streamed=False):
            continue
        return self._message(
            self._usage(ended.cached_tokens),
            content=[self._content(block) for block in self.blocks],
            stop_reason=self._reason(ended),
            stop_sequence=self.stopped_by,
            x_kakeya=self.provenance(ended),
        )

    def fail(self, refusal: Refusal) -> Iterator[Reply]:
        document, _ = anthropic_error(refusal)
        yield MessagesEvent(type="error", error=document.error)

    def _reason(self, ended: DecodeFinished) -> StopReason:
        if self.stopped_by is not None:
            return "stop_sequence"
        reasons: dict[schema.Finish, StopReason]
        reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        return reasons[self.finish(ended)]

    def _message(self, usage: MessagesUsage, content: Sequence[Content] = (), **fields: Any) -> MessageReply:
        return MessageReply(
            id=self.head["id"], model=self.head["model"], content=list(content), usage=usage, **fields
        )

    def _usage(self, cached: int) -> MessagesUsage:
        counted = self.usage(cached)
        return MessagesUsage(
            input_tokens=counted.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=counted.completion_tokens,
        )

    def _content(self, block: Block, *, empty: bool = False) -> Content:
        text, call = "" if empty else block.piece.text, block.piece.call
        if call is not None:
            given = {} if empty else _input_of(text)
            return ToolUseReply(id=call.id.replace("call_", "toolu_", 1), name=call.name, input=given)
        return TextReply(text=text) if block.piece.kind == "content" else ThinkingReply(thinking=text)


def _input_of(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object: of arguments that were cut off, those that are whole."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"invalid_json": arguments}
