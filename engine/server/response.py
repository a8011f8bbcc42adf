"""Steps of the engine → a protocol's objects: a whole answer, or the events of a stream and their bytes.

Here is what all protocols share, and OpenAI's completions; `responses` and `messages` have the others.
Nothing here knows of HTTP.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.decode import Step
from engine.detokenize import text_of
from engine.external_engines.engine import DraftCounts
from engine.logprobs import TokenLogprob
from engine.server import schema
from engine.server.parsing import CallHead, OutputParser, ParsedText, Piece
from engine.server.prompting import RenderedPrompt
from engine.server.sequence import DecodeFinished, DecodeRequest
from engine.server.sessions import LoadedModel
from engine.stops import Stops

# of `DecodeFinished`, told as they are
FACTS = ("engine", "fallback_from", "drafter", "block", "why_off", "cached_tokens", "cache_strategy")


class ResponseBuilder(ABC):
    """The answer to one request: what was said so far, and the objects for it."""

    prefix: str  # of the answer's id
    done = b""  # how a stream ends, behind its last event
    waiting = b": waiting\n\n"  # tells a client that its request still waits

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
            most_calls=1 if getattr(request, "parallel_tool_calls", None) is False else None,
        )
        self.parsed, self.tokens = ParsedText(), list[int]()
        self._pending: list[tuple[int, TokenLogprob]] = []
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model_name = request.model or model.entry.name

    def begin(self) -> Iterator[schema.Reply]:
        yield from ()

    @abstractmethod
    def take(self, steps: Sequence[Step]) -> Iterator[schema.Reply]: ...

    @abstractmethod
    def end(self, ended: DecodeFinished) -> Iterator[schema.Reply]: ...

    @abstractmethod
    def complete(self, ended: DecodeFinished) -> schema.Reply: ...

    def fail(self, refusal: schema.Refusal) -> Iterator[schema.Reply]:
        """End a stream that has started."""
        yield schema.ErrorReply.model_validate(refusal.document())

    def frame(self, reply: schema.Reply) -> bytes:
        """Return one event of a stream as it is sent."""
        return b"data: " + reply.model_dump_json().encode() + b"\n\n"

    def hear(self, steps: Sequence[Step]) -> ParsedText:
        parsed = ParsedText()
        for step in steps:
            parsed += self._parser.add(step.tokens)
            begins = self._parser.stream.begins[len(self.tokens) :]
            self.tokens += step.tokens
            placed = zip(begins, step.logprobs or (), strict=False)
            self._pending += [each for each in placed if each[1].token not in self._stops.tokens]
        return self._certain(parsed)

    def rest(self, ended: DecodeFinished) -> ParsedText:
        """What still waited when the text ended."""
        parsed = self._parser.finish(cut=ended.outcome.finish == "length")
        return self._certain(parsed, everything=not self._parser.stream.ended)

    def _certain(self, parsed: ParsedText, *, everything: bool = False) -> ParsedText:
        """Add the log-probabilities of tokens that begin in text that is certain, each once."""
        given = self._parser.stream.given
        parsed.logprobs = [each for each in self._pending if everything or each[0] < given]
        del self._pending[: len(parsed.logprobs)]
        self.parsed += parsed
        return parsed

    def finish(self, ended: DecodeFinished) -> schema.Finish:
        if ended.outcome.finish == "length":
            return "length"
        return "tool_calls" if any(piece.complete for _, piece in self.parsed.calls) else "stop"

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer."""
        return self._parser.stream.stopped_by

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

    def logprobs_of(self, parsed: ParsedText) -> list[schema.ContentLogprob]:
        """Spell out the log-probabilities of a part of the answer."""
        return [
            schema.ContentLogprob(
                **self._spelled(each.token, each.logprob),
                top_logprobs=[schema.TopLogprob(**self._spelled(*top)) for top in each.top],
            )
            for _, each in parsed.logprobs
        ]

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        """A token as text and bytes; a part of a character has no text, and its bytes are unknown here."""
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


@dataclass
class Block:
    """A text, a thought or a call, in the protocols whose answers are lists of these."""

    index: int
    id: str
    piece: Piece  # all of it so far
    cut: bool = False  # off, where the answer has as many tokens as it may
    logprobs: list[schema.ContentLogprob] = field(default_factory=list)


