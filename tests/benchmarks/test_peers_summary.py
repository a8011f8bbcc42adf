"""Rows from samples: totals, medians over repetitions, ratios within a repetition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from peerbench.engines.base import Batch, Simple
from peerbench.measure import Case, Run, Sample, Setting, clocked, measure
from peerbench.script import Script
from peerbench.summary import summarise, table

from engine.decode import Round

PLAIN = Setting("mlx-lm plain", 1, "oracle")
OURS = Setting("kakeya", 8, "oracle")


def sample(
    setting: Setting,
    repetition: int,
    timed: int,
    seconds: float,
    same: bool = True,
    rounds: Sequence[Round] = (),
) -> Sample:
    return Sample(setting, repetition, "random", Run([0] * (timed + 1), timed, seconds, list(rounds)), same)


def test_ratios_are_computed_per_repetition_then_their_median() -> None:
    samples = [
        *(sample(PLAIN, 0, 100, 1.0), sample(OURS, 0, 100, 0.5)),  # 2
        *(sample(PLAIN, 1, 100, 4.0), sample(OURS, 1, 100, 1.0)),  # 4, on a machine four times slower
        *(sample(PLAIN, 2, 100, 1.0), sample(OURS, 2, 100, 0.2)),  # 5
    ]
    (row,) = summarise(samples, "tiny", PLAIN)
    assert (row["engine"], row["size"], row["block"], row["mode"]) == ("kakeya", "tiny", 8, "oracle")
    assert (row["ratio_to_plain"], row["ratio_least"], row["ratio_greatest"]) == (4.0, 2.0, 5.0)
    assert row["ratio_of_best"] == pytest.approx(5.0)
    assert row["identical"] is True


def test_prompts_of_a_repetition_count_as_total_tokens_over_total_time() -> None:
    samples = [sample(PLAIN, 0, 10, 1.0), sample(PLAIN, 0, 90, 1.0), sample(OURS, 0, 100, 1.0)]
    (row,) = summarise(samples, "demo", PLAIN)
    assert row["ratio_to_plain"] == pytest.approx(2.0)


def test_an_earlier_commit_is_compared_prompt_by_prompt() -> None:
    earlier = Setting("kakeya-earlier", 8, "oracle")
    pairs = [(1.0, 1.0), (4.0, 2.0), (9.0, 3.0)]  # seconds before, and now: the machine gets slower
    samples = [sample(PLAIN, 0, 10, 1.0)]
    samples += [
        sample(setting, 0, 10, s) for pair in pairs for setting, s in zip((earlier, OURS), pair, strict=True)
    ]
    rows = {row["engine"]: row for row in summarise(samples, "tiny", PLAIN)}
    assert rows["kakeya"]["ratio_to_earlier"] == 2.0
    assert "ratio_to_earlier" not in rows["kakeya-earlier"]
    assert "2.000 × earlier" in table(list(rows.values()))


def test_one_prompt_with_other_tokens_makes_the_row_not_identical() -> None:
    samples = [sample(PLAIN, 0, 10, 1.0), sample(OURS, 0, 10, 1.0), sample(OURS, 0, 10, 1.0, same=False)]
    (row,) = summarise(samples, "tiny", PLAIN)
    assert row["identical"] is False
    assert "NO" in table([row])


def test_stages_and_the_share_of_their_limit_come_from_the_rounds() -> None:
    rounds = [Round(8, 7, 0.01, 0.03), Round(8, 7, 0.01, 0.03), Round(4, 3, 0.001, 0.001)]
    samples = [sample(PLAIN, 0, 10, 1.0), sample(OURS, 0, 20, 0.11, rounds=rounds)]
    (row,) = summarise(samples, "tiny", PLAIN)
    assert (row["draft_s"], row["verify_s"]) == (0.01, 0.03)  # whole blocks only
    assert row["tokens_per_round"] == pytest.approx(20 / 3)
    assert row["outside_s"] == pytest.approx((0.11 - 0.082) / 3)
    assert row["share_of_limit"] == pytest.approx(20 / 0.11 * 0.04 / 8)


def test_without_a_baseline_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(ValueError, match="baseline was not measured"):
        summarise([sample(OURS, 0, 10, 1.0)], "tiny", PLAIN)


def test_tokens_of_the_first_batch_are_not_timed() -> None:
    run = clocked(iter([Batch([1, 2, 3]), Batch([4]), Batch([5, 6], Round(2, 1, 0.0, 0.0))]))
    assert (run.tokens, run.timed, len(run.rounds)) == ([1, 2, 3, 4, 5, 6], 3, 1)
    assert run.seconds > 0


@pytest.mark.slow
def test_arms_alternate_and_each_repetition_starts_with_another() -> None:
    calls: list[str] = []

    def arm(name: str) -> Simple:
        def generate(prompt: Sequence[int], max_tokens: int, script: Script | None) -> Iterator[Batch]:
            calls.append(name)
            yield from (Batch([token]) for token in (1, 2 if name != "b" else 3))

        return Simple(generate)

    arms = {Setting(name, 4, "plain"): arm(name) for name in "abc"}
    samples = measure(arms, [Case("code", [9], [1, 2], None)], 2, 3, lambda *_: None)
    assert calls == [*"abc", *"abc", *"bca", *"cab"]  # once each to warm up, then the turns
    assert {s.setting.engine for s in samples if not s.identical} == {"b"}
    assert len(samples) == 9
