"""One prompt through one system, timed the same way from outside: the rows of a report.

`prefill_s` lasts until the first token is known to the host, `decode_s` from there to the last.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from engine.batch_decode import Emitted, Request, decode_batch
from engine.cache.stats import kept_positions, kv_use
from engine.cache.transaction import resident
from engine.config import Engine
from engine.detokenize import text_of
from engine.draft_length import DraftLength
from engine.errors import GenerationError
from engine.generate import Outcome, SamplingOptions, generate, token_limit
from engine.stops import Stops
from engine.target.loading import LoadedTarget


def plain(target: LoadedTarget, prompt: Sequence[int], max_tokens: int, prefill_chunk: int) -> Outcome:
    """Greedy decoding by mlx-lm, stopped at the tokenizer's stop tokens as its `stream_generate` does."""
    model = target.target.model
    caches = make_prompt_cache(model)
    limit = token_limit(target, len(prompt), max_tokens)
    steps = plain_steps(model, prompt, limit, prefill_chunk, caches)
    tokens: list[int] = []
    times: list[float] = []
    started = perf_counter()
    for token, _ in steps:
        times.append(perf_counter())
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
        prefill_s=times[0] - started,
        decode_s=times[-1] - times[0],
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


def speculate_batch(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, draft_length: DraftLength
) -> list[Outcome]:
    """Decoding by our loop, greedily, all prompts in one batch.

    ``prefill_s`` is the prompt's own; a round's seconds, and those between rounds, are divided among its
    sequences. Resident bytes are the merged caches', divided by the sequences in them when this one ended.
    """
    target, drafter = engine.target, engine.drafter.drafter if engine.drafter else None
    requests = [
        Request(prompt, token_limit(target, len(prompt), max_tokens), Stops(target.stops))
        for prompt in prompts
    ]
    # of each prompt: its steps, the sequences that each served, the seconds since the one before
    steps: list[list[tuple[Emitted, int, float]]] = [[] for _ in prompts]
    between = 0.0  # seconds after the prompts that no round accounts for
    last = perf_counter()
    for emitted in decode_batch(
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
            steps[each.request].append((each, len(emitted), now - last))
        record = emitted[0].step.round
        if record is not None:
            between += now - last - record.draft_s - record.verify_s
        last = now
    path = f"speculative:{drafter.name}" if drafter else "plain:kakeya.decode"
    decoded = max(sum(len(served) > 1 for served in steps), 1)
    outcomes = []
    for served, request in zip(steps, requests, strict=True):
        (first, _, prefill_s), (ended, *_) = served[0], served[-1]
        if first.step.round is not None or ended.step.finish is None or ended.share is None:
            raise GenerationError(f"{path} did not finish a text")
        tokens = [token for each, *_ in served for token in each.step.tokens]
        rounds = [
            replace(record, draft_s=record.draft_s / sequences, verify_s=record.verify_s / sequences)
            for each, sequences, _ in served
            if (record := each.step.round) is not None
        ]
        spent = sum(record.draft_s + record.verify_s for record in rounds)
        outcome = Outcome(
            tokens=tokens,
            text=text_of(target.tokenizer, tokens, request.stops, request.prompt),
            finish=ended.step.finish,
            prefill_s=prefill_s,
            decode_s=spent + max(between, 0.0) / decoded if rounds else 0.0,
            rounds=rounds,
            path=path,
            cache_classes=ended.share.classes,
            resident_bytes=ended.share.nbytes,
            kv=ended.share.kv,
            kept=ended.share.kept,
            restored=ended.share.restored,
            drafter_forwards=ended.share.drafter_forwards,
        )
        outcomes.append(outcome)
    return outcomes


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
