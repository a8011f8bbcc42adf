"""Steps of the engine → a protocol's objects: a whole answer, or the events of a stream and their bytes.

A `ResponseBuilder` makes the answer of one choice; `CompletionBuilder` has those of all choices of a request.
Here is what all protocols share, and OpenAI's completions; `responses` and `messages` have the others.
Nothing here knows of HTTP.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.decode import Step
from engine.detokenize import TextStream, text_of
from engine.external_engines.engine import DraftCounts
from engine.logprobs import TokenLogprob
from engine.server import schema
from engine.server.parsing import CallHead, OutputParser, ParsedText, Piece
from engine.server.prompting import RenderedPrompt
from engine.server.sequence import DecodeFinished, DecodeRequest, Event, PromptLogprobs
from engine.server.sessions import LoadedModel
from engine.stops import Stops

SUMMED = (  # of the choices' provenances
    *("verify_rounds", "plain_steps", "drafted", "accepted", "drafter_forwards", "cached_tokens"),
    *("resident_bytes", "drafter_resident_bytes"),
)
LONGEST = ("queue_s", "prefill_s", "decode_s")
# of `DecodeFinished`, told as they are
FACTS = (
    "engine",
    "batch",
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
        self.request, self._model, self.decoded = request, model, decode_request
        self.index = 0  # of the choice
        self.usage_so_far: Callable[[], schema.Usage] = lambda: self.usage(self.cached_tokens)  # of all
        self.cached_tokens: int = 0
        self._ignored = [*request.ignored, *prompt.ignored][: schema.MOST_IGNORED]
        self._spelled_tokens: dict[int, str] = {}
        target = model.target
        self._stops = decode_request.stops(target)
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
        self.echoed: list[TokenLogprob] = []  # of the prompt, its first token excepted
        self.likelihood = 0.0  # log-probabilities of the tokens, summed where they are computed
        self._pending: list[tuple[int, TokenLogprob]] = []
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or model.entry.name,
            "system_fingerprint": f"fp_{target.card.weights_sha256[:12]}",
        }

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
            self.likelihood += sum(each.logprob for each in step.logprobs or ())
            parsed += self._parser.add(step.tokens)
            begins = self._parser.stream.begins[len(self.tokens) :]
            self.tokens += step.tokens
            placed = zip(begins, (step.logprobs or ()) if self.request.tells_logprobs else (), strict=False)
            self._pending += [each for each in placed if self._keeps(each[1].token)]
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

    def _keeps(self, token: int) -> bool:
        """Whether a token's log-probability is told; not that of one which ends the text."""
        return token not in self._stops.tokens

    def finish(self, ended: DecodeFinished) -> schema.Finish:
        if ended.outcome.finish == "length":
            return "length"
        return "tool_calls" if any(piece.complete for _, piece in self.parsed.calls) else "stop"

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer."""
        return self._parser.stream.stopped_by

    @property
    def mean_logprob(self) -> float:
        """Of the tokens, the one that ended the text included."""
        return self.likelihood / max(len(self.tokens), 1)

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
        decoded, length = max(len(self.tokens) - 1, 0), counts.acceptance_length
        ours = ended.cache_strategy is None
        plain = len(outcome.rounds) - len(verified) if ours else decoded
        untold = ended.external_counts is not None  # it tells rounds and accepted drafts alone
        speed = round(decoded / outcome.decode_s, 3) if outcome.decode_s > 0 and decoded else None
        asked: dict[str, Any] = {}
        if self.request.return_token_ids:
            asked |= {"token_ids": self.tokens, "prompt_token_ids": self.decoded.prompt}
        if self.request.return_rounds and ours:
            asked["rounds"] = [
                (r.block, r.accepted, round(r.draft_s, 7), round(r.verify_s, 7), r.looked_up)
                for r in outcome.rounds
            ]
            asked["kept_positions"] = outcome.kept
            if (use := outcome.kv) is not None:
                asked["coded"] = {"layers": list(use.layers), "values": use.values, "bytes": use.nbytes}
        wanted, most = self.request.wanted_tokens, self.decoded.max_tokens
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
            ignored=self._ignored,
            max_tokens_clamped_to=most if wanted is not None and wanted > most else None,
            **asked,
        )

    def _text(self, token: int) -> str:
        """A token as it appears in the text, because as a text of its own it may lack its space."""
        if token not in self._spelled_tokens:
            tokenizer, prompt = self._model.target.tokenizer, self.decoded.prompt
            self._spelled_tokens[token] = text_of(tokenizer, [token], Stops(), prompt)
        return self._spelled_tokens[token]

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


class ChoiceBuilder(ResponseBuilder):
    """A choice of an answer as OpenAI's completions have it."""

    done = b"data: [DONE]\n\n"
    chunk: type[schema.ChatChunk | schema.TextCompletion]
    whole: type[schema.ChatCompletion | schema.TextCompletion]

    def take(self, steps: Sequence[Step]) -> Iterator[schema.Reply]:
        yield from self._chunks_of(self.hear(steps))

    def end(self, ended: DecodeFinished) -> Iterator[schema.Reply]:
        yield from self.close(ended, self.provenance(ended), self.usage(ended.cached_tokens))

    def close(
        self,
        ended: DecodeFinished,
        provenance: schema.Provenance | None,
        usage: schema.Usage,
        **own: Any,
    ) -> Iterator[schema.Reply]:
        """End the choice's chunks; with `provenance`, the stream."""
        yield from self._chunks_of(self.rest(ended))
        options = self.request.stream_options
        separate = options is not None and options.include_usage and provenance is not None
        choice = self._choice(ParsedText(), self.finish(ended), **own)
        yield self._chunk([choice], x_kakeya=None if separate else provenance)
        if separate:
            yield self.chunk(**self.head, choices=[], usage=usage, x_kakeya=provenance)

    def complete(self, ended: DecodeFinished) -> schema.Reply:
        choice = self.whole_choice(ended)
        usage, provenance = self.usage(ended.cached_tokens), self.provenance(ended)
        return self.whole(**self.head, choices=[choice], usage=usage, x_kakeya=provenance)

    def whole_choice(self, ended: DecodeFinished, **own: Any) -> Any:
        """All of a choice that has ended."""
        self.rest(ended)
        return self._choice(self.parsed, self.finish(ended), **own)

    def _chunks_of(self, parsed: ParsedText) -> Iterator[schema.Reply]:
        if parsed:
            yield self._chunk([self._choice(parsed, None)])

    @abstractmethod
    def _choice(self, parsed: ParsedText, finish: schema.Finish | None, **own: Any) -> Any: ...

    def _chunk(self, choices: list[Any], **fields: Any) -> schema.Reply:
        options = self.request.stream_options
        if options is not None and options.include_usage and options.continuous_usage_stats:
            fields["usage"] = self.usage_so_far()
        return self.chunk(**self.head, choices=choices, **fields)


