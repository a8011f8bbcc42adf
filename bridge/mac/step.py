"""One part of a Mac that is set up, or taken back: how it stands, and what brings it there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from bridge.errors import MachineError
from bridge.mac.action import ANYWHERE, Action, owners_environment
from bridge.proc import run_program

PROGRAM_S = 30.0


class State(StrEnum):
    """How a part stands. A closed set."""

    DONE = "done"
    TODO = "to do"
    ADVICE = "advice"
    MISSING = "missing"


@dataclass(frozen=True)
class Look:
    """What a look found.

    Attributes:
        state: `ADVICE` does not keep a Mac from being ready; `MISSING` does, and setup cannot mend it.
        looked_at: A file, or a command.
        finding: In words.
        fix: What a person can do; empty: nothing is needed, or setup does it.
    """

    state: State
    looked_at: str
    finding: str
    fix: str = ""


class Step(Protocol):
    """A part of a Mac."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def stops(self) -> bool:
        """Whether nothing after it makes sense while it is missing."""

    def look(self) -> Look:
        """How it stands. Changes nothing."""

    def actions(self) -> Sequence[Action]:
        """What brings it there."""


def answer(*argv: str) -> str | None:
    """What a program says; None: it is not there, or failed."""
    try:
        done = run_program(argv, env=owners_environment(), cwd=ANYWHERE, timeout_s=PROGRAM_S)
    except MachineError:
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.ok else None


def succeeds(*argv: str) -> bool:
    """Whether a program is there and ends well."""
    return answer(*argv) is not None


def reported(*argv: str, env: Mapping[str, str]) -> dict[str, Any] | None:
    """The JSON line that a program of ours ends with, whatever its exit code; None: there is none.

    Args:
        argv: The program and its arguments.
        env: Variables beside the usual ones.
    """
    try:
        done = run_program(argv, env={**owners_environment(), **env}, cwd=ANYWHERE, timeout_s=2 * PROGRAM_S)
        found = json.loads(done.stdout.decode("utf-8", "replace").strip().splitlines()[-1])
    except (MachineError, ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None
