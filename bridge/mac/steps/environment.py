"""The pinned environment: this checkout, installed with every package by version and digest.

Environments are made beside each other, and a link leads to the one that is used: an installation that fails
leaves the other one as it was, and a daemon that runs keeps its files. The one before is removed by the next.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bridge.interpreter import NAME as RECORD
from bridge.mac import names
from bridge.mac.action import Action, Folder, Link, Remove, Run, Write
from bridge.mac.options import Options
from bridge.mac.step import Look, State, succeeds
from bridge.mac.steps.services import is_due

# Beside the interpreter's record: which source was installed.
MARK = "installed.sha256"
_SHORT = 12
_RECORD = "from bridge import interpreter as i; i.write(i.record_path(), i.observe())"
_STEADY = "import sys; from bridge.runner.steady import objection; sys.exit(objection() or 0)"


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the prefix, with the record of its interpreter."""

    options: Options
    name: str = "environment"
    stops: bool = True

    @property
    def _has_source(self) -> bool:
        return (self.options.source / "uv.lock").is_file()

    def look(self) -> Look:
        """Whether what is installed is this source, on the interpreter that was recorded."""
        options, where = self.options, str(self.options.environment)
        wrong = self._wrong()
        if not self._has_source:
            if wrong is None:
                return Look(State.DONE, where, "as it was installed; upgrade from a checkout")
            fix = "run scripts/setup_mac.sh of a checkout"
            return Look(State.MISSING, where, f"{wrong}; nothing can be installed without a checkout", fix)
        if wrong is not None:
            return Look(State.TODO, where, wrong)
        mark = Write(options.environment / MARK, self._digest() + "\n")
        if not mark.is_there:
            return Look(State.TODO, str(mark.path), "another version than this checkout's is installed")
        return Look(State.DONE, where, "this checkout, on the recorded interpreter")

    def _wrong(self) -> str | None:
        """What is wrong with the environment as it is."""
        options = self.options
        if not options.python.exists():
            return "there is none"
        if not (options.environment / RECORD).is_file():
            return "its interpreter was not recorded, so nobody would notice that it was replaced"
        if not succeeds(str(options.python), "-I", "-c", _STEADY):
            return "its interpreter or its packages are not those that were recorded"
        return None

    def actions(self) -> tuple[Action, ...]:
        """Make one beside the one that is used, install, record; only then have the link lead to it."""
        if not self._has_source:
            return ()
        options, digest = self.options, self._digest()
        made = self._free(digest)
        python, uv = str(made / "bin" / "python"), str(made / "bin" / "uv")
        pins = str(options.source / "scripts" / "requirements-build.txt")
        pip = ("-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes")
        wheels = ("--only-binary", ":all:")
        # Without build isolation uv fetches no build backend, which it would not compare with a digest.
        sync = ("sync", "--locked", "--inexact", "--no-editable", "--no-build-isolation", "--extra", "engine")
        inside = options.prefix
        return (
            Folder(options.prefix, 0o755),
            *(Remove(other) for other in self._unused()),
            Run((self._interpreter(), "-I", "-m", "venv", str(made)), cwd=inside),
            Run((python, *pip, *wheels, "-r", pins), cwd=inside),
            Run(
                (uv, *sync, "--project", str(options.source), "--python", python),
                env={"UV_PROJECT_ENVIRONMENT": str(made)},
                cwd=inside,
            ),
            Run((python, "-I", "-c", _RECORD), cwd=inside),
            Write(made / MARK, digest + "\n"),
            *((is_due(options, names.SERVE_LABEL),) if options.is_serving else ()),
            Link(options.environment, made),
        )

    def _interpreter(self) -> str:
        """What environments are made with."""
        given = self.options.environ.get("KAKEYA_PYTHON") or sys.executable
        return os.path.abspath(given) if os.sep in given else given

    def _free(self, digest: str) -> Path:
        """A folder for the next environment: a running program keeps the files of its own."""
        folder = self.options.prefix / names.ENVIRONMENTS
        names_of_it = (folder / f"{digest[:_SHORT]}-{number}" for number in itertools.count(1))
        return next(path for path in names_of_it if not path.exists())

    def _unused(self) -> list[Path]:
        """Environments that the link does not lead to."""
        folder, used = self.options.prefix / names.ENVIRONMENTS, self.options.environment.resolve()
        return sorted(path for path in folder.iterdir() if path != used) if folder.is_dir() else []

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
