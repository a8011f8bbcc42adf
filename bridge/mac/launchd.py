"""What launchd says of a service, whose it is, and the waits for it: until it is gone, until it runs."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import MachineError
from bridge.mac import names
from bridge.mac.action import ANYWHERE, Say, owners_environment, quiet
from bridge.mac.step import answer, succeeds
from bridge.proc import run_in_terminal

# The first of each in what `launchctl print` says is the service's own; others are of its parts.
_STATE = re.compile(r"^\s*state = (.+?)\s*$", re.MULTILINE)
_EXIT = re.compile(r"^\s*last exit code = (.+?)\s*$", re.MULTILINE)
_LOG = re.compile(r"^\s*stdout path = (.+?)\s*$", re.MULTILINE)
_PAUSE_S = 0.5
_PROGRESS_S = 30.0
# So many looks in a row: a program that ends at once runs, too, for a moment.
_STEADY = 6


@dataclass(frozen=True)
class Known:
    """A service that launchd knows.

    Attributes:
        state: In launchd's words.
        last_exit: How its last process ended, likewise; None: it does not say.
        log: Where its output goes; None: it does not say.
    """

    state: str
    last_exit: str | None
    log: str | None = None

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
    state, last, log = (pattern.search(text) for pattern in (_STATE, _EXIT, _LOG))
    return Known(
        "not known" if state is None else state[1],
        None if last is None else last[1],
        None if log is None else log[1],
    )


def known(label: str) -> Known | None:
    """A service as launchd knows it; None: it does not."""
    said = answer("launchctl", "print", f"system/{label}")
    return None if said is None else parsed(said)


def stranger(label: str, prefix: Path, found: Known | None) -> Path | None:
    """The prefix of another setup whose service this is, perhaps another account's; None: it is no other's.

    A label is the whole machine's, so a service counts as ours only by where its output goes.

    Args:
        label: Of the service.
        prefix: Ours.
        found: As launchd knows it.
    """
    listed = answer("plutil", "-extract", "StandardOutPath", "raw", str(names.installed(label)))
    log = listed or (None if found is None else found.log)
    if log is None or Path(log) == names.log(prefix, label):
        return None
    return Path(log).parent.parent


@dataclass(frozen=True)
class Idle:
    """Waits until GitHub's runner has no job: one that is told to stop cancels it.

    Attributes:
        runner: Its folder.
        limit_s: Seconds, after which it is an error.
        busy: Whether it has one.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.
    """

    runner: Path
    limit_s: float
    busy: Callable[[str], bool] = field(default=lambda pattern: succeeds("pgrep", "-f", pattern), repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @property
    def _pattern(self) -> str:
        return f"{self.runner}/bin[^/]*/Runner.Worker"

    @property
    def said(self) -> str:
        """As a loop of a shell."""
        return f"while pgrep -f '{self._pattern}' >/dev/null; do sleep 5; done"

    def do(self, say: Say = quiet) -> None:
        """Wait."""
        _wait(
            lambda: self.busy(self._pattern),
            "GitHub's runner has a job",
            "cancel its run, or run this again when it has ended",
            limit_s=self.limit_s,
            say=say,
            clock=self.clock,
            sleep=self.sleep,
        )


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
        _wait(
            lambda: self.look(self.label) is not None,
            f"{self.label} finishes its job",
            "see what it does, and run this again when it has ended",
            limit_s=self.limit_s,
            say=say,
            clock=self.clock,
            sleep=self.sleep,
        )


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


def _wait(
    goes_on: Callable[[], bool],
    what: str,
    remedy: str,
    *,
    limit_s: float,
    say: Say,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Wait until something goes on no longer, saying so now and then.

    What sudo was told meanwhile stays good: nobody may be there to type a password a second time.
    """
    began = told = clock()
    while goes_on():
        now = clock()
        if now - began >= limit_s:
            raise MachineError(f"{what}, after {limit_s / 60:.0f} minutes still", remedy)
        if now - told >= _PROGRESS_S:
            say(f"      {what}; waiting since {now - began:.0f} s")
            with contextlib.suppress(MachineError):  # where there is no sudo, none was used
                run_in_terminal(["sudo", "-n", "-v"], env=owners_environment(), cwd=ANYWHERE)
            told = now
        sleep(_PAUSE_S)
