"""What the benchmark asks of an engine: a prompt goes in, tokens come out as they become known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.target.loading import LoadedTarget
from peerbench.script import Script
from peerbench.sizes import Folders

AUTO = "auto"


class MissingEngineError(Exception):
    """An engine is not installed."""


class UnsupportedError(Exception):
    """An engine cannot run the models of this size."""


@dataclass(frozen=True)
class World:
    """What the engines share: the folders, and the target as mlx-lm loads it."""

    folders: Folders
    target: LoadedTarget


@dataclass(frozen=True)
class Batch:
    """Tokens that became known together; ``round`` is ours alone (an engine's record of its stages)."""

    tokens: Sequence[int]
    round: Any = None


class Arm(Protocol):
    """An engine at one setting."""

    def warm_up(self, prompts: Sequence[Sequence[int]], max_tokens: int, script: Script | None) -> None:
        """Run whatever must have run once before the clock."""

    def run(self, prompt: Sequence[int], max_tokens: int, script: Script | None) -> Iterator[Batch]:
        """Continue a prompt greedily by exactly ``max_tokens`` tokens; stop tokens stop nothing."""


@dataclass(frozen=True)
class Simple:
    """An arm that needs no more than one run to be warm."""

    generate: Callable[[Sequence[int], int, Script | None], Iterator[Batch]]

    def warm_up(self, prompts: Sequence[Sequence[int]], max_tokens: int, script: Script | None) -> None:
        """See `Arm.warm_up`."""
        for _ in self.run(prompts[0], max_tokens, script):
            pass

    def run(self, prompt: Sequence[int], max_tokens: int, script: Script | None) -> Iterator[Batch]:
        """See `Arm.run`."""
        return self.generate(prompt, max_tokens, script)


class Engine(Protocol):
    """An engine that has loaded the models."""

    def arm(self, block: int | str) -> Arm:
        """The engine verifying ``block`` tokens at a time; ``auto`` leaves the choice to it."""
