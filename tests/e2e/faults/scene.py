"""What one fault needs: a remote, real runner daemons, requests, and the referee at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from bridge.bus.results import Believed
from bridge.protocol import refs
from tests.e2e.faults import jobs, procs, referee
from tests.e2e.faults.machines import Machine
from tests.e2e.faults.plan import Ask, RequestKind
from tests.e2e.faults.requesters import Requester
from tests.e2e.faults.witness import Witness
from tests.fixtures.repo import RepoFixture, build_repo, wait_for


@dataclass
class Scene:
    """One repository, its runners and what is asked. Entered, it has a witness of their jobs."""

    repo: RepoFixture
    address: str = ""
    machines: list[Machine] = field(default_factory=list)
    requester: Requester = field(init=False)
    witness: Witness = field(init=False)

    def __post_init__(self) -> None:
        self.requester = Requester(self.repo, self.address)
        self.witness = Witness(self.repo, self.machines)

    def __enter__(self) -> Scene:
        self.witness.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.witness.leave()

    def machine(self, name: str = "mac1", *, lease_s: float = 30.0, **values: Any) -> Machine:
        """A runner, not yet started."""
        machine = Machine(self.repo, name, lease_s, address=self.address, **values)
        self.machines.append(machine)
        return machine

    def ask(self, seconds: float = 0.0, kind: RequestKind = RequestKind.WORK) -> str:
        """Submit one request; its nonce."""
        ask = Ask(f"word-{len(self.requester.accepted):05d}", kind, seconds, 0.0)
        accepted = self.requester.submit(ask)
        assert accepted is not None, self.requester.errors
        return accepted.submitted.nonce

    def is_answered(self, nonce: str) -> bool:
        accepted = self.requester.accepted[nonce].submitted
        tip = self.repo.git("rev-parse", accepted.ref, cwd=self.repo.remote)
        return tip != accepted.commit or refs.RESULTS + nonce in self.repo.remote_refs()

    def answered(self, nonce: str, seconds: float = 30.0) -> None:
        """Wait for the answer."""
        with self.explained():
            wait_for(lambda: self.is_answered(nonce), seconds, f"an answer to {nonce}")

    def started(self, nonce: str, times: int = 1, seconds: float = 20.0) -> None:
        """Wait until the job of a request runs, for the n-th time."""
        with self.explained():
            wait_for(
                lambda: jobs.read_ledger(self.repo).started[nonce] >= times, seconds, f"the job of {nonce}"
            )

    def says(self, machine: Machine, text: str, seconds: float = 20.0) -> None:
        """Wait until a runner said something."""
        with self.explained():
            wait_for(
                lambda: text in machine.text(), seconds, f"{text!r} from {machine.label or machine.name}"
            )

    def close(self) -> dict[str, Believed]:
        """Stop every runner and let the referee look; the results by nonce.

        Raises:
            AssertionError: Something does not hold; the message has everything the runners said.
        """
        with self.explained():
            wait_for(self._is_tidy, 10, "an empty inbox, without claims,")
        for machine in self.machines:
            machine.wake()
            machine.drain()
        with self.explained():
            for machine in self.machines:
                assert machine.ended(30) == 0, f"{machine.label or machine.name} did not end well"
            self.witness.leave()
            report = referee.judge(self.repo, self.machines, self.requester, [], finished=True)
            assert not report.problems, "\n".join(report.problems)
        return report.results

    def _is_tidy(self) -> bool:
        return not any(ref.startswith((refs.INBOX, refs.CLAIMS)) for ref in self.repo.remote_refs())

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add to a failure what the runners said."""
        try:
            yield
        except AssertionError as error:
            for machine in self.machines:
                error.add_note(f"{machine.label or machine.name} said:\n{machine.text()[-4000:]}")
            raise


@contextlib.contextmanager
def build_fault_repo(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RepoFixture]:
    """A repository with jobs. This process uses its configuration, too; its processes end with it."""
    repo = build_repo(root / "repo")
    jobs.install(repo)
    for name in ("GIT_DIR", "GIT_CONFIG_GLOBAL", "KAKEYA_STATE", "KAKEYA_CONFIG", "SSH_AUTH_SOCK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in repo.env.items():
        monkeypatch.setenv(name, value)
    try:
        yield repo
    finally:
        left = procs.end_all(root)
    assert not left, f"would not end: {left}"
