"""Facts of the machine and its tools, without importing mlx.

What a job can measure about its own machine stands in its evidence report; this is what the runner knows and
signs for every result, refusals included.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bridge import weights
from bridge.errors import MachineError
from bridge.presets import Preset
from bridge.proc import run_program
from bridge.protocol.result import ENGINE_FACT, WEIGHTS_FACT
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


def of_inputs(preset: Preset, found: Mapping[str, Found]) -> dict[str, Fact]:
    """What the job's report must name as what ran: digests of the engine's source and of the models' weights.

    Made by the runner, not by the job, so that a client can hold the one against the other.

    Args:
        preset: What is to run.
        found: Its models on this machine, by name.

    Raises:
        OSError: A file cannot be read.
    """
    digests = {name: weights.digest(model.folder) for name, model in found.items()}
    engine = engine_digest() if preset.argv[0] == "${engine}" else None
    return {
        **({} if engine is None else {ENGINE_FACT: engine}),
        **{WEIGHTS_FACT + name: value for name, value in digests.items() if value is not None},
    }


def engine_digest() -> str | None:
    """sha256 over the installed engine's Python files, as a report has it; None: there is no engine.

    Lines ``<sha256>  <path>`` in path order, found without importing it.
    """
    spec = importlib.util.find_spec("engine")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0]).resolve()
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(package).as_posix()}\n"
        for file in sorted(package.rglob("*.py"))
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


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
