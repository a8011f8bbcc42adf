"""What a report says about the machine, the versions and the source that ran."""

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

from engine.child import printed_by
from engine.evaluation.strain import SwapWatch, power_source, thermal_state
from engine.loading import ModelCard
from engine.runtime import Runtime

PACKAGE = Path(__file__).resolve().parent.parent


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
        "power_source": power_source(),
        "thermal_state": thermal_state(),
        "swapping": swap.swapping(),
        "versions": {
            "python": platform.python_version(),
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
            "kakeya": _own_version(),
        },
        "git": _git() | {"source_sha256": source_digest()},
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


def _git() -> dict[str, Any]:
    """The commit of the checkout that holds this package, and whether the package differs from it.

    Both None outside a checkout, and where git itself cannot be run.
    """
    none = {"sha": None, "dirty": None}
    if not (PACKAGE.parent / ".git").exists():
        return none
    # Whoever owns the checkout, this code comes from it; what its configuration could start is switched off.
    switches = ("safe.directory=*", "core.fsmonitor=false", "core.hooksPath=/dev/null")
    git = ("git", "--no-optional-locks", *(part for switch in switches for part in ("-c", switch)))
    sha = printed_by((*git, "rev-parse", "--verify", "HEAD"), PACKAGE)
    changed = printed_by((*git, "status", "--porcelain", "--", "."), PACKAGE)
    return none if sha is None or changed is None else {"sha": sha.strip(), "dirty": bool(changed)}
