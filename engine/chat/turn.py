"""One answer of a conversation: the engine's events → pieces of text, and at last the turn.

An answer may be stopped midway; then it is what was said until then. Who asks, and what is kept, is in
`engine.chat.conversation`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter

from engine.decode import Round, Step
from engine.server.parsing import ParsedText
from engine.server.response import ChatResponseBuilder
from engine.server.schema import ChatChunk, Provenance, Reply, Usage
from engine.server.sequence import DecodeFailed, DecodeFinished, DecodeRequest, Event, PrefillProgress

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Turn:
    """An answer that has ended.

    Attributes:
        content: what was said.
        reasoning: what was said before that, to itself.
        finish: why it ended, in OpenAI's words, or `INTERRUPTED`.
        usage: tokens that were read and written.
        seconds: from the first token to the last.
        verify_rounds: forwards over a block.
        accepted: drafts that were confirmed in them.
        provenance: how the answer came about; None of one that was interrupted.
    """

    content: str
    reasoning: str
    finish: str
    usage: Usage
    seconds: float
    verify_rounds: int
    accepted: int
    provenance: Provenance | None

    @property
    def said(self) -> bool:
        """Whether there is anything in it."""
        return bool(self.content or self.reasoning)

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, that were not computed again."""
        return self.usage.prompt_tokens_details.cached_tokens

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted a verify round, the target's own included; None without one."""
        return self.accepted / self.verify_rounds + 1 if self.verify_rounds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of decoding, the first token excepted; None for a single one."""
        decoded = self.usage.completion_tokens - 1
        return decoded / self.seconds if decoded > 0 and self.seconds > 0 else None


class Listening:
    """One answer as it comes."""

    def __init__(self, builder: ChatResponseBuilder, work: DecodeRequest) -> None:
        """Begin.

        Args:
            builder: reads the steps.
            work: what is decoded.
        """
        self._builder, self.work = builder, work
        self._cached: int | None = None
        self._first = self._last = 0.0
        self._rounds: list[Round] = []
        self._ended: DecodeFinished | None = None
        self._content, self._reasoning = "", ""

    def until_end(self, events: "SimpleQueue[Event | None]") -> Iterator[PrefillProgress | ParsedText]:
        """What there is to tell, until the answer has ended or is stopped.

        Raises:
            EngineError: it failed.
        """
        while self._ended is None and (event := events.get()) is not None:
            match event:
                case DecodeFailed():
                    raise event.error
                case PrefillProgress():
                    self._cached = event.done if self._cached is None else self._cached
                    yield event
                case Step():
                    self._note(event)
                    yield from self._said(self._builder.take([event]))
                case DecodeFinished():
                    self._ended = event
                    yield from self._said(self._builder.end(event))

    @property
    def turn(self) -> Turn:
        """The answer, ended or stopped."""
        verified = [record for record in self._rounds if record.block > 1]
        ended = self._ended
        return Turn(
            content=self._content,
            reasoning=self._reasoning,
            finish=INTERRUPTED if ended is None else ended.outcome.finish,
            usage=self._builder.usage((self._cached or 0) if ended is None else ended.cached_tokens),
            seconds=self._last - self._first if ended is None else ended.outcome.decode_s,
            verify_rounds=len(verified),
            accepted=sum(record.accepted for record in verified),
            provenance=None if ended is None else self._builder.provenance(ended),
        )

    def _note(self, step: Step) -> None:
        self._last = perf_counter()
        if step.round is None:
            self._first = self._last
        else:
            self._rounds.append(step.round)

    def _said(self, chunks: Iterator[Reply]) -> Iterator[ParsedText]:
        """Pieces of text; a tool call, which nobody offered, is text too."""
        for chunk in chunks:
            if not isinstance(chunk, ChatChunk) or not chunk.choices:
                continue
            delta = chunk.choices[0].delta
            calls = [f"{call.function.name}({call.function.arguments})" for call in delta.tool_calls or []]
            said = ParsedText("".join([delta.content or "", *calls]), delta.reasoning or "")
            if said:
                self._content += said.content
                self._reasoning += said.reasoning
                yield said
