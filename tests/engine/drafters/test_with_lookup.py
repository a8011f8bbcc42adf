"""Prompt lookup next to another drafter: which is asked when, and both stay in step."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.autoregressive import Autoregressive
from engine.drafters.base import Draft, NetworkDrafter
from engine.drafters.prompt_lookup import PromptLookup
from engine.drafters.with_lookup import DraftScore, WithLookup
from engine.sampling import Sampler, Sampling
from engine.target.model import Target
from tests.engine import tiny


@pytest.fixture(scope="module")
def model() -> Target:
    return Target(tiny.build("llama"))


def prompt_of(length: int) -> list[int]:
    random = tiny.seeded(length)
    return [random.randrange(5, tiny.VOCAB) for _ in range(length)]


def test_a_repetition_is_looked_up_and_anything_else_left_to_the_other(model: Target):
    text = [*prompt_of(20), 6, 7, 8, 9, 10, 11, 6, 7]
    drafter, other = WithLookup(Autoregressive(model)), Autoregressive(model)
    drafter.observe(text, None)
    other.observe(text, None)
    assert drafter.propose(8, 3).tokens.tolist() == [9, 10, 11]
    assert drafter.propose(6, 3).tokens.tolist() == other.propose(6, 3).tokens.tolist()
    sampler = Sampler(Sampling(temperature=1.0, seed=1))
    assert drafter.propose(8, 3, sampler).q is None
    assert drafter.propose(6, 3, sampler).q is not None


class Mute(NetworkDrafter):
    """A drafter whose every draft is the token 0, and which keeps count of how often it is asked."""

    name, target_layers, block_size, nbytes, forwards = "mute", (), 8, 0, 0

    def __init__(self) -> None:
        self.asked = 0

    def bind(self, target: Target) -> None: ...
    def twin(self) -> Mute:
        return Mute()

    def start(self) -> None: ...
    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None: ...
    def rewindable(self, count: int) -> bool:
        return True

    def rewind(self, count: int) -> bool:
        return True

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        self.asked += 1
        return Draft(mx.zeros(count, mx.int32))


def rounds(drafter: WithLookup, text: Sequence[int], start: int) -> None:
    """Decode a text that is known beforehand, from its token ``start`` on, in blocks of up to 8."""
    drafter.observe(text[:start], None)
    while start < len(text) - 1:
        drafts = drafter.propose(text[start], min(7, len(text) - 1 - start)).tokens.tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == text[start + 1 + accepted]:
            accepted += 1
        drafter.observe(text[start : start + 1 + accepted], None)
        start += 1 + accepted


def test_where_short_matches_come_true_they_are_trusted():
    words = [[50 + 4 * word + place for place in range(4)] for word in range(10)]
    random = tiny.seeded(3)
    text = [token for _ in range(60) for token in words[random.randrange(10)]]
    drafter = WithLookup(other := Mute())
    rounds(drafter, text, 80)
    assert other.asked < 16  # of some 60 rounds; a rule that asks for three matching tokens leaves it 60


def test_where_matches_mislead_the_other_is_asked():
    new = iter(range(200, 10_000))
    drafter = WithLookup(other := Mute())
    drafter.observe([7, 8, 9, next(new)], None)
    drafter.observe([7, 8], None)
    drafter.propose(9, 7)
    assert other.asked == 0  # three tokens match
    for _ in range(10):  # what followed them the last time never does again
        drafter.observe([9, *(next(new) for _ in range(7))], None)
        drafter.observe([7, 8], None)
        asked = other.asked
        drafter.propose(9, 7)
    assert other.asked == asked + 1
    drafter.start()  # nothing is remembered of another text
    drafter.observe([7, 8, 9, 10, 7, 8], None)
    assert drafter.propose(9, 3).tokens.tolist() == [10, 7, 8]
    assert other.asked == asked + 1


def test_a_record_begins_with_a_belief_and_goes_back_to_it():
    record = DraftScore(2.0)
    assert record.tokens == 3.0
    for _ in range(100):
        record.add(6)
    assert 6.5 < record.tokens < 7.0
    for _ in range(200):
        record.fade(0.9)
    assert record.tokens == pytest.approx(3.0)


def test_the_other_is_asked_again_although_look_ups_once_fared_better():
    """A text whose every token has a match: look-ups mislead, and the other, which was useless, is right."""
    random = tiny.seeded(5)
    text = [random.randrange(40) for _ in range(3000)]
    drafter = WithLookup(other := Mute())
    drafter.observe(text[:100], None)
    for index in range(100, 1000):
        drafter.propose(text[index], 7)
        drafter.observe(text[index : index + 1], None)
    other.asked = 0
    for index in range(1000, 3000, 8):
        was = other.asked
        drafter.propose(text[index], 7)
        drafter.observe(text[index : index + (8 if other.asked > was else 1)], None)
    assert other.asked > 200


def test_drafts_of_a_round_that_was_left_are_nobody_s_success():
    drafter, fresh = WithLookup(Mute()), WithLookup(Mute())
    drafter.observe(range(100, 120), None)
    drafter.propose(7, 7)  # and the caller goes away
    assert drafter.rewind(0)
    for each in (drafter, fresh):
        each.observe([6, 7, 8, *range(200, 300), 6, 7], None)
    assert drafter.propose(8, 3).tokens.tolist() == fresh.propose(8, 3).tokens.tolist() == [200, 201, 202]


def test_both_rewind_or_neither(model: Target):
    text = [*prompt_of(20), 6, 7, 8, 9, 6, 7]
    drafter = WithLookup(Autoregressive(model))
    drafter.observe(text, None)
    assert not drafter.rewind(len(text) + 1)
    assert drafter.propose(8, 1).tokens.tolist() == [9]
    drafter.observe([8, 9, 9], None)
    assert drafter.rewind(4)
    other = Autoregressive(model)
    other.observe(text[:-1], None)
    assert drafter.propose(4, 2).tokens.tolist() == other.propose(4, 2).tokens.tolist()
    drafter.observe([7], None)
    assert drafter.propose(8, 1).tokens.tolist() == [9]


def test_its_name_and_size_tell_both(model: Target):
    drafter = WithLookup(Autoregressive(model, block_size=5))
    assert (drafter.name, drafter.block_size) == ("prompt-lookup+autoregressive", 5)
    drafter.observe(text := prompt_of(9), None)
    drafter.propose(5, 2)
    parts = PromptLookup(), Autoregressive(model, block_size=5)
    for part in parts:
        part.observe(text, None)
        part.propose(5, 2)
    assert drafter.nbytes == parts[0].nbytes + parts[1].nbytes


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_decoding_gives_the_plain_tokens(family: str):
    target = Target(tiny.build(family))
    prompt = [5 + token % 20 for token in prompt_of(60)]  # few kinds of tokens: matches abound
    truth = tiny.plain_tokens(target.model, prompt, 48)
    for other in (Autoregressive(target), PromptLookup()):
        steps = list(
            decode(target, WithLookup(other), prompt, max_tokens=48, draft_length=FixedDraftLength(8))
        )
        assert [token for step in steps for token in step.tokens] == truth
