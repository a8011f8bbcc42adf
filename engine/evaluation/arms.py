"""One prompt through one system, timed the same way for all: the rows of a report.

`plain` is mlx-lm's own `generate_step` with the caches the model makes for itself, `speculate` is our loop.
Both are timed from outside: `prefill_s` until the first token is known to the host, `decode_s` from there
to the last.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from engine.batch_decode import Emitted, Request, Share, decode_together
from engine.cache.stats import kept_positions, kv_use
from engine.cache.transaction import resident
from engine.config import Engine
from engine.decode import Round
from engine.detokenize import text_of
from engine.draft_length import DraftLength
from engine.errors import GenerationError
from engine.generate import Outcome, SamplingOptions, generate, token_limit
from engine.stops import Stops
from engine.target.loading import LoadedTarget

PLAIN_LOOP, OUR_LOOP = "mlx_lm.generate.generate_step", "kakeya.decode"


def plain(target: LoadedTarget, prompt: Sequence[int], max_tokens: int, prefill_chunk: int) -> Outcome:
    """Greedy decoding by mlx-lm, stopped at the tokenizer's stop tokens as its `stream_generate` does."""
    model = target.target.model
    caches = make_prompt_cache(model)
    limit = token_limit(target, len(prompt), max_tokens)
    steps = plain_steps(model, prompt, limit, prefill_chunk, caches)
    tokens: list[int] = []
    started = perf_counter()
    first = last = started
    for token, _ in steps:
        last = perf_counter()
        if not tokens:
            first = last
        tokens.append(int(token))
        if token in target.stops:
            break
    steps.close()
    mx.synchronize(generation_stream)  # generate_step leaves one forward running: not on the next one's time
    path = "plain:mlx_lm.generate_step"
    if not tokens:
        raise GenerationError(f"{path} gave no token")
    classes, nbytes = resident(caches)
    return Outcome(
        tokens=tokens,
        text=text_of(target.tokenizer, tokens, Stops(target.stops), prompt),
        finish="stop" if tokens[-1] in target.stops else "length",
        prefill_s=first - started,
        decode_s=last - first,
        rounds=[],
        path=path,
        cache_classes=classes,
        resident_bytes=nbytes,
        kv=kv_use(caches),
        kept=kept_positions(caches),
    )


def speculate(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int,
    draft_length: DraftLength,
    *,
    options: SamplingOptions | None = None,
) -> Outcome:
    """Decoding by our loop, with the engine's drafter if any; see `engine.generate.generate`."""
    options, target = options or SamplingOptions(), engine.target
    *_, last = generate(engine, prompt, max_tokens, options, draft_length=draft_length, text=False)
    if last.outcome is None:
        raise GenerationError("the text did not come to an end")
    text = text_of(target.tokenizer, last.outcome.tokens, options.stops(target), prompt)
    return replace(last.outcome, text=text)


def speculate_together(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, draft_length: DraftLength
) -> list[Outcome]:
    """Decoding by our loop, greedily, all prompts in one batch.

    Times are shares that add up to what passed: ``prefill_s`` is the prompt's own computation; a round's
    seconds, and those between rounds, are divided among the sequences that took part. They do not say how
    long one of them would take alone. Resident bytes are the merged caches' bytes divided by the sequences
    in them when this one ended. Nothing is compiled but the ends of prompts.
    """
    target, drafter = engine.target, engine.drafter.drafter if engine.drafter else None
    requests = [
        Request(prompt, token_limit(target, len(prompt), max_tokens), Stops(target.stops))
        for prompt in prompts
    ]
    rows = [_Row() for _ in prompts]
    between = 0.0  # seconds after the prompts that no round accounts for
    last = perf_counter()
    for emitted in decode_together(
        target.target,
        drafter,
        requests,
        draft_length=draft_length,
        prefill_chunk=engine.options.prefill_chunk,
        policy=engine.policy,
        restoration=engine.restoration,
    ):
        now = perf_counter()
        for each in emitted:
            rows[each.request].add(each, len(emitted), now - last)
        record = emitted[0].step.round
        if record is not None:
            between += now - last - record.draft_s - record.verify_s
        last = now
    path = f"speculative:{drafter.name}" if drafter else "plain:kakeya.decode"
    decoded = max(sum(bool(row.rounds) for row in rows), 1)
    return [
        row.outcome(target, request, path, max(between, 0.0) / decoded)
        for row, request in zip(rows, requests, strict=True)
    ]


class _Row:
    """What one prompt of a batch got so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rounds: list[Round] = []
        self._prefill_s = 0.0
        self._finish: str | None = None
        self._share: Share | None = None

    def add(self, emitted: Emitted, sequences: int, seconds: float) -> None:
        record = emitted.step.round
        if record is None:
            self._prefill_s = seconds
        else:
            draft_s, verify_s = record.draft_s / sequences, record.verify_s / sequences
            self.rounds.append(replace(record, draft_s=draft_s, verify_s=verify_s))
        self.tokens.extend(emitted.step.tokens)
        self._finish, self._share = emitted.step.finish, emitted.share

    def outcome(self, target: LoadedTarget, request: Request, path: str, between: float) -> Outcome:
        if self._finish is None or self._share is None:
            raise GenerationError(f"{path} did not finish a text")
        spent = sum(record.draft_s + record.verify_s for record in self.rounds)
        return Outcome(
            tokens=self.tokens,
            text=text_of(target.tokenizer, self.tokens, request.stops, request.prompt),
            finish=self._finish,
            prefill_s=self._prefill_s,
            decode_s=spent + between if self.rounds else 0.0,
            rounds=self.rounds,
            path=path,
            cache_classes=self._share.classes,
            resident_bytes=self._share.nbytes,
            kv=self._share.kv,
            kept=self._share.kept,
            restored=self._share.restored,
            drafter_forwards=self._share.drafter_forwards,
        )


def plain_steps(
    model: Any, prompt: Sequence[int], max_tokens: int, prefill_chunk: int, caches: list[Any]
) -> Generator[tuple[Any, mx.array]]:
    """mlx-lm's greedy generator: tokens with their log-probabilities [V]."""
    steps: Generator[tuple[Any, mx.array]] = generate_step(
        mx.array(list(prompt)),
        model,
        max_tokens=max_tokens,
        prompt_cache=caches,
        prefill_step_size=prefill_chunk,
    )
    return steps
