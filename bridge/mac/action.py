"""What a step does, as values: printed by a dry run, done by setup, by the same list."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bridge.errors import MachineError, described
from bridge.process import run_in_terminal, run_program

LONGEST_S = 3600.0
_LINES = 6


# Variables of the owner's shell that no program of setup needs, or that would send it elsewhere.
_DROPPED = ("KAKEYA_RUNNER_TOKEN", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def owners_environment() -> dict[str, str]:
    """What programs of setup see: the owner's own variables (proxies, Homebrew's, gh's), in a C locale."""
    return {**{name: value for name, value in os.environ.items() if name not in _DROPPED}, "LC_ALL": "C"}


class Action(Protocol):
    """One thing that is done."""

    @property
    def said(self) -> str:
        """What it is, as a person would type it."""

    def do(self) -> None:
        """Do it, whole or not at all.

        Raises:
            MachineError: It failed, with what was said.
        """


@dataclass(frozen=True)
class Run:
    """A program, run to its end.

    Attributes:
        argv: The program and its arguments.
        cwd: Where; None: anywhere.
        env: Variables beside the usual ones.
        secrets: Functions that give further variables when it is run, by name; never shown.
        is_administrators: It needs sudo.
        may_fail: Its failure is no news.
    """

    argv: tuple[str, ...]
    cwd: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Callable[[], str]] = field(default_factory=dict, repr=False)
    is_administrators: bool = False
    may_fail: bool = False

    @property
    def said(self) -> str:
        """The command line, with its variables; a secret's value is never in it."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        words += [f"{name}=…" for name in self.secrets]
        words += ["sudo"] if self.is_administrators else []
        where = "" if self.cwd is None else f"cd {shlex.quote(str(self.cwd))} && "
        return where + " ".join([*words, shlex.join(self.argv)])

    def do(self) -> None:
        """Run it."""
        given = {name: give() for name, give in self.secrets.items()}
        env = {**owners_environment(), **self.env, **given}
        if self.is_administrators:
            code = run_in_terminal(["sudo", *self.argv], env=env, cwd=self.cwd)
            said = ""
        else:
            done = run_program(self.argv, env=env, cwd=self.cwd, timeout_s=LONGEST_S)
            code = done.exit_code
            lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
            said = " | ".join(lines[-_LINES:])
        for secret in filter(None, given.values()):
            said = said.replace(secret, "…")
        if code != 0 and not self.may_fail:
            raise MachineError(f"{self.said} ended with {code}{': ' if said else ''}{said[:2000]}")


@dataclass(frozen=True)
class Write:
    """A file of ours.

    Attributes:
        path: Where.
        text: What is in it.
        mode: Its permissions.
    """

    path: Path
    text: str
    mode: int = 0o644

    @property
    def said(self) -> str:
        """Where, and its first and last lines."""
        return f"write {self.path} ({self.mode:o}, {len(self.text.encode())} bytes)"

    @property
    def is_there(self) -> bool:
        """Whether it is as it should be."""
        try:
            status = self.path.stat()
            return self.path.read_text(encoding="utf-8") == self.text and status.st_mode & 0o777 == self.mode
        except (OSError, UnicodeDecodeError):
            return False

    def do(self) -> None:
        """Write it beside, then put it in place."""
        name = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}-")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(self.text)
            os.chmod(name, self.mode)
            os.replace(name, self.path)
        except OSError as error:
            if name is not None:
                Path(name).unlink(missing_ok=True)
            raise MachineError(f"cannot write {self.path}: {described(error)}") from None


@dataclass(frozen=True)
class Folder:
    """A folder of this account's."""

    path: Path
    mode: int = 0o755

    @property
    def said(self) -> str:
        """As a command."""
        return f"mkdir -p -m {self.mode:o} {shlex.quote(str(self.path))}"

    def do(self) -> None:
        """Make it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=self.mode)
        except OSError as error:
            raise MachineError(f"cannot make {self.path}: {described(error)}") from None


@dataclass(frozen=True)
class Compare:
    """Holds a downloaded file against its digest, and removes one that is another."""

    path: Path
    sha256: str

    @property
    def said(self) -> str:
        """As a command."""
        return f"echo '{self.sha256}  {self.path}' | shasum -a 256 -c"

    def do(self) -> None:
        """Compare."""
        try:
            with self.path.open("rb") as handle:
                found = hashlib.file_digest(handle, "sha256").hexdigest()
        except OSError as error:
            raise MachineError(f"cannot read {self.path}: {described(error)}") from None
        if found != self.sha256:
            self.path.unlink(missing_ok=True)
            raise MachineError(
                f"{self.path.name} is not what it should be: its SHA-256 is {found}, not {self.sha256}",
                "was the download cut off, or a version given without its digest? It was removed",
            )


@dataclass(frozen=True)
class Remove:
    """Removes a file or a folder of setup's."""

    path: Path

    @property
    def said(self) -> str:
        """As a command."""
        return f"rm -rf {shlex.quote(str(self.path))}"

    def do(self) -> None:
        """Remove it."""
        try:
            if self.path.is_dir() and not self.path.is_symlink():
                shutil.rmtree(self.path)
            else:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            raise MachineError(f"cannot remove {self.path}: {described(error)}") from None
