"""OpenAI's Responses: a request → a chat request, and its answer → items, events, and turns to go on from.

Conversations are kept in memory, for each API key, so that a request can name the answer that it follows.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from engine.server import schema
from engine.server.response import Block, BlockBuilder
from engine.server.schema import (
    MOST_LOGPROBS,
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

LONGEST_NAME = 128  # characters of a function's name with its namespace
MOST_TURNS = 256  # kept for one API key
MOST_STORED = 2**25  # characters kept for one API key, with what a turn shares with the ones before it
RESPONSES_PATH = "/v1/responses"
# fields of a chat request -> what they are called here
PARAMS = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
}
LOGPROBS = "message.output_text.logprobs"  # what `include` calls them
# OpenAI's own tools, by the beginnings of their types, many of which end in a version
OWN_TOOLS = (
    *("web_search", "file_search", "code_interpreter", "computer", "mcp", "image_generation", "local_shell"),
    *("shell", "apply_patch", "tool_search", "programmatic_tool_calling"),
)
Status = Literal["in_progress", "completed", "incomplete", "failed"]

# --- requests -------------------------------------------------------------------------------------------


class InputPart(RequestPart):
    """Text, as clients write it or as answers have it."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = Field(None, description="Without effect, as logprobs.")
    logprobs: list[Any] | None = None


class RefusalPart(RequestPart):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


class MessageItem(RequestPart):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Many[Annotated[InputPart | RefusalPart, Field(discriminator="type")]]
    id: Text | None = Field(None, description="Without effect, as are status and phase.")
    status: Text | None = None
    phase: Text | None = None


class CallItem(RequestPart):
    type: Literal["function_call"]
    call_id: Text
    name: Name
    namespace: Name | None = None
    arguments: Text = Field(description="JSON as text.")
    id: Text | None = None
    status: Text | None = None


class CallOutputItem(RequestPart):
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Many[InputPart]
    id: Text | None = None
    status: Text | None = None


class ThoughtPart(RequestPart):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(RequestPart):
    type: Literal["reasoning"]
    summary: Many[ThoughtPart] = Field([])
    content: Many[ThoughtPart] | None = None
    encrypted_content: Text | None = Field(None, description="Without effect.")
    id: Text | None = None
    status: Text | None = None


class ItemReference(RequestPart):
    """An item of an earlier answer."""

    type: Literal["item_reference"]
    id: Text


def _type_of(item: Any) -> str:
    kind = item.get("type") if isinstance(item, Mapping) else getattr(item, "type", None)
    return str(kind or "message")


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_type_of),
]
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
INPUT_ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)


class FunctionTool(RequestPart):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: Json | None = Field(None, description="A JSON Schema.")
    strict: bool | None = None


class NamespaceTool(RequestPart):
    """Functions under a common name; the model calls them NAMESPACE.NAME."""

    type: Literal["namespace"]
    name: Name
    description: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)]


ResponsesTool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]


class NamedFunction(RequestPart):
    type: Literal["function"]
    name: Name


