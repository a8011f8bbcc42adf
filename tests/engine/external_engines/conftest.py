"""A small target, and what our own loop makes of a prompt under a channel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree

import mlx.core as mx
import pytest

from engine.cache.policy import parse_policy
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.target.loading import LoadedTarget, load_target
from tests.engine import tiny
from tests.engine.identity import tokens_of

PROMPT = tuple(range(20, 60))
COUNT = 16

Ours = Callable[[str], list[int]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers S S F S S F, window 8, heads wide enough for every code."""
    return tiny.save_target(tmp_path_factory.mktemp("external") / "target", head_dim=32)


@pytest.fixture(scope="session")
def target(folder: Path) -> LoadedTarget:
    return load_target(folder)


@pytest.fixture(scope="session")
def ours(target: LoadedTarget) -> Ours:
    """Tokens of our own plain decoding under a channel."""

    @cache
    def run(channel: str) -> list[int]:
        policy = parse_policy(channel)
        steps = decode(
            target.target, None, PROMPT, max_tokens=COUNT, draft_length=FixedDraftLength(1), policy=policy
        )
        return tokens_of(list(steps))

    return run


@pytest.fixture(scope="session")
def rough(folder: Path) -> Path:
    """The target with noise on its weights: as a draft model, right now and then."""
    rough = folder.parent / "rough"
    copytree(folder, rough)
    mx.random.seed(4)
    weights = mx.load(str(folder / "model.safetensors"))
    noisy = {name: w + 0.15 * mx.std(w) * mx.random.normal(w.shape) for name, w in weights.items()}
    mx.save_safetensors(str(rough / "model.safetensors"), noisy, {"format": "mlx"})
    return rough
