"""What on the machine disturbs a timing: other processes, a battery, heat, and swapping.

Linux tells in files, macOS by its own tools `pmset`, `notifyutil`, `vm_stat` and `ps`, which any user may
call. What a system does not tell is ``unknown`` (or None), never a guess.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil

from engine.child import printed_by
from evidence_format.claims import MOST_OTHER_CPU, MOST_SERVICE_CPU

SWAP_COUNTERS = ("pswpin", "pswpout")
MOST_SWAPPED = 64 * 2**20  # bytes in an evaluation; any process's page counts, and a few always go
# notifyutil's number of com.apple.system.thermalpressurelevel, from OSThermalNotification.h
PRESSURES = {0: "nominal", 1: "fair", 2: "serious", 3: "critical", 4: "critical"}
# From the best to the worst; what nobody says may be worse than what is harmless.
POWER = ("not_applicable", "ac", "unknown", "battery")
HEAT = ("not_applicable", "nominal", "fair", "unknown", "serious", "critical")


SETTLE_S = 1.0  # seconds over which an idle machine is looked at
# macOS starts these by itself, and they keep disks, memory or the neural engine busy.
SERVICES = {
    "spotlight": ("mds", "mds_stores", "mdworker", "mdworker_shared"),
    "time_machine": ("backupd", "backupd-helper"),
    "photos": ("photoanalysisd", "mediaanalysisd", "photolibraryd"),
}


@dataclass(frozen=True)
class Load:
    """What else a machine did.

    Attributes:
        seconds: wall time watched.
        other_cpu_share: CPU time of other processes, and of other machines on the same host where the system
            counts it, as a share of what all cores had; None where no time passed.
        services: CPU seconds of macOS services that start by themselves; empty elsewhere.
    """

    seconds: float
    other_cpu_share: float | None
    services: dict[str, float]

    @property
    def busy(self) -> str | None:
        """Why no speed can be measured beside this load; None: it can."""
        if self.other_cpu_share is not None and self.other_cpu_share > MOST_OTHER_CPU:
            return (
                f"other processes used {self.other_cpu_share:.0%} of the CPU time, more than "
                f"{MOST_OTHER_CPU:.0%}"
            )
        for name, seconds in self.services.items():
            if seconds > MOST_SERVICE_CPU * self.seconds:
                return f"{name.replace('_', ' ')} used {seconds:.1f} s of CPU in {self.seconds:.1f} s"
        return None


@dataclass(frozen=True)
class _Usage:
    """Counters at one moment; seconds."""

    wall: float
    busy: float  # of all cores, since the system's start
    own: float  # of this process and its children
    services: dict[str, float]

    @classmethod
    def now(cls) -> "_Usage":
        cpu, own = psutil.cpu_times(), os.times()
        # A guest's time is part of `user` on Linux; what the host gave to others is `steal`.
        fields = ("user", "nice", "system", "irq", "softirq", "steal")
        busy = sum(getattr(cpu, name, 0.0) for name in fields)
        return cls(
            perf_counter(),
            busy,
            own.user + own.system + own.children_user + own.children_system,
            _services(),
        )

    def until(self, later: "_Usage") -> Load:
        """What happened between two moments."""
        seconds = later.wall - self.wall
        available = seconds * (psutil.cpu_count() or 1)
        other = (later.busy - self.busy) - (later.own - self.own)
        share = min(max(other / available, 0.0), 1.0) if seconds > 0 else None
        services = {
            name: round(max(used - self.services.get(name, 0.0), 0.0), 2)
            for name, used in later.services.items()
        }
        return Load(round(seconds, 3), None if share is None else round(share, 4), services)


def _services() -> dict[str, float]:
    """CPU seconds of `SERVICES`; empty where there are none or nothing says it."""
    if sys.platform != "darwin":
        return {}
    printed = printed_by(("/bin/ps", "-A", "-c", "-o", "time=,comm="))
    return {} if printed is None else services_of(printed)


def services_of(printed: str) -> dict[str, float]:
    """CPU seconds of `SERVICES` in what ``ps -A -c -o time=,comm=`` prints: ``0:01.25 mds``."""
    used = dict.fromkeys(SERVICES, 0.0)
    for line in printed.splitlines():
        time, _, command = line.strip().partition(" ")
        for name, commands in SERVICES.items():
            if command.strip() in commands:
                used[name] += _cpu_seconds(time)
    return used


def _cpu_seconds(text: str) -> float:
    """Seconds of ``[[days-]hours:]minutes:seconds``."""
    days, _, rest = text.rpartition("-")
    seconds = 0.0
    for part in rest.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds + 86400 * int(days or 0)


def idle_load() -> Load:
    """What the machine does while this process does nothing, over `SETTLE_S`."""
    before = _Usage.now()
    sleep(SETTLE_S)
    return before.until(_Usage.now())


class StrainWatch:
    """What disturbs an evaluation, from making this object to the last time of asking.

    Power source and heat are read when it is made and whenever it is asked; the worst of them counts. The
    load is that of the whole time, or of `timing` alone where that was entered.
    """

    def __init__(self) -> None:
        self._swapped = swapped_bytes()
        self._since = _Usage.now()
        self._load: Load | None = None
        self._power, self._heat = power_source(), thermal_state()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Watch the load while the rows are timed, and no longer."""
        since = _Usage.now()
        yield
        self._load = since.until(_Usage.now())

    @property
    def timed_load(self) -> Load:
        """The load of `timing`, or so far."""
        return self._load or self._since.until(_Usage.now())

    def load(self) -> dict[str, Any]:
        """The ``load`` of a report's environment."""
        return asdict(self.timed_load)

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
