"""`auto` on Metal's published costs, as `benchmarks/draft_length.py` replays them."""

from __future__ import annotations

import pytest
from draft_length import CHANCES, DRAFTING, METAL, Drafting, replay, tokens_of, verify_cost


def test_costs_are_those_published_and_linear_between():
    assert [verify_cost(rows) for rows in METAL] == pytest.approx(list(METAL.values()))
    assert verify_cost(5) == pytest.approx((1.47 + 2.07) / 2)
    assert verify_cost(12) == pytest.approx(2.69 + 4 * 0.31)


def test_a_round_emits_what_its_chances_say():
    assert tokens_of(1, 0.9) == 1
    assert tokens_of(3, 0.5) == pytest.approx(1.75)


@pytest.mark.slow
@pytest.mark.parametrize("drafting", DRAFTING, ids=lambda drafting: drafting.name)
@pytest.mark.parametrize("chance", CHANCES)
def test_the_lengths_chosen_are_as_good_as_the_best(drafting: Drafting, chance: float):
    row = replay(drafting, chance)
    assert row.of_used > 0.89, row
    assert row.of_best > 0.93, row
    assert row.of_plain > 0.99, row


def test_with_free_drafts_it_picks_the_published_optimum():
    rows = [replay(DRAFTING[0], chance, sequences=10) for chance in (0.0, 0.5, 0.7, 0.9)]
    assert [row.best for row in rows] == [row.used for row in rows] == [1, 2, 3, 4]


def test_a_drafter_slower_than_its_target_costs_next_to_nothing():
    row = replay(DRAFTING[-1], 0.95, sequences=10)
    assert (row.best, row.used) == (1, 1)
    assert row.of_plain > 0.99
