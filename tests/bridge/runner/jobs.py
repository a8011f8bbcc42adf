"""Supervised jobs of small Python programs, in this machine's sandbox or in another."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bridge.proc import run_program
from bridge.runner.child import JobCommand, JobExit, Supervisor
from bridge.runner.sandbox import Access, JobDirs, NoSandbox, Sandbox, find_sandbox, installation

SANDBOX = find_sandbox()
UNSANDBOXED = NoSandbox("left out by the test")
needs_sandbox = pytest.mark.skipif(isinstance(SANDBOX, NoSandbox), reason=getattr(SANDBOX, "why", ""))
EITHER = (
    pytest.param(SANDBOX, id="sandbox", marks=needs_sandbox),
    pytest.param(
        UNSANDBOXED, id="unsandboxed", marks=[] if isinstance(SANDBOX, NoSandbox) else pytest.mark.slow
    ),
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Jobs:
    """Runs small Python programs as supervised jobs; `folder` is where they start."""

    def __init__(self, root: Path, sandbox: Sandbox = SANDBOX) -> None:
        self.root = root
        self.sandbox = sandbox
        self.dirs = JobDirs(root / "job")
        self.dirs.make()
        self.folder = self.dirs.workspace
        self.lock = root / "lock"
        self.log = root / "log"
        self.lines: list[str] = []

    def command(
        self,
        script: str,
        *,
        argv: Sequence[str] = (),
        readable: Sequence[Path] = (),
        hidden: Sequence[Path] = (),
        network: bool = False,
        **changes: object,
    ) -> JobCommand:
        access = Access(self.dirs, (*installation(), *readable), hidden=tuple(hidden), network=network)
        values: dict[str, object] = {
            "env": {"PATH": os.environ["PATH"], "HOME": str(self.dirs.home)},
            "folder": str(self.dirs.root),
            "cwd": str(self.folder),
            "wrappers": self.sandbox.wrappers,
            "limits": {},
            "allowed": {},
            "timeout_s": 30,
            "max_output": 8 << 20,
            "grace_s": 1.0,
        }
        wrapped = self.sandbox.command(argv or (sys.executable, "-I", "-c", textwrap.dedent(script)), access)
        return JobCommand(wrapped, **{**values, **changes})  # type: ignore[arg-type]

    def run(self, script: str, *, stop: Callable[[], bool] = lambda: False, **changes: object) -> JobExit:
        with Supervisor(self.lock) as supervisor, self.log.open("wb", 0) as log:
            command = self.command(script, **changes)  # type: ignore[arg-type]
            return supervisor.run(command, log, on_line=self.lines.append, stop=stop)

    def outcomes(self) -> dict[str, str]:
        """The rest of each line, by its first word."""
        return dict(line.split(" ", 1) for line in self.lines)


def marked(mark: str) -> list[int]:
    """Processes whose command line holds `mark`, other than this one."""
    done = run_program(["ps", "-axo", "pid=,stat=,command="], timeout_s=10, limit_bytes=1 << 22)
    rows = [line.split(None, 2) for line in done.stdout.decode("utf-8", "replace").splitlines()]
    return [int(pid) for pid, state, command in rows if mark in command and "Z" not in state]
