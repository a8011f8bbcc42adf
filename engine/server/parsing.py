"""Tokens as they come → content, reasoning and tool calls apart, stop strings cut off.

mlx-lm's text machine decides which part of the text is which, and its tool parsers read calls, as in its own
server. Its parsers need the whole text of a call. Where calls are JSON, the arguments are passed on as they
come instead, as the model writes them.
"""

import json
import logging
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from engine.detokenize import TextStream
from engine.logprobs import TokenLogprob
from engine.stops import Stops

logger = logging.getLogger(__name__)
_MACHINE: Any = TextStateMachine  # its functions take a state and have no types
_new_machine: Any = make_text_state_machine
JSON_CALLS = "mlx_lm.tool_parsers.json_tools"  # families whose calls are {"name": …, "arguments": …}
# up to the arguments, if they are an object
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')

Kind = Literal["content", "reasoning", "call"]


@dataclass(frozen=True)
class CallHead:
    """Which call it is, and of which tool."""

    index: int
    id: str
    name: str


@dataclass
class Piece:
    """A stretch of an answer that is of one kind: what was added to it, or all of it."""

    kind: Kind
    text: str  # of a call: its arguments, JSON as text
    call: CallHead | None = None
    begins: bool = False  # a call: whether nothing of it came before
    complete: bool = False  # a call: whether its end was seen

    def __iadd__(self, other: "Piece") -> "Piece":
        self.text += other.text
        self.complete = other.complete
        return self


@dataclass
class ParsedText:
    """A part of an answer, in the order in which it was written."""

    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)  # and where its token begins

    @property
    def content(self) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == "content")

    @property
    def reasoning(self) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == "reasoning")

    @property
    def calls(self) -> list[tuple[CallHead, Piece]]:
        return [(piece.call, piece) for piece in self.pieces if piece.call is not None]

    def add(self, piece: Piece) -> None:
        last = self.pieces[-1] if self.pieces else None
        if last is not None and (last.kind, last.call) == (piece.kind, piece.call):
            last += piece
        elif piece.text or piece.call is not None:
            self.pieces.append(Piece(**vars(piece)))  # a copy, to be added to

    def __iadd__(self, other: "ParsedText") -> "ParsedText":
        for piece in other.pieces:
            self.add(piece)
        self.logprobs += other.logprobs
        return self

    def __bool__(self) -> bool:
        return bool(self.pieces or self.logprobs)