class ChatResponseBuilder(ChoiceBuilder):
    """A chat completion."""

    prefix, chunk, whole = "chatcmpl-", schema.ChatChunk, schema.ChatCompletion
    request: schema.ChatRequest

    def begin(self) -> Iterator[schema.Reply]:
        first = schema.Delta(role="assistant", content="")
        yield self._chunk([schema.ChunkChoice(index=self.index, delta=first)])

    def _chunks_of(self, parsed: ParsedText) -> Iterator[schema.Reply]:
        """A call's id and name come in a chunk of their own, before its arguments."""
        first = [piece for _, piece in parsed.calls if piece.begins and piece.text]
        rest = ParsedText([Piece(**vars(piece) | {"begins": False}) for piece in first])
        for piece in first:
            piece.text = ""
        parsed.pieces = [piece for piece in parsed.pieces if piece.text or piece.begins]
        yield from super()._chunks_of(parsed)
        yield from super()._chunks_of(rest)

    def _choice(self, parsed: ParsedText, finish: schema.Finish | None, **own: Any) -> schema.ChunkChoice:
        delta = schema.Delta(
            content=parsed.content or None,
            reasoning=parsed.reasoning or None,
            tool_calls=[_call_delta(head, piece) for head, piece in parsed.calls] or None,
        )
        own |= {"index": self.index, "logprobs": self._chat_logprobs(parsed), "finish_reason": finish}
        return schema.ChunkChoice(delta=delta, **own)

    def whole_choice(self, ended: DecodeFinished, **own: Any) -> schema.ChatChoice:
        self.rest(ended)
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
        own |= {"index": self.index, "logprobs": self._chat_logprobs(parsed)}
        return schema.ChatChoice(message=message, finish_reason=self.finish(ended), **own)

    def _chat_logprobs(self, parsed: ParsedText) -> schema.ChatLogprobs | None:
        content = self.logprobs_of(parsed)
        return schema.ChatLogprobs(content=content) if content else None


