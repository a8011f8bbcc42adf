"""What decoding asks of a drafter, and which drafters there are. The networks live in `engine.networks`."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from engine.errors import DrafterMismatchError
from engine.target import Target


class Drafter(Protocol):
    """Proposes tokens for one sequence at a time."""

    @property
    def name(self) -> str:
        """The registry's name of this kind."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `observe` needs; empty for none."""

    @property
    def block_size(self) -> int:
        """Block length it was made for, the bonus token included."""

    @property
    def nbytes(self) -> int:
        """Resident bytes of its sequence state."""

    def bind(self, target: Target) -> None:
        """Check that it fits the target, and use that target from now on."""

    def start(self) -> None:
        """Begin a new sequence."""

    def observe(self, tokens: Sequence[int], taps: mx.array | None) -> None:
        """Take note of committed tokens and the target's taps at their positions, in order."""

    def propose(self, bonus: int, count: int) -> mx.array:
        """Draft ``count`` tokens [count] after ``bonus``, the one token not yet committed; lazy."""


def refuse_mismatch(what: str, drafter: int | None, target: int) -> None:
    """Compare a property of the target the drafter was made for with the target given.

    Raises:
        DrafterMismatchError: they differ (None on the drafter's side: unknown, not compared).
    """
    if drafter is not None and drafter != target:
        raise DrafterMismatchError(
            f"this drafter is for another target: {what} {drafter} in the drafter, {target} in the target"
        )
