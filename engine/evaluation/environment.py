"""What a report says about the machine, the versions and the source that ran, and what disturbed the timing.

What a system does not say is ``unknown`` (or None), never a guess.
"""

import ctypes
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache, make_prompt_cache

from engine.child import printed_by
from engine.device import Runtime
from engine.target.loading import LoadedTarget
from evidence_format import claims
from evidence_format.figures import Case
from evidence_format.model import (
    CUT_LOOPS,
    Arm,
    CacheLayer,
    Model,
    OtherLoad,
    Report,
    ReportClaim,
)
from evidence_format.rules.claims import baseline_slow, speedup_decode_spread, speedup_prefill_spread
from evidence_format.weights import source_digest

PACKAGE = Path(__file__).resolve().parent.parent
MOST_SWAPPED = 64 * 2**20  # bytes in an evaluation; any process's page counts, and a few are always swapped
# notifyutil's number of com.apple.system.thermalpressurelevel, from OSThermalNotification.h
PRESSURES = {0: "nominal", 1: "fair", 2: "serious", 3: "critical", 4: "critical"}
# From the best to the worst; an unknown state may be worse than a harmless one.
POWER = ("not_applicable", "ac", "unknown", "battery")
HEAT = ("not_applicable", "nominal", "fair", "unknown", "serious", "critical")
SETTLE_S = 1.0  # seconds over which an idle machine is watched
# macOS starts these by itself, and they keep disks, memory or the neural engine busy.
SERVICES = {
    "spotlight": ("mds", "mds_stores", "mdworker", "mdworker_shared"),
    "time_machine": ("backupd", "backupd-helper"),
    "photos": ("photoanalysisd", "mediaanalysisd", "photolibraryd"),
}


def describe(runtime: Runtime, watch: "LoadWatch", models: Mapping[str, Model]) -> dict[str, Any]:
    """The ``environment`` block of a report; ``watch`` was created before the work, models are by role."""
    return {
        "machine": platform.machine() or "unknown",
        "system": platform.system() or "unknown",
        "os_release": platform.release() or "unknown",
        "chip": _chip(),
        "cpu_count": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "metal": runtime.metal,
        "device": runtime.device,
        "blas": runtime.blas.name,
        **watch.conditions(),
        "load": watch.timed_load.model_dump(),
        "versions": {
            "python": platform.python_version(),
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
            "kakeya": version("kakeya-mac"),
        },
        "git": _git() | {"source_sha256": source_digest(PACKAGE)},
        "models": {role: card.model_dump() for role, card in models.items()},
    }


def target_card(target: LoadedTarget) -> Model:
    """The card of a target, with its vocabulary and the caches it makes for itself."""
    layers = tuple(_cache_layers(target.target.model))
    return target.card.model_copy(update={"vocab_size": target.target.vocab_size, "cache_layers": layers})


def _cache_layers(model: Any) -> Iterator[CacheLayer]:
    """What each cache keeps per position, from the shapes that one token leaves; nothing is computed."""
    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    for cache in caches:
        keys = None if isinstance(cache, (ArraysCache, CacheList)) else cache.keys
        if keys is None:
            yield CacheLayer(kind="other", values=0, window=None)
            continue
        values = keys.shape[1] * keys.shape[3] + cache.values.shape[1] * cache.values.shape[3]
        window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        yield CacheLayer(kind="full" if window is None else "sliding", values=values, window=window)


def _chip() -> str:
    """The processor's name, by the same source as the runner's: sysctl on a Mac, /proc/cpuinfo on Linux."""
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string") or platform.machine()
    found = re.search(r"^model name.*?: *(.*)$", content(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.machine() or "unknown"


def sysctl(name: str) -> str:
    """A text of macOS's kernel; empty where it has none of that name."""
    text = ctypes.create_string_buffer(256)
    length = ctypes.c_size_t(len(text))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), text, ctypes.byref(length), None, 0)
    return "" if failed else text.value.decode("utf-8", "replace").strip()


def _git() -> dict[str, Any]:
    """The commit of the checkout that holds this package, and whether the package differs from it."""
    # git only names digests; files are read here, so that no configuration of it runs or hides a difference
    sha = _git_output("rev-parse", "--verify", "HEAD") if (PACKAGE.parent / ".git").exists() else None
    listed = sha and _git_output("ls-tree", "-r", "-z", sha.strip(), "--", ".")
    if sha is None or listed is None:
        return {"sha": None, "dirty": None}
    rows = (row.partition("\t") for row in listed.split("\0") if row)
    committed = {name: about.rpartition(" ")[2] for about, _, name in rows}  # about: mode, type, digest
    present = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py")}
    changed = any(_blob(PACKAGE / name, len(digest)) != digest for name, digest in committed.items())
    return {"sha": sha.strip(), "dirty": changed or not present <= committed.keys()}


