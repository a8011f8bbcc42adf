"""What on the machine disturbs a timing: a battery, heat, and swapping.

Linux tells in files, macOS by its own tools `pmset`, `notifyutil` and `vm_stat`, which any user may call.
What a system does not tell is ``unknown`` (or None), never a guess.
"""

import re
import sys
from pathlib import Path

from engine.child import printed_by

SWAP_COUNTERS = ("pswpin", "pswpout")
# notifyutil's number of com.apple.system.thermalpressurelevel, from OSThermalNotification.h
PRESSURES = {0: "nominal", 1: "fair", 2: "serious", 3: "critical", 4: "critical"}


class SwapWatch:
    """Whether the machine swaps between making this object and asking."""

    def __init__(self) -> None:
        self._before = _swapped_pages()

    def swapping(self) -> bool | None:
        """Pages went to or came from swap meanwhile; None where the system does not say."""
        now = _swapped_pages()
        return None if now is None or self._before is None else now > self._before


def power_source() -> str:
    """``ac``, ``battery``, ``not_applicable`` without a battery, ``unknown`` where nothing says it."""
    if sys.platform == "darwin":
        return power_of(printed_by(("/usr/bin/pmset", "-g", "batt")) or "")
    batteries = [
        supply
        for supply in Path("/sys/class/power_supply").glob("*")
        if _line(supply / "type") == "Battery" and _line(supply / "scope") != "Device"
    ]
    if not batteries:
        return "not_applicable"
    return "battery" if any(_line(supply / "status") == "Discharging" for supply in batteries) else "ac"


def thermal_state() -> str:
    """``nominal``, ``fair``, ``serious`` or ``critical`` on macOS; ``not_applicable`` elsewhere."""
    if sys.platform != "darwin":
        return "not_applicable"
    return pressure_of(
        printed_by(("/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel")) or ""
    )


def power_of(printed: str) -> str:
    """The power source in what ``pmset -g batt`` prints: ``Now drawing from 'AC Power'``."""
    found = re.search(r"drawing from '(AC|Battery|UPS) Power'", printed)
    if found is None:
        return "unknown"
    if found[1] != "AC":
        return "battery"
    return "ac" if "InternalBattery" in printed else "not_applicable"


def pressure_of(printed: str) -> str:
    """The thermal state in what ``notifyutil -g`` prints: the notification's name and its number."""
    found = re.search(r"thermalpressurelevel\s+(\d+)", printed)
    return "unknown" if found is None else PRESSURES.get(int(found[1]), "unknown")


def swapped_of(printed: str) -> int | None:
    """Pages swapped since the start in what ``vm_stat`` prints: the lines Swapins and Swapouts."""
    found = re.findall(r"^Swap(?:ins|outs):\s+(\d+)\.?$", printed, re.MULTILINE)
    return sum(map(int, found)) if len(found) == len(SWAP_COUNTERS) else None


def _swapped_pages() -> int | None:
    if sys.platform == "darwin":
        return swapped_of(printed_by(("/usr/bin/vm_stat",)) or "")
    try:
        rows = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return sum(int(value) for name, value in rows if name in SWAP_COUNTERS)
    except (OSError, ValueError):
        return None


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
