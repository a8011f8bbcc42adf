"""`dflash-mlx` (PyPI dflash-mlx, module `dflash_mlx`) on a target that we have loaded.

It replaces methods of the target's classes; that is done anew in every generation, where it is also undone.
Its block is fixed here. For Gemma 4 it asks the model for caches, for Qwen it makes them in a method of its
own.
"""

from collections.abc import Generator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.errors import ConfigurationError
from engine.target.loading import LoadedTarget


class DFlashMlx:
    """`dflash_mlx.runtime.stream_dflash_generate`."""

    def __init__(self, target: LoadedTarget, drafter: Path, block: int | None) -> None:
        operations: Any = import_module("dflash_mlx.engine.target_ops")
        loading: Any = import_module("dflash_mlx.runtime.loading")
        contexts: Any = import_module("dflash_mlx.runtime.context")
        self._runtime: Any = import_module("dflash_mlx.runtime")
        self._backend: Any = import_module("dflash_mlx.draft_backend").EagerDraftBackend()
        self._event: Any = import_module("dflash_mlx.engine.events").TokenEvent
        self._model, self._tokenizer = target.target.model, target.tokenizer
        self._operations = operations.resolve_target_ops(self._model)
        self._draft, _ = loading.load_draft_bundle(str(drafter), lazy=False)
        self._draft.set_dtype(target.target.embed(mx.array([[0]])).dtype)
        mx.eval(self._draft.parameters())
        operations.bind_draft_to_target(self._draft, self._model, target_ops=self._operations)
        self._context = contexts.build_offline_runtime_context(verify_mode="dflash")
        self.block = int(block or self._draft.block_size)

    def steps(self, prompt: Sequence[int], max_tokens: int, **caches: Any) -> Generator[int]:
        """See `Loop.steps`."""
        self._operations.install_speculative_hooks(self._model)
        try:
            for event in self._runtime.stream_dflash_generate(
                target_model=self._model,
                target_ops=self._operations,
                tokenizer=self._tokenizer,
                draft_model=self._draft,
                draft_backend=self._backend,
                prompt_tokens_override=list(prompt),
                max_new_tokens=max_tokens,
                block_tokens=self.block,
                stop_token_ids=[],
                runtime_context=self._context,
                **caches,
            ):
                if isinstance(event, self._event):
                    yield int(event.token_id)
        finally:
            mx.synchronize()


def open_dflash_mlx(target: LoadedTarget, drafter: Path | None, block: int | None) -> DFlashMlx:
    """Open the loop with a drafter's folder.

    Raises:
        ConfigurationError: the block is shorter than 2.
    """
    assert drafter is not None  # noqa: S101 - the registry says so
    if block is not None and block < 2:
        raise ConfigurationError(f"dflash-mlx verifies at least 2 tokens at a time, not {block}")
    return DFlashMlx(target, drafter, block)
