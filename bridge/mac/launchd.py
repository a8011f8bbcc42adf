"""What launchd says of a service, and the two waits for it: until it is gone, until it runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import MachineError
from bridge.mac.action import Say, quiet
from bridge.mac.step import answer

# The first of each in what `launchctl print` says is the service's own; others are of its parts.
_STATE = re.compile(r"^\s*state = (.+?)\s*$", re.MULTILINE)
_EXIT = re.compile(r"^\s*last exit code = (.+?)\s*$", re.MULTILINE)
_PAUSE_S = 0.5
_PROGRESS_S = 30.0
# So many looks in a row: a program that ends at once runs, too, for a moment.
_STEADY = 3


@dataclass(frozen=True)
class Known:
    """A service that launchd knows.

    Attributes:
        state: In launchd's words.
        last_exit: How its last process ended, likewise; None: it does not say.
    """

    state: str
    last_exit: str | None

    @property
    def runs(self) -> bool:
        """Whether it has a process."""
        return self.state == "running"

    @property
    def said(self) -> str:
        """Its state in a line."""
        return f"its state is {self.state}, its last exit code {self.last_exit or 'not known'}"


def parsed(text: str) -> Known:
    """What ``launchctl print system/LABEL`` says."""
    state, last = _STATE.search(text), _EXIT.search(text)
    return Known("not known" if state is None else state[1], None if last is None else last[1])


def known(label: str) -> Known | None:
    """A service as launchd knows it; None: it does not."""
    said = answer("launchctl", "print", f"system/{label}")
    return None if said is None else parsed(said)


@dataclass(frozen=True)
class Gone:
    """Waits until launchd knows a service no longer: it goes on until the service's process has ended.

    Attributes:
        label: Which.
        limit_s: Seconds, after which it is an error.
        look: What launchd says.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.
    """

    label: str
    limit_s: float
    look: Callable[[str], Known | None] = field(default=known, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @property
    def said(self) -> str:
        """As a loop of a shell."""
        return f"while launchctl print system/{self.label} >/dev/null 2>&1; do sleep 1; done"

    def do(self, say: Say = quiet) -> None:
        """Wait."""
        began = told = self.clock()
        while self.look(self.label) is not None:
            now = self.clock()
            if now - began >= self.limit_s:
                raise MachineError(
                    f"{self.label} has not ended after {self.limit_s / 60:.0f} minutes",
                    "see what it does, and run this again when it has ended",
                )
            if now - told >= _PROGRESS_S:
                say(f"      {self.label} finishes its job; waiting since {now - began:.0f} s")
                told = now
            self.sleep(_PAUSE_S)


@dataclass(frozen=True)
class Running:
    """Waits until a service runs, and goes on running for a moment.

    Attributes:
        label: Which.
        log: What it says, for people.
        limit_s: Seconds, after which it is an error.
        look: What launchd says.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.
    """

    label: str
    log: Path
    limit_s: float = 20.0
    look: Callable[[str], Known | None] = field(default=known, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @property
    def said(self) -> str:
        """As a command."""
        return f"launchctl print system/{self.label} | grep -m1 state"

    def do(self, _say: Say = quiet) -> None:
        """Wait."""
        deadline, seen = self.clock() + self.limit_s, 0
        while True:
            found = self.look(self.label)
            seen = seen + 1 if found is not None and found.runs else 0
            if seen == _STEADY:
                return
            if self.clock() >= deadline:
                how = "launchd does not know it" if found is None else found.said
                raise MachineError(f"{self.label} does not run: {how}", f"see why: tail {self.log}")
            self.sleep(_PAUSE_S)
