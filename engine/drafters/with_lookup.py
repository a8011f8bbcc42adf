"""Prompt lookup next to another drafter: each round the one whose drafts did better in this text.

A look-up costs no forward, so it may be confirmed a little less. It is tried in every round, also where the
other drafter is asked, and tells how much it expects to come true. The other's score fades while it is not
asked, so that it gets another chance. Scores begin again with each continuation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from engine.drafters.base import NOTHING, Draft, Drafter, Proposal
from engine.drafters.prompt_lookup import PromptLookup
from engine.sampling import Sampler
from engine.target.model import Target

PROPOSED = 2.0  # … of a drafter that was not tried yet
TRUST = 2.0  # trials' worth of this belief
FORGET = 0.95  # weight of the past after each trial
FADE = 0.98  # … after each round in which the other drafter was not asked
FREE = 0.8  # of a round's time is left without the other's forward, measured with a DFlash drafter


class DraftScore:
    """How many drafts of a kind were confirmed a round, beginning with a belief."""

    def __init__(self, believed: float) -> None:
        self._believed, self._confirmed, self._trials = believed, 0.0, 0.0

    def add(self, confirmed: int) -> None:
        self.fade(FORGET)
        self._confirmed += confirmed
        self._trials += 1

    def fade(self, kept: float) -> None:
        self._confirmed *= kept
        self._trials *= kept

    @property
    def tokens(self) -> float:
        return 1 + (self._confirmed + TRUST * self._believed) / (self._trials + TRUST)


def network_of(drafter: Drafter) -> Drafter:
    """The drafter that look-ups are combined with, or the drafter itself."""
    return drafter.other if isinstance(drafter, WithLookup) else drafter


class WithLookup:
    """Two drafters, told of the same tokens."""

    def __init__(self, other: Drafter) -> None:
        self._lookup, self.other = PromptLookup(), other
        self.name = f"{self._lookup.name}+{other.name}"
        self.target_layers, self.block_size = other.target_layers, other.block_size
        self.most_drafts = other.most_drafts
        self._forget()

    def _forget(self) -> None:
        self._other_score = DraftScore(PROPOSED)
        self._asked = False  # the other, for the round on its way

    def bind(self, target: Target) -> None:
        self.other.bind(target)
        self.target_layers = self.other.target_layers

    def twin(self) -> "WithLookup":
        return WithLookup(self.other.twin())

    def start(self) -> None:
        self._lookup.start()
        self.other.start()
        self._forget()

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        self._lookup.observe(tokens, None)
        self.other.observe(tokens, hidden_states)
        if self._asked:
            self._asked = False
            self._other_score.add(len(tokens) - 1)

    def fork(self) -> "WithLookup":
        fork = WithLookup(self.other.fork())
        fork._lookup = self._lookup.fork()
        return fork

    def state(self) -> dict[str, Any]:
        return self.other.state()

    def restore(self, tokens: Sequence[int], state: Mapping[str, Any]) -> None:
        self.other.restore(tokens, state)
        self._lookup.restore(tokens, {})
        self._forget()

    def rewindable(self, count: int) -> bool:
        return self.other.rewindable(count) and self._lookup.rewindable(count)

    def rewind(self, count: int) -> bool:
        if not self.rewindable(count):
            return False
        self.other.rewind(count)
        self._lookup.rewind(count)
        self._forget()
        return True

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        looked_up = self._better(bonus, count)
        if looked_up is not None:
            return looked_up
        draft = self.other.propose(bonus, count, sampler)
        self._asked = len(draft) > 0
        return draft

    def propose_together(self, others: Sequence[Proposal]) -> list[Draft]:
        drafts, left = list[Draft](), list[tuple[int, WithLookup, Proposal]]()
        for index, each in enumerate(others):
            drafter, looked_up = each.drafter, None
            if isinstance(drafter, WithLookup):
                looked_up = drafter._better(each.bonus, each.count)
                if looked_up is None:
                    left.append((index, drafter, replace(each, drafter=drafter.other)))
            drafts.append(NOTHING if looked_up is None else looked_up)
        if left:
            found = self.other.propose_together([each for *_, each in left])
            for (index, drafter, _), draft in zip(left, found, strict=True):
                drafter._asked = len(draft) > 0
                drafts[index] = draft
        return drafts

    def _better(self, bonus: int, count: int) -> Draft | None:
        """A look-up that promises more than the other drafter."""
        looked_up = self.look_up(bonus, count)
        if not len(looked_up) or looked_up.expected[-1] <= FREE * min(self._other_score.tokens, 1 + count):
            return None
        self._other_score.fade(FADE)
        return looked_up

    def look_up(self, bonus: int, count: int) -> Draft:
        return self._lookup.look_up(bonus, count)

    @property
    def backlog(self) -> int:
        return self.other.backlog

    def draft_forwards(self, count: int) -> int:
        return self.other.draft_forwards(count)

    def try_forward(self) -> None:
        self.other.try_forward()

    @property
    def nbytes(self) -> int:
        return self._lookup.nbytes + self.other.nbytes

    @property
    def forwards(self) -> int:
        return self.other.forwards