def _call_delta(head: CallHead, piece: Piece) -> schema.ToolCallDelta:
    function = schema.FunctionDelta(name=head.name if piece.begins else None, arguments=piece.text)
    if not piece.begins:
        return schema.ToolCallDelta(index=head.index, function=function)
    return schema.ToolCallDelta(index=head.index, id=head.id, type="function", function=function)


class TextResponseBuilder(ChoiceBuilder):
    """A text completion, behind its prompt where that is echoed."""

    prefix, chunk, whole = "cmpl-", schema.TextCompletion, schema.TextCompletion
    request: schema.TextRequest

    def __init__(
        self,
        request: schema.AnyRequest,
        model: LoadedModel,
        prompt: RenderedPrompt,
        decode_request: DecodeRequest,
    ) -> None:
        super().__init__(request, model, prompt, decode_request)
        self._prompt_text, self._begins = "", list[int]()
        if self.request.echo:
            stream = TextStream(model.target.tokenizer, Stops())
            text = stream.add(prompt.tokens) + stream.finish()
            self._prompt_text = text if prompt.text is None else prompt.text
            extra = len(text) - len(self._prompt_text)  # of a token that the tokenizer puts in front
            self._begins = [min(max(at - extra, 0), len(self._prompt_text)) for at in stream.begins]
        self._is_told = not self.request.echo  # of the prompt

    def hear(self, steps: Sequence[Step]) -> ParsedText:
        return ParsedText() if self.request.max_tokens == 0 else super().hear(steps)

    def finish(self, ended: DecodeFinished) -> schema.Finish:
        return "length" if self.request.max_tokens == 0 else super().finish(ended)

    def _keeps(self, token: int) -> bool:
        # clients that score a prompt count on one record for each token, lm-eval among them
        return bool(self.request.echo) or super()._keeps(token)

    def _choice(self, parsed: ParsedText, finish: schema.Finish | None, **own: Any) -> schema.TextChoice:
        text, shift = parsed.content, len(self._prompt_text)
        placed = [(shift + begin, record) for begin, record in parsed.logprobs]
        logprobs = self._logprobs([], [], placed)
        if not self._is_told:
            self._is_told, text = True, self._prompt_text + text
            if self.request.tells_logprobs:
                placed = [*zip(self._begins[1:], self.echoed, strict=True), *placed]
                logprobs = self._logprobs(self.decoded.prompt[:1], self._begins[:1], placed)
        own |= {"index": self.index, "logprobs": logprobs, "finish_reason": finish}
        return schema.TextChoice(text=text, **own)

    def _logprobs(
        self, first: Sequence[int], begins: Sequence[int], placed: Sequence[tuple[int, TokenLogprob]]
    ) -> schema.TextLogprobs | None:
        """Records, behind tokens that have none; None without any."""
        if not first and not placed:
            return None
        records, blank = [record for _, record in placed], [None] * len(first)
        # of tokens that are spelled alike the likelier counts
        top = [{self._text(token): value for token, value in reversed(each.top)} for each in records]
        return schema.TextLogprobs(
            tokens=[self._text(token) for token in (*first, *(each.token for each in records))],
            token_logprobs=[*blank, *(each.logprob for each in records)],
            top_logprobs=[*blank, *(dict(reversed(each.items())) for each in top)]
            if self.decoded.logprobs
            else None,
            text_offset=[*begins, *(begin for begin, _ in placed)],
        )


