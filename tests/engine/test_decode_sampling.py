"""Drawn text is distributed as the target's own, whatever is drafted and processed; a seed repeats it.

The distribution of three tokens is compared with its exact enumeration on a model of four tokens, and long
texts with the model's distribution at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from engine import acceptance
from engine.acceptance import pack_sampled
from engine.decode import Processor, Step, decode
from engine.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from engine.drafters.autoregressive import Autoregressive
from engine.drafters.base import NOTHING, Draft, Drafter
from engine.drafters.block import BlockDrafter
from engine.drafters.prompt_lookup import PromptLookup
from engine.drafters.with_lookup import WithLookup
from engine.networks.dflash2 import build_network
from engine.networks.dflash_config import DFlashConfig
from engine.sampling import Sampler, Sampling
from engine.session import Session
from engine.target.model import Target
from tests.engine import tiny
from tests.engine.random_drafters import mtp_drafter
from tests.engine.statistics import assert_drawn_from, joint_distribution, uniform_ranks

VOCAB = 4
SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPT = [0, 1, 2, 3, 1, 0, 2, 1]  # every token has a successor to look up
DRAWS = 500
MANY_DRAWS = 6000
MORE_DRAWS = 800  # of `Certain` at COLD these tell 5/4 of the right confirmations by six standard deviations
HOT, FILTERED = Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.9)
COLD = Sampling(temperature=0.3)
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 3}


@cache
def small() -> Target:
    """Four tokens, two layers, a softened head: most continuations have a chance worth counting."""
    model = tiny.build("llama", seed=3, num_hidden_layers=2, intermediate_size=32, **SMALL)
    model.lm_head.weight = 0.5 * model.lm_head.weight
    return Target(model)


@cache
def wandering() -> Target:
    """Twelve tokens, a window of eight and a softened head, for long texts."""
    model = tiny.build("gemma3_text", seed=4, vocab_size=12)
    model.lm_head.weight = 0.25 * model.lm_head.weight
    return Target(model)


def dflash(target: Target, kind: str = "dflash", **nested: Any) -> BlockDrafter:
    """A network of random weights; the smaller ``output_multiplier``, the more even its q."""
    nested = {"mask_token_id": 0, "target_layer_ids": [0, target.layer_count - 1], **nested}
    config = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_target_layers": target.layer_count,
        "dflash_config": nested | (SECOND if kind == "dflash2" else {}),
        "architectures": [f"{'DFlash2' if kind == 'dflash2' else 'DFlash'}DraftModel"],
    }
    mx.random.seed(7)
    drafter = BlockDrafter(build_network(DFlashConfig.from_dict(tiny.drafter_config(**config))))
    drafter.bind(target)
    return drafter


def mtp(target: Target) -> Drafter:
    drafter = mtp_drafter(tiny.GEMMA | {"hidden_size": target.hidden_size})
    drafter.bind(target)
    return drafter


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "dflash": partial(dflash, output_multiplier=8.0),
    "dflash-near": partial(dflash, output_multiplier=0.8),
    "dflash2": partial(dflash, kind="dflash2"),
    "prompt-lookup": lambda target: PromptLookup(),
    "autoregressive": lambda target: Autoregressive(target, block_size=4),
    "mtp": mtp,
    "prompt-lookup+dflash": lambda target: WithLookup(dflash(target)),
}


class Certain:
    """Chooses, without drawing, the likeliest continuation of PROMPT at COLD, which is often not taken.

    With q = 1 at the draft, what is emitted shows at once how often it is confirmed.
    """

    name = "certain"
    block_size = 4
    target_layers = ()
    nbytes = 0
    forwards = 0

    def __init__(self) -> None:
        self._seen: list[int] = []

    def bind(self, target: Target) -> None:
        pass

    def twin(self) -> Certain:
        return Certain()

    def start(self) -> None:
        self._seen = []

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        assert hidden_states is None
        self._seen.extend(tokens)

    def rewind(self, count: int) -> bool:
        del self._seen[len(self._seen) - count :]
        return True

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        before, joint = (*self._seen[len(PROMPT) :], bonus), exact(COLD)
        if len(before) >= 3:
            return NOTHING
        likeliest = max((path for path in joint if path[: len(before)] == before), key=joint.__getitem__)
        return Draft(mx.array(likeliest[len(before) :][:count], mx.int32))


OF_PROMPT: dict[str, Callable[[Target], Drafter]] = {"certain": lambda target: Certain()}


CHOICES: dict[str, Callable[[], DraftLength]] = {
    **{f"block {block}": partial(FixedDraftLength, block) for block in (2, 3, 4)},
    "plain": partial(FixedDraftLength, 1),
    "auto": partial(AdaptiveDraftLength, 4, (2, 3, 4)),
    "seams": partial(tiny.Alternating, 0, (1, 1, 2, 3, 4)),
}


def triples(
    kind: str,
    sampling: Sampling,
    draft_length: str,
    draws: int,
    *,
    processors: Sequence[Processor] = (),
    seed: int = 1,
) -> list[tuple[int, ...]]:
    """The first three tokens after PROMPT, drawn again and again in one session."""
    target = small()
    sampler = Sampler(Sampling(**{**vars(sampling), "seed": seed}))
    drawn, blocks = [], CHOICES[draft_length]()
    with Session(target, (DRAFTERS | OF_PROMPT)[kind](target), headroom=4) as session:
        for _ in range(draws):
            tokens: list[int] = []
            for step in decode(
                target,
                session.drafter,
                PROMPT,
                max_tokens=5,
                sampler=sampler,
                draft_length=blocks,
                session=session,
                processors=processors,
            ):
                tokens.extend(step.tokens)
                if len(tokens) >= 3:
                    break
            drawn.append(tuple(tokens[:3]))
    return drawn


@cache
def exact(sampling: Sampling) -> dict[tuple[int, ...], float]:
    return joint_distribution(small().model, PROMPT, sampling)


def preference(tokens: mx.array, logits: mx.array) -> mx.array:
    """A bias that depends on the token before."""
    table = mx.array([[0.0, 2, 0, -1], [1, 0, 1.5, 0], [-2, 0, 0, 1], [0.5, 0.5, -3, 0]])
    return logits + table[tokens[-1:]]


def grammar(tokens: mx.array, logits: mx.array) -> mx.array:
    """After each token only some may follow."""
    allowed = mx.array([[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 1], [0, 1, 1, 1]])
    return mx.where(allowed[tokens[-1:]] > 0, logits, -mx.inf)


PROCESSORS: dict[str, Callable[[], list[Processor]]] = {
    "bias": lambda: [preference],
    "grammar": lambda: [grammar],
    "repetition": lambda: make_logits_processors(repetition_penalty=4.0, repetition_context_size=2),
    "all": lambda: [
        *make_logits_processors(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        preference,
        grammar,
    ],
}


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(
    ("kind", "sampling", "draft_length", "draws"),
    [
        ("dflash", HOT, "block 3", DRAWS),
        ("dflash-near", FILTERED, "auto", DRAWS),
        ("prompt-lookup", HOT, "block 3", DRAWS),
        ("certain", COLD, "block 3", MORE_DRAWS),
    ],
    ids=str,
)
def test_three_tokens_have_the_targets_joint_distribution(
    kind: str, sampling: Sampling, draft_length: str, draws: int
):
    assert_drawn_from(triples(kind, sampling, draft_length, draws), exact(sampling))


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "sampling", "draft_length"),
    [
        ("dflash", HOT, "block 2"),
        ("dflash", FILTERED, "block 4"),
        ("dflash-near", HOT, "block 4"),
        ("dflash-near", Sampling(temperature=1.3, min_p=0.1), "seams"),
        ("dflash2", HOT, "block 3"),
        ("dflash2", COLD, "block 4"),
        ("prompt-lookup", FILTERED, "block 4"),
        ("prompt-lookup+dflash", HOT, "auto"),
        ("autoregressive", Sampling(temperature=0.9, top_k=3), "block 4"),
        ("certain", COLD, "block 4"),
    ],
    ids=str,
)
def test_many_draws_have_the_targets_joint_distribution(kind: str, sampling: Sampling, draft_length: str):
    """Twelve times the draws of the slow cases, so that smaller errors show."""
    assert_drawn_from(triples(kind, sampling, draft_length, MANY_DRAWS, seed=5), exact(sampling))


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize(("kind", "name"), [("dflash", "all"), ("prompt-lookup", "repetition")])
def test_three_tokens_have_the_joint_distribution_that_processors_leave(kind: str, name: str):
    drawn = triples(kind, HOT, "block 3", DRAWS, processors=PROCESSORS[name]())
    left = joint_distribution(small().model, PROMPT, HOT, processors=PROCESSORS[name]())
    assert_drawn_from(drawn, left)
    with pytest.raises(AssertionError):  # the processors make a difference that shows
        assert_drawn_from(drawn, exact(HOT))


def accept_all(draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
    """Wrong: every draft is taken."""
    following = sampler.draw(sampler.distribution(logits)[-1:])
    return mx.concatenate([mx.array([len(draft)], mx.int32), draft.tokens, following])


def residual_from_p(draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
    """Wrong: after a rejection the token is drawn from p instead of max(0, p - q)."""
    p = sampler.distribution(logits)
    packed = pack_sampled(draft, logits, sampler)
    following = sampler.draw(p[packed[0]][None])
    rows = mx.arange(len(draft) + 1)
    return mx.concatenate([packed[:1], mx.where(rows == packed[0], following, packed[1:])])


def drawn_again_after_inequality(draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
    """Wrong: drafts are taken where they equal a draw of the target, and else the target draws once more."""
    p = sampler.distribution(logits)
    hits = (sampler.draw(p[: len(draft)]) == draft.tokens).astype(mx.int32)
    accepted = mx.cumprod(hits).sum()
    following = sampler.draw(p[accepted][None])
    rows = mx.arange(len(draft) + 1)
    tokens = mx.where(rows < accepted, mx.concatenate([draft.tokens, following]), following)
    return mx.concatenate([accepted[None], tokens])


def accept_too_often(draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
    """Wrong: drafts, chosen and not drawn, are taken with 5/4 of their probability."""
    assert draft.q is None
    p = sampler.distribution(logits)
    p_chosen = mx.take_along_axis(p[:-1], draft.tokens[:, None], axis=-1)[:, 0]
    numbers = mx.random.uniform(shape=(len(draft),), key=sampler.key())
    accepted = mx.cumprod((numbers * 0.8 < p_chosen).astype(mx.int32)).sum()
    refused = mx.concatenate([draft.tokens, mx.array([-1], mx.int32)])[accepted]
    following = sampler.draw(mx.where(mx.arange(VOCAB) == refused, 0, p[accepted])[None])
    rows = mx.arange(len(draft) + 1)
    tokens = mx.where(rows < accepted, mx.concatenate([draft.tokens, following]), following)
    return mx.concatenate([accepted[None], tokens])


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(
    ("wrong", "kind", "sampling", "draws"),
    [
        (residual_from_p, "dflash", HOT, DRAWS),
        (accept_all, "dflash", HOT, DRAWS),
        (drawn_again_after_inequality, "dflash", HOT, DRAWS),
        (accept_too_often, "certain", COLD, MORE_DRAWS),
    ],
)
def test_a_wrong_acceptance_fails_the_same_test(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., mx.array], kind: str, sampling: Sampling, draws: int
):
    monkeypatch.setattr(acceptance, "pack_sampled", wrong)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_drawn_from(triples(kind, sampling, "block 3", draws), exact(sampling))


@pytest.mark.slow
def test_a_drafter_near_the_target_is_mostly_confirmed_and_a_random_one_is_not():
    """So the distributions above were reached on both ways, by confirmed drafts and by rejected ones."""
    shares = {}
    for kind in ("dflash", "dflash-near", "autoregressive"):
        target = small()
        steps = text(target, DRAFTERS[kind](target), 150, "block 3")
        rounds = [step.round for step in steps if step.round and step.round.block == 3]
        shares[kind] = sum(item.accepted for item in rounds) / (2 * len(rounds))
    assert shares["autoregressive"] == 1.0  # it is the target itself
    assert shares["dflash"] < 0.6 < shares["dflash-near"] < 1


def text(
    target: Target,
    drafter: Drafter | None,
    count: int,
    draft_length: str,
    sampling: Sampling = HOT,
    seed: int = 2,
) -> list[Step]:
    """One long text after PROMPT."""
    sampler = Sampler(Sampling(**{**vars(sampling), "seed": seed}))
    return list(
        decode(
            target,
            drafter,
            PROMPT,
            max_tokens=count,
            draft_length=CHOICES[draft_length](),
            sampler=sampler,
        )
    )


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def assert_every_token_is_drawn_from_the_target(steps: Sequence[Step], sampling: Sampling, seed: int) -> None:
    """Chi-square on three consecutive tokens' ranks, three bins each, far into a text."""
    tokens, random = tokens_of(steps), tiny.seeded(seed)
    jitter = [random.random() for _ in tokens]
    ranks = uniform_ranks(wandering().model, PROMPT, tokens, sampling, jitter)
    bins = [int(3 * rank) for rank in ranks]
    values = [tuple(bins[at : at + 3]) for at in range(0, len(bins) - 2, 3)]
    cells = list(product(range(3), repeat=3))
    assert_drawn_from(values, dict.fromkeys(cells, 1 / len(cells)))


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("kind", "sampling", "draft_length"),
    [
        ("dflash-near", HOT, "auto"),
        ("prompt-lookup+dflash", FILTERED, "seams"),
        ("prompt-lookup", FILTERED, "auto"),
    ],
    ids=str,
)
def test_long_texts_with_plain_steps_between_blocks_are_drawn_from_the_target(
    kind: str, sampling: Sampling, draft_length: str
):
    steps = text(wandering(), DRAFTERS[kind](wandering()), 480, draft_length, sampling)
    blocks = {step.round.block for step in steps if step.round}
    assert 1 in blocks, "no plain steps"
    assert max(blocks) > 1, "no blocks"
    assert_every_token_is_drawn_from_the_target(steps, sampling, seed=3)


