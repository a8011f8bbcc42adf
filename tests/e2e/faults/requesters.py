"""Those who ask: submissions of this process, and ``kakeya_mac run`` processes that are killed on the way."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from bridge.bus.requests import Submitted, submit
from bridge.errors import BusError
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from tests.e2e.faults import procs
from tests.e2e.faults.jobs import MOST_SECONDS
from tests.e2e.faults.plan import Ask, Client, RequestKind
from tests.fixtures.repo import BIN, RepoFixture

# The client processes' job: a bundled preset, because a client knows no other.
CLIENT_PRESET = "gate"
CLIENT_FILE = "report.json"


@dataclass(frozen=True)
class Accepted:
    """A request whose submission was reported as done."""

    ask: Ask
    submitted: Submitted
    workload_sha: str
    at: float


@dataclass
class Requester:
    """Submits requests from this process, as the command does; `address` empty: to the remote's path."""

    repo: RepoFixture
    address: str = ""
    accepted: dict[str, Accepted] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    workload_sha: str = field(init=False)

    def __post_init__(self) -> None:
        self.workload_sha = self.repo.git("rev-parse", "HEAD")
        self.address = self.address or str(self.repo.remote)

    def submit(self, ask: Ask) -> Accepted | None:
        """Push one request; None when that was reported as failed."""
        now = datetime.now(UTC).replace(microsecond=0)
        nonce = refs.new_nonce(now, secrets.token_bytes(6))
        preset = "fails" if ask.kind is RequestKind.FAIL else "works"
        manifest = Manifest(
            nonce=nonce,
            preset=preset,
            params={"word": ask.word, "seconds": _seconds(ask)},
            workload_sha=self.workload_sha,
            result_ref=refs.request_ref(preset, nonce, None),
            requested_by="course",
            created_at=now,
            expires_at=now + timedelta(hours=6),
            audience=refs.audience_of(self.address),
        )
        try:
            submitted = submit(GitRepo(self.repo.clone), self.address, manifest, None)
        except BusError as error:
            self.errors.append(f"{nonce}: {error.message}")
            return None
        accepted = Accepted(ask, submitted, self.workload_sha, time.monotonic())
        self.accepted[nonce] = accepted
        return accepted

    def cancel(self, nonce: str) -> subprocess.Popen[bytes]:
        """Start the command that cancels a request."""
        return _command(self.repo, ["cancel", nonce, "--remote", str(self.repo.remote)], "cancels.log")


@dataclass
class Visitor:
    """One ``kakeya_mac run`` process and what became of it."""

    repo: RepoFixture
    client: Client
    process: subprocess.Popen[bytes]
    born: float
    killed: bool = False
    pushing_since: float | None = None

    @classmethod
    def start(cls, repo: RepoFixture, client: Client) -> Visitor:
        argv = ["run", "--preset", CLIENT_PRESET, "-p", f"file={CLIENT_FILE}", "--json"]
        process = _command(repo, argv, f"{client.name}.log", requested_by=client.name)
        return cls(repo, client, process, time.monotonic())

    def attend(self) -> bool:
        """Kill it when its time has come; whether it is gone."""
        if self.process.poll() is not None:
            return True
        due = self.client.kill_at_s
        if self.client.from_push and self.pushing_since is None:
            below = procs.descendants(self.process.pid) if due is not None else []
            self.pushing_since = time.monotonic() if any(_pushes(pid) for pid in below) else None
        since = self.pushing_since if self.client.from_push else self.born
        if due is not None and since is not None and time.monotonic() - since >= due:
            below = procs.descendants(self.process.pid) if self.client.with_children else []
            ours = [pid for pid in below if not procs.is_server_side(pid, self.repo.remote)]
            procs.send([self.process.pid, *ours], signal.SIGKILL)
            self.process.wait()
            self.killed = True
        return self.process.poll() is not None

    @property
    def reported(self) -> str | None:
        """The nonce it said it had submitted; None: it did not come to say so."""
        lines = self.text().strip().splitlines()
        try:
            document = json.loads(lines[-1]) if lines else {}
        except json.JSONDecodeError:
            return None
        return document.get("nonce") if isinstance(document, dict) else None

    def text(self) -> str:
        return (self.repo.root / f"{self.client.name}.log").read_text(errors="replace")


def _pushes(pid: int) -> bool:
    return " push " in procs.command(pid)


def _seconds(ask: Ask) -> float:
    """What the request gives; for one that is to be refused more than the preset allows."""
    return MOST_SECONDS + 1.0 if ask.kind is RequestKind.REFUSED else ask.seconds


def _command(
    repo: RepoFixture, argv: list[str], log: str, requested_by: str | None = None
) -> subprocess.Popen[bytes]:
    env = repo.env if requested_by is None else {**repo.env, "KAKEYA_REQUESTED_BY": requested_by}
    with (repo.root / log).open("ab") as sink:
        return subprocess.Popen(
            [str(BIN / "kakeya_mac"), *argv],
            env={**env, "KAKEYA_STATE": str(repo.root / "state-client")},
            cwd=repo.clone,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            preexec_fn=procs.die_with_parent,  # noqa: PLW1509 - one call into libc
        )


def isolate(repo: RepoFixture) -> None:
    """Let this process's own git see the run's configuration instead of the developer's."""
    for name in [name for name in os.environ if name.startswith(("GIT_", "KAKEYA_", "SSH_AUTH"))]:
        del os.environ[name]
    os.environ.update(repo.env)
