"""Where a benchmark's figures go.

- ``results/``: evidence reports that the gate accepted, the only place for a speed, a recall or a size.
- ``records/``: what the gate has no kind for, such as seconds of git and counts of faults. Claims nothing.
- ``unjudged/``: speeds that no gate can judge (other engines' loops, streams over HTTP). Ignored by git.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, RECORDS, UNJUDGED = HERE / "results", HERE / "records", HERE / "unjudged"
BIN = Path(sys.executable).parent


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
        "load_1m": round(os.getloadavg()[0], 1),  # at the end of the run: was the machine busy?
    }


def write(name: str, figures: dict[str, Any], folder: Path = RECORDS) -> Path:
    """Store `figures` as ``<name>.json`` in a folder and return the path."""
    folder.mkdir(exist_ok=True)
    document = {
        "benchmark": name,
        "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "machine": machine(),
        **figures,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path


def evaluate(name: str, *arguments: str) -> Path:
    """Run ``kakeya_engine eval …``, show what it prints, and store its report if the gate accepts it.

    Returns:
        ``results/<name>.json``.

    Raises:
        SystemExit: The evaluation failed, or the gate rejected the report; nothing is stored then.
    """
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / f"{name}.json"
        command = [str(BIN / "kakeya_engine"), "eval", *arguments, "--report", str(report)]
        subprocess.run(command, check=True)
        gate = subprocess.run([str(BIN / "kakeya_mac"), "gate", str(report)], check=False)
        if gate.returncode != 0:
            raise SystemExit(f"{name}: the gate rejected the report, so it is not stored")
        return Path(shutil.copy(report, RESULTS))
