"""What a report says about source and machine, its load, and which disturbances the gate rejects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.evidence.gate import judge
from engine.device import prepare
from engine.evaluation import environment
from engine.evaluation.environment import LoadWatch, disturbance
from evidence_format.model import Arm, OtherLoad
from tests.bridge.evidence import reports
from tests.bridge.evidence.rules.speed import block_1


def git(folder: Path, *argv: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ("git", *identity, *argv), cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose package replaces this one."""
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "decode.py").write_text("ONE = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.setattr(environment, "PACKAGE", folder)
    return folder


def describe() -> dict[str, object]:
    block = environment.describe(prepare(), LoadWatch(), {})["git"]
    assert block["source_sha256"] == environment.source_digest(environment.PACKAGE)
    return {name: block[name] for name in ("sha", "dirty")}


def test_what_was_committed_is_clean(package: Path) -> None:
    (package.parent / "report.json").write_text("{}")  # not of the package
    assert describe() == {"sha": git(package, "rev-parse", "HEAD"), "dirty": False}


def test_a_changed_or_new_file_is_dirty(package: Path) -> None:
    changed = package / "decode.py"
    changed.write_text("ONE = 2\n")
    assert describe()["dirty"] is True
    git(package, "checkout", "-q", "--", ".")
    assert describe()["dirty"] is False
    (package / "extra.py").write_text("TWO = 2\n")
    assert describe()["dirty"] is True


@pytest.mark.parametrize("way", ["not-shown", "excluded", "unwatched"])
def test_no_configuration_hides_a_difference(package: Path, way: str) -> None:
    if way == "unwatched":
        git(package, "update-index", "--assume-unchanged", "decode.py")
        (package / "decode.py").write_text("ONE = 2\n")
    else:
        (package / "extra.py").write_text("TWO = 2\n")
    if way == "not-shown":
        git(package, "config", "status.showUntrackedFiles", "no")
    if way == "excluded":
        (package.parent / ".git" / "info" / "exclude").write_text("extra.py\n")
    assert git(package, "status", "--porcelain") == ""
    assert describe()["dirty"] is True


def test_a_replaced_commit_hides_no_difference(package: Path) -> None:
    (package / "decode.py").write_text("ONE = 2\n")
    committed = git(package, "rev-parse", "HEAD")
    git(package, "commit", "-q", "-a", "-m", "two")
    git(package, "replace", committed, "HEAD")
    git(package, "reset", "-q", "--soft", committed)
    assert describe() == {"sha": committed, "dirty": True}


def test_links_and_longer_digests_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "näch ste.py").write_text("ONE = 1\n")
    (folder / "link").symlink_to("näch ste.py")
    git(tmp_path, "init", "-q", "--object-format=sha256")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.setattr(environment, "PACKAGE", folder)
    assert describe()["dirty"] is False
    (folder / "link").unlink()
    (folder / "link").symlink_to("elsewhere")
    assert describe()["dirty"] is True


@pytest.mark.parametrize("started_by", ["fsmonitor", "filter"])
def test_git_configuration_of_a_checkout_starts_nothing(package: Path, started_by: str) -> None:
    mark = package.parent / "started"
    if started_by == "fsmonitor":
        git(package, "config", "core.fsmonitor", f"touch {mark}; false")
    else:
        (package.parent / ".git" / "info" / "attributes").write_text("*.py filter=x\n")
        git(package, "config", "filter.x.clean", f"touch {mark}; cat")
    (package / "decode.py").write_text("TWO = 1\n")  # as long as the committed one
    assert describe()["dirty"] is True
    assert not mark.exists()


def test_a_missing_git_object_is_not_fetched(package: Path) -> None:
    mark = package.parent / "started"
    git(package, "config", "core.repositoryFormatVersion", "1")
    git(package, "config", "extensions.partialClone", "origin")
    git(package, "config", "remote.origin.promisor", "true")
    git(package, "config", "remote.origin.url", str(package.parent))
    git(package, "config", "remote.origin.uploadpack", f"touch {mark}; false")
    tree = git(package, "rev-parse", "HEAD:engine")
    (package.parent / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    assert describe() == {"sha": None, "dirty": None}
    assert not mark.exists()


def test_without_a_checkout_nothing_is_said(package: Path) -> None:
    (package.parent / ".git").rename(package.parent / "elsewhere")
    assert describe() == {"sha": None, "dirty": None}


def test_a_run_that_began_on_battery_was_on_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "power_source", lambda: "battery")
    watch = LoadWatch()
    monkeypatch.setattr(environment, "power_source", lambda: "ac")
    for _ in range(2):  # for the fingerprint of rows, and for the report
        assert environment.describe(prepare(), watch, {})["power_source"] == "battery"