def _git_output(*words: str) -> str | None:
    """What git prints. It fetches no missing object and accepts any owner: this code comes from there."""
    git = ("git", "--no-replace-objects", "-c", "safe.directory=*")
    return printed_by((*git, *words), PACKAGE, {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"})


def _blob(file: Path, digits: int) -> str | None:
    """Git's digest of a file, or of a link's target; None without a file."""
    try:
        data = os.fsencode(os.readlink(file)) if file.is_symlink() else file.read_bytes()
    except OSError:
        return None
    algorithm = "sha256" if digits == hashlib.sha256().digest_size * 2 else "sha1"
    return hashlib.new(algorithm, b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def busy(load: OtherLoad) -> str | None:
    """Why no speed can be measured under this load; None: it can."""
    if load.other_cpu_share is not None and load.other_cpu_share > claims.MOST_OTHER_CPU:
        share, most = load.other_cpu_share, claims.MOST_OTHER_CPU
        return f"other processes used {share:.0%} of the CPU time, more than {most:.0%}"
    for name, seconds in load.services.items():
        if seconds > claims.MOST_SERVICE_CPU * load.seconds:
            return f"{name.replace('_', ' ')} used {seconds:.1f} s of CPU in {load.seconds:.1f} s"
    return None


def _usage() -> tuple[float, float, dict[str, float]]:
    """At this moment: wall seconds, CPU seconds of others on all cores, and those of `SERVICES`."""
    cpu, own = psutil.cpu_times(), os.times()
    # A guest's time is part of `user` on Linux; what the host gave to others is `steal`.
    used = sum(getattr(cpu, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    ours = own.user + own.system + own.children_user + own.children_system
    printed = printed_by(("/bin/ps", "-A", "-c", "-o", "time=,comm=")) if sys.platform == "darwin" else None
    return perf_counter(), used - ours, {} if printed is None else services_of(printed)


def _load_since(start: tuple[float, float, dict[str, float]]) -> OtherLoad:
    (before, others_before, earlier), (now, others, services) = start, _usage()
    seconds = now - before
    available = seconds * (psutil.cpu_count() or 1)
    share = round(min(max((others - others_before) / available, 0.0), 1.0), 4) if seconds > 0 else None
    used = {name: round(max(total - earlier.get(name, 0.0), 0.0), 2) for name, total in services.items()}
    load = {"seconds": round(seconds, 3), "other_cpu_share": share, "services": used}
    return OtherLoad.model_validate(load)


def services_of(printed: str) -> dict[str, float]:
    """CPU seconds of `SERVICES` in what ``ps -A -c -o time=,comm=`` prints: ``0:01.25 mds``."""
    used = dict.fromkeys(SERVICES, 0.0)
    for line in printed.splitlines():
        time, _, command = line.strip().partition(" ")
        days, _, clock = time.rpartition("-")  # [[days-]hours:]minutes:seconds
        for name, commands in SERVICES.items():
            if command.strip() in commands:
                parts = enumerate(reversed(clock.split(":")))
                used[name] += sum(60**place * float(part) for place, part in parts) + 86400 * int(days or 0)
    return used


def idle_load() -> OtherLoad:
    """What the machine does while this process does nothing, over `SETTLE_S`."""
    before = _usage()
    sleep(SETTLE_S)
    return _load_since(before)


class LoadWatch:
    """What disturbs an evaluation from the moment this is created: load, worst power source and heat."""

    def __init__(self) -> None:
        self._swapped = swapped_bytes()
        self._since = _usage()
        self._load: OtherLoad | None = None
        self._power, self._heat = power_source(), thermal_state()

    @contextmanager
    def timing(self) -> Iterator[None]:
        since = _usage()
        yield
        self._load = _load_since(since)

    @property
    def timed_load(self) -> OtherLoad:
        return self._load or _load_since(self._since)

    def conditions(self) -> dict[str, Any]:
        """The worst power source and thermal state so far; more than `MOST_SWAPPED` bytes are swapping."""
        self._power = max(self._power, power_source(), key=POWER.index)
        self._heat = max(self._heat, thermal_state(), key=HEAT.index)
        now, before = swapped_bytes(), self._swapped
        swapping = None if now is None or before is None else now - before > MOST_SWAPPED
        return {"power_source": self._power, "thermal_state": self._heat, "swapping": swapping}


def power_source() -> str:
    """``ac``, ``battery``, ``not_applicable`` without a battery, or ``unknown``."""
    if sys.platform == "darwin":
        return power_of(printed_by(("/usr/bin/pmset", "-g", "batt")) or "")
    statuses = [
        content(supply / "status")
        for supply in Path("/sys/class/power_supply").glob("*")
        if content(supply / "type") == "Battery" and content(supply / "scope") != "Device"
    ]
    if not statuses:
        return "not_applicable"
    return "battery" if "Discharging" in statuses else "ac"


def thermal_state() -> str:
    """``nominal``, ``fair``, ``serious`` or ``critical`` on macOS; ``not_applicable`` elsewhere."""
    if sys.platform != "darwin":
        return "not_applicable"
    notified = ("/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel")
    return pressure_of(printed_by(notified) or "")


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
    return int(size[1]) * sum(map(int, found)) if size and len(found) == 2 else None


def swapped_bytes() -> int | None:
    """Bytes that any process swapped in or out since the system's start; None where it does not say."""
    if sys.platform == "darwin":
        return swapped_of(printed_by(("/usr/bin/vm_stat",)) or "")
    found = re.findall(r"^pswp(?:in|out) (\d+)$", content(Path("/proc/vmstat")), re.MULTILINE)
    return os.sysconf("SC_PAGE_SIZE") * sum(map(int, found)) if found else None


def content(path: Path) -> str:
    """The text of a file of the system; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def disturbance(arms: Sequence[Arm]) -> str | None:
    """Which identical work took very different times so far; None: the machine is steady.

    By the gate's own rules, for an arm under test and a baseline. Only identical work is compared, never the
    ratio of these arms: a measurement never starts over for its result.
    """
    known: dict[str, Any] = {
        "kind": "throughput",
        "arms": tuple(arms),
        "claims": (ReportClaim(name="speedup"),),
        "configuration": {"loops": CUT_LOOPS},
        "environment": SimpleNamespace(models={}),  # the rules below ask for no more
        "parity": None,
        "perplexity": None,
    }
    rules = [speedup_prefill_spread, speedup_decode_spread]
    if len(arms[0].samples) >= claims.FEWEST_SAMPLES:
        rules.append(baseline_slow)
    case = Case(Report.model_construct(**known))
    return next((message for rule in rules for message in rule(case)), None)
