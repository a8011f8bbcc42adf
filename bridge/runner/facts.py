"""Facts of the machine and its tools, without importing mlx.

What a job can measure about its own machine stands in its evidence report; this is what the runner knows and
signs for every result, refusals included.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bridge.errors import MachineError
from bridge.presets import Preset
from bridge.process import run_program
from bridge.runner.isolation.enforced import Enforced
from bridge.runner.models import Found

Fact = str | int | float | bool | None
_PROGRAM_S = 10.0


def machine() -> dict[str, Fact]:
    """Platform, chip, memory (bytes), CPUs, Python, and whether Metal can be expected."""
    return {
        "system": platform.system(),
        "os_release": platform.release(),
        "machine": platform.machine(),
        "chip": _chip(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "metal": has_metal(),
        "python": platform.python_version(),
    }


def isolation(enforced: Enforced | None, survivors: int) -> dict[str, Fact]:
    """What the machine enforced around the job, and what it did not (None: nothing was started).

    Args:
        enforced: The means, item by item.
        survivors: Processes of the job that would not die.
    """
    if enforced is None:
        return {}
    return {**{f"isolation_{item}": how for item, how in asdict(enforced).items()}, "survivors": survivors}


def of_models(found: Mapping[str, Found]) -> dict[str, Fact]:
    """Where each model of a job's preset was found, and which shipped model stood in for it."""
    return {f"model:{name}": str(model) for name, model in found.items()}


def tools() -> dict[str, str]:
    """Versions of git and of the packages a job stands on; what is absent is left out."""
    found = {"python": platform.python_version()}
    for name in ("mlx", "mlx-lm", "kakeya-mac"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    git = _first_line("git", "--version")
    if git:
        found["git"] = git.removeprefix("git version ")
    return found


def unfit(preset: Preset) -> str | None:
    """Why this machine cannot run the preset, or None."""
    missing = [name for name in preset.requires.modules if importlib.util.find_spec(name) is None]
    if missing:
        return f"the runner's Python ({sys.executable}) lacks {', '.join(missing)}"
    if preset.requires.metal and not has_metal():
        return f"it needs Metal, and this machine is {platform.system()} {platform.machine()}"
    wanted = preset.requires.memory_gb
    if wanted is not None and memory_bytes() < wanted * 1e9:
        return f"it needs {wanted:g} GB of memory, and this machine has {memory_bytes() / 1e9:.0f} GB"
    return None


def has_metal() -> bool:
    """Whether this is an Apple Silicon Mac."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def memory_bytes() -> int:
    """Physical memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _chip() -> str:
    if sys.platform == "darwin":
        return _first_line("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _first_line(*argv: str) -> str:
    try:
        done = run_program(argv, timeout_s=_PROGRAM_S)
    except MachineError:
        return ""
    return done.stdout.decode("utf-8", "replace").partition("\n")[0].strip() if done.ok else ""
