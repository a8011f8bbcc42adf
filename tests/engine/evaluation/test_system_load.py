"""What is read from the machine's own tools, and that nothing is made up where they say nothing."""

import sys

import pytest

from engine.evaluation import environment
from evidence_format.model import OtherLoad

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
