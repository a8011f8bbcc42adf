"""The DFlash drafters at work: what they were drawn from, what they remember, and what they refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from engine.drafters.base import Proposal
from engine.drafters.block import BlockDrafter, drawn_path, likeliest_path
from engine.errors import DrafterMismatchError
from engine.networks.dflash import DFlashConfig
from engine.networks.dflash2 import Candidates, build_network
from engine.sampling import Sampler, Sampling
from engine.target.model import Target
from tests.engine import tiny

SECOND = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}
KINDS = ("dflash", "dflash2")
ROWS = mx.random.normal((1, 200, 96), key=mx.random.key(3))


def drafter_config(kind: str, **changes: Any) -> dict[str, Any]:
    if kind == "dflash2":
        nested = tiny.drafter_config()["dflash_config"] | SECOND
        changes |= {"architectures": ["DFlash2DraftModel"], "dflash_config": nested}
    return tiny.drafter_config(**changes)


def make(kind: str, target: Any, **changes: Any) -> BlockDrafter:
    mx.random.seed(7)
    network = build_network(DFlashConfig.from_dict(drafter_config(kind, **changes)))
    network.update(tree_map(lambda w: 2 * w if w.ndim > 1 else w, network.parameters()))
    drafter = BlockDrafter(network)
    drafter.bind(Target(target))
    return drafter


def observe(drafter: BlockDrafter, first: int, last: int) -> None:
    drafter.observe(range(first, last), ROWS[:, first:last])


def drafts(drafter: BlockDrafter, count: int = 7) -> list[int]:
    return drafter.propose(11, count).tokens.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_is_the_kind_and_all_drafts_asked_for_are_made(kind: str, gemma: Any):
    drafter = make(kind, gemma)
    observe(drafter, 0, 20)
    assert drafter.name == kind
    for count in (1, 2, 7, 15):
        draft = drafter.propose(11, count)
        assert (len(draft), draft.tokens.dtype, draft.q) == (count, mx.int32, None)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_usual_prompt_wait_for_the_first_draft(kind: str, gemma: Any):
    drafter = make(kind, gemma)
    rows = mx.zeros((1, 2000, ROWS.shape[-1]))
    drafter.observe([7] * 2000, rows)
    assert drafter.nbytes == rows.nbytes  # no keys and values were made of them
    draft = drafter.propose(11, 3)
    assert len(draft) == 3
    assert drafter.nbytes != rows.nbytes
    drafter.start()
    for _ in range(3):
        drafter.observe([7] * 2000, rows)
    assert 0 < drafter.nbytes < 3 * rows.nbytes  # memory stays bounded


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_tokens_come_from_q_and_the_seed_repeats_them(kind: str, gemma: Any):
    drafter = make(kind, gemma)
    observe(drafter, 0, 20)
    first, second, other = (
        drafter.propose(11, 7, Sampler(Sampling(temperature=1.5, seed=seed))) for seed in (4, 4, 5)
    )
    assert first.q is not None
    assert second.q is not None
    assert (first.q.shape, first.q.dtype) == ((7, tiny.VOCAB), mx.float32)
    assert np.allclose(np.array(first.q.sum(axis=-1)), 1, atol=1e-5)
    assert (np.array(first.q)[range(7), first.tokens.tolist()] > 0).all()
    assert first.tokens.tolist() == second.tokens.tolist() != other.tokens.tolist()
    # Some kernels round by where in memory their arguments lie.
    assert np.allclose(np.array(first.q), np.array(second.q), rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_tokens_follow_q_at_every_position_given_the_drafts_before(kind: str, gemma: Any):
    """Chi-square of the second draft within each group of equal first drafts, and of the first draft."""
    drafter = make(kind, gemma)
    observe(drafter, 0, 20)
    sampler = Sampler(Sampling(temperature=1.0, top_k=4, seed=1))
    pairs: Counter[tuple[int, int]] = Counter()
    q: dict[int, np.ndarray] = {}
    rounds = 600
    for _ in range(rounds):
        draft = drafter.propose(11, 2, sampler)
        a, b = draft.tokens.tolist()
        pairs[a, b] += 1
        rows = np.array(draft.q)
        assert np.allclose(q.setdefault(-1, rows[0]), rows[0], atol=1e-6)
        assert np.allclose(q.setdefault(a, rows[1]), rows[1], atol=1e-6), "q must depend on the path alone"
    expected = {
        (a, b): rounds * q[-1][a] * q[a][b]
        for a in np.flatnonzero(q[-1])
        if a in q
        for b in np.flatnonzero(q[a])
    }
    assert set(pairs) <= {(int(a), int(b)) for a, b in expected}
    large = {pair: value for pair, value in expected.items() if value >= 5}
    assert len(large) >= 4
    statistic = sum((pairs[int(a), int(b)] - value) ** 2 / value for (a, b), value in large.items())
    degrees = len(large)
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def test_a_path_is_walked_step_by_step():
    """Against the plain loop, on random scores."""
    n, k, vocabulary = 9, 5, 40
    rng = np.random.default_rng(0)
    tokens = np.stack([rng.permutation(vocabulary)[:k] for _ in range(n)]).astype(np.int32)
    scores = rng.normal(size=(n, k, k)).astype(np.float32)
    scores[0] = scores[0, 0]
    expected, before = [], 0
    for position in range(n):
        before = int(scores[position, before].argmax())
        expected.append(int(tokens[position, before]))
    candidates = Candidates(mx.array(tokens), mx.array(scores))
    assert likeliest_path(candidates).tokens.tolist() == expected
    cold = drawn_path(candidates, Sampler(Sampling(temperature=1e-3, seed=0)), vocabulary)
    assert cold.tokens.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 6, 30])
def test_rewinding_is_as_if_the_rows_had_never_been_seen(kind: str, count: int, gemma: Any):
    rewound, straight = make(kind, gemma), make(kind, gemma)
    for drafter, last in ((rewound, 120), (straight, 120 - count)):
        observe(drafter, 0, 60)
        drafter.propose(3, 7)
        observe(drafter, 60, min(110, last))
        drafter.propose(5, 7)
        if last > 110:
            observe(drafter, 110, last)  # these wait for the next draft
    assert rewound.rewind(count)
    assert rewound.rewind(0)
    assert drafts(rewound) == drafts(straight)
    observe(rewound, 120 - count, 130)
    observe(straight, 120 - count, 130)
    assert drafts(rewound) == drafts(straight)


def test_a_rewind_that_cannot_be_leaves_the_drafter_as_it_was(gemma: Any):
    drafter, same = make("dflash", gemma), make("dflash", gemma)
    for each in (drafter, same):
        observe(each, 0, 190)
        each.propose(3, 7)
        observe(each, 190, 195)
    assert not drafter.rewind(100)  # more than the sliding layer keeps in reserve
    assert not drafter.rewind(196)
    assert drafts(drafter) == drafts(same)


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_shares_weights_and_nothing_else(kind: str, gemma: Any):
    drafter, fresh = make(kind, gemma), make(kind, gemma)
    observe(drafter, 0, 50)
    twin = drafter.twin()
    for each in (twin, fresh):
        observe(each, 50, 70)
    assert twin.network is drafter.network
    assert drafts(twin) == drafts(fresh)
    assert drafter.nbytes == ROWS[:, :50].nbytes  # its own rows still wait


def test_a_drafter_for_another_target_is_refused_by_name(gemma: Any):
    with pytest.raises(DrafterMismatchError, match="hidden size 64 in the drafter, 32 in the target"):
        make("dflash2", gemma, hidden_size=64)
    with pytest.raises(DrafterMismatchError, match="vocabulary 320"):
        make("dflash", gemma, vocab_size=320)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", [False, True])
def test_propose_reads_nothing_back(kind: str, draws: bool, gemma: Any):
    """While mlx traces a function, reading any value that depends on its arguments is an error."""
    drafter = make(kind, gemma, layer_types=["full_attention"] * 2)
    sampler = Sampler(Sampling(temperature=0.8, top_p=0.9, seed=2)) if draws else None

    def propose(rows: mx.array) -> mx.array:
        drafter.start()
        drafter.observe(range(24), rows)
        return drafter.propose(11, 7, sampler).tokens

    def peeking(rows: mx.array) -> mx.array:
        return propose(rows + rows.sum().item())

    rows = ROWS[:, :24]
    assert max(mx.compile(propose)(rows).tolist()) < tiny.VOCAB
    with pytest.raises(ValueError, match="eval"):
        mx.compile(peeking)(rows)


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}], ids=str
)
def test_several_sequences_draft_together_what_each_drafts_alone(gemma: Any, changes: dict[str, Any]):
    """Contexts of different lengths, some long, and blocks of different lengths, round after round."""
    first = make("dflash", gemma, **changes)
    together = [first, *(first.twin() for _ in range(3))]
    alone = [drafter.twin() for drafter in together]
    sampler = Sampler(Sampling(temperature=1.0, seed=4))
    seen = [5, 90, 1, 17]
    for drafter, other, length in zip(together, alone, seen, strict=True):
        observe(drafter, 0, length)
        observe(other, 0, length)
    for turn in range(3):
        asked = [
            Proposal(drafter, 11 + index, 3 + index, sampler if index == 2 else None)
            for index, drafter in enumerate(together)
        ]
        found = first.propose_together(asked)
        for index, (draft, other) in enumerate(zip(found, alone, strict=True)):
            own = other.propose(11 + index, 3 + index, sampler if index == 2 else None)
            assert len(draft) == 3 + index
            if draft.q is not None and own.q is not None:
                assert mx.allclose(draft.q, own.q, atol=1e-5)
            else:
                assert draft.tokens.tolist() == own.tokens.tolist()
        for index, pair in enumerate(zip(together, alone, strict=True)):
            for drafter in pair:
                observe(drafter, seen[index], seen[index] + index + turn)
            seen[index] += index + turn
    assert [drafter.forwards for drafter in together] == [3] * 4