class AllowedFunctions(RequestPart):
    """Some of the tools; the others are left out of the prompt."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MOST_TOOLS)]


class TextJsonSchema(RequestPart):
    type: Literal["json_schema"]
    name: Name
    description: Text | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class TextConfig(RequestPart):
    format: Annotated[schema.PlainFormat | TextJsonSchema, Field(discriminator="type")] | None = None


class ReasoningConfig(RequestPart):
    effort: schema.Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The reasoning comes as its own summary, whole."
    )


class ResponsesRequest(schema.TranslatedRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (None, False),
        "conversation": (None,),
        "prompt": (None,),
        "context_management": (None, []),
    }

    input: Text | Annotated[Many[InputItem], Field(min_length=1)]
    instructions: Text | None = Field(None, description="Of this turn alone.")
    previous_response_id: Text | None = Field(None, description="The answer that this one follows.")
    store: bool | None = Field(None, description="Whether this answer may be followed; true by default.")
    max_output_tokens: schema.Count | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Text] | None = Field(None, description=f"`{LOGPROBS}`; all others are without effect.")
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    metadata: Json | None = Field(None, description="Told back.")
    user: Text | None = None

    @classmethod
    def supported(cls, fields: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        kept, _ = super().supported(fields)
        _refuse_items(kept.get("input"))
        kept["tools"], ignored = _functions_of(kept.get("tools"), kept.get("tool_choice"))
        text = kept.get("text")
        if isinstance(text, Mapping) and text.get("verbosity") not in (None, "medium"):
            raise schema.unsupported_value("text.verbosity", text["verbosity"], (None, "medium"))
        return kept, ignored

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [_called(tool.name, space) for space, tool in self._spaced()]
        if len(names) > MOST_TOOLS or any(len(name) > LONGEST_NAME for name in names):
            text = f"there are {len(names)} functions, or a name with its namespace is too long"
            raise invalid("tools", f"{text}; at most {MOST_TOOLS} of {LONGEST_NAME} characters are accepted")
        return self

    @property
    def functions(self) -> dict[str, FunctionTool]:
        """The functions, by the names by which the model calls them."""
        return {_called(tool.name, space): tool for space, tool in self._spaced()}

    def called(self, name: str) -> tuple[str, str | None]:
        """A function's name and namespace, of the name by which the model called it."""
        spaced = {_called(tool.name, space): (tool.name, space) for space, tool in self._spaced()}
        return spaced.get(name, (name, None))

    def _spaced(self) -> Iterator[tuple[str | None, FunctionTool]]:
        for tool in self.tools or []:
            if isinstance(tool, FunctionTool):
                yield None, tool
            else:
                yield from ((tool.name, each) for each in tool.tools)

    def items(self, earlier: Sequence[Any]) -> tuple[Any, ...]:
        """The conversation's items up to the answer."""
        own = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return (*earlier, *own)

    def chat(self, items: Sequence[Any]) -> schema.ChatRequest:
        """The same question as a chat request; raise Refusal."""
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        elif isinstance(choice, AllowedFunctions):
            named = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}) | {"name": name}}
            for name, tool in self.functions.items()
        ]
        form = self.text.format if self.text else None
        wanted: Any = form
        if isinstance(form, TextJsonSchema):
            wanted = {"type": "json_schema", "json_schema": form.model_dump(exclude={"type"}, by_alias=True)}
        elif form is not None:
            wanted = form.model_dump()
        return self.as_chat(
            effort_fields=("reasoning.effort",),
            open_ended=True,  # as OpenAI's are, and agents never say
            messages=messages_of(items, self.instructions),
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=wanted,
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            logprobs=LOGPROBS in (self.include or ()) or bool(self.top_logprobs) or None,
            top_logprobs=self.top_logprobs,
        )


def _called(name: str, space: str | None) -> str:
    return f"{space}.{name}" if space else name


def _refuse_items(items: Any) -> None:
    for index, item in enumerate(items if isinstance(items, list) else []):
        if not isinstance(item, Mapping):
            continue
        kind = _type_of(item)
        if (
            kind.endswith(("_call", "_call_output", "_list_tools", "_approval_request"))
            and kind not in ITEM_TYPES
        ):
            raise unsupported(f"an item of the type {ascii(kind)[1:-1]}", f"input.{index}")
        for name in ("content", "output"):
            schema.refuse_media(item.get(name), f"input.{index}.{name}")


