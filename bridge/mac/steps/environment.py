"""The pinned environment: this checkout, installed with every package by version and digest."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from bridge.mac.action import Action, Folder, Remove, Run, Write
from bridge.mac.options import Options
from bridge.mac.step import Look, State, succeeds

# Beside the interpreter's record: which source was installed.
MARK = "installed.sha256"
_RECORD = "from bridge import interpreter as i; i.write(i.record_path(), i.observe())"
_STEADY = "import sys; from bridge.runner.steady import objection; sys.exit(objection() or 0)"


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the prefix, and the record of its interpreter."""

    options: Options
    name: str = "environment"
    stops: bool = True

    @property
    def _mark(self) -> Path:
        return self.options.environment / MARK

    @property
    def _has_source(self) -> bool:
        return (self.options.source / "uv.lock").is_file()

    def look(self) -> Look:
        """Whether what is installed is this source, on the interpreter that was recorded."""
        options, where = self.options, str(self.options.environment)
        if not self._has_source:
            if options.python.exists():
                return Look(State.DONE, where, "as it was installed; upgrade from a checkout")
            fix = "run scripts/setup_mac.sh of a checkout"
            return Look(
                State.MISSING, str(options.source), "this is no checkout, so nothing can be installed", fix
            )
        if not options.python.exists():
            return Look(State.TODO, where, "there is none")
        if not Write(self._mark, self._digest() + "\n").is_there:
            return Look(State.TODO, str(self._mark), "another version than this checkout's is installed")
        if not succeeds(str(options.python), "-I", "-c", _STEADY):
            return Look(State.TODO, where, "its interpreter or its packages are not those that were recorded")
        return Look(State.DONE, where, "this checkout, on the recorded interpreter")

    def actions(self) -> tuple[Action, ...]:
        """Make it, install, record."""
        options, python = self.options, str(self.options.python)
        pins = options.source / "scripts" / "requirements-uv.txt"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes")
        sync = (str(options.environment / "bin" / "uv"), "sync", "--locked", "--inexact", "--no-editable")
        return (
            Folder(options.prefix, 0o755),
            Run(
                (
                    options.environ.get("KAKEYA_PYTHON") or sys.executable,
                    "-m",
                    "venv",
                    "--clear",
                    str(options.environment),
                )
            ),
            Run((*pip, "-r", str(pins))),
            Run(
                (*sync, "--extra", "engine", "--project", str(options.source), "--python", python),
                env={"UV_PROJECT_ENVIRONMENT": str(options.environment)},
            ),
            Run((python, "-I", "-c", _RECORD)),
            Write(self._mark, self._digest() + "\n" if self._has_source else "\n"),
        )

    def undo(self) -> tuple[Action, ...]:
        """Remove it."""
        return (Remove(self.options.environment),)

    def _digest(self) -> str:
        """SHA-256 over the source that is installed: lock file, both packages, names and contents."""
        root, total = self.options.source, hashlib.sha256()
        files = [root / "uv.lock", root / "pyproject.toml"]
        for package in ("bridge", "engine"):
            files += [path for path in (root / package).rglob("*") if path.is_file()]
        for path in sorted(files):
            if "__pycache__" not in path.parts:
                data = path.read_bytes()
                total.update(f"{path.relative_to(root)}\0{len(data)}\0".encode() + data)
        return total.hexdigest()
