"""mlx-lm: plain decoding, which everything is compared with, and its loop with a small draft model.

Left to itself, the loop drafts two tokens a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.utils import load_model

from peerbench.engines.base import AUTO, Arm, Batch, Simple, UnsupportedError, World
from peerbench.script import Script

OWN_BLOCK = 3


def plain(world: World) -> Arm:
    """mlx-lm's plain decoding."""
    model = world.target.target.model

    def generate(prompt: Sequence[int], max_tokens: int, _: Script | None) -> Iterator[Batch]:
        for token, _logprobs in generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens):
            yield Batch([int(token)])
        mx.synchronize(generation_stream)  # a forward it has launched and does not need

    return Simple(generate)


class Speculative:
    """`speculative_generate_step` with the small model."""

    def __init__(self, world: World) -> None:
        if world.folders.small is None:
            raise UnsupportedError(
                "its loop needs a small model with this vocabulary, and none is shipped with this pair"
            )
        self._target = world.target.target
        self._small, _ = load_model(world.folders.small)

    def arm(self, block: int | str) -> Arm:
        """See `Engine.arm`."""
        drafts = (OWN_BLOCK if block == AUTO else int(block)) - 1

        def generate(prompt: Sequence[int], max_tokens: int, script: Script | None) -> Iterator[Batch]:
            small = self._small if script is None else _Scripted(self._small, script)
            tokens: list[int] = []
            for token, _, drafted in speculative_generate_step(
                mx.array(list(prompt)),
                self._target.model,
                small,
                num_draft_tokens=drafts,
                max_tokens=max_tokens,
            ):
                tokens.append(int(token))
                if not drafted:  # the target's own token ends a round
                    yield Batch(tokens)
                    tokens = []
            if tokens:
                yield Batch(tokens)

        return Simple(generate)


class _Scripted:
    """A draft model whose likeliest next token is the script's."""

    def __init__(self, model: Any, script: Script) -> None:
        self._model, self._script = model, script
        self.layers = model.layers

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Logits [1, N, V]; the last row's maximum is moved."""
        logits = self._model(tokens, cache=cache)
        held = cache[0].offset
        if held < self._script.prompt_length:
            return logits
        # `held` tokens are behind: the next one is the draft after held - 1 committed ones and a bonus.
        wanted = self._script.tokens(1, committed=held - 1)[0]
        chosen = mx.arange(logits.shape[-1]) == wanted
        return mx.where(chosen, mx.max(logits) + 1, logits)
