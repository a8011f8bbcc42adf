"""Let an adaptive draft length try every block before anything is measured."""

from engine.draft_length import PLAIN_TRIALS, TRIALS, AdaptiveDraftLength, DraftLength


class Calibration(DraftLength):
    """Tries every block of an adaptive draft length in turn, so that it knows what they cost."""

    def __init__(self, draft_length: AdaptiveDraftLength) -> None:
        super().__init__(draft_length.largest)
        self._adaptive, self._asked = draft_length, 0
        self._left = [block for block in draft_length.blocks for _ in range(TRIALS + 1)]
        self._left += [1] * (PLAIN_TRIALS + 2)

    @property
    def finished(self) -> bool:
        return not self._left

    def start(self) -> None:
        self._adaptive.start()

    def choose(self, remaining: int) -> int:
        """The next block to try, then what the draft length chooses."""
        if self.finished:
            return self._adaptive.choose(remaining)
        self._asked = min(self._left[0], remaining)
        return self._asked

    def record(self, block: int, accepted: int, seconds: float) -> None:
        if self._left and self._left[0] in (block, self._asked):  # a drafter may propose less
            self._left.pop(0)
        self._adaptive.record(block, accepted, seconds)