class OutputParser:
    """Parses one answer as it comes."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Stops,
        *,
        prompt: Sequence[int] = (),
        state: str = "normal",
        tools: Sequence[dict[str, Any]] = (),
        plain: bool = False,
        most_calls: int | None = None,
    ) -> None:
        """Begin in a `state` of the text machine; `plain` passes marks on as text; more calls are dropped."""
        self.stream = TextStream(tokenizer, stops, prompt)
        self.reasoning_tokens = 0
        self._tools, self._parser = list(tools), tokenizer.tool_parser
        self._mark = str(tokenizer.tool_call_start or "")
        self._machine = (_MACHINE() if plain else _new_machine(tokenizer)).make_state(state)
        self._part, self._call, self._calls = state, "", 0
        self._json = _JsonCall() if has_json_calls(tokenizer) else None
        self._most_calls = most_calls
        self._has_content = False

    def add(self, tokens: Sequence[int]) -> ParsedText:
        parsed = self._parse(self.stream.add(tokens))
        self.reasoning_tokens += len(tokens) if self._part == "reasoning" else 0
        return parsed

    def finish(self, *, cut: bool = False) -> ParsedText:
        """Return what still waited.

        A call without its end is one if it can be parsed. If the answer was `cut` off at its greatest length,
        what there is of a call is a call, too, if the tool's name is known.
        """
        parsed = self._parse(self.stream.finish())
        self._machine, rest, part = _MACHINE.flush(self._machine)
        if cut and self._tools and (len(rest) > 1 or not self._has_content) and self._mark.startswith(rest):
            rest = ""  # the mark of a call, cut off; behind other text one character may be the text's
        self._add_segment(part, rest, parsed)
        if self._call:
            self._end_call(parsed, cut=cut, marked=False)
        return parsed

    def _parse(self, text: str) -> ParsedText:
        parsed = ParsedText()
        self._machine, segments = _MACHINE.split(self._machine, text)
        for part, segment in segments:
            self._add_segment(part, segment, parsed)
        return parsed

    def _add_segment(self, part: str, text: str, parsed: ParsedText) -> None:
        if part != "tool" and self._part == "tool":
            self._end_call(parsed)
        self._part = part
        if part == "reasoning":
            parsed.add(Piece("reasoning", text))
        elif part == "tool":
            self._call += text
            if self._json is not None and self._may_call:
                self._pass_on(self._json, parsed)
        else:
            self._has_content = self._has_content or bool(text.strip())
            parsed.add(Piece("content", text))

    @property
    def _may_call(self) -> bool:
        return self._most_calls is None or self._calls < self._most_calls

    def _pass_on(self, call: "_JsonCall", parsed: ParsedText) -> None:
        arguments = call.read(self._call)
        if call.name is not None and call.head is None:
            call.head = self._new_head(call.name)
            parsed.add(Piece("call", arguments, call.head, begins=True))
        elif call.head is not None and arguments:
            parsed.add(Piece("call", arguments, call.head))

    def _new_head(self, name: str) -> CallHead:
        return CallHead(self._calls, f"call_{uuid.uuid4().hex[:24]}", name)

    def _end_call(self, parsed: ParsedText, *, cut: bool = False, marked: bool = True) -> None:
        """End a call that was passed on, or parse it with mlx-lm's parser; if that fails it stays text."""
        text, self._call = self._call, ""
        passed = self._json.head if self._json is not None else None
        if self._json is not None:
            closed, self._json = self._json.closed, _JsonCall()
        if not self._may_call:
            return
        if passed is not None:
            parsed.add(Piece("call", "", passed, complete=closed or marked))
            self._calls += 1
            return
        if cut:  # a parser might find values that are only beginnings
            if named := self._first_tool_in(text):
                name, rest = named
                parsed.add(Piece("call", rest, self._new_head(name), begins=True))
                self._calls += 1
            return
        try:
            found = self._parser(text, self._tools)
        except Exception as error:  # parsers raise anything
            logger.info("a tool call cannot be parsed: %s", type(error).__name__)
            found = []
        calls = found if isinstance(found, list) else [found]
        if not calls or not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
            parsed.add(Piece("content", text))
            return
        for call in calls[: None if self._most_calls is None else self._most_calls - self._calls]:
            arguments = call.get("arguments", {})
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            parsed.add(Piece("call", arguments, self._new_head(call["name"]), begins=True, complete=True))
            self._calls += 1

    def _first_tool_in(self, text: str) -> tuple[str, str] | None:
        """The tool that the beginning of a call names, and what follows the name, where that is no JSON."""
        quote = "" if self._json is None else '"'
        names = [str(tool["function"]["name"]) for tool in self._tools]
        found = [re.search(rf"{quote}({re.escape(name)}){quote}(?![\w.-])", text) for name in names]
        first = min(filter(None, found), key=lambda match: (match.start(), -match.end()), default=None)
        if first is None:
            return None
        name, rest = first[1], text[first.end() :]
        if not rest and not quote and any(other.startswith(name) for other in names if other != name):
            return None  # it may be the beginning of the other's
        return name, "" if quote else rest


class _JsonCall:
    """Reads the text of a call {"name": …, "arguments": {…}} as it grows."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.head: CallHead | None = None
        self.closed = False  # whether the arguments are whole
        self._read, self._depth, self._quoted, self._escaped = 0, 0, False, False

    def read(self, text: str) -> str:
        """Return what all of the text so far adds to the arguments."""
        if self.name is None:
            found = HEAD.match(text)
            if found is None or (name := _unquoted(found[1])) is None:
                return ""
            self.name, self._read = name, found.end()
        begin = self._read
        while self._read < len(text) and not self.closed:
            self._step(text[self._read])
            self._read += 1
        return text[begin : self._read]

    def _step(self, character: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.closed = self._depth == 0


def _unquoted(text: str) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:  # a wrong escape
        return None


def has_json_calls(tokenizer: Any) -> bool:
    """Whether this model's family writes calls as {"name": …, "arguments": …}."""
    return getattr(tokenizer.tool_parser, "__module__", None) == JSON_CALLS
