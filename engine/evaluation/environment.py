"""What a report says about the machine, the versions and the source that ran. Starts no other program."""

import ctypes
import hashlib
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.loading import ModelCard
from engine.runtime import Runtime

PACKAGE = Path(__file__).resolve().parent.parent
SWAP_COUNTERS = ("pswpin", "pswpout")


class SwapWatch:
    """Whether the machine swaps between making this object and asking."""

    def __init__(self) -> None:
        self._before = _swapped_pages()

    def swapping(self) -> bool | None:
        """Pages went to or came from swap meanwhile; None where the system does not say."""
        now = _swapped_pages()
        return None if now is None or self._before is None else now > self._before


def describe(runtime: Runtime, swap: SwapWatch, models: dict[str, ModelCard]) -> dict[str, Any]:
    """The ``environment`` block of a report."""
    return {
        "machine": platform.machine() or "unknown",
        "system": platform.system() or "unknown",
        "os_release": platform.release() or "unknown",
        "chip": _chip(),
        "cpu_count": os.cpu_count() or 1,
        "memory_bytes": _memory(),
        "metal": runtime.metal,
        "device": runtime.device,
        "blas": runtime.blas.name,
        "power_source": _power(),
        "thermal_state": "unknown" if sys.platform == "darwin" else "not_applicable",
        "swapping": swap.swapping(),
        "versions": {
            "python": platform.python_version(),
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
            "kakeya": _own_version(),
        },
        "git": {"sha": _git_sha(), "dirty": None, "source_sha256": source_digest()},
        "models": {role: asdict(card) for role, card in models.items()},
    }


def source_digest() -> str:
    """sha256 over the engine's own Python files: lines ``<sha256>  <path>`` in path order."""
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(PACKAGE).as_posix()}\n"
        for file in sorted(PACKAGE.rglob("*.py"))
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _own_version() -> str:
    try:
        return version("kakeya-mac")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "uninstalled"


def _chip() -> str:
    """The processor's name: mlx knows it on a Mac, /proc/cpuinfo on Linux."""
    if mx.metal.is_available():
        return str(mx.device_info().get("device_name", "unknown"))
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip() or "unknown"
    except OSError:
        pass
    return platform.processor() or "unknown"


def _memory() -> int:
    if sys.platform == "darwin":
        size = ctypes.c_uint64()
        length = ctypes.c_size_t(ctypes.sizeof(size))
        ctypes.CDLL(None).sysctlbyname(b"hw.memsize", ctypes.byref(size), ctypes.byref(length), None, 0)
        return int(size.value)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _power() -> str:
    """``ac``, ``battery``, ``not_applicable`` without a battery, ``unknown`` where only macOS could tell."""
    if sys.platform == "darwin":
        return "unknown"
    batteries = [
        supply
        for supply in Path("/sys/class/power_supply").glob("*")
        if _line(supply / "type") == "Battery" and _line(supply / "scope") != "Device"
    ]
    if not batteries:
        return "not_applicable"
    return "battery" if any(_line(supply / "status") == "Discharging" for supply in batteries) else "ac"


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _swapped_pages() -> int | None:
    try:
        rows = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return sum(int(value) for name, value in rows if name in SWAP_COUNTERS)
    except (OSError, ValueError):
        return None


def _git_sha() -> str | None:
    """The commit of the checkout this package lies in, read from git's own files; None outside one."""
    dot_git = PACKAGE.parent / ".git"
    try:
        if dot_git.is_file():  # a linked work tree
            dot_git = (PACKAGE.parent / dot_git.read_text().partition("gitdir:")[2].strip()).resolve()
        head = (dot_git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head or None
        reference = head.removeprefix("ref: ")
        shared = _line(dot_git / "commondir")
        for folder in (dot_git, (dot_git / shared).resolve()):
            if sha := _line(folder / reference):
                return sha
            for line in _line(folder / "packed-refs").splitlines():
                if line.endswith(f" {reference}"):
                    return line.split()[0]
    except OSError:
        pass
    return None
