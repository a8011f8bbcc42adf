"""A drafting model stays in step with the text: what it proposes depends on the committed tokens alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.ring import SlidingRing
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.autoregressive import CHUNK, UNSEEN, Autoregressive
from engine.errors import ConfigurationError, DrafterMismatchError
from engine.sampling import Sampler, Sampling
from engine.target.model import Target
from tests.engine import families, tiny

DRAFTING = ("llama", "gemma3_text", "qwen3_5")  # full, sliding and recurrent layers


@pytest.fixture(scope="module", params=DRAFTING)
def drafting(request: pytest.FixtureRequest) -> Target:
    return Target(families.build(request.param))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    random = tiny.seeded(seed + 1000 * length)
    return [random.randrange(5, tiny.VOCAB) for _ in range(length)]


def fresh(model: Target, tokens: list[int]) -> Autoregressive:
    drafter = Autoregressive(model)
    drafter.observe(tokens, None)
    return drafter


def continued(model: Target, text: list[int], count: int) -> list[int]:
    """The model's own greedy continuation, without any cache."""
    text = list(text)
    for _ in range(count):
        text.append(int(mx.argmax(model.model(mx.array([text]))[0, -1]).item()))
    return text[len(text) - count :]


def test_it_proposes_the_models_own_continuation(drafting: Target):
    text = prompt_of(45)
    drafter = fresh(drafting, text[:-1])
    assert drafter.propose(text[-1], 6).tokens.tolist() == continued(drafting, text, 6)


