"""Runner daemons, each on state of its own as if it were a machine of its own, and what can befall them."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.faults import procs
from tests.fixtures.repo import BIN, RepoFixture

_SHORT_LIVED = 0.7


@dataclass
class Machine:
    """One runner daemon.

    Attributes:
        repo: Whose remote it serves.
        name: The runner's name.
        lease_s: Its lease; it beats five times a lease.
        states: Every state folder it ever had, the present one last.
        label: What tells it from another one of the same name; its log is called so.
        address: Of the remote; empty: the path of the repository's.
        env: What it has in its environment in addition to the repository's.
        prefix: A program that starts it, with that one's arguments.
    """

    repo: RepoFixture
    name: str
    lease_s: float
    states: list[Path] = field(default_factory=list)
    label: str = ""
    address: str = ""
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    _process: subprocess.Popen[bytes] | None = None
    _asleep: list[int] = field(default_factory=list)
    _state: Path = Path()
    _said: int = 0

    @property
    def log(self) -> Path:
        return self.repo.root / f"{self.label or self.name}.log"

    @property
    def pid(self) -> int:
        """The daemon's process; 0 when there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    @property
    def up(self) -> bool:
        """Whether the daemon runs, and is not asleep."""
        return bool(self.pid) and not self._asleep

    def inside(self, path: Path) -> Path:
        """Where a path of the daemon's is found from here: it may have disks that no other process sees."""
        return Path(f"/proc/{pid}/root{path}") if (pid := self.pid) else path

    def start(self, state: Path | None = None) -> None:
        """Start the daemon on a state folder; None: the one it had, or its first."""
        if state is None:
            state = self.states[-1] if self.states else self._fresh()
        argv = [*self.prefix, str(BIN / "kakeya_mac"), "runner", "serve"]
        argv += ["--remote", self.address or str(self.repo.remote)]
        argv += ["--name", self.name, "--idle", "0.3"]
        argv += ["--lease", f"{self.lease_s:g}", "--beat", f"{self.lease_s / 5:g}"]
        self._state, self._said = state, len(self.text())
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                env={**self.repo.env, **self.env, "KAKEYA_STATE": str(state)},
                cwd=self.repo.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=procs.die_with_parent,  # noqa: PLW1509 - one call into libc
            )

    def has_settled(self) -> bool:
        """Whether it serves since its last start, and nothing of its earlier lives is left to see to."""
        try:
            left = [*procs.unpublished(self._state), *self._state.glob("runner/*/jobs/*")]
        except FileNotFoundError:  # a start removes the folder just now
            return False
        return "serving " in self.text()[self._said :] and not left

    def lose_state(self) -> None:
        """Put what it has on disk aside; the next start makes a runner without a past."""
        self._fresh()

    def kill(self) -> None:
        """-9 to the daemon alone: its git children and its supervisor are left to see to themselves."""
        if self._process is not None:
            self.wake()
            self._process.kill()
            self._process.wait()

    def kill_git(self, choose: float, seconds: float = 0.3) -> bool:
        """-9 to one of its own git children; whether there was one.

        `choose` (0 to 1) picks among them; below `_SHORT_LIVED` one is waited for that is not there to stay,
        a push or a fetch. The remote's part of these runs below it, too: a remote that breaks is another
        test's.
        """
        deadline = time.monotonic() + seconds
        while self.pid and time.monotonic() < deadline:
            ours = [
                pid
                for pid in procs.children(self.pid)  # what they start may be the remote's part a moment later
                if procs.is_git(pid)
                and not procs.is_server_side(pid, self.repo.remote)
                and (choose >= _SHORT_LIVED or "cat-file" not in procs.command(pid))
            ]
            if ours and procs.send([ours[int(choose * len(ours)) % len(ours)]], signal.SIGKILL):
                return True
            time.sleep(0.002)
        return False

    def drain(self) -> None:
        """SIGTERM; a second one stops the job, too."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def sleep(self) -> None:
        """Stop the whole machine: the daemon and everything below it."""
        self._asleep = [self.pid, *procs.descendants(self.pid)]
        self._asleep = [pid for pid in self._asleep if not procs.is_server_side(pid, self.repo.remote)]
        procs.send(self._asleep, signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on where it stood."""
        procs.send(self._asleep, signal.SIGCONT)
        self._asleep = []

    def ended(self, seconds: float) -> int | None:
        """Wait for the daemon's end; its exit code, or None when it did not come."""
        if self._process is None:
            return None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def text(self) -> str:
        """What it said, over all its lives."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def _fresh(self) -> Path:
        state = self.repo.root / f"state-{self.label or self.name}-{len(self.states)}"
        state.mkdir(mode=0o700)
        self.states.append(state)
        return state
