"""What is known of a foreign engine before it is imported, and what it looks like once it is open."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.target.loading import LoadedTarget


class Loop(Protocol):
    """An engine opened for one target, its drafter loaded.

    Attributes:
        block: the most positions that it appends in one forward after the prompt's.
    """

    block: int

    def steps(self, prompt: Sequence[int], max_tokens: int, **caches: Any) -> Generator[int]:
        """Continue a prompt greedily.

        Args:
            prompt: token ids, at least one.
            max_tokens: tokens to give; stop tokens end nothing.
            caches: the target's caches under the engine's own keyword, if it has one; else nothing.

        Yields:
            Tokens, as they become known.
        """


Open = Callable[[LoadedTarget, Path | None, int | None], Loop]


@dataclass(frozen=True)
class ForeignEngine:
    """One engine of the registry.

    Attributes:
        name: what a registry entry calls it.
        module: the package it needs.
        install: what installs it.
        open: from a target, a drafter's folder and a block length (None: the engine's own) to a loop; imports
            the engine. Raises ConfigurationError or ModelError where they do not go together.
        drafter: whether it needs a drafter's folder; it takes none otherwise.
        trims: whether it takes positions back, which caches must then allow.
        attends: whether it may attend by itself, past the function of the model's module, where nobody can
            read codes.
        keyword: what its loop calls the target's caches; None where it takes none.
        makers: names that make caches in its modules, as (module, dotted name); a maker is given the model.
    """

    name: str
    module: str
    install: str
    open: Open
    drafter: bool
    trims: bool
    attends: bool = False
    keyword: str | None = None
    makers: tuple[tuple[str, str], ...] = ()
