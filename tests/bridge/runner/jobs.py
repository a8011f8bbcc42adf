"""Supervised jobs of small Python programs, on this machine or as on one that permits less."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bridge.proc import run_program
from bridge.runner.child import Ended, Order, Standby, Supervised
from bridge.runner.isolation import landlock, namespaces, seccomp, view

OLD = """
from bridge.runner.isolation import view
def unknown(*_, **__): raise OSError(38, "Function not implemented")
view._set_attributes = unknown
"""
LEVEL = namespaces.best_level(network=False)


class Jobs:
    """Runs small Python programs as supervised jobs in a folder of their own, `folder`."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.folder = folder / "room"
        self.folder.mkdir()
        self.lock = folder / "lock"
        self.log = folder / "log"
        self.lines: list[str] = []

    def order(self, script: str, **changes: object) -> Order:
        values: dict[str, object] = {
            "argv": (sys.executable, "-I", "-c", textwrap.dedent(script)),
            "env": {"PATH": os.environ["PATH"]},
            "room": self.folder,
            "cwd": self.folder,
            "limits": {},
            "timeout_s": 30,
            "grace_s": 1.0,
        }
        return Order(**{**values, **changes})  # type: ignore[arg-type]

    def standby(self, **changes: Any) -> Standby:
        return Standby(self.lock, writable=[self.folder], **changes)

    def run(
        self,
        script: str,
        *,
        stop: Callable[[], bool] = lambda: False,
        hide: Sequence[Path] = (),
        keep: Sequence[Path] = (),
        network: bool = False,
        **changes: object,
    ) -> Ended:
        with (
            Supervised(
                self.standby(hide=hide, keep=[*keep, Path(sys.prefix)], network=network)
            ) as supervised,
            self.log.open("wb", 0) as log,
        ):
            self.enforced = supervised.enforced
            return supervised.run(self.order(script, **changes), log, on_line=self.lines.append, stop=stop)


def marked(mark: str) -> list[int]:
    """Processes whose command line holds `mark`, other than this one."""
    done = run_program(["ps", "-axo", "pid=,stat=,command="], timeout_s=10, limit_bytes=1 << 22)
    rows = [line.split(None, 2) for line in done.stdout.decode("utf-8", "replace").splitlines()]
    return [int(pid) for pid, state, command in rows if mark in command and "Z" not in state]


def as_permitted(
    monkeypatch: pytest.MonkeyPatch,
    *,
    level: str,
    rules: bool = True,
    filters: bool = True,
    old: bool = False,
    scratch: Sequence[str] = view.SCRATCH,
) -> None:
    """Have supervisors find a machine that permits no more than this; skips where this one permits less.

    Args:
        monkeypatch: Undoes it.
        level: Of `namespaces.LEVELS`.
        rules: Whether there is Landlock.
        filters: Whether there is seccomp.
        old: Whether the kernel cannot change all mounts below a folder at once.
        scratch: Which folders a view has fresh.
    """
    if namespaces.LEVELS.index(level) < namespaces.LEVELS.index(LEVEL):
        pytest.skip(f"this machine permits {LEVEL} at best")
    if (rules and not landlock.version()) or (filters and not seccomp.available()):
        pytest.skip("this machine lacks Landlock or a filter of kernel calls")
    lines = [
        "import json, sys",
        "from bridge.runner import supervisor",
        "from bridge.runner.isolation import landlock, namespaces, seccomp, view",
        f"namespaces.best_level = lambda network: {level!r}",
        "" if rules else "landlock.version = lambda: 0",
        "" if filters else "seccomp.available = lambda: False",
        OLD if old else "",
        f"view.SCRATCH = {scratch!r}",
        "raise SystemExit(supervisor.main(json.loads(sys.argv[1])))",
    ]
    monkeypatch.setattr("bridge.runner.child.SUPERVISOR", ("-c", "\n".join(lines)))
