"""What is read from the machine's own tools, and that nothing is made up where they say nothing."""

import sys

import pytest

from engine.evaluation import strain

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
    assert strain.power_of(printed) == source


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
    assert strain.pressure_of(printed) == state


def test_swapped_pages_are_those_that_went_in_and_out() -> None:
    assert strain.swapped_of(VM_STAT) == 4224
    assert strain.swapped_of("vm_stat: failed") is None


def test_this_machine_says_something_of_the_kind() -> None:
    power, heat = strain.power_source(), strain.thermal_state()
    assert power in {"ac", "battery", "not_applicable"}
    assert heat == "not_applicable" if sys.platform == "linux" else heat in {"nominal", "fair", "serious"}
    assert strain.SwapWatch().swapping() is not None
