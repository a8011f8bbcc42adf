"""What a step does, as values: printed by a dry run, done by setup, by the same list."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bridge.errors import MachineError, described
from bridge.proc import run_in_terminal, run_program

LONGEST_S = 3600.0
ANYWHERE = Path("/")
_LINES = 6
Say = Callable[[str], None]

# Variables of the owner's shell that no program of setup needs, or that would send it elsewhere.
_DROPPED = ("KAKEYA_RUNNER_TOKEN", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def owners_environment() -> dict[str, str]:
    """What programs of setup see: the owner's own variables (proxies, Homebrew's, gh's), in a C locale."""
    return {**{name: value for name, value in os.environ.items() if name not in _DROPPED}, "LC_ALL": "C"}


def quiet(_line: str) -> None:
    """Say nothing."""


class Action(Protocol):
    """One thing that is done."""

    @property
    def said(self) -> str:
        """What it is, as a person would type it."""

    def do(self, say: Say = quiet) -> None:
        """Do it, whole or not at all.

        Args:
            say: Takes one line, when it takes long.

        Raises:
            MachineError: It failed, with what was said.
        """


@dataclass(frozen=True)
class Run:
    """A program, run to its end.

    Attributes:
        argv: The program and its arguments.
        cwd: Where; never the folder that setup was called in, which may hold anything.
        env: Variables beside the usual ones.
        secrets: Functions that give further variables when it is run, by name; never shown.
        is_administrators: It needs sudo.
        may_fail: Its failure is no news.
        tries: How often it is tried.
        pause_s: Seconds between two tries.
        remedy: What a person can do when it fails.
        sleep: Waits that many seconds.
    """

    argv: tuple[str, ...]
    cwd: Path = ANYWHERE
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Callable[[], str]] = field(default_factory=dict, repr=False)
    is_administrators: bool = False
    may_fail: bool = False
    tries: int = 1
    pause_s: float = 2.0
    remedy: str | None = None
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @property
    def said(self) -> str:
        """The command line, with its variables; a secret's value is never in it."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        words += [f"{name}=…" for name in self.secrets]
        words += ["sudo"] if self.is_administrators else []
        where = "" if self.cwd == ANYWHERE else f"cd {shlex.quote(str(self.cwd))} && "
        return where + " ".join([*words, shlex.join(self.argv)])

    def do(self, say: Say = quiet) -> None:
        """Run it."""
        given = {name: give() for name, give in self.secrets.items()}
        env = {**owners_environment(), **self.env, **given}
        for left in reversed(range(self.tries)):
            code, said = self._once(env)
            if code == 0 or self.may_fail:
                return
            if left:
                say(f"      it ended with {code}, and is tried again in {self.pause_s:.0f} s")
                self.sleep(self.pause_s)
        for secret in filter(None, given.values()):
            said = said.replace(secret, "…")
        raise MachineError(f"{self.said} ended with {code}{': ' if said else ''}{said[:2000]}", self.remedy)

    def _once(self, env: Mapping[str, str]) -> tuple[int, str]:
        """Its exit code, and the last of what it said."""
        if self.is_administrators:
            return run_in_terminal(["sudo", *self.argv], env=env, cwd=self.cwd), ""
        done = run_program(self.argv, env=env, cwd=self.cwd, timeout_s=LONGEST_S)
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        return done.exit_code, " | ".join(lines[-_LINES:])


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

    def do(self, _say: Say = quiet) -> None:
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

    def do(self, _say: Say = quiet) -> None:
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

    def do(self, _say: Say = quiet) -> None:
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

    def do(self, _say: Say = quiet) -> None:
        """Remove it."""
        try:
            if self.path.is_dir() and not self.path.is_symlink():
                shutil.rmtree(self.path)
            else:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            raise MachineError(f"cannot remove {self.path}: {described(error)}") from None


@dataclass(frozen=True)
class Link:
    """A symbolic link, which leads from one moment to the next to something else.

    Attributes:
        path: Where.
        target: Where it leads, beside it or below.
    """

    path: Path
    target: Path

    @property
    def said(self) -> str:
        """As a command."""
        return f"ln -sfn {shlex.quote(self._relative)} {shlex.quote(str(self.path))}"

    @property
    def _relative(self) -> str:
        return os.path.relpath(self.target, self.path.parent)

    def do(self, _say: Say = quiet) -> None:
        """Make it beside, then put it in place."""
        beside = self.path.with_name(f".{self.path.name}-{os.getpid()}")
        try:
            beside.unlink(missing_ok=True)
            beside.symlink_to(self._relative)
            os.replace(beside, self.path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            remedy = f"{self.path} is a folder: remove it" if self.path.is_dir() else None
            raise MachineError(f"cannot link {self.path}: {described(error)}", remedy) from None