def _functions_of(tools: Any, choice: Any) -> tuple[Any, tuple[str, ...]]:
    """Leave out tools of OpenAI's own; raise Refusal where the answer would need one.

    Agents list them next to their functions. A model that may choose may leave them, and it does.
    """
    if not isinstance(tools, list):
        return tools, ()
    kinds = [_tool_type(each) for each in tools]
    allowed = choice.get("tools") if isinstance(choice, Mapping) else None
    for each in [choice, *(allowed if isinstance(allowed, list) else [])]:
        if (kind := _tool_type(each)) == "custom" or kind.startswith(OWN_TOOLS):
            raise unsupported(f"a tool of the type {kind!a}", "tool_choice")
    own = [index for index, kind in enumerate(kinds) if kind.startswith(OWN_TOOLS)]
    for index, kind in enumerate(kinds):
        if kind == "custom" or (index in own and len(own) == len(tools)):
            raise unsupported(f"a tool of the type {kind!a}", f"tools.{index}")
    kept = [each for index, each in enumerate(tools) if index not in own]
    return kept, tuple(f"tools.{ascii(kinds[index])[1:-1][: schema.LONGEST_NAME]}" for index in own)


def _tool_type(tool: Any) -> str:
    return str(tool.get("type")) if isinstance(tool, Mapping) else ""


def messages_of(items: Sequence[Any], instructions: str | None) -> list[dict[str, Any]]:
    """A conversation's items as the messages of a chat."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []

    def answer() -> dict[str, Any]:
        if not turns or turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": None})
        return turns[-1]

    for item in items:
        match item:
            case MessageItem(role="assistant"):
                turn = answer()
                turn["content"] = (turn["content"] or "") + text_of_parts(item.content)
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                turns.append({"role": role, "content": text_of_parts(item.content)})
            case CallItem():
                function = {"name": _called(item.name, item.namespace), "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                answer().setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                content = text_of_parts(item.output)
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            case ReasoningItem():
                turn = answer()
                said = "".join(part.text for part in item.content or item.summary)
                turn["reasoning"] = turn.get("reasoning", "") + said
    return merged(turns)


def text_of_parts(content: str | Sequence[InputPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def merged(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the system's messages into one at the beginning, and users' turns that follow each other into one.

    Chat templates of many models refuse anything else. What the system says after the first turn of a user
    becomes a part of the user's turn there, so that the prompt before it stays the same.
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        role = turn["role"]
        if role == "system" and any(each["role"] != "system" for each in found):
            role = "user"
        if found and role in {"system", "user"} and found[-1]["role"] == role:
            found[-1]["content"] += "\n\n" + turn["content"]
        else:
            found.append(turn | {"role": role})
    return found


# --- replies --------------------------------------------------------------------------------------------


class OutputText(Reply):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field([])
    logprobs: list[schema.ContentLogprob] = Field([])


class Thought(Reply):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class OutputMessage(Reply):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputReasoning(Reply):
    """The reasoning: in `content`, or in `summary` where the request asked for one."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: Status
    summary: list[Thought] = Field([])
    content: list[Thought] | None = omitted()
    encrypted_content: None = None


class OutputCall(Reply):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    namespace: str | None = omitted()
    arguments: str
    status: Status


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Reply):
    reasoning_tokens: int


class ResponsesUsage(Reply):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponsesError(Reply):
    code: str
    message: str


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Reply):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponsesError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None
    x_kakeya: schema.Provenance | None = omitted()


