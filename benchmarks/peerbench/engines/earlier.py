"""This engine at an earlier commit, in the same process as today's, for ``peers.py --against COMMIT``.

The commit's packages are unpacked into a temporary folder under other names, so that both versions can be
imported. Its own ``ours.py`` says how it is run.
"""

from __future__ import annotations

import importlib
import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from peerbench.engines.base import Arm, MissingEngineError, World

ROOT = Path(__file__).resolve().parents[3]
SUFFIX = "_earlier"
IMPORTS = re.compile(r"^(\s*(?:from|import) )(engine|evidence_format)\b", re.MULTILINE)


def unpack(commit: str, folder: Path) -> None:
    """Write the commit's packages into the folder and make them importable.

    Raises:
        MissingEngineError: git has no such commit here.
    """
    names = ("engine", "evidence_format", "benchmarks/peerbench/engines/ours.py")
    command = ["git", "-C", str(ROOT), "archive", commit, *names]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode:
        reason = archive.stderr.decode(errors="replace").strip()
        raise MissingEngineError(f"--against {commit} cannot be read: {reason}; give a commit of this clone")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(folder, filter="data")
    for package in ("engine", "evidence_format"):
        (folder / package).rename(folder / f"{package}{SUFFIX}")
    (folder / names[2]).rename(folder / f"ours{SUFFIX}.py")
    for path in folder.rglob("*.py"):
        path.write_text(IMPORTS.sub(rf"\1\2{SUFFIX}", path.read_text(encoding="utf-8")), encoding="utf-8")
    sys.path.append(str(folder))


class Earlier:
    """The engine of the commit that was unpacked."""

    def __init__(self, world: World) -> None:
        module: Any = importlib.import_module(f"ours{SUFFIX}")
        loading = sys.modules[module.load_drafter.__module__]
        self._engine = module.Kakeya(World(world.folders, loading.load_target(world.folders.target)))

    def arm(self, block: int | str) -> Arm:
        """See `Engine.arm`."""
        arm: Arm = self._engine.arm(block)
        return arm