ON_POWER = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=22085731)\t100%; charged; 0:00 remaining present: true
"""
ON_BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=22085731)\t81%; discharging; 6:40 remaining present: true
"""
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               52106.
Compressions:                          98232110.
Swapins:                                    128.
Swapouts:                                  4096.
"""


@pytest.mark.parametrize(
    ("printed", "source"),
    [
        (ON_POWER, "ac"),
        (ON_BATTERY, "battery"),
        ("Now drawing from 'UPS Power'\n", "battery"),
        ("Now drawing from 'AC Power'\n", "not_applicable"),
        ("", "unknown"),
        ("pmset: something else", "unknown"),
    ],
    ids=["ac", "battery", "ups", "desktop", "nothing", "other"],
)
def test_the_power_source_is_what_pmset_says(printed: str, source: str) -> None:
    assert environment.power_of(printed) == source


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ("com.apple.system.thermalpressurelevel 0\n", "nominal"),
        ("com.apple.system.thermalpressurelevel 1\n", "fair"),
        ("com.apple.system.thermalpressurelevel 2\n", "serious"),
        ("com.apple.system.thermalpressurelevel 4\n", "critical"),
        ("com.apple.system.thermalpressurelevel 9\n", "unknown"),
        ("notifyutil: failed", "unknown"),
    ],
    ids=["0", "1", "2", "4", "9", "failed"],
)
def test_the_thermal_state_is_the_pressure_that_was_notified(printed: str, state: str) -> None:
    assert environment.pressure_of(printed) == state


def test_swapped_bytes_are_the_pages_that_went_in_and_out() -> None:
    assert environment.swapped_of(VM_STAT) == 4224 * 16384
    assert environment.swapped_of("vm_stat: failed") is None


@pytest.mark.parametrize(
    ("meanwhile", "swapping"),
    [(4096, False), (64 * 2**20, False), (64 * 2**20 + 4096, True), (None, None)],
    ids=["a-page", "64-mib", "more", "unknown"],
)
def test_a_few_swapped_pages_are_no_swapping(
    meanwhile: int | None, swapping: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = iter([2**30, None if meanwhile is None else 2**30 + meanwhile])
    monkeypatch.setattr(environment, "swapped_bytes", lambda: next(read))
    assert environment.LoadWatch().conditions()["swapping"] is swapping


@pytest.mark.parametrize(
    ("read", "worst"),
    [
        (["battery", "ac"], "battery"),
        (["ac", "battery", "ac"], "battery"),
        (["ac", "unknown"], "unknown"),
        (["ac", "ac"], "ac"),
    ],
    ids=["plugged-in", "unplugged-between", "once-unknown", "always-ac"],
)
def test_the_power_source_is_the_worst_that_was_read(
    read: list[str], worst: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter(read)
    monkeypatch.setattr(environment, "power_source", lambda: next(readings))
    watch = environment.LoadWatch()
    assert [watch.conditions()["power_source"] for _ in read[1:]][-1] == worst


@pytest.mark.parametrize(
    ("read", "worst"),
    [(["serious", "nominal"], "serious"), (["unknown", "fair"], "unknown"), (["nominal", "fair"], "fair")],
    ids=["cooled", "once-unknown", "warmed"],
)
def test_the_thermal_state_is_the_worst_that_was_read(
    read: list[str], worst: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter(read)
    monkeypatch.setattr(environment, "thermal_state", lambda: next(readings))
    assert environment.LoadWatch().conditions()["thermal_state"] == worst


def test_conditions_of_this_machine_are_known() -> None:
    found = environment.LoadWatch().conditions()
    assert found["power_source"] in {"ac", "battery", "not_applicable"}
    heat = found["thermal_state"]
    assert heat == "not_applicable" if sys.platform == "linux" else heat in {"nominal", "fair", "serious"}
    assert found["swapping"] is not None


PS = """  0:01.25 mds
 12:00.50 mds_stores
  0:02.00 mdworker_shared
