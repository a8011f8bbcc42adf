"""Events of the engine → OpenAI's objects: a whole completion, or the chunks of a stream.

One `ResponseBuilder` for each request. It takes the steps as they come and knows nothing of HTTP.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.cache.stats import KVUse
from engine.decode import Round, Step
from engine.detokenize import text_of
from engine.logprobs import TokenLogprob
from engine.server.parsing import OutputParser, ParsedText
from engine.server.prompting import RenderedPrompt
from engine.server.schema import (
    CachedTokens,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    CodedValues,
    ContentLogprob,
    Delta,
    Finish,
    Provenance,
    ReasoningTokens,
    Reply,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TextRequest,
    TopLogprob,
    Usage,
)
from engine.server.sequence import DecodeFinished, DecodeRequest
from engine.server.sessions import LoadedModel
from engine.stops import Stops


@dataclass(frozen=True)
class PlacedLogprob:
    """A token's log-probabilities, and where in the text the token begins."""

    begin: int
    record: TokenLogprob


@dataclass
class Whole:
    """What has been said so far."""

    said: ParsedText = field(default_factory=ParsedText)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[PlacedLogprob] = field(default_factory=list)


class ResponseBuilder(ABC):
    """The answer to one request; `ChatResponseBuilder` and `TextResponseBuilder` are the two kinds."""

    prefix = ""

    def __init__(
        self,
        request: ChatRequest | TextRequest,
        model: LoadedModel,
        asked: RenderedPrompt,
        work: DecodeRequest,
    ) -> None:
        self._request, self._model, self._asked, self._work = request, model, asked, work
        target = model.target
        self._stops = Stops(target.stops, work.stop_texts, target.tokenizer)
        self._parser = self._new_parser(target.tokenizer)
        self.whole = Whole()
        self._pending: list[PlacedLogprob] = []
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or model.entry.name,
            "system_fingerprint": f"fp_{target.card.weights_sha256[:12]}",
        }

    @abstractmethod
    def _new_parser(self, tokenizer: Any) -> OutputParser:
        """What tells apart the parts of the text."""

    def begin(self) -> Iterator[Reply]:
        """Chunks before the first token."""
        yield from ()

    def hear(self, steps: Sequence[Step]) -> tuple[ParsedText, list[PlacedLogprob]]:
        """Take in steps; what became certain with them."""
        said = ParsedText()
        for step in steps:
            said += self._parser.add(step.tokens)
            begins = self._parser.stream.begins[len(self.whole.tokens) :]
            self.whole.tokens += step.tokens
            if step.logprobs is not None:
                placed = map(PlacedLogprob, begins, step.logprobs)
                self._pending += [each for each in placed if each.record.token not in self._stops.tokens]
        self.whole.said += said
        return said, self._certain()

    def _rest(self) -> tuple[ParsedText, list[PlacedLogprob]]:
        """What was still held back when the text ended."""
        said = self._parser.finish()
        self.whole.said += said
        return said, self._certain(whole=not self._parser.stream.ended)

    def take(self, steps: Sequence[Step]) -> Iterator[Reply]:
        """A chunk for steps, if any text became certain with them."""
        said, shown = self.hear(steps)
        if said or shown:
            yield self._chunk(said, shown, None)

    def end(self, ended: DecodeFinished) -> Iterator[Reply]:
        """The last chunks."""
        said, shown = self._rest()
        if said or shown:
            yield self._chunk(said, shown, None)
        provenance, apart = self.provenance(ended), self._request.wants_usage
        yield self._chunk(ParsedText(), [], self.finish(ended), provenance=None if apart else provenance)
        if apart:
            yield self._closing(self.usage(ended.cached_tokens), provenance)

    def _certain(self, *, whole: bool = False) -> list[PlacedLogprob]:
        """Log-probabilities of tokens that begin in text that is certain, or of all; each once."""
        shown = [each for each in self._pending if whole or each.begin < self._parser.stream.given]
        del self._pending[: len(shown)]
        self.whole.logprobs += shown
        return shown

    def complete(self, ended: DecodeFinished) -> Reply:
        """The whole answer as one object, instead of chunks."""
        self._rest()
        return self._complete(ended)

    @abstractmethod
    def _complete(self, ended: DecodeFinished) -> Reply:
        """The whole answer, of which everything was said."""

    @abstractmethod
    def _chunk(
        self,
        said: ParsedText,
        logprobs: Sequence[PlacedLogprob],
        finish: Finish | None,
        *,
        provenance: Provenance | None = None,
    ) -> Reply:
        """A piece of the answer."""

    @abstractmethod
    def _closing(self, usage: Usage, provenance: Provenance) -> Reply:
        """A last chunk that holds these alone."""

    def finish(self, ended: DecodeFinished) -> Finish:
        """Why the answer ended."""
        if ended.finish == "length":
            return "length"
        return "tool_calls" if self.whole.said.calls else "stop"

    def usage(self, cached_tokens: int) -> Usage:
        """Tokens that were read, some of them from a session, and written; also of an answer left midway."""
        read, written = len(self._work.prompt), len(self.whole.tokens)
        reasoning = self._parser.reasoning_tokens
        return Usage(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            prompt_tokens_details=CachedTokens(cached_tokens=cached_tokens),
            completion_tokens_details=ReasoningTokens(reasoning_tokens=reasoning) if reasoning else None,
        )

    def provenance(self, ended: DecodeFinished) -> Provenance:
        """How the answer came about."""
        verified = [record for record in ended.rounds if record.block > 1]
        accepted = sum(record.accepted for record in verified)
        decoded = len(self.whole.tokens) - 1
        wanted, traced = bool(self._request.return_token_ids), bool(self._request.return_rounds)
        return Provenance(
            model=self._model.entry.name,
            kv_channel=self._work.channel.name,
            kv_policy=self._work.channel.policy.spec,
            drafter=ended.drafter,
            block=ended.block,
            speculation=bool(verified),
            why_off=ended.why_off,
            verify_rounds=len(verified),
            plain_steps=len(ended.rounds) - len(verified),
            drafted=sum(record.block - 1 for record in verified),
            accepted=accepted,
            acceptance_length=round(accepted / len(verified) + 1, 4) if verified else None,
            drafter_forwards=ended.drafter_forwards,
            cached_tokens=ended.cached_tokens,
            queue_s=round(ended.queue_s, 6),
            prefill_s=round(ended.prefill_s, 6),
            decode_s=round(ended.decode_s, 6),
            decode_tokens_per_s=round(decoded / ended.decode_s, 3)
            if ended.decode_s > 0 and decoded
            else None,
            resident_bytes=ended.resident_bytes,
            cache_classes=dict(ended.cache_classes),
            cache_strategy=ended.cache_strategy,
            token_ids=self.whole.tokens if wanted else None,
            prompt_token_ids=self._work.prompt if wanted else None,
            rounds=_traced(ended.rounds) if traced else None,
            kept_positions=ended.kept_positions if traced else None,
            coded=_coded(ended.coded) if traced else None,
        )

    def _text(self, token: int) -> str:
        """A token as it stands in the text, and not as a text of its own, which may lack its space."""
        return text_of(self._model.target.tokenizer, [token], Stops(), self._work.prompt)

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        """A token as text and bytes; a part of a character has no text, and its bytes are not known here."""
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _traced(rounds: Sequence[Round]) -> list[tuple[int, int, float, float]]:
    return [(each.block, each.accepted, round(each.draft_s, 7), round(each.verify_s, 7)) for each in rounds]


