"""The controller against simulated machines: no clock, costs and acceptance are given."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import mlx.core as mx
import pytest

from engine.draft_length import (
    FORWARD_TRIALS,
    PLAIN_TRIALS,
    REMEASURE_AFTER,
    TRIALS,
    AdaptiveDraftLength,
    Ask,
    DraftLength,
    FixedDraftLength,
)
from engine.drafters.base import Draft, NetworkDrafter
from engine.evaluation.calibration import Calibration
from tests.engine.batches import drafter_of
from tests.engine.tiny import seeded


def simulate(
    draft_length: DraftLength,
    cost: Callable[[int], float],
    chance: Callable[[int], float],
    tokens: int,
    seed: int = 0,
) -> tuple[float, list[int]]:
    """Decode one sequence; chance(n) is the chance of a draft after n tokens. Seconds and blocks used."""
    random, done, seconds, blocks = seeded(seed), 0, 0.0, []
    draft_length.start()
    while done < tokens:
        block = draft_length.choose(tokens - done)
        assert 1 <= block <= min(tokens - done, draft_length.largest)
        accepted = 0
        while accepted < block - 1 and random.random() < chance(done):
            accepted += 1
        draft_length.record(block, accepted, cost(block))
        seconds += cost(block)
        done += accepted + 1
        blocks.append(block)
    return seconds, blocks


def cheap(block: int) -> float:
    """A device on which a block of 8 costs twice a single token."""
    return 1.0 if block == 1 else 1.2 + 0.1 * block


def linear(block: int) -> float:
    """A device on which every token of a block costs the same, and drafting a little more."""
    return 1.0 if block == 1 else 1.0 * block + 0.4


def linear_then_costly(block: int) -> float:
    """A device on which blocks of up to 4 cost little and longer ones by their tokens."""
    return 1.0 if block == 1 else max(1.3, 0.5 * block)


def test_with_good_drafts_long_blocks_are_used():
    seconds, blocks = simulate(AdaptiveDraftLength(8), cheap, lambda _: 0.95, 400)
    assert seconds < 0.35 * 400
    assert max(set(blocks), key=blocks.count) in {12, 16}


def test_no_block_is_asked_of_a_head_that_is_longer_than_its_drafts():
    _, blocks = simulate(AdaptiveDraftLength(5, most_drafts=4), cheap, lambda _: 0.95, 400)
    assert max(blocks) == max(set(blocks), key=blocks.count) == 5
    assert AdaptiveDraftLength(5, most_drafts=4).largest > 5, "for look-ups"


def test_with_useless_drafts_it_costs_hardly_more_than_plain_decoding():
    draft_length = AdaptiveDraftLength(8)
    simulate(draft_length, cheap, lambda _: 0.0, 100)
    seconds, blocks = simulate(draft_length, cheap, lambda _: 0.0, 1000)
    assert seconds < 1.02 * 1000
    assert blocks[-1] == 1


def test_where_blocks_cost_as_much_as_their_tokens_it_decodes_plainly_even_with_good_drafts():
    draft_length = AdaptiveDraftLength(8)
    simulate(draft_length, linear, lambda _: 0.9, 100)
    for _ in range(5):
        seconds, blocks = simulate(draft_length, linear, lambda _: 0.9, 96)
        assert seconds < 1.04 * 96
        assert sum(block > 1 for block in blocks) <= 2  # the look at the start of a sequence


def test_it_comes_back_when_drafts_become_good_again():
    draft_length = AdaptiveDraftLength(8)
    simulate(draft_length, cheap, lambda _: 0.0, 100)
    _, blocks = simulate(draft_length, cheap, lambda done: 0.0 if done < 300 else 0.95, 1200)
    assert blocks[60] == 1
    assert sum(block > 1 for block in blocks[-30:]) > 20


def test_plain_steps_are_measured_again_while_blocks_run():
    draft_length = AdaptiveDraftLength(8)
    _, blocks = simulate(draft_length, cheap, lambda _: 0.6, 3000)
    last_plain = len(blocks) - 1 - blocks[::-1].index(1)
    assert max(set(blocks), key=blocks.count) > 1
    assert last_plain > len(blocks) - REMEASURE_AFTER - 5


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
def test_blocks_stay_within_twice_what_the_drafter_was_made_for(block_size: int):
    draft_length = AdaptiveDraftLength(block_size)
    assert all(2 <= block <= 2 * block_size for block in draft_length.blocks)
    _, blocks = simulate(draft_length, cheap, lambda _: 0.9, 200)
    assert max(blocks) <= 2 * block_size


def test_a_fixed_block_shrinks_only_at_the_end():
    draft_length = FixedDraftLength(8)
    assert [draft_length.choose(remaining) for remaining in (100, 8, 7, 1)] == [8, 8, 7, 1]


def test_calibration_measures_every_block_and_plain_steps():
    draft_length = AdaptiveDraftLength(8)
    _, blocks = simulate(Calibration(draft_length), cheap, lambda _: 0.0, 60)
    counts = {block: blocks.count(block) for block in (*draft_length.blocks, 1)}
    assert all(counts[block] >= TRIALS + 1 for block in draft_length.blocks)
    assert counts[1] >= PLAIN_TRIALS + 1
    assert all(draft_length.cost(block) == pytest.approx(cheap(block)) for block in (*draft_length.blocks, 1))


def work(seed: int, swaying: float) -> float:
    """Seconds on a steady machine of the blocks chosen on one that is so much slower in every third spell."""
    noise, drafts, time, seconds, draft_length = (
        seeded(seed),
        seeded(seed + 1),
        0,
        0.0,
        AdaptiveDraftLength(8),
    )
    for _ in range(60):
        chance, done = noise.choice((0.3, 0.5, 0.65, 0.8, 0.9)), 0
        draft_length.start()
        while done < 128:
            block, accepted = draft_length.choose(128 - done), 0
            while accepted < block - 1 and drafts.random() < chance:
                accepted += 1
            time += 1
            slow = swaying if (time // 60) % 3 == 0 else 1.0
            draft_length.record(block, accepted, cheap(block) * slow * noise.uniform(0.9, 1.1))
            seconds += cheap(block)
            done += accepted + 1
    return seconds


@pytest.mark.slow
def test_a_machine_that_is_slower_now_and_faster_then_does_not_mislead_it():
    steady = sum(work(seed, 1.0) for seed in range(12))
    for swaying in (2.0, 3.0):  # costs averaged over rounds would cost 6 % here
        assert sum(work(seed, swaying) for seed in range(12)) < 1.03 * steady


def test_a_look_up_tells_what_verifying_costs_and_nothing_of_the_network():
    draft_length = AdaptiveDraftLength(8)
    simulate(Calibration(draft_length), cheap, lambda _: 0.8, 400)
    before = draft_length.cost(4) / draft_length.cost(8), draft_length.expected(8)
    for _ in range(200):
        draft_length.choose(1000)
        draft_length.record(4, 3, cheap(4), looked_up=True)
    assert (draft_length.cost(4) / draft_length.cost(8), draft_length.expected(8)) == pytest.approx(before)


def test_short_sequences_are_not_cut_for_the_sake_of_measuring():
    draft_length, blocks = AdaptiveDraftLength(8), []
    for seed in range(300):
        blocks += simulate(draft_length, linear_then_costly, lambda _: 0.7, 10, seed)[1]
    assert sum(block > 4 for block in blocks[100:]) < 0.15 * len(blocks[100:])


def test_a_length_that_the_drafter_never_fills_is_asked_for_only_now_and_then():
    draft_length, asked = AdaptiveDraftLength(8), []
    for _ in range(400):
        asked.append(draft_length.choose(1000))
        block = min(asked[-1], 8)  # nothing longer is ever proposed
        draft_length.record(block, min(block - 1, 3), cheap(block))
    assert sum(block > 8 for block in asked[100:]) < 30


def test_what_is_read_first_counts_as_a_cost_of_the_sequence():
    draft_length = AdaptiveDraftLength(8, forwards=lambda count: count)
    simulate(draft_length, cheap, lambda _: 0.8, 400)
    unread, drafter = 1000, Certain(unread=1000)
    draft_length.start()
    draft_length.note_backlog([Ask(drafter, 0, 200)])
    draft_length.record(4, 3, cheap(4) + 100.0, 100.0)  # it has read them: 0.1 plain steps each
    worth = 300  # tokens whose saving pays for reading so much
    for remaining, pays in ((worth // 4, False), (worth * 4, True)):
        draft_length.start()
        draft_length.note_backlog([Ask(drafter, 0, remaining)])
        assert (draft_length.choose(remaining) > 1) == pays, (unread, remaining)


class Certain(NetworkDrafter):
    """A drafter whose drafts are all zeros; its forward takes no time, what it must read is said."""

    name, target_layers, block_size, nbytes, forwards = "certain", (), 8, 0, 0

    def __init__(self, unread: int) -> None:
        self._unread, self.tried = unread, 0

    @property
    def backlog(self) -> int:
        return self._unread

    def try_forward(self) -> None:
        self.tried += 1

    def propose(self, bonus: int, count: int, sampler: object = None) -> Draft:
        raise AssertionError("it was asked for drafts")


def test_a_drafter_slower_than_its_target_never_reads_the_prompt():
    """A forward of one token tells: every draft would take longer than a plain step."""
    draft_length, drafter = AdaptiveDraftLength(8, forwards=lambda count: count), Certain(unread=500)
    for _ in range(30):
        draft_length.start()
        for _ in range(8):
            draft_length.choose(90)
            draft_length.record(1, 0, 1e-9)  # less than any forward
        (draft,) = draft_length.drafts([Ask(drafter, 0, 90)], 16)
        assert not len(draft)
    assert drafter.tried == FORWARD_TRIALS


@pytest.mark.parametrize("slow", [1, 2])
def test_drafts_that_once_took_long_do_not_end_drafting(slow: int):
    """The first draft may compile kernels, and any may wait for another process."""
    draft_length, seen = AdaptiveDraftLength(8), 0
    tried = Calibration(draft_length)
    for _ in range(400):
        block = tried.choose(1000)
        drafting = 0.2 if block > 1 else 0.0
        seen += block > 1
        if seen == slow and block > 1:
            drafting = 500.0
        tried.record(block, block - 1, cheap(block) + drafting, drafting)
    assert tried.choose(1000) > 4


def test_short_sequences_teach_it_too():
    draft_length, random = AdaptiveDraftLength(8), seeded(6)
    for seed in range(300):
        simulate(draft_length, cheap, lambda _: 0.8, random.randrange(1, 40), seed)
    used = (1, *(block for block in draft_length.blocks if block <= 8))
    ratios = [draft_length.cost(block) / draft_length.cost(8) for block in used]
    assert ratios == pytest.approx([cheap(block) / cheap(8) for block in used], rel=0.03)


@pytest.mark.parametrize(("chance", "wanted"), [(0.9, {8, 12, 16}), (0.7, {3, 4, 6, 8}), (0.1, {1})])
def test_look_ups_are_cut_where_they_stop_paying(chance: float, wanted: set[int]):
    draft_length = AdaptiveDraftLength(8, forwards=lambda _: 0)
    simulate(Calibration(draft_length), cheap, lambda _: 0.8, 400)
    ask, blocks = Ask(Found(Draft(mx.array([0] * 15, mx.int32), None, (chance,) * 15)), 0, 200), []
    for _ in range(200):
        (draft,) = draft_length.drafts([ask], 16)
        blocks.append(block := 1 + len(draft))
        draft_length.record(block, block - 1, cheap(block), looked_up=True)
    assert max(set(blocks), key=blocks.count) in wanted
    assert draft_length.has_lookup([ask]) == (wanted != {1})


class Found(Certain):
    """A drafter whose look-up is given."""

    def __init__(self, found: Draft) -> None:
        super().__init__(0)
        self._found = found

    def look_up(self, bonus: int, count: int) -> Draft:
        return self._found.first(count)


def test_block_at_the_end_of_a_text_may_be_of_any_length():
    draft_length = AdaptiveDraftLength(8)
    simulate(draft_length, cheap, lambda _: 0.8, 60)
    for block in range(2, draft_length.largest + 1):
        draft_length.record(block, 1, 1.5, 0.2)
    assert draft_length.choose(64) in (1, *draft_length.blocks)


def test_what_one_has_learnt_does_not_keep_the_drafter_that_it_learnt_with():
    """Nor its keys and values: the server keeps one for each kind of request."""
    drafter = drafter_of("dflash", "llama")
    draft_length, gone = AdaptiveDraftLength.of(drafter), weakref.ref(drafter)
    del drafter
    assert gone() is None
    assert draft_length.largest > 1


def test_with_a_margin_blocks_are_used_where_they_promise_that_much_more_than_plain_steps():
    """At these costs and chances the best block makes some 1.4 times the tokens of plain steps."""
    shares = {}
    for margin in (1.0, 1.2, 2.0):
        _, blocks = simulate(AdaptiveDraftLength(8, margin=margin), cheap, lambda _: 0.7, 600)
        shares[margin] = sum(block > 1 for block in blocks) / len(blocks)
    assert shares[1.0] > 0.6
    assert shares[1.2] > 0.4
    assert shares[2.0] < 0.1
