"""What decoding asks of a drafter. The networks live in `engine.networks`, the kinds in `registry`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from engine.errors import DrafterMismatchError
from engine.sampling import Sampler
from engine.target.model import Target


@dataclass(frozen=True)
class Draft:
    """Drafted tokens, and what they were drawn from.

    Attributes:
        tokens: int32 [n], not evaluated yet; n may be less than was asked for, also 0.
        q: float32 [n, V]; token i was drawn from q[i], given the drafts before it. None: the tokens were
            chosen, not drawn, and each counts as certain.
    """

    tokens: mx.array
    q: mx.array | None = None

    def __len__(self) -> int:
        return int(self.tokens.shape[0])


NOTHING = Draft(mx.array([], mx.int32))


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

    @property
    def forwards(self) -> int:
        """Forwards of its network since it was made; 0 for one without."""

    def bind(self, target: Target) -> None:
        """Check that it fits the target, and use that target from now on."""

    def twin(self) -> "Drafter":
        """One more of its kind for another sequence: same weights, same target, nothing observed yet."""

    def start(self) -> None:
        """Begin a new sequence."""

    def observe(self, tokens: Sequence[int], taps: mx.array | None) -> None:
        """Take note of committed tokens and the target's taps at their positions, in order."""

    def rewind(self, count: int) -> bool:
        """Forget the last ``count`` observed tokens; False where it cannot, and then nothing is forgotten."""

    def mark(self) -> Callable[[], None]:
        """Note the present state; what is returned brings it back, as often as it is called."""

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        """Draft up to ``count`` tokens after ``bonus``, the one token not yet committed.

        Args:
            bonus: the last emitted token.
            count: how many drafts at most, at least 1.
            sampler: draws the drafts; None for the likeliest.
        """


def refuse_mismatch(what: str, drafter: int | None, target: int) -> None:
    """Compare a property of the target the drafter was made for with the target given.

    Raises:
        DrafterMismatchError: they differ (None on the drafter's side: unknown, not compared).
    """
    if drafter is not None and drafter != target:
        raise DrafterMismatchError(
            f"this drafter is for another target: {what} {drafter} in the drafter, {target} in the target"
        )