def _coded(use: KVUse | None) -> CodedValues | None:
    if use is None:
        return None
    return CodedValues(layers=list(use.layers), values=use.values, bytes=use.nbytes)


class ChatResponseBuilder(ResponseBuilder):
    """A chat completion."""

    prefix = "chatcmpl"
    _request: ChatRequest

    def _new_parser(self, tokenizer: Any) -> OutputParser:
        tools = [tool.model_dump(exclude_none=True) for tool in self._request.tools or []]
        return OutputParser(
            tokenizer, self._stops, prompt=self._work.prompt, state=self._asked.state, tools=tools
        )

    def begin(self) -> Iterator[Reply]:
        """The role, as OpenAI's streams begin."""
        delta = Delta(role="assistant", content="")
        yield ChatChunk(**self.head, choices=[ChunkChoice(delta=delta)])

    def _complete(self, ended: DecodeFinished) -> Reply:
        whole, said = self.whole, self.whole.said
        message = ChatMessage(
            content=said.content if said.content or not said.calls else None,
            reasoning=said.reasoning or None,
            tool_calls=[call.model_copy(update={"index": None}) for call in said.calls] or None,
        )
        choice = ChatChoice(
            message=message, logprobs=self._logprobs(whole.logprobs), finish_reason=self.finish(ended)
        )
        return ChatCompletion(
            **self.head,
            choices=[choice],
            usage=self.usage(ended.cached_tokens),
            x_kakeya=self.provenance(ended),
        )

    def _chunk(
        self,
        said: ParsedText,
        logprobs: Sequence[PlacedLogprob],
        finish: Finish | None,
        *,
        provenance: Provenance | None = None,
    ) -> Reply:
        delta = Delta(
            content=said.content or None, reasoning=said.reasoning or None, tool_calls=said.calls or None
        )
        choice = ChunkChoice(delta=delta, logprobs=self._logprobs(logprobs), finish_reason=finish)
        return ChatChunk(**self.head, choices=[choice], x_kakeya=provenance)

    def _closing(self, usage: Usage, provenance: Provenance) -> Reply:
        return ChatChunk(**self.head, choices=[], usage=usage, x_kakeya=provenance)

    def _logprobs(self, logprobs: Sequence[PlacedLogprob]) -> ChatLogprobs | None:
        if not logprobs:
            return None
        return ChatLogprobs(
            content=[
                ContentLogprob(
                    **self._spelled(each.record.token, each.record.logprob),
                    top_logprobs=[TopLogprob(**self._spelled(*top)) for top in each.record.top],
                )
                for each in logprobs
            ]
        )


