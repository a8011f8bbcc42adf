"""Steps of the engine → OpenAI's objects: a whole completion, or the chunks of a stream.

A `ResponseBuilder` answers one request. It gets the steps as they come and knows nothing of HTTP.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.decode import Step
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


class ResponseBuilder(ABC):
    """The answer to one request: what was said so far, and the objects for it."""

    prefix = ""

    def __init__(
        self,
        request: ChatRequest | TextRequest,
        model: LoadedModel,
        prompt: RenderedPrompt,
        decode_request: DecodeRequest,
    ) -> None:
        self._request, self._model, self._decoded = request, model, decode_request
        target = model.target
        self._stops = Stops(target.stops, decode_request.stop_texts, target.tokenizer)
        self._parser = self._new_parser(target.tokenizer, prompt)
        self.parsed, self.tokens = ParsedText(), list[int]()
        self._logprobs: list[PlacedLogprob] = []  # those sent or ready
        self._pending: list[PlacedLogprob] = []
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or model.entry.name,
            "system_fingerprint": f"fp_{target.card.weights_sha256[:12]}",
        }

    def begin(self) -> Iterator[Reply]:
        """Yield the chunks before the first token."""
        yield from ()

    def take(self, steps: Sequence[Step]) -> Iterator[Reply]:
        """Yield a chunk for steps, if any text became certain with them."""
        return self._chunk_of(*self.hear(steps))

    def end(self, ended: DecodeFinished) -> Iterator[Reply]:
        """Yield the last chunks."""
        yield from self._chunk_of(*self._rest())
        provenance, separate = self.provenance(ended), self._request.wants_usage
        choice = self._choice(ParsedText(), [], self.finish(ended))
        yield self._chunk([choice], x_kakeya=None if separate else provenance)
        if separate:
            yield self._chunk([], usage=self.usage(ended.cached_tokens), x_kakeya=provenance)

    def complete(self, ended: DecodeFinished) -> Reply:
        """Return the whole answer as one object, instead of chunks."""
        self._rest()
        return self._complete(
            self.finish(ended), usage=self.usage(ended.cached_tokens), x_kakeya=self.provenance(ended)
        )

    def hear(self, steps: Sequence[Step]) -> tuple[ParsedText, list[PlacedLogprob]]:
        """Take in steps; return what became certain with them."""
        parsed = ParsedText()
        for step in steps:
            parsed += self._parser.add(step.tokens)
            begins = self._parser.stream.begins[len(self.tokens) :]
            self.tokens += step.tokens
            if step.logprobs is not None:
                placed = map(PlacedLogprob, begins, step.logprobs)
                self._pending += [each for each in placed if each.record.token not in self._stops.tokens]
        self.parsed += parsed
        return parsed, self._certain()

    def _rest(self) -> tuple[ParsedText, list[PlacedLogprob]]:
        """What still waited when the text ended."""
        parsed = self._parser.finish()
        self.parsed += parsed
        return parsed, self._certain(everything=not self._parser.stream.ended)

    def _certain(self, *, everything: bool = False) -> list[PlacedLogprob]:
        """Log-probabilities of tokens that begin in text that is certain, each once."""
        given = self._parser.stream.given
        ready = [each for each in self._pending if everything or each.begin < given]
        del self._pending[: len(ready)]
        self._logprobs += ready
        return ready

    def _chunk_of(self, parsed: ParsedText, logprobs: Sequence[PlacedLogprob]) -> Iterator[Reply]:
        if parsed or logprobs:
            yield self._chunk([self._choice(parsed, logprobs, None)])

    @abstractmethod
    def _new_parser(self, tokenizer: Any, prompt: RenderedPrompt) -> OutputParser: ...

    @abstractmethod
    def _choice(
        self, parsed: ParsedText, logprobs: Sequence[PlacedLogprob], finish: Finish | None
    ) -> Any: ...

    @abstractmethod
    def _chunk(self, choices: list[Any], **fields: Any) -> Reply: ...

    @abstractmethod
    def _complete(self, finish: Finish, **fields: Any) -> Reply: ...

    def finish(self, ended: DecodeFinished) -> Finish:
        """Say why the answer ended."""
        if ended.finish == "length":
            return "length"
        return "tool_calls" if self.parsed.calls else "stop"

    def usage(self, cached_tokens: int) -> Usage:
        """Count tokens of prompt and answer, also of an answer that was interrupted."""
        read, written = len(self._decoded.prompt), len(self.tokens)
        reasoning = self._parser.reasoning_tokens
        return Usage(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            prompt_tokens_details=CachedTokens(cached_tokens=cached_tokens),
            completion_tokens_details=ReasoningTokens(reasoning_tokens=reasoning) if reasoning else None,
        )

    def provenance(self, ended: DecodeFinished) -> Provenance:
        """Describe how the answer was made."""
        verified = [each for each in ended.rounds if each.block > 1]
        accepted = sum(each.accepted for each in verified)
        decoded, coded = len(self.tokens) - 1, ended.coded
        wants_tokens, wants_rounds = self._request.return_token_ids, self._request.return_rounds
        return Provenance(
            model=self._model.entry.name,
            kv_channel=self._decoded.channel.name,
            kv_policy=self._decoded.channel.policy.spec,
            drafter=ended.drafter,
            block=ended.block,
            speculation=bool(verified),
            why_off=ended.why_off,
            verify_rounds=len(verified),
            plain_steps=len(ended.rounds) - len(verified),
            drafted=sum(each.block - 1 for each in verified),
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
            token_ids=self.tokens if wants_tokens else None,
            prompt_token_ids=self._decoded.prompt if wants_tokens else None,
            rounds=[
                (each.block, each.accepted, round(each.draft_s, 7), round(each.verify_s, 7))
                for each in ended.rounds
            ]
            if wants_rounds
            else None,
            kept_positions=ended.kept_positions if wants_rounds else None,
            coded=CodedValues(layers=list(coded.layers), values=coded.values, bytes=coded.nbytes)
            if wants_rounds and coded is not None
            else None,
        )

    def _text(self, token: int) -> str:
        """A token as it appears in the text, because as a text of its own it may lack its space."""
        return text_of(self._model.target.tokenizer, [token], Stops(), self._decoded.prompt)


class ChatResponseBuilder(ResponseBuilder):
    """A chat completion."""

    prefix = "chatcmpl"
    _request: ChatRequest

    def begin(self) -> Iterator[Reply]:
        """Yield the role, as OpenAI's streams begin."""
        yield self._chunk([ChunkChoice(delta=Delta(role="assistant", content=""))])

    def _new_parser(self, tokenizer: Any, prompt: RenderedPrompt) -> OutputParser:
        tools = [tool.model_dump(exclude_none=True) for tool in self._request.tools or []]
        return OutputParser(tokenizer, self._stops, prompt=prompt.tokens, state=prompt.state, tools=tools)

    def _choice(
        self, parsed: ParsedText, logprobs: Sequence[PlacedLogprob], finish: Finish | None
    ) -> ChunkChoice:
        delta = Delta(
            content=parsed.content or None,
            reasoning=parsed.reasoning or None,
            tool_calls=parsed.calls or None,
        )
        return ChunkChoice(delta=delta, logprobs=self._chat_logprobs(logprobs), finish_reason=finish)

    def _chunk(self, choices: list[Any], **fields: Any) -> Reply:
        return ChatChunk(**self.head, choices=choices, **fields)

    def _complete(self, finish: Finish, **fields: Any) -> Reply:
        parsed = self.parsed
        message = ChatMessage(
            content=parsed.content if parsed.content or not parsed.calls else None,
            reasoning=parsed.reasoning or None,
            tool_calls=[call.model_copy(update={"index": None}) for call in parsed.calls] or None,
        )
        choice = ChatChoice(
            message=message, logprobs=self._chat_logprobs(self._logprobs), finish_reason=finish
        )
        return ChatCompletion(**self.head, choices=[choice], **fields)

    def _chat_logprobs(self, logprobs: Sequence[PlacedLogprob]) -> ChatLogprobs | None:
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

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        """A token as text and bytes; a part of a character has no text, and its bytes are unknown here."""
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class TextResponseBuilder(ResponseBuilder):
    """A text completion."""

    prefix = "cmpl"
    _request: TextRequest

    def _new_parser(self, tokenizer: Any, prompt: RenderedPrompt) -> OutputParser:
        return OutputParser(tokenizer, self._stops, prompt=prompt.tokens, plain=True)

    def _choice(
        self, parsed: ParsedText, logprobs: Sequence[PlacedLogprob], finish: Finish | None
    ) -> TextChoice:
        return TextChoice(text=parsed.content, logprobs=self._text_logprobs(logprobs), finish_reason=finish)

    def _chunk(self, choices: list[Any], **fields: Any) -> Reply:
        return TextCompletion(**self.head, choices=choices, **fields)

    def _complete(self, finish: Finish, **fields: Any) -> Reply:
        return self._chunk([self._choice(self.parsed, self._logprobs, finish)], **fields)

    def _text_logprobs(self, logprobs: Sequence[PlacedLogprob]) -> TextLogprobs | None:
        if not logprobs:
            return None
        records = [each.record for each in logprobs]
        top = [{self._text(token): value for token, value in each.top} for each in records]
        return TextLogprobs(
            tokens=[self._text(each.token) for each in records],
            token_logprobs=[each.logprob for each in records],
            top_logprobs=top if self._decoded.logprobs else None,
            text_offset=[each.begin for each in logprobs],
        )
