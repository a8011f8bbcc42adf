"""z-lab's `dflash` (PyPI dflash 0.1.0, module `dflash.model_mlx`) on the shared target.

Its hooks stay on the target, so they are taken off after every run. It writes text while it decodes; here it
gets a tokenizer that does not, because no other engine is asked to. Left to itself, it takes the drafter's
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from dflash import model_mlx
from mlx_lm.generate import generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.external_engines.loops import add_unseen_scale
from peerbench.engines.base import AUTO, Arm, Batch, Simple, World
from peerbench.script import Script

model_mlx.snapshot_download = lambda path, **_: path


class ZLab:
    """z-lab's loop."""

    def __init__(self, world: World) -> None:
        self._model = world.target.target.model
        self._draft = model_mlx.load_draft(str(world.folders.drafter))
        add_unseen_scale(self._draft, world.target.target)
        self._draft.set_dtype(world.target.target.embed(mx.array([[0]])).dtype)
        mx.eval(self._draft.parameters())

    def arm(self, block: int | str) -> Arm:
        """See `Engine.arm`."""
        size = None if block == AUTO else int(block)

        def generate(prompt: Sequence[int], max_tokens: int, script: Script | None) -> Iterator[Batch]:
            draft = self._draft if script is None else _scripted(self._draft, script)
            try:
                for response in model_mlx.stream_generate(
                    self._model,
                    draft,
                    _Mute(),
                    mx.array(list(prompt)),
                    block_size=size,
                    max_tokens=max_tokens,
                ):
                    if response.tokens:
                        yield Batch(response.tokens)
            finally:
                _unhook(self._model)
                mx.synchronize(generation_stream)

        return Simple(generate)


class _Mute(TokenizerWrapper):  # the loop wraps whatever is not one
    """A tokenizer without text and without stop tokens."""

    eos_token_ids: frozenset[int] = frozenset()
    last_segment = ""

    def __init__(self) -> None:
        pass

    @property
    def detokenizer(self) -> _Mute:
        """Itself: it has the three methods the loop calls."""
        return self

    def add_token(self, token: int) -> None:
        """Nothing is written."""

    def finalize(self) -> None:
        """Nothing is written."""


class _Spoken(model_mlx.DFlash2DraftModel):
    """A drafter that hands out tokens instead of logits, which the loop accepts from one of this class."""

    def __init__(self, network: Any, script: Script) -> None:
        # The network's own parts, not new ones: nothing is initialised.
        object.__setattr__(self, "_held", (network, script))

    @property
    def config(self) -> Any:
        """The network's configuration."""
        return self._held[0].config

    def bind(self, target: Any) -> Any:
        """Use this target's embedding and head."""
        return self._held[0].bind(target)

    def make_cache(self) -> list[Any]:
        """Caches for the network."""
        return self._held[0].make_cache()

    @property
    def layers(self) -> list[Any]:
        """The network's layers."""
        return self._held[0].layers

    def propose(
        self,
        inputs: mx.array,
        hidden: mx.array,
        cache: list[Any],
        temperature: float,  # noqa: ARG002 - the loop gives it
        logits_start: int = 0,
    ) -> tuple[mx.array, None, None]:
        """The network's drafts, computed, with the script's values."""
        network, script = self._held
        logits = network(inputs, hidden, cache, logits_start=logits_start)
        script.saw(hidden.shape[1])
        return script.say(mx.argmax(logits, axis=-1)), None, None


def _scripted(network: Any, script: Script) -> _Spoken:
    script.start()
    return _Spoken(network, script)


def _unhook(model: Any) -> None:
    layers = model_mlx._get_layers(model)
    for index, layer in enumerate(layers):
        if isinstance(layer, model_mlx._LayerHook):
            layers[index] = layer._layer
    if hasattr(model, "_hidden_states"):
        del model._hidden_states