class BlockBuilder(ResponseBuilder):
    """An answer as a list of blocks. White space alone is no block."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._held = Piece("content", "")  # white space that may begin the next block
        self._told: list[schema.ContentLogprob] = []  # of tokens whose text is yet to come

    @abstractmethod
    def opened(self, block: Block) -> Iterator[schema.Reply]: ...

    @abstractmethod
    def grown(
        self, block: Block, text: str, logprobs: list[schema.ContentLogprob]
    ) -> Iterator[schema.Reply]: ...

    @abstractmethod
    def closed(self, block: Block) -> Iterator[schema.Reply]: ...

    def take(self, steps: Sequence[Step]) -> Iterator[schema.Reply]:
        yield from self._advance(self.hear(steps))

    def finish_blocks(self, ended: DecodeFinished, *, streamed: bool) -> Iterator[schema.Reply]:
        """Add what still waited, or all of an answer that was not streamed, and close the last block."""
        rest = self.rest(ended)
        yield from self._advance(rest if streamed else self.parsed)
        if self._open is not None and ended.outcome.finish == "length":
            self._open.cut = not self._open.piece.complete
        yield from self._close()

    def _advance(self, parsed: ParsedText) -> Iterator[schema.Reply]:
        self._told += self.logprobs_of(parsed)
        for piece in parsed.pieces:
            block, text = self._open, piece.text
            if block is None or (block.piece.kind, block.piece.call) != (piece.kind, piece.call):
                text = (self._held.text if self._held.kind == piece.kind else "") + text
                if piece.call is None and not text.strip():
                    self._held = Piece(piece.kind, text)
                    continue
                yield from self._close()
                new = Piece(piece.kind, "", piece.call)
                block = self._open = Block(len(self.blocks), uuid.uuid4().hex, new)
                self.blocks.append(block)
                yield from self.opened(block)
            block.piece += Piece(piece.kind, text, complete=piece.complete)
            told = list[schema.ContentLogprob]()
            if piece.kind == "content":
                told, self._told = self._told, told
                block.logprobs += told
            if text:
                yield from self.grown(block, text, told)

    def _close(self) -> Iterator[schema.Reply]:
        block, self._open, self._held = self._open, None, Piece("content", "")
        if block is not None:
            yield from self.closed(block)


class CompletionBuilder(ResponseBuilder):
    """An answer as OpenAI's completions have it."""

    done = b"data: [DONE]\n\n"
    chunk: type[schema.ChatChunk | schema.TextCompletion]

    @property
    def head(self) -> dict[str, Any]:
        fingerprint = f"fp_{self._model.target.card.weights_sha256[:12]}"
        own = {"id": self.id, "created": self.created, "model": self.model_name}
        return own | {"system_fingerprint": fingerprint}

    def take(self, steps: Sequence[Step]) -> Iterator[schema.Reply]:
        yield from self._chunks_of(self.hear(steps))

    def end(self, ended: DecodeFinished) -> Iterator[schema.Reply]:
        yield from self._chunks_of(self.rest(ended))
        provenance, options = self.provenance(ended), self._request.stream_options
        separate = options is not None and options.include_usage
        choice = self._choice(ParsedText(), self.finish(ended))
        yield self._chunk([choice], x_kakeya=None if separate else provenance)
        if separate:
            yield self._chunk([], usage=self.usage(ended.cached_tokens), x_kakeya=provenance)

    def complete(self, ended: DecodeFinished) -> schema.Reply:
        self.rest(ended)
        usage, provenance = self.usage(ended.cached_tokens), self.provenance(ended)
        return self._complete(self.finish(ended), usage=usage, x_kakeya=provenance)

    def _chunks_of(self, parsed: ParsedText) -> Iterator[schema.Reply]:
        if parsed:
            yield self._chunk([self._choice(parsed, None)])

    @abstractmethod
    def _choice(self, parsed: ParsedText, finish: schema.Finish | None) -> Any: ...

    def _chunk(self, choices: list[Any], **fields: Any) -> schema.Reply:
        return self.chunk(**self.head, choices=choices, **fields)

    def _complete(self, finish: schema.Finish, **fields: Any) -> schema.Reply:
        return self._chunk([self._choice(self.parsed, finish)], **fields)


class ChatResponseBuilder(CompletionBuilder):
    """A chat completion."""

    prefix, chunk = "chatcmpl-", schema.ChatChunk
    _request: schema.ChatRequest

    def begin(self) -> Iterator[schema.Reply]:
        yield self._chunk([schema.ChunkChoice(delta=schema.Delta(role="assistant", content=""))])

    def _chunks_of(self, parsed: ParsedText) -> Iterator[schema.Reply]:
        """A call's id and name come in a chunk of their own, before its arguments."""
        begun = [piece for _, piece in parsed.calls if piece.begins and piece.text]
        rest = ParsedText([Piece(**vars(piece) | {"begins": False}) for piece in begun])
        for piece in begun:
            piece.text = ""
        parsed.pieces = [piece for piece in parsed.pieces if piece.text or piece.begins]
        yield from super()._chunks_of(parsed)
        yield from super()._chunks_of(rest)

    def _choice(self, parsed: ParsedText, finish: schema.Finish | None) -> schema.ChunkChoice:
        delta = schema.Delta(
            content=parsed.content or None,
            reasoning=parsed.reasoning or None,
            tool_calls=[_call_delta(head, piece) for head, piece in parsed.calls] or None,
        )
        return schema.ChunkChoice(delta=delta, logprobs=self._chat_logprobs(parsed), finish_reason=finish)

    def _complete(self, finish: schema.Finish, **fields: Any) -> schema.Reply:
        parsed = self.parsed
        calls = [
            schema.ToolCallReply(
                id=head.id, function=schema.CalledFunction(name=head.name, arguments=piece.text)
            )
            for head, piece in parsed.calls
        ]
        message = schema.ChatMessage(
            content=parsed.content if parsed.content or not calls else None,
            reasoning=parsed.reasoning or None,
            tool_calls=calls or None,
        )
        told = self._chat_logprobs(parsed)
        choice = schema.ChatChoice(message=message, logprobs=told, finish_reason=finish)
        return schema.ChatCompletion(**self.head, choices=[choice], **fields)

    def _chat_logprobs(self, parsed: ParsedText) -> schema.ChatLogprobs | None:
        content = self.logprobs_of(parsed)
        return schema.ChatLogprobs(content=content) if content else None


def _call_delta(head: CallHead, piece: Piece) -> schema.ToolCallDelta:
    function = schema.FunctionDelta(name=head.name if piece.begins else None, arguments=piece.text)
    if not piece.begins:
        return schema.ToolCallDelta(index=head.index, function=function)
    return schema.ToolCallDelta(index=head.index, id=head.id, type="function", function=function)


class TextResponseBuilder(CompletionBuilder):
    """A text completion."""

    prefix, chunk = "cmpl-", schema.TextCompletion
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
