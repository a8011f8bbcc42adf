"""Drawn text is distributed as the target's own, whatever is drafted; greedy text obeys processors; seeds repeat.

The distribution of three tokens is compared with its exact enumeration on a model of four tokens, and long
texts with the model's distribution at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from engine import accept
from engine import decode as loop
from engine.cache.transaction import new_caches
from engine.config import Options, open_engine
from engine.decode import Processor, Step, decode
from engine.drafters.autoregressive import Autoregressive
from engine.drafters.base import Draft, Drafter
from engine.drafters.block import BlockDrafter
from engine.drafters.lookup_first import LookupFirst
from engine.drafters.prompt_lookup import PromptLookup
from engine.evaluation.prompts import encode, load_prompts
from engine.networks.dflash2 import build_network
from engine.networks.dflash_config import DFlashConfig
from engine.pace import Adaptive, Fixed, Pace
from engine.sampling import Sampler, Sampling
from engine.session import Session
from engine.target import Target
from tests.engine import families, tiny
from tests.engine.statistics import assert_drawn_from, joint_distribution, uniform_ranks

VOCAB = 4
SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPT = [0, 1, 2, 3, 1, 0, 2, 1]  # every token has a successor to look up
HOT, FILTERED = Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.9)
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 3}


@cache
def small() -> Target:
    """Four tokens, two layers: every continuation of three tokens has a chance worth counting."""
    return Target(tiny.build("llama", seed=3, num_hidden_layers=2, intermediate_size=32, **SMALL))


@cache
def wandering() -> Target:
    """Twelve tokens and a window of eight, for long texts."""
    return Target(tiny.build("gemma3_text", seed=4, vocab_size=12))


def dflash(target: Target, kind: str = "dflash", **nested: Any) -> BlockDrafter:
    """A network of random weights; a small ``output_multiplier`` makes its q nearly even, and so near p."""
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


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "dflash": dflash,
    "dflash-near": partial(dflash, output_multiplier=0.3),
    "dflash2": partial(dflash, kind="dflash2"),
    "prompt-lookup": lambda target: PromptLookup(),
    "autoregressive": lambda target: Autoregressive(target, block_size=4),
    "prompt-lookup+dflash": lambda target: LookupFirst(dflash(target), shortest=2),
}


class Seams:
    """A pace that crosses every seam between plain steps and blocks."""

    largest = 4

    def __init__(self, seed: int = 0) -> None:
        self._random = tiny.seeded(seed)

    def start(self) -> None:
        pass

    def choose(self, remaining: int) -> int:
        return min(self._random.choice((1, 1, 2, 3, 4)), remaining)

    def record(self, block: int, accepted: int, seconds: float) -> None:
        pass


def triples(
    kind: str,
    sampling: Sampling,
    pace: Pace,
    draws: int,
    *,
    processors: Sequence[Processor] = (),
    seed: int = 1,
) -> list[tuple[int, ...]]:
    """The first three tokens after PROMPT, drawn again and again in one session."""
    target = small()
    sampler = Sampler(Sampling(**{**vars(sampling), "seed": seed}))
    drawn = []
    with Session(target, DRAFTERS[kind](target), headroom=4) as session:
        for _ in range(draws):
            tokens: list[int] = []
            for step in decode(
                target,
                session.drafter,
                PROMPT,
                max_tokens=5,
                sampler=sampler,
                pace=pace,
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
    "repetition": lambda: make_logits_processors(repetition_penalty=1.7, repetition_context_size=5),
    "all": lambda: [
        *make_logits_processors(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        preference,
        grammar,
    ],
}


@pytest.mark.parametrize(
    ("kind", "sampling", "pace"),
    [
        ("dflash", HOT, Fixed(3)),
        ("dflash-near", HOT, Fixed(4)),
        ("dflash-near", FILTERED, Seams()),
        ("dflash2", HOT, Fixed(3)),
        ("prompt-lookup", HOT, Fixed(3)),
        ("autoregressive", FILTERED, Fixed(2)),
    ],
    ids=str,
)
def test_three_tokens_have_the_targets_joint_distribution(kind: str, sampling: Sampling, pace: Pace):
    assert_drawn_from(triples(kind, sampling, pace, 300), exact(sampling))


@pytest.mark.parametrize(("kind", "name"), [("dflash", "all"), ("prompt-lookup", "repetition")])
def test_three_tokens_have_the_joint_distribution_that_processors_leave(kind: str, name: str):
    drawn = triples(kind, HOT, Fixed(3), 300, processors=PROCESSORS[name]())
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
    packed = accept.pack_sampled(draft, logits, sampler)
    following = sampler.draw(p[packed[0]][None])
    rows = mx.arange(len(draft) + 1)
    return mx.concatenate([packed[:1], mx.where(rows == packed[0], following, packed[1:])])


def greedy_drafts_as_drawn(draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
    """Wrong: drawn tokens are treated as if they had been certain."""
    return accept.pack_sampled(Draft(draft.tokens), logits, sampler)


@pytest.mark.parametrize(
    ("wrong", "draws"), [(accept_all, 300), (residual_from_p, 300), (greedy_drafts_as_drawn, 1200)]
)
def test_a_wrong_acceptance_fails_the_same_test(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., mx.array], draws: int
):
    monkeypatch.setattr(loop, "pack_sampled", wrong)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_drawn_from(triples("dflash", HOT, Fixed(3), draws), exact(HOT))


def test_a_drafter_near_the_target_is_mostly_confirmed_and_a_random_one_is_not():
    """So the distributions above were reached on both ways, by confirmed drafts and by rejected ones."""
    shares = {}
    for kind in ("dflash", "dflash-near", "autoregressive"):
        target = small()
        steps = text(target, DRAFTERS[kind](target), 150, Fixed(3))
        rounds = [step.round for step in steps if step.round and step.round.block == 3]
        shares[kind] = sum(item.accepted for item in rounds) / (2 * len(rounds))
    assert shares["autoregressive"] == 1.0  # it is the target itself
    assert shares["dflash"] < 0.6 < shares["dflash-near"] < 1
