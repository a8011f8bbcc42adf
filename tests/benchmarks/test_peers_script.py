"""What drafters are made to say: the true continuation, or that with every fifth token wrong."""

from __future__ import annotations

import mlx.core as mx
import pytest
from peerbench.script import Script, script_for

TRUTH = list(range(100, 120))


def test_drafts_follow_the_bonus_token_at_every_drafter_position() -> None:
    script = Script(TRUTH, prompt_length=7, vocabulary=1000, wrong=False)
    script.start()
    script.saw(7)  # the prompt: the bonus is the first new token
    assert script.tokens(3) == TRUTH[1:4]
    script.saw(1)
    script.saw(2)
    assert script.tokens(3) == TRUTH[4:7]
    script.start()
    script.saw(7)
    assert script.tokens(2) == TRUTH[1:3]


def test_past_the_end_of_the_truth_there_are_zeros() -> None:
    script = Script(TRUTH, prompt_length=0, vocabulary=1000, wrong=False)
    assert script.tokens(4, committed=17) == [118, 119, 0, 0]


def test_noise_spoils_the_same_fifth_of_tokens_at_every_round_length() -> None:
    script = Script(TRUTH, prompt_length=0, vocabulary=1000, wrong=True)
    said = {index: token for at in range(15) for index, token in enumerate(script.tokens(4, at), at + 1)}
    assert [index for index, token in said.items() if token != TRUTH[index]] == [4, 9, 14]
    assert script_for("noisy", [119], 0, 120).tokens(1, committed=-1) == [119]  # type: ignore[union-attr]
    assert Script([0, 0, 0, 0, 119], 0, 120, wrong=True).tokens(1, committed=3) == [0]


def test_replacement_keeps_shape_and_type_and_depends_on_drafts() -> None:
    script = Script(TRUTH, prompt_length=0, vocabulary=1000, wrong=False)
    said = script.say(mx.array([[5, 6]], mx.uint32))
    assert (said.tolist(), said.dtype) == ([[101, 102]], mx.uint32)
    nan = mx.array([0.0, 1.0]) / 0  # a drafter that is not computed could not fail
    assert script.say((nan < 0).astype(mx.int32) - 1).tolist() == [-1, -1]


def test_plain_mode_has_no_script_and_others_are_refused() -> None:
    assert script_for("plain", TRUTH, 0, 10) is None
    with pytest.raises(ValueError, match="'guess' is not one of plain, oracle, noisy"):
        script_for("guess", TRUTH, 0, 10)
