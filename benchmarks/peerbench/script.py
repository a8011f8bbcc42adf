"""What a drafter is made to say in the modes `oracle` and `noisy`, the same for every engine.

The drafter runs as it is and its drafts are computed; then their values are replaced by the true continuation
of the prompt, of which `noisy` gets every fifth token wrong. Which tokens those are depends on their position
in the continuation alone, so every engine meets the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

MODES = ("plain", "oracle", "noisy")
WRONG_EVERY = 5


@dataclass
class Script:
    """The drafts for one prompt; it counts the committed rows that a drafter is shown.

    Attributes:
        truth: the greedy continuation, beginning with the first new token.
        prompt_length: tokens of the prompt.
        vocabulary: number of token ids.
        wrong: whether every fifth token is to be wrong.
    """

    truth: Sequence[int]
    prompt_length: int
    vocabulary: int
    wrong: bool
    _committed: int = field(default=0, init=False)

    def start(self) -> None:
        """A sequence begins."""
        self._committed = 0

    def saw(self, rows: int) -> None:
        """A drafter was shown so many more committed positions, the prompt's included."""
        self._committed += rows

    def tokens(self, count: int, committed: int | None = None) -> list[int]:
        """The drafts that follow ``committed`` positions and the bonus token; 0 after the truth's end."""
        bonus = (self._committed if committed is None else committed) - self.prompt_length
        return [self._token(index) for index in range(bonus + 1, bonus + 1 + count)]

    def say(self, drafted: mx.array) -> mx.array:
        """The scripted tokens in the shape and type of ``drafted`` [..., n], which is still computed."""
        scripted = mx.array(self.tokens(drafted.shape[-1]), drafted.dtype)
        return mx.where(drafted < 0, drafted, scripted)  # ids are never negative: the script's alone

    def _token(self, index: int) -> int:
        token = self.truth[index] if index < len(self.truth) else 0
        off = self.wrong and index % WRONG_EVERY == WRONG_EVERY - 1
        return (token + 1) % self.vocabulary if off else token


def script_for(mode: str, truth: Sequence[int], prompt_length: int, vocabulary: int) -> Script | None:
    """The script of a mode; None where drafters speak for themselves.

    Raises:
        ValueError: the mode is unknown.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    return None if mode == "plain" else Script(truth, prompt_length, vocabulary, mode == "noisy")