1-00:00:01.0 photoanalysisd
  0:10.00 notmds
  0:03.00 Some App
"""


def test_services_are_found_by_their_processes() -> None:
    assert environment.services_of(PS) == {"spotlight": 723.75, "time_machine": 0.0, "photos": 86401.0}
    assert environment.services_of("") == {"spotlight": 0.0, "time_machine": 0.0, "photos": 0.0}


@pytest.mark.parametrize(
    ("load", "busy"),
    [
        (OtherLoad(seconds=10, other_cpu_share=0.10, services={}), False),
        (OtherLoad(seconds=10, other_cpu_share=0.11, services={}), True),
        (OtherLoad(seconds=10, other_cpu_share=0.0, services={"spotlight": 1.0}), False),
        (OtherLoad(seconds=10, other_cpu_share=0.0, services={"spotlight": 1.1}), True),
        (OtherLoad(seconds=0, other_cpu_share=None, services={}), False),
    ],
)
def test_a_machine_is_busy_above_the_limits(load: OtherLoad, busy: bool) -> None:
    assert (environment.busy(load) is not None) is busy


def test_the_load_of_the_timing_is_kept() -> None:
    watch = environment.LoadWatch()
    with watch.timing():
        pass
    kept = watch.timed_load
    assert kept.seconds < 1
    assert watch.timed_load == kept


SPREADS = {"SPEEDUP_PREFILL_SPREAD", "SPEEDUP_DECODE_SPREAD"}
SLOW = {"BASELINE_SLOW"}


def rejected(document: dict[str, Any], codes: set[str] = SPREADS) -> bool:
    judgement = judge(json.dumps(document).encode())
    return bool(codes & {violation.code for violation in judgement.violations})


def arms_of(document: dict[str, Any], rows: int | None = None) -> list[Arm]:
    arms = [Arm.model_validate(arm, strict=False) for arm in document["arms"]]
    return [arm.model_copy(update={"samples": arm.samples[:rows]}) for arm in arms]


def test_a_steady_measurement_is_steady():
    assert disturbance(arms_of(reports.throughput())) is None
    assert disturbance(arms_of(reports.throughput(), 1)) is None


def test_steps_of_a_looping_text_disturb_nothing():
    document = reports.throughput()
    block_1(document, 0.002)
    assert disturbance(arms_of(document)) is not None
    for sample in document["arms"][0]["samples"]:
        sample["tokens"] = [7] * len(sample["tokens"])  # in a measurement, texts of all arms loop alike
    assert disturbance(arms_of(document)) is None


@pytest.mark.slow
@given(
    row=st.integers(0, 7),
    arm=st.integers(0, 1),
    stage=st.sampled_from(["prefill_s", "decode_s"]),
    factor=st.floats(0.5, 12.0),
    prompt_tokens=st.sampled_from([60, 66, 70, 300]),
)
def test_the_gate_and_the_measurement_agree(
    row: int, arm: int, stage: str, factor: float, prompt_tokens: int
):
    document = reports.throughput()
    for part in document["arms"]:
        part["samples"][row]["prompt_tokens"] = prompt_tokens
    sample = document["arms"][arm]["samples"][row]
    sample[stage] = round(sample[stage] * factor, 7)
    assert (disturbance(arms_of(document)) is not None) == rejected(reports.settle(document), SPREADS | SLOW)


@pytest.mark.slow
@given(seconds=st.floats(0.001, 0.004), disturbed=st.integers(0, 8), factor=st.floats(1.0, 2.9))
def test_gate_and_measurement_find_a_slow_baseline(seconds: float, disturbed: int, factor: float):
    document = reports.throughput()
    block_1(document, seconds)
    for sample in document["arms"][0]["samples"][:disturbed]:
        sample["decode_s"] = round(sample["decode_s"] * factor, 7)
    assert (disturbance(arms_of(document)) is not None) == rejected(reports.settle(document), SPREADS | SLOW)
    assert disturbance(arms_of(document, 4)) == disturbance(arms_of(document, 4)[:2])
