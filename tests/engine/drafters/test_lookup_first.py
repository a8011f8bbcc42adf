"""Prompt lookup in front of another drafter: who is asked when, and both stay in step."""

from __future__ import annotations

import pytest

from engine.decode import decode
from engine.drafters.autoregressive import Autoregressive
from engine.drafters.lookup_first import LookupFirst
from engine.drafters.prompt_lookup import PromptLookup
from engine.pace import Fixed
from engine.sampling import Sampler, Sampling
from engine.target import Target
from tests.engine import tiny


@pytest.fixture(scope="module")
def model() -> Target:
    return Target(tiny.build("llama"))


def prompt_of(length: int) -> list[int]:
    random = tiny.seeded(length)
    return [random.randrange(5, tiny.VOCAB) for _ in range(length)]


def test_a_repetition_is_looked_up_and_anything_else_left_to_the_other(model: Target):
    text = [*prompt_of(20), 6, 7, 8, 9, 10, 11, 6, 7]
    drafter, other = LookupFirst(Autoregressive(model)), Autoregressive(model)
    drafter.observe(text, None)
    other.observe(text, None)
    assert drafter.propose(8, 3).tokens.tolist() == [9, 10, 11]
    assert drafter.propose(6, 3).tokens.tolist() == other.propose(6, 3).tokens.tolist()
    sampler = Sampler(Sampling(temperature=1.0, seed=1))
    assert drafter.propose(8, 3, sampler).q is None
    assert drafter.propose(6, 3, sampler).q is not None


def test_both_rewind_or_neither(model: Target):
    text = [*prompt_of(20), 7, 8, 9, 7]
    drafter = LookupFirst(Autoregressive(model), shortest=1)
    drafter.observe(text, None)
    assert not drafter.rewind(len(text) + 1)
    assert drafter.propose(8, 1).tokens.tolist() == [9]
    drafter.observe([8, 9, 9], None)
    assert drafter.rewind(4)
    other = Autoregressive(model)
    other.observe(text[:-1], None)
    assert drafter.propose(4, 2).tokens.tolist() == other.propose(4, 2).tokens.tolist()
    assert drafter.propose(8, 1).tokens.tolist() == [9]


def test_its_name_and_size_tell_both(model: Target):
    drafter = LookupFirst(Autoregressive(model, block_size=5), shortest=1)
    assert (drafter.name, drafter.block_size) == ("prompt-lookup+autoregressive", 5)
    drafter.observe(text := prompt_of(9), None)
    drafter.propose(5, 2)
    parts = PromptLookup(), Autoregressive(model, block_size=5)
    for part in parts:
        part.observe(text, None)
        part.propose(5, 2)
    assert drafter.nbytes == parts[0].nbytes + parts[1].nbytes


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_decoding_gives_the_plain_tokens(family: str):
    target = Target(tiny.build(family))
    prompt = [5 + token % 20 for token in prompt_of(60)]  # few kinds of tokens: matches abound
    truth = tiny.plain_tokens(target.model, prompt, 48)
    for other in (Autoregressive(target), PromptLookup()):
        steps = list(decode(target, LookupFirst(other), prompt, max_tokens=48, pace=Fixed(8)))
        assert [token for step in steps for token in step.tokens] == truth
