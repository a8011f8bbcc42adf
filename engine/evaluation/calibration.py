"""Let an adaptive draft length try every block before anything is measured."""

from collections.abc import Sequence

from engine.draft_length import PLAIN_TRIALS, TRIALS, AdaptiveDraftLength, Ask, DraftLength
from engine.drafters.base import Draft

LONG = 1_000_000  # tokens of a sequence whose prompt costs nothing in comparison


class Calibration(DraftLength):
    """Tries every block of an adaptive draft length that may pay, so that it knows what they cost."""

    times_drafts = True

    def __init__(self, draft_length: AdaptiveDraftLength) -> None:
        super().__init__(draft_length.largest)
        self._adaptive, self._asked = draft_length, 0
        self._left = [1] * (PLAIN_TRIALS + 2)
        self._left += [block for block in draft_length.blocks for _ in range(TRIALS + 1)]

    @property
    def finished(self) -> bool:
        return not self._left

    def start(self) -> None:
        self._adaptive.start()

    def choose(self, remaining: int) -> int:
        """The next block to try, then what the draft length chooses."""
        while self._left and self._left[0] > 1 and not self._adaptive.may_pay(self._left[0], LONG):
            self._left.pop(0)
        if self.finished:
            return self._adaptive.choose(remaining)
        self._asked = min(self._left[0], remaining)
        return self._asked

    def drafts(self, asks: Sequence[Ask], most: int) -> list[Draft]:
        """Drafts for the block to try, then those of the draft length."""
        if self.finished:
            return self._adaptive.drafts(asks, most)
        self._adaptive.note_backlog(asks)
        if self._left[0] > 1:
            self._adaptive.try_forward(asks[0].drafter)
        return super().drafts(asks, most)

    def has_lookup(self, asks: Sequence[Ask]) -> bool:
        return self.finished and self._adaptive.has_lookup(asks)

    def record(
        self,
        block: int,
        accepted: int | Sequence[int],
        seconds: float,
        draft_s: float = 0.0,
        *,
        looked_up: bool = False,
    ) -> None:
        if self._left and self._left[0] in (block, self._asked):  # a drafter may propose less
            self._left.pop(0)
        self._adaptive.record(block, accepted, seconds, draft_s, looked_up=looked_up)
