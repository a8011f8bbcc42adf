"""Figures of finished requests over time: what counts, what is a series, exit codes, exports, the plot."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from bridge.bus.requests import Submitted
from bridge.cli.history import history
from bridge.client.series import Figures, Group, Point, Series
from bridge.protocol import refs
from bridge.render.series import EXPORTS, to_svg
from tests.bridge.bus.archives import nonce_of_age, pruned
from tests.bridge.cli.calls import call
from tests.bridge.evidence import reports
from tests.fixtures.bus import RUNNER, BusFixture
from tests.fixtures.repo import Done

TIMES = {"started_at": "2026-03-01T12:00:04Z", "finished_at": "2026-03-01T12:01:06Z"}
METRIC = ("--preset", "throughput", "--metric", "decode_ratio", "--allow-unsigned")
# https://bencher.dev/bmf.json
BMF = {
    "$schema": "http://json-schema.org/draft-07/schema",
    "type": "object",
    "patternProperties": {
        ".+": {
            "type": "object",
            "patternProperties": {
                ".+": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "number"},
                        "lower_value": {"type": "number"},
                        "upper_value": {"type": "number"},
                    },
                    "required": ["value"],
                }
            },
        }
    },
}


def asked(bus: BusFixture, days: float) -> Submitted:
    """A throughput request that many days old."""
    nonce = nonce_of_age(timedelta(days=days))
    place = refs.request_ref("throughput", nonce, None)
    return bus.submit(nonce=nonce, preset="throughput", result_ref=place)


def measured(
    bus: BusFixture, days: float, ratio: float, *, forged: bool = False, **changes: object
) -> Submitted:
    """A throughput request that many days old, whose report says that ratio."""
    submitted = asked(bus, days)
    document = reports.throughput()
    document["request"] |= {"nonce": submitted.nonce, "workload_sha": bus.repo.head()}
    plain, fast = document["arms"]
    for slow, row in zip(plain["samples"], fast["samples"], strict=True):
        row["decode_s"] = round(slow["decode_s"] / ratio, 7)
        row["rounds"] = reports.rounds_for(len(row["tokens"]) - 1, row["decode_s"])
    document["request"]["preset_digest"] = str(changes.get("preset_digest", "56" * 32))
    document = reports.settle(document)
    if forged:
        document["summary"]["comparisons"][0]["decode_ratio"] = 9.0
    files = {"report.json": reports.dump(document)}
    fields: dict[str, object] = {"preset": "throughput", "preset_digest": "56" * 32, **TIMES, **changes}
    data = bus.result(bus.expected(submitted), files, {"report.json": "evidence"}, **fields)
    bus.answer(submitted, result=data, files=files)
    return submitted


Build = Callable[[Sequence[float]], list[Submitted]]


@pytest.fixture
def bus_of(here: BusFixture) -> Build:
    """A bus whose throughput results say some ratios, a day between two, the oldest first."""

    def build(ratios: Sequence[float]) -> list[Submitted]:
        return [measured(here, 40 - day, ratio) for day, ratio in enumerate(ratios)]

    return build


def ask(capsys: pytest.CaptureFixture[str], *args: str) -> Done:
    return call(history, capsys, *METRIC, *args)


@pytest.mark.slow
def test_a_series_is_of_results_that_count_wherever_they_are(
    here: BusFixture, bus_of: Build, capsys: pytest.CaptureFixture[str]
):
    ratios = [2.0, 2.02, 1.98, 2.0, 2.01, 1.99, 1.6, 1.61]
    done = bus_of(ratios)
    forged = measured(here, 20, 3.0, forged=True)
    failed = asked(here, 19)
    verdict = {"status": "failed", "reason": "exit_code"}
    data = here.result(here.expected(failed), {}, preset="throughput", verdict=verdict, **TIMES)
    here.answer(failed, result=data, files={})
    other = measured(here, 18, 1.7, preset_digest="78" * 32)
    here.answer(here.submit())
    assert len(pruned(here, keep=3, older_than=timedelta(days=99)).archived) == 8

    found = ask(capsys, "--regression", "5%", "--runner", RUNNER.name, "--json")
    assert found.code == 4  # a series of one
    assert found.json["status"] == "too_few_results"
    assert found.json["newest"] == other.nonce
    assert "check --preset, -p and --runner" in ask(capsys, "-p", "limit=3").err

    found = ask(capsys, "--json")
    assert found.code == 0, found.err
    newest, series = found.json["series"]
    assert [value["handle"] for value in newest["values"]] == [other.nonce]
    assert [value["handle"] for value in series["values"]] == [each.nonce for each in done]
    assert [value["value"] for value in series["values"]] == pytest.approx(ratios, rel=1e-4)
    assert [value["archived"] for value in series["values"]] == [True] * 8
    assert {value["commit"] for value in series["values"]} == {here.repo.head()}
    assert (series["runner"], series["chip"], series["params"]) == (RUNNER.name, "Apple M4", {})
    assert [left["handle"] for left in found.json["left_out"]] == [failed.nonce, forged.nonce]
    assert found.json["left_out"][0]["reason"] == "failed (exit_code)"
    assert "SUMMARY_MISMATCH" in found.json["left_out"][1]["reason"]
    assert {"series", "left_out"} <= set(found.json["untrusted"])


@pytest.mark.slow
def test_a_threshold_and_a_regression_end_in_1(
    bus_of: Build, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    bus_of([2.0, 2.02, 1.98, 2.0, 1.8, 1.81, 1.8, 1.79, 1.6])
    plot = tmp_path / "plot.svg"
    done = ask(capsys, "--threshold", "ratio>=1.7", "--regression", "5%", "--plot", str(plot))
    assert done.code == 1
    assert "FAILED  threshold: 1.6 against decode_ratio>=1.7" in done.out
    assert "REGRESSION  1.6 is" in done.out
    assert "change of -10" in done.out
    assert ask(capsys, "--threshold", "decode_ratio >= 1.2").code == 0
    assert ask(capsys, "--regression", "50%").code == 0
    assert ask(capsys, "--regression", "5%", "-n", "3").code == 4
    drawn = ElementTree.parse(plot).getroot()  # noqa: S314 - our own
    names = {"s": "http://www.w3.org/2000/svg"}
    assert len(drawn.findall("s:circle", names)) == 9
    assert [line for line in drawn.findall("s:line", names) if line.get("class") == "limit"]
    assert [line for line in drawn.findall("s:line", names) if line.get("class") == "change"]
    assert drawn.find("s:title", names).text == "decode_ratio of throughput"

    args = ("--preset", "throughput", "--allow-unsigned", "--export")
    bmf = json.loads(call(history, capsys, *args, "bmf").out)
    jsonschema.validate(bmf, BMF)
    measures = {name: value for each in bmf.values() for name, value in each.items()}
    assert measures["decode_ratio"] == {"value": pytest.approx(1.6, rel=1e-4)}
    assert {"acceptance_length", "max_resident_bytes", "command_s"} <= measures.keys()
    rows = list(csv.DictReader(io.StringIO(call(history, capsys, *args, "csv").out)))
    lines = [json.loads(line) for line in call(history, capsys, *args, "jsonl").out.splitlines()]
    assert len(rows) == len(lines) >= 9 * 5
    assert [float(row["value"]) for row in rows] == [line["value"] for line in lines]


def test_without_a_trusted_key_nothing_counts_unless_it_is_allowed(
    bus_of: Build, capsys: pytest.CaptureFixture[str]
):
    bus_of([2.0])
    done = call(history, capsys, *METRIC[:-1], "--json")
    assert (done.code, done.json["error"]) == (4, "TooFewResults")
    assert "no trusted key signed it" in done.json["message"]
    assert "runners trust" in done.json["remedy"]
    done = call(history, capsys, "--preset", "throughput", "--metric", "recall", "--allow-unsigned")
    assert done.code == 4
    assert "these have: acceptance_length" in done.err


def test_text_of_others_does_no_harm_in_any_format():
    chip = "M4 <script>alert(1)</script>\x1b[31m\uffff"
    group = Group("throughput", None, "0" * 16, "=cmd()", chip, {"word": "a\nb"}, None, {}, "fast")
    point = Point("20260301t120000z0123456789ab", TIMES["finished_at"], None, None, 2.0, 1.9, 2.1, False)
    series = Series("decode_ratio", group, [point])
    drawn = to_svg([series], None)
    ElementTree.fromstring(drawn)  # noqa: S314 - our own
    assert "<script" not in drawn
    found = Figures({("decode_ratio", group.digest): series})
    for kind in EXPORTS.values():
        assert "\x1b" not in kind(found, ["decode_ratio"])
    [row] = csv.DictReader(io.StringIO(EXPORTS["csv"](found, ["decode_ratio"])))
    assert row["runner"] == "'=cmd()"
    [[measure]] = [each.values() for each in json.loads(EXPORTS["bmf"](found, ["decode_ratio"])).values()]
    assert measure == {"value": 2.0, "lower_value": 1.9, "upper_value": 2.1}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--preset", "throughput", "--threshold", "decode_ratio>=1"), "needs --metric"),
        (("--metric", "recall"), "need --preset"),
        (("--metric", "speed", "--preset", "throughput"), "'recall'"),
        ((*METRIC, "--threshold", "recall>=1"), "the metric is decode_ratio"),
        ((*METRIC, "--threshold", "more"), "no threshold: 'more'"),
        ((*METRIC, "--regression", "0.05"), "write 5%"),
        ((*METRIC, "--status", "passed"), "with the list alone"),
        (("-p", "limit=3"), "with --metric or --export alone"),
        ((*METRIC, "--export", "csv", "--json"), "leave out --json"),
    ],
)
def test_what_cannot_be_meant_ends_in_2(
    here: BusFixture, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], said: str
):
    done = call(history, capsys, *args)
    assert done.code == 2
    assert said in done.err
