"""z-lab's `dflash` (PyPI dflash, module `dflash.model_mlx`).

It writes text while it decodes, so it gets a tokenizer that writes none and stops at nothing. What it looks
for only in a config's nested part is read from where published configs also have it. It knows a target's own
embedding scale where mlx-lm keeps it in `embed_scale` (Gemma 4); the scale of other targets is added to the
drafter's. It takes no caches: it asks `make_prompt_cache` for those of the target and of its drafter.
"""

import json
from collections.abc import Generator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.errors import ConfigurationError
from engine.external_engines.strategies import replaced
from engine.target.loading import LoadedTarget
from engine.target.model import Target

MODULE = "dflash.model_mlx"
NESTED = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


class ZLab:
    """`dflash.model_mlx.stream_generate`."""

    def __init__(self, target: LoadedTarget, drafter: Path, block: int | None) -> None:
        self._module: Any = import_module(MODULE)
        self._model = target.target.model
        with replaced(self._module, "snapshot_download", lambda path, **_: path):
            self._draft = self._module.load_draft(str(drafter))
        config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
        for name in NESTED:
            if name in config and name not in config["dflash_config"]:
                setattr(self._draft.config, name, config[name])
        add_unseen_scale(self._draft, target.target)
        self._draft.set_dtype(target.target.embed(mx.array([[0]])).dtype)
        mx.eval(self._draft.parameters())
        self.block = int(block or self._draft.config.block_size)

    def steps(self, prompt: Sequence[int], max_tokens: int, **caches: Any) -> Generator[int]:
        """See `Loop.steps`."""
        try:
            for response in self._module.stream_generate(
                self._model,
                self._draft,
                Mute(),
                mx.array(list(prompt)),
                block_size=self.block,
                max_tokens=max_tokens,
                **caches,
            ):
                yield from response.tokens
        finally:
            mx.synchronize(generation_stream)


def add_unseen_scale(draft: Any, target: Target) -> None:
    """Put the target's embedding scale into the draft's configuration where the package does not see it."""
    given = draft.config.input_embedding_scale
    if draft.bind(target.model).embed_scale == given:
        draft.config.input_embedding_scale = given * target.embedding_scale


class Mute(TokenizerWrapper):
    """A tokenizer without text and without stop tokens; the loop wraps whatever is no `TokenizerWrapper`."""

    eos_token_ids: frozenset[int] = frozenset()
    last_segment = ""

    def __init__(self) -> None:
        """Nothing is wrapped."""

    @property
    def detokenizer(self) -> "Mute":
        """Itself: it has the three names that the loop uses."""
        return self

    def add_token(self, token: int) -> None:
        """Nothing is written."""

    def finalize(self) -> None:
        """Nothing is written."""


def open_dflash(target: LoadedTarget, drafter: Path | None, block: int | None) -> ZLab:
    """Open z-lab's loop with a drafter's folder.

    Raises:
        ConfigurationError: the block is shorter than 2.
    """
    assert drafter is not None  # noqa: S101 - the registry says so
    if block is not None and block < 2:
        raise ConfigurationError(f"dflash verifies at least 2 tokens at a time, not {block}")
    return ZLab(target, drafter, block)