class CompletionBuilder:
    """All choices of a request: those of its first prompt, then those of the next one."""

    def __init__(self, builders: Sequence[ResponseBuilder]) -> None:
        """Take a builder for each choice that is decoded, as many for each prompt."""
        self.builders = list(builders)
        self.first = builders[0]
        self._choices = [each for each in builders if isinstance(each, ChoiceBuilder)]
        self._ends: dict[int, DecodeFinished] = {}
        for index, builder in enumerate(self.builders):
            builder.index, builder.head = index, self.first.head
            builder.usage_so_far = self.usage

    @property
    def ended(self) -> bool:
        return len(self._ends) == len(self.builders)

    @property
    def finish(self) -> schema.Finish:
        """Why the first choice ended."""
        return self.first.finish(self._ends[0])

    @property
    def _several(self) -> bool:
        return len(self.builders) > 1

    def begin(self) -> Iterator[schema.Reply]:
        for builder in self.builders:
            yield from builder.begin()

    def take(self, batch: Sequence[tuple[int, Event]]) -> Iterator[schema.Reply]:
        """Yield the chunks of these events; with the last one of the last choice, the stream has ended."""
        for builder, steps, ended in self._sorted(batch):
            yield from builder.take(steps)
            if ended is not None and not self._several:
                yield from builder.end(ended)
            elif ended is not None and isinstance(builder, ChoiceBuilder):
                whole = self.provenance() if self.ended else None
                own = builder.provenance(ended)
                yield from builder.close(ended, whole, self.usage(), x_kakeya=own)

    def hear(self, batch: Sequence[tuple[int, Event]]) -> None:
        """Take the events of an answer that is sent whole."""
        for builder, steps, _ in self._sorted(batch):
            builder.hear(steps)

    def complete(self) -> schema.Reply:
        """Make the whole answer; of a prompt's choices, the likeliest where more were decoded."""
        if not self._several:
            return self.first.complete(self._ends[0])
        request = self.first.request
        count, kept, choices = request.decoded_choices, request.kept_choices, list[Any]()
        for begin in range(0, len(self.builders), count):
            rank = sorted(range(begin, begin + count), key=lambda at: -self.builders[at].mean_logprob)
            for at in rank[:kept] if kept < count else range(begin, begin + count):
                builder, ended = self._choices[at], self._ends[at]
                builder.index = len(choices)
                choices.append(builder.whole_choice(ended, x_kakeya=builder.provenance(ended)))
        whole: Any = self._choices[0].whole
        return whole(  # type: ignore[no-any-return]
            **self.first.head, choices=choices, usage=self.usage(), x_kakeya=self.provenance()
        )

    def usage(self) -> schema.Usage:
        """Sum the tokens, those of choices that are not told included; each prompt counts once."""
        parts = [builder.usage(builder.cached_tokens) for builder in self.builders]
        prompts = parts[:: self.first.request.decoded_choices]
        read, written = sum(p.prompt_tokens for p in prompts), sum(p.completion_tokens for p in parts)
        cached = sum(p.prompt_tokens_details.cached_tokens for p in prompts)
        thought = sum(d.reasoning_tokens for p in parts if (d := p.completion_tokens_details))
        return schema.Usage(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            prompt_tokens_details=schema.CachedTokens(cached_tokens=cached),
            completion_tokens_details=schema.ReasoningTokens(reasoning_tokens=thought) if thought else None,
        )

    def provenance(self) -> schema.Provenance:
        """How all choices came about: counts and bytes are sums, seconds those of the longest one."""
        parts = [self.builders[at].provenance(ended) for at, ended in sorted(self._ends.items())]
        if not self._several:
            return parts[0]
        sums = {
            name: None if None in (found := [getattr(part, name) for part in parts]) else sum(found)
            for name in SUMMED
        }
        longest = {name: max(getattr(part, name) for part in parts) for name in LONGEST}
        rounds, accepted = sums["verify_rounds"], sums["accepted"]
        whys = [part.why_off for part in parts]
        return parts[0].model_copy(
            update={
                **sums,
                **longest,
                "speculation": bool(rounds),
                "acceptance_length": round(1 + accepted / rounds, 4) if rounds else None,
                "why_off": None if None in whys else whys[0],
                "decode_tokens_per_s": None,
                **dict.fromkeys(("token_ids", "prompt_token_ids", "rounds", "kept_positions", "coded")),
            }
        )

    def _sorted(
        self, batch: Sequence[tuple[int, Event]]
    ) -> Iterator[tuple[ResponseBuilder, list[Step], DecodeFinished | None]]:
        """The steps of each choice in a batch, and its end."""
        for at in sorted({at for at, _ in batch}):
            builder, steps, events = self.builders[at], list[Step](), [e for index, e in batch if index == at]
            for event in events:
                match event:
                    case PromptLogprobs():
                        builder.echoed += event.records
                    case Step():
                        steps.append(event)
                    case DecodeFinished():
                        self._ends[at] = event
                        builder.cached_tokens = event.cached_tokens
            yield builder, steps, self._ends.get(at)