class DeletedResponse(Reply):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponsesEvent(Reply):
    """One event of a stream; its `type` says which of the fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | None = omitted()
    output_index: int | None = omitted()
    item_id: str | None = omitted()
    content_index: int | None = omitted()
    summary_index: int | None = omitted()
    item: OutputItem | None = omitted()
    part: OutputText | Thought | None = omitted()
    delta: str | None = omitted()
    text: str | None = omitted()
    arguments: str | None = omitted()
    logprobs: list[schema.ContentLogprob] | None = omitted()


# --- the turns that are kept ----------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTurn:
    """An answer, and the conversation up to its end."""

    reply: ResponseObject
    items: tuple[Any, ...]
    size: int  # characters of the items


@dataclass
class TurnStore:
    """The last answers of each API key, the oldest of which goes first."""

    turns: dict[str, OrderedDict[str, StoredTurn]] = field(default_factory=dict)

    def put(self, owner: str, reply: ResponseObject, items: tuple[Any, ...]) -> None:
        own = self.turns.setdefault(owner, OrderedDict())
        own[reply.id] = StoredTurn(reply, items, sum(len(item.model_dump_json()) for item in items))
        while len(own) > MOST_TURNS or (
            len(own) > 1 and sum(each.size for each in own.values()) > MOST_STORED
        ):
            own.popitem(last=False)

    def get(self, owner: str, identifier: str, param: str | None = None) -> StoredTurn:
        found = self.turns.get(owner, OrderedDict()).get(identifier)
        if found is None:
            text = (
                f"there is no response {ascii(identifier)[:100]}: it was not stored, or it was dropped since"
            )
            text += f" (the last {MOST_TURNS} are kept, in memory); send the conversation's items instead"
            raise Refusal(404, text, param, code="response_not_found")
        return found

    def delete(self, owner: str, identifier: str) -> None:
        self.get(owner, identifier)
        del self.turns[owner][identifier]

    def items_before(self, owner: str, request: ResponsesRequest) -> tuple[Any, ...]:
        """The conversation up to the request; raise Refusal if it is not here."""
        if request.previous_response_id is None:
            return ()
        return self.get(owner, request.previous_response_id, "previous_response_id").items

    def resolved(self, owner: str, items: Sequence[Any]) -> tuple[Any, ...]:
        """The items with those that references name in their place; raise Refusal if one is not here."""
        if not any(isinstance(item, ItemReference) for item in items):
            return tuple(items)
        kept = (item for turn in self.turns.get(owner, OrderedDict()).values() for item in turn.items)
        known = {item.id: item for item in kept if item.id}
        for index, item in enumerate(items):
            if isinstance(item, ItemReference) and item.id not in known:
                text = f"there is no item {ascii(item.id)[:100]}: its response was not stored, or was dropped"
                raise Refusal(
                    404, f"{text} since; send the item itself", f"input.{index}", code="item_not_found"
                )
        return tuple(known[item.id] if isinstance(item, ItemReference) else item for item in items)


# --- the answer -----------------------------------------------------------------------------------------

PREFIXES = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}


class ResponsesBuilder(BlockBuilder):
    """An answer as OpenAI's Responses have it."""

    prefix = "resp_"

    def __init__(
        self, *parts: Any, asked: ResponsesRequest, items: tuple[Any, ...], store: TurnStore
    ) -> None:
        super().__init__(*parts)
        self._asked, self._items, self._store = asked, items, store
        self._sent = 0

    def frame(self, reply: Reply) -> bytes:
        assert isinstance(reply, ResponsesEvent)  # noqa: S101 - all that this builder makes for a stream
        return f"event: {reply.type}\ndata: {reply.model_dump_json()}\n\n".encode()

    def begin(self) -> Iterator[Reply]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def opened(self, block: Block) -> Iterator[Reply]:
        yield self._event(
            "output_item.added", output_index=block.index, item=self._item(block, "in_progress")
        )
        if block.piece.kind != "call":
            yield self._event(
                f"{self._part_event(block)}.added", **self._place(block), part=self._part(block, "")
            )

    def grown(self, block: Block, text: str, logprobs: list[schema.ContentLogprob]) -> Iterator[Reply]:
        told = {"logprobs": logprobs} if block.piece.kind == "content" else {}
        yield self._event(f"{self._text_event(block)}.delta", **self._place(block), delta=text, **told)

    def closed(self, block: Block) -> Iterator[Reply]:
        text = block.piece.text
        done = f"{self._text_event(block)}.done"
        if block.piece.kind == "call":
            yield self._event(done, **self._place(block), arguments=text)
        else:
            told = {"logprobs": block.logprobs} if block.piece.kind == "content" else {}
            yield self._event(done, **self._place(block), text=text, **told)
            yield self._event(
                f"{self._part_event(block)}.done", **self._place(block), part=self._part(block, text)
            )
        yield self._event("output_item.done", output_index=block.index, item=self._item(block))

    def end(self, ended: DecodeFinished) -> Iterator[Reply]:
        yield from self.finish_blocks(ended, streamed=True)
        reply = self._ended(ended)
        yield self._event(reply.status, response=reply)

    def complete(self, ended: DecodeFinished) -> Reply:
        for _ in self.finish_blocks(ended, streamed=False):
            continue
        return self._ended(ended)

    def fail(self, refusal: Refusal) -> Iterator[Reply]:
        error = ResponsesError(code="server_error", message=str(refusal))
        yield self._event("failed", response=self._response("failed", error=error))

    def _ended(self, ended: DecodeFinished) -> ResponseObject:
        cut = ended.outcome.finish == "length"
        usage = self.usage(ended.cached_tokens)
        details = usage.completion_tokens_details
        reply = self._response(
            "incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails() if cut else None,
            usage=ResponsesUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputDetails(cached_tokens=ended.cached_tokens),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputDetails(
                    reasoning_tokens=details.reasoning_tokens if details else 0
                ),
                total_tokens=usage.total_tokens,
            ),
            x_kakeya=self.provenance(ended),
        )
        if self._asked.store is not False:
            answer = [INPUT_ITEM.validate_python(item.model_dump()) for item in reply.output]
            self._store.put(self.decoded.owner, reply, (*self._items, *answer))
        return reply

    def _event(self, name: str, **fields: Any) -> ResponsesEvent:
        self._sent += 1
        return ResponsesEvent(type=f"response.{name}", sequence_number=self._sent - 1, **fields)

    def _response(self, status: Status, **fields: Any) -> ResponseObject:
        asked, done = self._asked, status != "in_progress"
        choice = asked.tool_choice or "auto"
        form = asked.text.format if asked.text else None
        return ResponseObject(
            id=self.head["id"],
            created_at=self.head["created"],
            status=status,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            model=self.head["model"],
            output=[self._item(block) for block in self.blocks] if done else [],
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            previous_response_id=asked.previous_response_id,
            reasoning=asked.reasoning.model_dump() if asked.reasoning else {"effort": None, "summary": None},
            store=asked.store is not False,
            temperature=asked.temperature or 0.0,
            text={"format": form.model_dump(by_alias=True) if form else {"type": "text"}},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in asked.tools or []],
            top_logprobs=asked.top_logprobs or 0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            user=asked.user,
            **fields,
        )

    def _item(self, block: Block, status: Status | None = None) -> OutputItem:
        empty = status == "in_progress"
        status = status or ("incomplete" if block.cut else "completed")
        identifier, text = PREFIXES[block.piece.kind] + block.id, "" if empty else block.piece.text
        if (call := block.piece.call) is not None:
            name, space = self._asked.called(call.name)
            return OutputCall(
                id=identifier, call_id=call.id, name=name, namespace=space, arguments=text, status=status
            )
        part = [] if empty else [self._part(block, text)]
        if block.piece.kind == "content":
            return OutputMessage(id=identifier, status=status, content=part)
        field_name = "summary" if self._summarized else "content"
        return OutputReasoning(id=identifier, status=status, **{field_name: part})

    @property
    def _summarized(self) -> bool:
        return self._asked.reasoning is not None and self._asked.reasoning.summary is not None

    def _part(self, block: Block, text: str) -> Any:
        if block.piece.kind == "content":
            return OutputText(text=text, logprobs=block.logprobs if text else [])
        return Thought(type="summary_text" if self._summarized else "reasoning_text", text=text)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"output_index": block.index, "item_id": PREFIXES[block.piece.kind] + block.id}
        if block.piece.kind == "call":
            return place
        summarized = block.piece.kind == "reasoning" and self._summarized
        return place | {"summary_index" if summarized else "content_index": 0}

    def _part_event(self, block: Block) -> str:
        summarized = block.piece.kind == "reasoning" and self._summarized
        return "reasoning_summary_part" if summarized else "content_part"

    def _text_event(self, block: Block) -> str:
        thought = "reasoning_summary_text" if self._summarized else "reasoning_text"
        names = {"content": "output_text", "call": "function_call_arguments", "reasoning": thought}
        return names[block.piece.kind]
