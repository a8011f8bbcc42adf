"""`dflash-mlx` (PyPI dflash-mlx 0.1.8), with a target of its own loading.

It replaces the call of mlx-lm's attention class for the whole process; the replacement is in force during its
own runs alone. Left to itself, it adapts the block (`verify_mode` adaptive, its default).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from dflash_mlx.draft_backend import EagerDraftBackend
from dflash_mlx.engine.events import TokenEvent
from dflash_mlx.runtime import stream_dflash_generate
from dflash_mlx.runtime.bundle import load_runtime_bundle
from dflash_mlx.runtime.context import build_offline_runtime_context

from peerbench.engines.base import AUTO, Arm, Batch, Simple, UnsupportedError, World
from peerbench.script import Script


class DFlashMlx:
    """dflash-mlx's loop."""

    def __init__(self, world: World) -> None:
        classes = {type(layer.self_attn) for layer in world.target.target.model.layers}
        self._own = {kind: kind.__call__ for kind in classes}
        try:
            self._bundle = load_runtime_bundle(
                model_ref=str(world.folders.target),
                draft_ref=str(world.folders.drafter),
                verify_config=build_offline_runtime_context(verify_mode="dflash").verify,
                lazy=False,
            )
        except (NotImplementedError, ValueError) as error:
            raise UnsupportedError(str(error).splitlines()[0]) from error
        finally:
            self._patched = {kind: kind.__call__ for kind in classes}
            _install(self._own)

    def arm(self, block: int | str) -> Arm:
        """See `Engine.arm`."""
        mode = "adaptive" if block == AUTO else "dflash"
        context = build_offline_runtime_context(verify_mode=mode)

        def generate(prompt: Sequence[int], max_tokens: int, script: Script | None) -> Iterator[Batch]:
            backend = EagerDraftBackend() if script is None else _Scripted(script)
            _install(self._patched)
            try:
                events = stream_dflash_generate(
                    target_model=self._bundle.target_model,
                    target_ops=self._bundle.target_ops,
                    tokenizer=self._bundle.tokenizer,
                    draft_model=self._bundle.draft_model,
                    draft_backend=backend,
                    prompt_tokens_override=list(prompt),
                    max_new_tokens=max_tokens,
                    block_tokens=None if block == AUTO else int(block),
                    stop_token_ids=[],
                    runtime_context=context,
                )
                for event in events:
                    if isinstance(event, TokenEvent):
                        yield Batch([event.token_id])
            finally:
                _install(self._own)
                mx.synchronize()

        return Simple(generate)


class _Scripted(EagerDraftBackend):
    """Its own drafting, the values replaced by the script's."""

    def __init__(self, script: Script) -> None:
        self._script = script
        script.start()

    def draft_greedy(self, *, draft_context: mx.array, async_launch: bool, **rest: Any) -> mx.array:
        """Drafts [block - 1]."""
        drafted = super().draft_greedy(draft_context=draft_context, async_launch=async_launch, **rest)
        self._script.saw(draft_context.shape[1])
        scripted = self._script.say(drafted)
        if async_launch:
            mx.async_eval(scripted)
        return scripted

    def advance_context(self, *, draft_context: mx.array, **rest: Any) -> None:
        """Take in committed rows without drafting."""
        super().advance_context(draft_context=draft_context, **rest)
        self._script.saw(draft_context.shape[1])


def _install(calls: dict[Any, Any]) -> None:
    for kind, call in calls.items():
        kind.__call__ = call
