"""`mlx-vlm` (PyPI mlx-vlm 0.7.10): its text decoding with a DFlash drafter, models of its own loading.

Left to itself, it shortens the block while drafts are rejected; a fixed block is asked for with its switch
`prefer_requested_block_size`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.generate.ar import generate_step
from mlx_vlm.speculative.common import generation_stream
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.utils import load_model

from peerbench.engines.base import AUTO, Arm, Batch, Simple, UnsupportedError, World
from peerbench.script import Script


class MlxVlm:
    """mlx-vlm's loop."""

    def __init__(self, world: World) -> None:
        dtype = world.target.target.embed(mx.array([[0]])).dtype
        try:
            self._model = load_model(world.folders.target)
            self._draft, _ = load_drafter(str(world.folders.drafter), "dflash")
            self._model.set_dtype(dtype)
            self._draft.set_dtype(dtype)
            for _ in self.arm(4).run([1, 2, 3], 3, None):
                pass
        except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise UnsupportedError(f"three tokens with this target and drafter failed: {what}") from error

    def arm(self, block: int | str) -> Arm:
        """See `Engine.arm`."""

        def generate(prompt: Sequence[int], max_tokens: int, script: Script | None) -> Iterator[Batch]:
            draft = self._draft
            draft.prefer_requested_block_size = block != AUTO
            if script is not None:
                draft.draft_block = _Scripted(type(draft).draft_block.__get__(draft), script)
            try:
                for token, _ in generate_step(
                    mx.array([list(prompt)]),
                    self._model,
                    None,
                    None,
                    max_tokens=max_tokens,
                    temperature=0.0,
                    draft_model=draft,
                    draft_block_size=None if block == AUTO else int(block),
                ):
                    yield Batch([int(token)])
            finally:
                if script is not None:
                    del draft.draft_block
                mx.synchronize(generation_stream)

        return Simple(generate)


class _Scripted:
    """The drafter's own drafting, the values replaced by the script's."""

    def __init__(self, draft_block: Any, script: Script) -> None:
        self._draft_block, self._script = draft_block, script
        script.start()

    def __call__(self, bonus: Any, hidden: mx.array, *rest: Any, **named: Any) -> mx.array:
        """Drafts [1, block - 1]."""
        drafted = self._draft_block(bonus, hidden, *rest, **named)
        self._script.saw(hidden.shape[1])
        return self._script.say(drafted)