@pytest.mark.slow
def test_a_wrong_acceptance_shows_in_long_texts(monkeypatch: pytest.MonkeyPatch):
    """The finer errors are for the joint distributions above: here they would need far longer texts."""
    monkeypatch.setattr(acceptance, "pack_sampled", accept_all)
    steps = text(wandering(), DRAFTERS["dflash-near"](wandering()), 480, "block 3")
    with pytest.raises(AssertionError, match="chi-square"):
        assert_every_token_is_drawn_from_the_target(steps, HOT, seed=3)


def by_seed(drafter: Drafter | None, draft_length: str, seed: int, count: int = 30) -> list[int]:
    """One text whose tokens are drawn with the numbers of their positions."""
    steps = decode(
        wandering(),
        drafter,
        PROMPT,
        max_tokens=count,
        draft_length=CHOICES[draft_length](),
        sampler=Sampler(replace(HOT, seed=seed), by_position=True),
    )
    return tokens_of(list(steps))


@pytest.mark.sampled(16, 8)
@pytest.mark.parametrize("draft_length", ["block 3", "auto", "seams"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_seed_gives_the_text_of_plain_decoding_however_it_is_drafted(kind: str, draft_length: str):
    plain = by_seed(None, "plain", 5)
    assert by_seed(DRAFTERS[kind](wandering()), draft_length, 5) == plain
    assert by_seed(DRAFTERS[kind](wandering()), draft_length, 6) != plain


def test_texts_of_many_seeds_are_distributed_as_the_target():
    with Session(small(), PromptLookup(), headroom=4) as session:
        drawn = [
            tuple(
                tokens_of(
                    list(
                        decode(
                            small(),
                            session.drafter,
                            PROMPT,
                            max_tokens=3,
                            sampler=Sampler(replace(HOT, seed=seed), by_position=True),
                            draft_length=FixedDraftLength(3),
                            session=session,
                        )
                    )
                )
            )
            for seed in range(DRAWS)
        ]
    assert_drawn_from(drawn, exact(HOT))


@pytest.mark.slow
def test_plain_decoding_draws_from_the_target_too():
    steps = text(wandering(), None, 480, "plain")
    assert_every_token_is_drawn_from_the_target(steps, HOT, seed=3)


EVERY = [(kind, draft_length) for kind in DRAFTERS for draft_length in CHOICES if draft_length != "plain"]


@pytest.mark.sampled(0, 32)
@pytest.mark.parametrize(("kind", "draft_length"), EVERY)
def test_every_drafter_at_every_pace_has_the_joint_distribution(kind: str, draft_length: str):
    sampling = (HOT, FILTERED)[EVERY.index((kind, draft_length)) % 2]
    assert_drawn_from(triples(kind, sampling, draft_length, 1500, seed=8), exact(sampling))


@pytest.mark.sampled(0, 20)
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "prompt-lookup", "autoregressive"])
def test_every_processor_leaves_its_joint_distribution(kind: str, name: str):
    drawn = triples(kind, FILTERED, "seams", 1500, processors=PROCESSORS[name](), seed=9)
    left = joint_distribution(small().model, PROMPT, FILTERED, processors=PROCESSORS[name]())
    assert_drawn_from(drawn, left)
