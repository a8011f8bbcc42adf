"""What decoding asks of a drafter. The networks live in `engine.networks`, the kinds in `registry`."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol, Self

import mlx.core as mx

from engine.errors import DrafterMismatchError
from engine.sampling import Sampler
from engine.target.model import Target


@dataclass(frozen=True)
class Draft:
    """Drafted tokens, and the distributions they were drawn from."""

    tokens: mx.array  # int32 [n], not evaluated yet; n may be less than was asked for, also 0
    # float32 [n, V]; token i was drawn from q[i], given those before. None: chosen, counts as certain.
    q: mx.array | None = None
    # Of look-ups: the chance that each is confirmed if those before it were, as the text so far has it.
    chances: tuple[float, ...] | None = None

    @property
    def expected(self) -> list[float]:
        """Tokens that 1, 2 … of these drafts, and the target's own token, are expected to make."""
        reached, tokens, found = 1.0, 1.0, []
        for chance in self.chances or ():
            reached *= chance
            tokens += reached
            found.append(tokens)
        return found

    def first(self, count: int) -> "Draft":
        """The first ``count`` of drafts that were looked up."""
        if count >= len(self):
            return self
        return Draft(self.tokens[:count], None, self.chances and self.chances[:count])

    def __len__(self) -> int:
        return int(self.tokens.shape[0])


NOTHING = Draft(mx.array([], mx.int32))


class Drafter(Protocol):
    """Proposes tokens for one sequence at a time."""

    name: str  # the registry's name of this kind
    target_layers: tuple[int, ...]  # target layers whose outputs `observe` needs; empty for none
    block_size: int  # block length it was made for, the bonus token included
    most_drafts: int | None  # that its network makes a round; None: as many as it is asked for

    @property
    def nbytes(self) -> int:
        """Resident bytes of its sequence state."""

    @property
    def forwards(self) -> int:
        """Forwards of its network since it was made; 0 for one without."""

    @property
    def backlog(self) -> int:
        """Observed tokens that it must read before it drafts."""

    def draft_forwards(self, count: int) -> int:
        """Forwards of its network, one after the other, that ``count`` drafts take; 0 for one without."""

    def try_forward(self) -> None:
        """Run one forward of one token that changes nothing, and wait for it; only its time is of use."""

    def look_up(self, bonus: int, count: int) -> Draft:
        """At most ``count`` drafts after ``bonus`` that cost no forward, with their chances; often none."""

    def bind(self, target: Target) -> None:
        """Use this target from now on; DrafterMismatchError where it was made for another."""

    def twin(self) -> "Drafter":
        """One more of its kind for another sequence: same weights, same target, nothing observed yet."""

    def fork(self) -> "Drafter":
        """A twin that has observed the same; what either does from now on does not change the other."""

    def start(self) -> None:
        """Begin a new sequence."""

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        """Note committed tokens and the outputs of `target_layers` at them, [1, N, K·hidden], in order."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs besides the tokens: a tree that `engine.cache.saved` can save."""

    def restore(self, tokens: Sequence[int], state: Mapping[str, Any]) -> None:
        """Be as the drafter of the same kind was whose `state` this is, and which had observed ``tokens``."""

    def rewindable(self, count: int) -> bool:
        """Whether it can forget the last ``count`` observed tokens."""

    def rewind(self, count: int) -> bool:
        """Forget the last ``count`` observed tokens; False where it cannot, and then nothing is forgotten."""

    def propose_together(self, others: Sequence["Proposal"]) -> list[Draft]:
        """`propose`, for sequences whose drafters are of this kind; in one pass where it can."""

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        """Draft at most ``count`` ≥ 1 tokens after ``bonus``, the one token not yet committed.

        A sampler draws the drafts; without one they are the likeliest.
        """


@dataclass(frozen=True)
class Proposal:
    """What a sequence of a batch asks its drafter for, see `Drafter.propose`."""

    drafter: Drafter
    bonus: int
    count: int
    sampler: Sampler | None


class NetworkDrafter:
    """A drafter that drafts a block in one forward, with little to read before."""

    most_drafts: int | None = None

    @property
    def backlog(self) -> int:
        return 0

    def draft_forwards(self, count: int) -> int:  # noqa: ARG002 - others need more for more
        return 1

    def try_forward(self) -> None:
        """It is not asked for, as one forward is what a first draft takes."""

    def look_up(self, bonus: int, count: int) -> Draft:  # noqa: ARG002 - it has none
        return NOTHING

    def propose_together(self, others: Sequence[Proposal]) -> list[Draft]:
        return [each.drafter.propose(each.bonus, each.count, each.sampler) for each in others]


class TextDrafter(NetworkDrafter):
    """A drafter that reads nothing but the tokens, and can go back to any length of the text."""

    target_layers: tuple[int, ...] = ()
    _tokens: Any  # a list or an array of those observed, or what works like one

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:  # noqa: ARG002 - it needs none
        self._tokens.extend(tokens)

    @abstractmethod
    def twin(self) -> Self: ...

    @abstractmethod
    def start(self) -> None: ...

    def fork(self) -> Self:
        other = self.twin()
        other._tokens = deepcopy(self._tokens)
        return other

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, tokens: Sequence[int], state: Mapping[str, Any]) -> None:  # noqa: ARG002 - others have one
        self.start()
        self._tokens.extend(tokens)

    def rewindable(self, count: int) -> bool:
        return count <= len(self._tokens)

    def rewind(self, count: int) -> bool:
        possible = self.rewindable(count)
        if possible:
            del self._tokens[len(self._tokens) - count :]
        return possible


def refuse_mismatch(what: str, drafter: int | None, target: int) -> None:
    """Raise DrafterMismatchError where a property of the drafter's target differs from the target's."""
    if drafter is not None and drafter != target:
        raise DrafterMismatchError(
            f"this drafter is for another target: {what} {drafter} in the drafter, {target} in the target"
        )
