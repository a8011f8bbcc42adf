"""Tokens as they come → what is said: content, reasoning and tool calls apart, stop strings cut off.

Which part of the text is which is told by mlx-lm's text machine and tool parsers, as in its own server. Text
that may turn out to be the beginning of a mark waits; what still waits at the end is text.
"""

import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from engine.detokenize import TextStream
from engine.server.schema import CalledFunction, ToolCallReply
from engine.stops import Stops

logger = logging.getLogger(__name__)
_MACHINE: Any = TextStateMachine  # its functions take a state and know nothing of types


@dataclass
class ParsedText:
    """A piece of an answer.

    Attributes:
        content: text for the user.
        reasoning: text of the reasoning.
        calls: tool calls that came to their end.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallReply] = field(default_factory=list)

    def __iadd__(self, other: "ParsedText") -> "ParsedText":
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls
        return self

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class OutputParser:
    """One answer, piece by piece."""

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
        """Begin.

        Args:
            tokenizer: mlx-lm's wrapper.
            stops: what ends the text; stop tokens give none, stop strings are cut off.
            prompt: token ids the answer continues.
            state: of the text machine where the answer begins.
            tools: as the template was given them; parsers look up the types of arguments there.
            plain: pass the text on as it is, marks included.
        """
        self.stream = TextStream(tokenizer, stops, prompt)
        self._tools, self._parser = list(tools), tokenizer.tool_parser
        make: Any = make_text_state_machine
        machine = _MACHINE() if plain else make(tokenizer)
        self._machine = machine.make_state(state)
        self._part, self._call = state, ""
        self.called = 0
        self.reasoning_tokens = 0

    def add(self, tokens: Sequence[int]) -> ParsedText:
        """What became certain with these tokens."""
        said = self._take(self.stream.add(tokens))
        self.reasoning_tokens += len(tokens) if self._part == "reasoning" else 0
        return said

    def finish(self) -> ParsedText:
        """What was still held back; a call without its end is one if it can be read."""
        said = self._take(self.stream.finish())
        self._machine, rest, part = _MACHINE.flush(self._machine)
        self._sort(part, rest, said)
        if self._call:
            self._end_call(said)
        return said

    def _take(self, text: str) -> ParsedText:
        said = ParsedText()
        self._machine, segments = _MACHINE.split(self._machine, text)
        for part, segment in segments:
            self._sort(part, segment, said)
        return said

    def _sort(self, part: str, text: str, said: ParsedText) -> None:
        if part != "tool" and self._part == "tool":
            self._end_call(said)
        self._part = part
        if part == "reasoning":
            said.reasoning += text
        elif part == "tool":
            self._call += text
        else:
            said.content += text

    def _end_call(self, said: ParsedText) -> None:
        """Read the text of a call; one that cannot be read stays text."""
        text, self._call = self._call, ""
        found = _calls(self._parser, text, self._tools)
        if not found:
            said.content += text
        for function in found:
            said.calls.append(
                ToolCallReply(id=f"call_{uuid.uuid4().hex[:24]}", function=function, index=self.called)
            )
            self.called += 1


def _calls(parser: Any, text: str, tools: list[dict[str, Any]]) -> list[CalledFunction]:
    """What mlx-lm's parser of the model's family reads in a text; nothing if that is no call."""
    try:
        parsed = parser(text, tools)
    except Exception as error:  # parsers raise whatever the text leads them to
        logger.info("a tool call cannot be read: %s", type(error).__name__)
        return []
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [CalledFunction(name=call["name"], arguments=_json(call.get("arguments", {}))) for call in calls]


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
