"""Steps of the engine → OpenAI's objects: a whole completion, or the chunks of a stream; nothing of HTTP."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from engine.decode import Step
from engine.detokenize import text_of
from engine.external_engines.engine import DraftCounts
from engine.logprobs import TokenLogprob
from engine.server import schema
from engine.server.parsing import OutputParser, ParsedText
from engine.server.prompting import RenderedPrompt
from engine.server.sequence import DecodeFinished, DecodeRequest
from engine.server.sessions import LoadedModel
from engine.stops import Stops

# of `DecodeFinished`, told as they are
FACTS = (
    "engine",
    "fallback_from",
    "drafter",
    "block",
    "why_off",
    "cached_tokens",
    "cached_from",
    "cache_strategy",
)


class ResponseBuilder(ABC):
    """The answer to one request: what was said so far, and the objects for it."""

    prefix: str
    chunk: type[schema.ChatChunk | schema.TextCompletion]

    def __init__(
        self,
        request: schema.AnyRequest,
        model: LoadedModel,
        prompt: RenderedPrompt,
        decode_request: DecodeRequest,
    ) -> None:
        self._request, self._model, self.decoded = request, model, decode_request
        target = model.target
        self._stops = Stops(target.stops, decode_request.stop_texts, target.tokenizer)
        self._parser = OutputParser(
            target.tokenizer,
            self._stops,
            prompt=prompt.tokens,
            state=prompt.state,
            tools=[tool.model_dump(exclude_none=True) for tool in getattr(request, "tools", None) or []],
            plain=isinstance(request, schema.TextRequest),
        )
        self.parsed, self.tokens = ParsedText(), list[int]()
        self._pending: list[tuple[int, TokenLogprob]] = []
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or model.entry.name,
            "system_fingerprint": f"fp_{target.card.weights_sha256[:12]}",
        }

    def begin(self) -> Iterator[schema.Reply]:
        yield from ()

    def take(self, steps: Sequence[Step]) -> Iterator[schema.Reply]:
        if parsed := self.hear(steps):
            yield self._chunk([self._choice(parsed, None)])

    def end(self, ended: DecodeFinished) -> Iterator[schema.Reply]:
        if parsed := self._rest():
            yield self._chunk([self._choice(parsed, None)])
        provenance, options = self.provenance(ended), self._request.stream_options
        separate = options is not None and options.include_usage
        choice = self._choice(ParsedText(), self.finish(ended))
        yield self._chunk([choice], x_kakeya=None if separate else provenance)
        if separate:
            yield self._chunk([], usage=self.usage(ended.cached_tokens), x_kakeya=provenance)

    def complete(self, ended: DecodeFinished) -> schema.Reply:
        self._rest()
        usage, provenance = self.usage(ended.cached_tokens), self.provenance(ended)
        return self._complete(self.finish(ended), usage=usage, x_kakeya=provenance)

    def hear(self, steps: Sequence[Step]) -> ParsedText:
        parsed = ParsedText()
        for step in steps:
            parsed += self._parser.add(step.tokens)
            begins = self._parser.stream.begins[len(self.tokens) :]
            self.tokens += step.tokens
            placed = zip(begins, step.logprobs or (), strict=False)
            self._pending += [each for each in placed if each[1].token not in self._stops.tokens]
        return self._certain(parsed)

    def _rest(self) -> ParsedText:
        """What still waited when the text ended."""
        parsed = self._parser.finish()
        return self._certain(parsed, everything=not self._parser.stream.ended)

    def _certain(self, parsed: ParsedText, *, everything: bool = False) -> ParsedText:
        """Add the log-probabilities of tokens that begin in text that is certain, each once."""
        given = self._parser.stream.given
        parsed.logprobs = [each for each in self._pending if everything or each[0] < given]
        del self._pending[: len(parsed.logprobs)]
        self.parsed += parsed
        return parsed

    @abstractmethod
    def _choice(self, parsed: ParsedText, finish: schema.Finish | None) -> Any: ...

    def _chunk(self, choices: list[Any], **fields: Any) -> schema.Reply:
        return self.chunk(**self.head, choices=choices, **fields)

    def _complete(self, finish: schema.Finish, **fields: Any) -> schema.Reply:
        return self._chunk([self._choice(self.parsed, finish)], **fields)

    def finish(self, ended: DecodeFinished) -> schema.Finish:
        if ended.outcome.finish == "length":
            return "length"
        return "tool_calls" if self.parsed.calls else "stop"

    def usage(self, cached_tokens: int) -> schema.Usage:
        """Count tokens of prompt and answer, also of an answer that was interrupted."""
        read, written = len(self.decoded.prompt), len(self.tokens)
        reasoning = self._parser.reasoning_tokens
        return schema.Usage(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            prompt_tokens_details=schema.CachedTokens(cached_tokens=cached_tokens),
            completion_tokens_details=schema.ReasoningTokens(reasoning_tokens=reasoning)
            if reasoning
            else None,
        )

    def provenance(self, ended: DecodeFinished) -> schema.Provenance:
        outcome = ended.outcome
        verified = [each for each in outcome.rounds if each.block > 1]
        counts = ended.external_counts or DraftCounts(len(verified), sum(each.accepted for each in verified))
        decoded, length = len(self.tokens) - 1, counts.acceptance_length
        ours = ended.cache_strategy is None
        plain = len(outcome.rounds) - len(verified) if ours else decoded
        untold = ended.external_counts is not None  # it tells rounds and accepted drafts alone
        speed = round(decoded / outcome.decode_s, 3) if outcome.decode_s > 0 and decoded else None
        asked: dict[str, Any] = {}
        if self._request.return_token_ids:
            asked |= {"token_ids": self.tokens, "prompt_token_ids": self.decoded.prompt}
        if self._request.return_rounds and ours:
            asked["rounds"] = [
                (r.block, r.accepted, round(r.draft_s, 7), round(r.verify_s, 7), r.looked_up)
                for r in outcome.rounds
            ]
            asked["kept_positions"] = outcome.kept
            if (use := outcome.kv) is not None:
                asked["coded"] = {"layers": list(use.layers), "values": use.values, "bytes": use.nbytes}
        return schema.Provenance(
            model=self._model.entry.name,
            kv_channel=self.decoded.channel.name,
            kv_policy=self.decoded.channel.policy.spec,
            **{name: getattr(ended, name) for name in FACTS},
            speculation=counts.rounds > 0,
            verify_rounds=counts.rounds,
            plain_steps=None if untold else plain,
            drafted=None if untold else sum(each.block - 1 for each in verified),
            accepted=counts.accepted,
            acceptance_length=length if length is None else round(length, 4),
            drafter_forwards=None if untold else outcome.drafter_forwards,
            queue_s=round(ended.queue_s, 6),
            prefill_s=round(outcome.prefill_s, 6),
            decode_s=round(outcome.decode_s, 6),
            decode_tokens_per_s=speed,
            resident_bytes=ended.resident_bytes,
            drafter_resident_bytes=ended.drafter_resident_bytes,
            cache_classes=dict(outcome.cache_classes),
            **asked,
        )

    def _text(self, token: int) -> str:
        """A token as it appears in the text, because as a text of its own it may lack its space."""
        return text_of(self._model.target.tokenizer, [token], Stops(), self.decoded.prompt)


class ChatResponseBuilder(ResponseBuilder):
    """A chat completion."""

    prefix, chunk = "chatcmpl", schema.ChatChunk
    _request: schema.ChatRequest

    def begin(self) -> Iterator[schema.Reply]:
        yield self._chunk([schema.ChunkChoice(delta=schema.Delta(role="assistant", content=""))])

    def _choice(self, parsed: ParsedText, finish: schema.Finish | None) -> schema.ChunkChoice:
        delta = schema.Delta(
            content=parsed.content or None,
            reasoning=parsed.reasoning or None,
            tool_calls=parsed.calls or None,
        )
        return schema.ChunkChoice(delta=delta, logprobs=self._chat_logprobs(parsed), finish_reason=finish)

    def _complete(self, finish: schema.Finish, **fields: Any) -> schema.Reply:
        parsed = self.parsed
        message = schema.ChatMessage(
            content=parsed.content if parsed.content or not parsed.calls else None,
            reasoning=parsed.reasoning or None,
            tool_calls=[call.model_copy(update={"index": None}) for call in parsed.calls] or None,
        )
        told = self._chat_logprobs(parsed)
        choice = schema.ChatChoice(message=message, logprobs=told, finish_reason=finish)
        return schema.ChatCompletion(**self.head, choices=[choice], **fields)

    def _chat_logprobs(self, parsed: ParsedText) -> schema.ChatLogprobs | None:
        content = [
            schema.ContentLogprob(
                **self._spelled(each.token, each.logprob),
                top_logprobs=[schema.TopLogprob(**self._spelled(*top)) for top in each.top],
            )
            for _, each in parsed.logprobs
        ]
        return schema.ChatLogprobs(content=content) if content else None

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        """A token as text and bytes; a part of a character has no text, and its bytes are unknown here."""
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class TextResponseBuilder(ResponseBuilder):
    """A text completion."""

    prefix, chunk = "cmpl", schema.TextCompletion
    _request: schema.TextRequest

    def _choice(self, parsed: ParsedText, finish: schema.Finish | None) -> schema.TextChoice:
        records = [record for _, record in parsed.logprobs]
        top = [{self._text(token): value for token, value in each.top} for each in records]
        told = schema.TextLogprobs(
            tokens=[self._text(each.token) for each in records],
            token_logprobs=[each.logprob for each in records],
            top_logprobs=top if self.decoded.logprobs else None,
            text_offset=[begin for begin, _ in parsed.logprobs],
        )
        logprobs = told if records else None
        return schema.TextChoice(text=parsed.content, logprobs=logprobs, finish_reason=finish)
