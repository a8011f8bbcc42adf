"""The shoot-out of KV policies on the shipped pair: its arms, its rows, and what it must show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge.evidence.gate import judge
from engine.cache.policy import parse_policy
from engine.cli.tables import kv_figures
from engine.config import Engine, Options
from engine.device import prepare
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.haystack import Haystack
from engine.evaluation.journal import Journal
from engine.evaluation.kv import (
    DEPTHS,
    POLICIES,
    KVSwitches,
    arms_of,
    measure_kv,
    open_shootout,
    settled,
    with_controls,
)
from engine.target.loading import SHIPPED_DRAFTER
from tests.engine.evaluation.test_measurements import check, quiet

SMALL = KVSwitches(
    policies=("sink-window:4,64", "affine:4,64", "restored:learned"),
    haystack=Haystack(200, (0.5,), 1),
    answer_tokens=6,
    speed_limit=1,
    max_tokens=12,
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_shootout(settled(Options(compiled=False)))


@pytest.fixture(scope="module")
def document(engine: Engine) -> dict[str, Any]:
    switches = replace(SMALL, claim_bytes=("affine:4,64=200000",))
    return check(measure_kv(engine, switches, prepare(), progress=quiet))


def rows_of(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    [arm] = [arm for arm in document["arms"] if arm["name"] == name]
    return arm["samples"]


@pytest.mark.slow
def test_shootout_arms_are_oracle_baseline_policies_controls(document: dict[str, Any]):
    arms = [(arm["name"], arm["role"], arm["control"]) for arm in document["arms"]]
    assert arms == [
        ("oracle", "oracle", None),
        ("native", "baseline", None),
        ("sink-window:4,64@all", "sut", None),
        ("affine:4,64@all", "sut", None),
        ("restored:learned:4,64@full", "sut", None),
        ("restored:exact:4,64@full", "control", "exact"),
        ("restored:noise:4,64@full", "control", "noise"),
        ("no_needle", "control", "no_needle"),
    ]
    for arm in document["arms"][2:-1]:
        system = arm["system"]
        assert (system["kv"], system["drafter"], system["block"]) == (arm["name"], "dflash", "8")
        source = arm["name"].split(":")[1] if arm["name"].startswith("restored") else None
        assert system["restoration"] == source
    assert document["claims"] == [
        {"name": "resident_bytes", "arm": "affine:4,64@all", "at_most": 200_000},
        {"name": "restoration", "arm": "restored:learned:4,64@full"},
    ]
    assert set(document["environment"]["models"]) == {"target", "drafter", "projector"}


@pytest.mark.slow
def test_its_report_is_accepted(document: dict[str, Any]):
    assert judge(json.dumps(document).encode()).violations == ()


@pytest.mark.slow
def test_every_arm_runs_every_prompt_in_turn(document: dict[str, Any]):
    names = [arm["name"] for arm in document["arms"]]
    prompts = ["needle-200-0.5-001", "code-001"]
    assert [tuple(pair) for pair in document["order"]] == [
        (name, prompt)
        for turn, prompt in enumerate(prompts)
        for name in (names if turn % 2 == 0 else reversed(names))
    ]
    for arm in document["arms"]:
        asked, longer = arm["samples"]
        assert len(asked["tokens"]) <= 6 < len(longer["tokens"]) <= 12
        assert asked["needle"]["prompt_contains_needle"] is (arm["name"] != "no_needle")
        assert "needle" not in longer


@pytest.mark.slow
def test_rows_have_held_bytes_and_distortion(document: dict[str, Any]):
    assert not any("kv" in row for name in ("oracle", "native") for row in rows_of(document, name))
    for row in rows_of(document, "affine:4,64@all"):
        assert 8 * row["kv"]["bytes"] == 5 * row["kv"]["values"]
        assert 0 < row["kv"]["key_distortion"] < 0.05
    for row in rows_of(document, "sink-window:4,64@all"):
        assert 8 * row["kv"]["bytes"] == 32 * row["kv"]["values"]
        assert row["kv"]["bytes"] < row["cache"]["resident_bytes"]
        assert 0.1 < row["kv"]["value_distortion"] < 1
    exact, noise = (rows_of(document, f"restored:{name}:4,64@full") for name in ("exact", "noise"))
    assert all(row["kv"]["key_distortion"] < 1e-9 and row["restored_positions"] > 0 for row in exact)
    assert all(row["kv"]["key_distortion"] > 0.5 for row in noise)
    native = rows_of(document, "native")
    assert [row["tokens"] for row in exact] == [row["tokens"] for row in native]
    assert [row["tokens"] for row in rows_of(document, "oracle")] == [row["tokens"] for row in native]


@pytest.mark.slow
def test_the_lines_of_the_table_are_the_reports_figures(document: dict[str, Any]):
    lines = {line["policy"]: line for line in kv_figures(document)}
    assert list(lines) == [arm["name"] for arm in document["arms"][1:-1]]
    native, summary = lines["native"], document["summary"]["arms"]
    assert (native["stored_bits_per_value"], native["key_distortion"]) == (32, 0)
    assert native["decode_relative_to_native"] == 1
    for name, line in lines.items():
        assert line["recall"] == summary[name]["recall"]
        assert line["acceptance_length"] == summary[name]["acceptance_length"]
        assert line["max_resident_bytes"] == max(
            row["cache"]["resident_bytes"] for row in rows_of(document, name)
        )
    [ratio] = [each for each in document["summary"]["comparisons"] if each["arm"] == "affine:4,64@all"]
    assert lines["affine:4,64@all"]["decode_relative_to_native"] == pytest.approx(ratio["decode_ratio"])


@pytest.mark.slow
def test_an_interrupted_shootout_resumes(engine: Engine, tmp_path: Path):
    needles = Haystack(120, (0.5,), 2)
    switches = replace(SMALL, policies=("affine:4,64@full",), haystack=needles, speed_prompts="none")

    def run(progress: Any) -> dict[str, Any]:
        journal = Journal(tmp_path / "kv.jsonl")
        try:
            return check(measure_kv(engine, switches, prepare(), progress=progress, journal=journal))
        finally:
            journal.close()

    def interrupted(done: int, total: int, phase: str, detail: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)
    document = run(quiet)
    assert document["configuration"]["resumed"] == 3
    assert len(document["order"]) == 8
    assert judge(json.dumps(document).encode()).violations == ()


def controls(*specs: str) -> dict[str, str | None]:
    found = with_controls([parse_policy(spec) for spec in specs])
    return {policy.spec: control for policy, control in found.items()}


def test_a_learned_source_is_tested_others_are_controls():
    assert controls("affine", "restored:zeros:4,32", "restored:learned:4,32") == {
        "affine:4,64@all": None,
        "restored:learned:4,32@full": None,
        "restored:zeros:4,32@full": "zeros",
        "restored:exact:4,32@full": "exact",
        "restored:noise:4,32@full": "noise",
    }


@pytest.mark.parametrize("source", ["learned", "exact", "zeros", "noise"])
def test_a_source_alone_gets_the_controls_it_lacks(source: str):
    found = controls(f"restored:{source}")
    assert found.pop(f"restored:{source}:4,64@full") is None
    assert found == {f"restored:{name}:4,64@full": name for name in ("exact", "noise") if name != source}


def test_restorations_of_different_windows_have_own_controls():
    found = controls("restored:learned:4,32", "restored:exact:4,64")
    assert list(found.values()).count(None) == 2
    assert found["restored:noise:4,32@full"] == found["restored:noise:4,64@full"] == "noise"


def test_default_policies_fit_a_report(engine: Engine):
    assert len(arms_of(engine, KVSwitches().parsed)) == 16
    assert {"rotated:5,64@inner:2", "lattice-packed:e8,5"} < set(POLICIES)
    more = [parse_policy(f"sink-window:4,{window}") for window in range(100, 118)]
    with pytest.raises(ConfigurationError, match="34 arms"):
        arms_of(engine, [*KVSwitches().parsed, *more])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ()}, "at least one policy"),
        ({"policies": ("affine", "affine:4,64@all")}, "names affine:4,64@all twice"),
        ({"policies": ("native",)}, "native is the baseline"),
        ({"policies": ("afine",)}, "'afine' is none of"),
        ({"claim_parity": ("rotated",), "speed_prompts": "none"}, "none of --policies"),
        ({"claim_parity": ("sink-window",)}, "add --speed-prompts none"),
        ({"claim_bytes": ("rotated=1000",)}, "--claim-bytes rotated:4,64@all: it is none of --policies"),
        ({"claim_bytes": ("sink-window",)}, "write POLICY=BYTES"),
        ({"claim_bytes": ("sink-window=-1",)}, "write POLICY=BYTES"),
        ({"claim_bytes": ("sink-window=0",)}, "write POLICY=BYTES"),
        ({"answer_tokens": 13}, "--answer-tokens 13 is more than --max-tokens 12"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1"),
        ({"speed_limit": 0}, "--speed-limit must be at least 1"),
        ({"haystack": Haystack(0, (0.5,), 1)}, "--context"),
    ],
)
def test_switches_that_make_no_sense_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        replace(SMALL, **changes).check()


def test_shootout_drafts_without_lookups_in_equal_blocks(tmp_path: Path):
    options = settled(Options())
    assert (options.drafter, options.block) == (str(SHIPPED_DRAFTER), "8")
    assert settled(Options(block="4")).block == "4"
    assert settled(Options(model=tmp_path)).drafter == "none"
    assert settled(Options(model=tmp_path)).block == "auto"
    with pytest.raises(ConfigurationError, match="give --policies 'affine' in place of --kv"):
        settled(Options(kv="affine"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ("restored:zeros:4,150",)}, "code-001 has [0-9]+ tokens; 154 are kept"),
        ({"policies": ("sink-window:4,250",)}, "too short"),
        ({"speed_prompts": "retrieval"}, "retrieval-001 has one"),
    ],
)
def test_unfit_shootout_prompts_are_refused(engine: Engine, changes: dict[str, Any], message: str):
    with pytest.raises(PromptError, match=message):
        measure_kv(engine, replace(SMALL, **changes), prepare(), progress=quiet)


@pytest.mark.exhaustive
@pytest.mark.parametrize("per_depth", [2, 4])
def test_what_policies_cost_on_the_shipped_pair(engine: Engine, per_depth: int):
    """The figures of the shoot-out, ten or twenty needles beyond every window."""
    switches = KVSwitches(
        haystack=Haystack(per_depth=per_depth).with_defaults(depths=DEPTHS),
        policies=("sliding-bounded:0,16", "sink-window", "affine:8,64", "restored:learned", "restored:zeros"),
        answer_tokens=8,
        speed_prompts="none",
        claim_parity=("sliding-bounded:0,16",),
    )
    document = check(measure_kv(engine, switches, prepare(), progress=quiet))
    assert judge(json.dumps(document).encode()).violations == ()
    figures = {line["policy"].split("@")[0]: line for line in kv_figures(document)}
    recall = {policy: line["recall"] for policy, line in figures.items()}
    assert recall["native"] >= 0.95
    assert abs(recall["sliding-bounded:0,16"] - recall["native"]) <= 0.02
    bounded = figures["sliding-bounded:0,16"]  # half of the model's own window: something is really lost
    assert bounded["key_distortion"] > 0.4
    assert bounded["max_resident_bytes"] < figures["native"]["max_resident_bytes"]
    assert recall["sink-window:4,64"] <= 0.2
    assert recall["restored:exact:4,64"] == recall["native"]
    assert recall["restored:noise:4,64"] <= 0.1
    assert recall["restored:zeros:4,64"] <= recall["restored:learned:4,64"] <= 1
