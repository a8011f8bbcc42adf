"""Where a benchmark's figures go: one JSON file a benchmark, with the machine and the versions named."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The facts that a timing cannot be read without."""
    chip = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        chip = names[0] if names else chip
    git = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "chip": chip,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "git": git,
    }


def write(name: str, figures: dict[str, Any]) -> Path:
    """Store `figures` as ``results/<name>.json`` and return the path."""
    RESULTS.mkdir(exist_ok=True)
    document = {
        "benchmark": name,
        "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "machine": machine(),
        **figures,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path