class TextResponseBuilder(ResponseBuilder):
    """A text completion."""

    prefix = "cmpl"
    _request: TextRequest

    def _new_parser(self, tokenizer: Any) -> OutputParser:
        return OutputParser(tokenizer, self._stops, prompt=self._work.prompt, plain=True)

    def _complete(self, ended: DecodeFinished) -> Reply:
        choice = TextChoice(
            text=self.whole.said.content,
            logprobs=self._logprobs(self.whole.logprobs),
            finish_reason=self.finish(ended),
        )
        return TextCompletion(
            **self.head,
            choices=[choice],
            usage=self.usage(ended.cached_tokens),
            x_kakeya=self.provenance(ended),
        )

    def _chunk(
        self,
        said: ParsedText,
        logprobs: Sequence[PlacedLogprob],
        finish: Finish | None,
        *,
        provenance: Provenance | None = None,
    ) -> Reply:
        choice = TextChoice(text=said.content, logprobs=self._logprobs(logprobs), finish_reason=finish)
        return TextCompletion(**self.head, choices=[choice], x_kakeya=provenance)

    def _closing(self, usage: Usage, provenance: Provenance) -> Reply:
        return TextCompletion(**self.head, choices=[], usage=usage, x_kakeya=provenance)

    def _logprobs(self, logprobs: Sequence[PlacedLogprob]) -> TextLogprobs | None:
        if not logprobs:
            return None
        records = [each.record for each in logprobs]
        wanted = bool(self._work.logprobs)
        return TextLogprobs(
            tokens=[self._text(each.token) for each in records],
            token_logprobs=[each.logprob for each in records],
            top_logprobs=[{self._text(token): value for token, value in each.top} for each in records]
            if wanted
            else None,
            text_offset=[each.begin for each in logprobs],
        )
