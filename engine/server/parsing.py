"""Tokens as they come → content, reasoning and tool calls apart, stop strings cut off.

mlx-lm's text machine and tool parsers decide which part of the text is which, as in its own server.
"""

import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from engine.detokenize import TextStream
from engine.logprobs import TokenLogprob
from engine.server.schema import CalledFunction, ToolCallReply
from engine.stops import Stops

logger = logging.getLogger(__name__)
_MACHINE: Any = TextStateMachine  # its functions take a state and have no types
_new_machine: Any = make_text_state_machine


@dataclass
class ParsedText:
    """A part of an answer, with the tool calls that ended in it."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallReply] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)  # and where its token begins

    def __iadd__(self, other: "ParsedText") -> "ParsedText":
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls
        self.logprobs += other.logprobs
        return self

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


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
    ) -> None:
        """Begin in a `state` of the text machine; `plain` passes marks on as text."""
        self.stream = TextStream(tokenizer, stops, prompt)
        self.reasoning_tokens = 0
        self._tools, self._parser = list(tools), tokenizer.tool_parser
        self._machine = (_MACHINE() if plain else _new_machine(tokenizer)).make_state(state)
        self._part, self._call, self._calls = state, "", 0

    def add(self, tokens: Sequence[int]) -> ParsedText:
        parsed = self._parse(self.stream.add(tokens))
        self.reasoning_tokens += len(tokens) if self._part == "reasoning" else 0
        return parsed

    def finish(self) -> ParsedText:
        """Return what still waited; a call without its end is one if it can be parsed."""
        parsed = self._parse(self.stream.finish())
        self._machine, rest, part = _MACHINE.flush(self._machine)
        self._add_segment(part, rest, parsed)
        if self._call:
            self._end_call(parsed)
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
            parsed.reasoning += text
        elif part == "tool":
            self._call += text
        else:
            parsed.content += text

    def _end_call(self, parsed: ParsedText) -> None:
        """Parse the text of a call with mlx-lm's parser of the family; where that fails it stays text."""
        text, self._call = self._call, ""
        try:
            found = self._parser(text, self._tools)
        except Exception as error:  # parsers raise anything
            logger.info("a tool call cannot be parsed: %s", type(error).__name__)
            found = []
        calls = found if isinstance(found, list) else [found]
        if not calls or not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
            parsed.content += text
            return
        for call in calls:
            arguments = call.get("arguments", {})
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = CalledFunction(name=call["name"], arguments=arguments)
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            parsed.calls.append(ToolCallReply(id=call_id, function=function, index=self._calls))
            self._calls += 1
