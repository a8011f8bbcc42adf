"""What on the machine disturbs a timing: a battery, heat, and swapping.

Linux tells in files, macOS by its own tools `pmset`, `notifyutil` and `vm_stat`, which any user may call.
What a system does not tell is ``unknown`` (or None), never a guess.
"""

import os
import re
import sys
from pathlib import Path

from engine.child import printed_by

SWAP_COUNTERS = ("pswpin", "pswpout")
MOST_SWAPPED = 64 * 2**20  # bytes in an evaluation; any process's page counts, and a few always go
# notifyutil's number of com.apple.system.thermalpressurelevel, from OSThermalNotification.h
PRESSURES = {0: "nominal", 1: "fair", 2: "serious", 3: "critical", 4: "critical"}
# From the best to the worst; what nobody says may be worse than what is harmless.
POWER = ("not_applicable", "ac", "unknown", "battery")
HEAT = ("not_applicable", "nominal", "fair", "unknown", "serious", "critical")


class StrainWatch:
    """What disturbs an evaluation, from making this object to the last time of asking.

    Power source and heat are read when it is made and whenever it is asked; the worst of them counts.
    """

    def __init__(self) -> None:
        self._swapped = swapped_bytes()
        self._power, self._heat = power_source(), thermal_state()

    def power_source(self) -> str:
        """The worst so far, one of `POWER`."""
        self._power = max(self._power, power_source(), key=POWER.index)
        return self._power

    def thermal_state(self) -> str:
        """The worst so far, one of `HEAT`."""
        self._heat = max(self._heat, thermal_state(), key=HEAT.index)
        return self._heat

    def swapping(self) -> bool | None:
        """More than `MOST_SWAPPED` went to or came from swap; None where the system does not say."""
        now = swapped_bytes()
        return None if now is None or self._swapped is None else now - self._swapped > MOST_SWAPPED


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
    """Bytes swapped since the start in what ``vm_stat`` prints: the lines Swapins and Swapouts, in pages."""
    size = re.search(r"page size of (\d+) bytes", printed)
    found = re.findall(r"^Swap(?:ins|outs):\s+(\d+)\.?$", printed, re.MULTILINE)
    return int(size[1]) * sum(map(int, found)) if size and len(found) == len(SWAP_COUNTERS) else None


def swapped_bytes() -> int | None:
    """Bytes that any process swapped in or out since the system's start; None where it does not say."""
    if sys.platform == "darwin":
        return swapped_of(printed_by(("/usr/bin/vm_stat",)) or "")
    try:
        rows = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        pages = sum(int(value) for name, value in rows if name in SWAP_COUNTERS)
    except (OSError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
