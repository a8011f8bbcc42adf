"""Parity of our loop's verify forwards with plain decoding: blocks through a session against single tokens.

The texts are what mlx-lm's `generate_step` makes of the prompts. Each is run again in rounds of several block
lengths, some of which keep only a part of their block, so that what is rolled back is in the figures; the
reference are forwards of one token on the caches mlx-lm makes for itself.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from math import isfinite
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.device import fit_threads, read_float
from engine.errors import ConfigurationError
from engine.evaluation.arms import plain_steps
from engine.evaluation.measure import Progress
from engine.evaluation.parity import Parity, RoundParity
from engine.evaluation.prompts import Prompt, encode
from engine.evaluation.rounding import Run, paired_logits
from engine.generate import token_limit
from engine.target.loading import SHIPPED_TARGET, LoadedTarget, load_target

ROUNDS = ((2, 1), (4, 1), (8, 7), (16, 9), (3, 0), (1, 0))  # block and accepted drafts, over and over
# The largest difference of a logit that passes unless told otherwise: blocks and single tokens add in
# different orders, layer after layer.
TOLERANCES = {"float32": 1e-3, "float16": 0.25, "bfloat16": 1.0}


def open_target(model: Path | None, dtype: str | None) -> LoadedTarget:
    """The target of a folder, or the shipped one.

    Raises:
        ModelError, ConfigurationError: see `engine.target.loading.load_target`.
    """
    target = load_target(model or SHIPPED_TARGET, dtype)
    fit_threads(target.target.hidden_size)
    return target


def compare_target(
    target: LoadedTarget,
    prompts: Sequence[Prompt],
    max_tokens: int,
    chunk: int,
    *,
    tolerance: float | None = None,
    progress: Progress,
) -> Parity:
    """Compare the logits of blocks and of single tokens along what plain decoding makes of the prompts.

    Args:
        target: the model.
        prompts: where to begin.
        max_tokens: tokens a text.
        chunk: prompt positions per forward.
        tolerance: largest difference of a logit that passes; None for that of the model's dtype.
        progress: told of each prompt.

    Raises:
        ConfigurationError: the tolerance is not a number of at least 0, or a text would hold no block.
        PromptError: a prompt does not fit the model.
    """
    dtype = target.card.dtype
    largest = TOLERANCES.get(dtype, TOLERANCES["bfloat16"]) if tolerance is None else tolerance
    if not 0 <= largest < float("inf"):
        raise ConfigurationError(f"--tolerance must be a number of at least 0, not {largest}")
    if max_tokens < 2:
        raise ConfigurationError(f"--max-tokens must be at least 2, not {max_tokens}")
    encoded = [encode(p, target.tokenizer, target.target.vocab_size, target.context) for p in prompts]
    rounds: list[RoundParity] = []
    for done, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
        progress(done, len(prompts), "comparing", prompt.id)
        rounds.extend(_compare(target, prompt.id, tokens, max_tokens, chunk))
    progress(len(prompts), len(prompts), "comparing", "done")
    return Parity(tuple(rounds), largest, dtype)


def _compare(
    target: LoadedTarget, identifier: str, prompt: Sequence[int], max_tokens: int, chunk: int
) -> list[RoundParity]:
    """The rounds of one text."""
    model, count = target.target.model, token_limit(target, len(prompt), max_tokens)
    text = [int(token) for token, _ in plain_steps(model, prompt, count, chunk, make_prompt_cache(model))]
    run = Run(prompt, text, list(islice(cycle(ROUNDS), len(text))))
    return [
        RoundParity(
            case=identifier,
            round=number,
            hidden_max_abs=None,
            logits_max_abs=_largest(ours, reference),
            argmax_agreement=read_float((ours.argmax(-1) == reference.argmax(-1)).astype(mx.float32).mean()),
            path_equal=None,
            rows=ours.shape[1],
        )
        for number, (ours, reference) in enumerate(paired_logits(target, run, chunk), 1)
    ]


def _largest(ours: mx.array, reference: mx.array) -> float:
    """Largest absolute difference; infinity where one is not finite."""
    value = read_float(mx.abs(ours.astype(mx.float32) - reference.astype(mx.float32)).max())
    return value if isfinite(value) else float("inf")