@pytest.mark.sampled(0, 2)
def test_proposal_depends_only_on_committed_tokens(drafting: Target):
    random = tiny.seeded(5)
    text = prompt_of(6)
    drafter = fresh(drafting, text)
    for turn in range(24):
        bonus = random.randrange(5, tiny.VOCAB)
        count = random.choice([1, 3, 7, 15])
        drafts = drafter.propose(bonus, count).tokens.tolist()
        assert drafts == fresh(drafting, text).propose(bonus, count).tokens.tolist(), f"turn {turn}"
        kept = random.randrange(count + 1)
        step = [bonus, *drafts[:kept]]
        if turn % 4 == 3:  # someone else's tokens were committed in place of ours
            step = [bonus, *drafts[: kept // 2], *prompt_of(2, turn)]
        drafter.observe(step, None)
        text += step
        if turn % 5 == 4:  # plain steps
            drafter.observe(plain := prompt_of(3, turn), None)
            text += plain


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize("back", [0, 1, 2, 9, 40])
def test_rewound_it_proposes_as_if_the_tokens_had_never_come(drafting: Target, back: int):
    text = prompt_of(30)
    drafter = fresh(drafting, text)
    drafts = drafter.propose(7, 9).tokens.tolist()
    drafter.observe([7, *drafts], None)
    text += [7, *drafts]
    drafter.propose(8, 4)  # nothing of it is committed
    assert drafter.rewind(back)
    text = text[: len(text) - back]
    assert drafter.propose(9, 5).tokens.tolist() == fresh(drafting, text).propose(9, 5).tokens.tolist()


def test_rewinding_more_than_was_seen_is_refused_and_changes_nothing(drafting: Target):
    text = prompt_of(5)
    drafter = fresh(drafting, text)
    assert not drafter.rewind(6)
    assert drafter.propose(9, 3).tokens.tolist() == continued(drafting, [*text, 9], 3)


def test_a_new_sequence_and_a_twin_know_nothing_of_the_last(drafting: Target):
    drafter = fresh(drafting, prompt_of(40))
    drafter.propose(5, 4)
    twin = drafter.twin()
    text = prompt_of(7, seed=2)
    twin.observe(text, None)
    drafter.start()
    drafter.observe(text, None)
    expected = continued(drafting, [*text, 6], 4)
    assert drafter.propose(6, 4).tokens.tolist() == expected
    assert twin.propose(6, 4).tokens.tolist() == expected


class Widths(Target):
    """A target that notes how many tokens each forward takes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.widths: list[int] = []

    def forward(self, tokens: mx.array, caches: list[Any], hidden_states: Any) -> Any:
        self.widths.append(tokens.shape[1])
        return super().forward(tokens, caches, hidden_states)


@pytest.mark.slow
def test_a_long_text_is_read_in_chunks_and_once():
    model = Widths(tiny.build())
    drafter = fresh(model, prompt_of(2 * CHUNK + 40))
    assert model.widths == []  # nothing is read before a draft is asked for
    drafts = drafter.propose(5, 3).tokens.tolist()
    assert model.widths == [CHUNK, CHUNK, 40, 1, 1, 1]
    model.widths.clear()
    drafter.observe([5, *drafts], None)
    drafter.propose(6, 2)
    assert model.widths == [2, 1]  # the last draft was not fed yet; it enters with the bonus
    model.widths.clear()
    drafter.observe([6, *prompt_of(UNSEEN)], None)
    drafter.propose(6, 1)
    assert model.widths == [UNSEEN + 1]


def test_a_block_is_bounded_so_that_rings_are():
    drafter = Autoregressive(Target(tiny.build()), block_size=4)
    assert len(drafter.propose(5, 100)) == 7
    with pytest.raises(ConfigurationError, match="at least 2, not 1"):
        Autoregressive(Target(tiny.build()), block_size=1)


@pytest.mark.slow
def test_sliding_layers_hold_no_more_for_a_longer_text():
    model, block_size = Target(tiny.build()), 8
    for length in (100, 1500):
        drafter = fresh(model, prompt_of(length))
        mx.eval(drafter.propose(5, 15).tokens)
        rings = [cache for cache in drafter._transaction.caches if isinstance(cache, SlidingRing)]
        assert len(rings) == 4
        rows = tiny.WINDOW + UNSEEN + 2 * block_size
        assert sum(ring.nbytes for ring in rings) == 4 * 2 * rows * 2 * 8 * 4  # of 2 heads, 8 float32
        assert drafter.nbytes > sum(ring.nbytes for ring in rings)  # the full layers are counted too


def test_q_is_the_models_distribution_given_the_drafts_before():
    model = Target(tiny.build("llama"))
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)
    text = prompt_of(12)
    drafter = fresh(model, text[:-1])
    draft = drafter.propose(text[-1], 5, Sampler(sampling))
    assert draft.q is not None
    tokens = draft.tokens.tolist()
    logits = model.model(mx.array([[*text, *tokens[:-1]]]))[0, len(text) - 1 :]
    assert mx.allclose(draft.q, Sampler(sampling).distribution(logits), atol=1e-5).item()
    assert all(draft.q[i, token].item() > 0 for i, token in enumerate(tokens))
    again = fresh(model, text[:-1]).propose(text[-1], 5, Sampler(sampling))
    assert again.tokens.tolist() == tokens


@pytest.mark.slow
def test_drafts_are_drawn_from_q():
    model = Target(tiny.build("llama"))
    sampler = Sampler(Sampling(temperature=1.5, top_k=4, seed=11))
    drafter = fresh(model, prompt_of(5))
    drafts = [drafter.propose(7, 1, sampler) for _ in range(400)]
    counts = Counter(mx.concatenate([draft.tokens for draft in drafts]).tolist())
    assert drafts[0].q is not None
    q = {token: p for token, p in enumerate(drafts[0].q[0].tolist()) if p > 0}
    assert 2 <= len(q) <= 4
    assert set(counts) <= set(q)
    chi_square = sum((counts[token] - 400 * p) ** 2 / (400 * p) for token, p in q.items())
    assert chi_square < 16.3  # 0.999 of the distribution with three degrees of freedom


def test_another_vocabulary_is_refused_naming_both_sides():
    drafter = Autoregressive(Target(tiny.build("llama", vocab_size=200)))
    with pytest.raises(DrafterMismatchError, match="vocabulary 200 in the drafter, 300 in the target"):
        drafter.bind(Target(tiny.build("qwen3")))


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_decoding_gives_the_plain_tokens(family: str):
    model = tiny.build(family)
    target, other, itself = Target(model), Target(tiny.build("qwen3", seed=8)), Target(model)
    prompt = prompt_of(19)
    truth = tiny.plain_tokens(model, prompt, 40)
    for block in (2, 7):
        for drafter in (Autoregressive(other), Autoregressive(itself)):
            steps = list(decode(target, drafter, prompt, max_tokens=40, draft_length=FixedDraftLength(block)))
            assert [token for step in steps for token in step.tokens] == truth
            rounds = [step.round for step in steps if step.round]
            if drafter._model is itself:  # it knows the target's mind
                assert all(r.accepted == r.block - 1 for r in rounds)


def test_when_sampling_a_drafter_that_is_the_target_has_its_drafts_confirmed():
    target = Target(tiny.build("llama"))
    drafter, sampler = Autoregressive(target), Sampler(Sampling(temperature=1.0, seed=5))
    steps = list(
        decode(
            target, drafter, prompt_of(9), max_tokens=61, sampler=sampler, draft_length=FixedDraftLength(6)
        )
    )
    rounds = [step.round for step in steps if step.round]
    assert len(rounds) == 10
    assert all(r.accepted == r.block - 1 == 5 for r in rounds)
