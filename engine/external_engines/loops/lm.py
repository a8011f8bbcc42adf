"""mlx-lm: its plain loop, and its loop with a small draft model.

The second takes the target's caches and the draft model's in one list and divides it by the number of the
target's layers. Models that share keys and values among layers have fewer caches than layers, so there the
list cannot be handed in; such a model can still be given a `make_cache`.
"""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step

from engine.cache.transaction import new_caches
from engine.drafters.base import refuse_mismatch
from engine.errors import ConfigurationError, GenerationError
from engine.external_engines.strategies import MAKER, replaced
from engine.target.loading import LoadedTarget, load_target

DRAFTS = 2  # mlx-lm's own number


class Plain:
    """`mlx_lm.generate.generate_step`."""

    block = 1

    def __init__(self, target: LoadedTarget) -> None:
        self._model = target.target.model

    def steps(self, prompt: Sequence[int], max_tokens: int, **caches: Any) -> Generator[int]:
        """See `Loop.steps`."""
        try:
            for token, _ in generate_step(
                mx.array(list(prompt)), self._model, max_tokens=max_tokens, **caches
            ):
                yield int(token)
        finally:
            mx.synchronize(generation_stream)  # one forward more than there are tokens


class Speculative:
    """`mlx_lm.generate.speculative_generate_step`."""

    def __init__(self, target: LoadedTarget, small: Any, block: int) -> None:
        self._model, self._small, self.block = target.target.model, small, block

    def steps(self, prompt: Sequence[int], max_tokens: int, **caches: Any) -> Generator[int]:
        """See `Loop.steps`; the draft model's caches are ours in any case."""
        own, prompt_cache = new_caches(self._small, self.block), caches.get("prompt_cache")
        if prompt_cache is not None and len(prompt_cache) != len(self._model.layers):
            raise GenerationError(
                f"mlx-lm divides caches by the target's {len(self._model.layers)} layers, "
                f"of which {len(prompt_cache)} have one"
            )
        together = None if prompt_cache is None else [*prompt_cache, *own]
        steps = speculative_generate_step(
            mx.array(list(prompt)),
            self._model,
            self._small,
            num_draft_tokens=self.block - 1,
            max_tokens=max_tokens,
            prompt_cache=together,
        )
        try:
            with replaced(self._small, MAKER, lambda: own):
                first = next(steps, None)
            if first is not None:
                yield int(first[0])
                for token, *_ in steps:
                    yield int(token)
        finally:
            steps.close()
            mx.synchronize(generation_stream)


def open_plain(target: LoadedTarget, drafter: Path | None, block: int | None) -> Plain:
    """Open the plain loop, which has no block to choose."""
    assert drafter is None  # noqa: S101 - the registry says so
    if block not in {None, 1}:
        raise ConfigurationError(f"mlx-lm decodes one token at a time; a block of {block} cannot be had")
    return Plain(target)


def open_speculative(target: LoadedTarget, drafter: Path | None, block: int | None) -> Speculative:
    """Open the loop with the draft model of a folder.

    Raises:
        ConfigurationError: the block is shorter than 2.
        ModelError: the folder cannot be used, or speaks of other tokens than the target.
    """
    assert drafter is not None  # noqa: S101 - the registry says so
    if block is not None and block < 2:
        raise ConfigurationError(f"mlx-lm's block is at least 2 with a draft model, not {block}")
    small = load_target(drafter).target
    refuse_mismatch("vocabulary", small.vocab_size, target.target.vocab_size)
    return Speculative(target, small.model, block or DRAFTS + 1)
