"""The workflow run of a request, as the REST API tells of it: where it is, and whether it was evicted.

A run belongs to a request by its commit where a push started it, and by its name where a dispatch did: the
workflow names its runs after the request's branch. All of it is for people, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.bus.carriage import WORKFLOW_NAME
from bridge.client.remotes import Remote
from bridge.github import GitHub, find_token, repository_of
from bridge.github.types import Job, Run
from bridge.protocol.refs import parse_request_ref
from bridge.protocol.sanitize import clean_line

_LISTED = 100
_TIMEOUT_S = 10.0
# Runs of a list whose jobs are asked for: each is a call.
_DETAILED = 5
_JOB = "run"  # as mac-bridge.yaml calls the Mac's


@dataclass(frozen=True)
class Request:
    """A request whose run is looked for.

    Attributes:
        nonce: Its name.
        branch: Full name.
        commit: The request commit.
        run_id: Of its run, where a dispatch said it.
    """

    nonce: str
    branch: str
    commit: str
    run_id: int | None = None


@dataclass(frozen=True)
class RunView:
    """A workflow run at one moment.

    Attributes:
        id: Of the run.
        url: Its page.
        state: ``queued``, ``pending``, ``waiting``, ``requested``, ``in_progress`` or ``completed``.
        conclusion: Once completed; None before.
        attempt: From 1.
        machine: The machine that has, or had, the Mac's job; None: none yet, or not known.
        job: The job that runs; None: none does, or not known.
        step: Its step.
        labels: What the Mac's job asks of a machine.
        began: Whether any machine ever had a job of this attempt; None: not known.
        mac_job: Id of the Mac's job; None: not known.
    """

    id: int
    url: str
    state: str
    conclusion: str | None = None
    attempt: int = 1
    machine: str | None = None
    job: str | None = None
    step: str | None = None
    labels: tuple[str, ...] = ()
    began: bool | None = None
    mac_job: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.state == "completed"

    @property
    def is_evicted(self) -> bool:
        """Whether it ended before any machine had it: another took its place, or somebody cancelled it."""
        return self.is_done and self.conclusion == "cancelled" and self.began is False

    @property
    def is_on_a_machine(self) -> bool:
        """Whether the Mac has it now."""
        return not self.is_done and self.machine is not None

    def as_json(self) -> dict[str, Any]:
        """What commands say of it with ``--json``."""
        return {
            "id": self.id,
            "url": self.url,
            "state": self.state,
            "conclusion": self.conclusion,
            "attempt": self.attempt,
            "machine": self.machine,
            "job": self.job,
            "step": self.step,
        }


def api_of(remote: Remote, environ: Mapping[str, str] | None = None) -> GitHub | None:
    """The API of a remote's repository, for looks beside other work; None: no such repository, or no token.

    Args:
        remote: The bus.
        environ: Variables; None: the process's own.

    Raises:
        ApiError: A variable holds what can be neither.
    """
    repository = repository_of(remote.address, environ)
    token = None if repository is None else find_token(environ, address=remote.address)
    if repository is None or token is None:
        return None
    return quick(GitHub(repository, token))


def quick(github: GitHub) -> GitHub:
    """The same API for looks beside other work: one try each, and not a long one."""
    return GitHub(github.repository, github.token, patience_s=0.0, timeout_s=_TIMEOUT_S)


def run_of(github: GitHub, request: Request) -> RunView | None:
    """The newest run of a request with its jobs; None: none is known.

    Args:
        github: The repository's API.
        request: Which.

    Raises:
        ApiError: The API did not answer, or said no.
    """
    if request.run_id is not None:
        return detailed(github, github.run(request.run_id))
    pushed = github.runs(workflow=WORKFLOW_NAME, head_sha=request.commit, limit=1)
    if (run := next(iter(pushed), None)) is not None:
        return detailed(github, run)
    found = dispatched(github, request.branch)
    return None if found is None else detailed(github, found)


def dispatched(github: GitHub, branch: str) -> Run | None:
    """The newest run that a dispatch started for a request; None: there is none among the newest.

    Args:
        github: The repository's API.
        branch: The request's, with or without ``refs/heads/``.

    Raises:
        ApiError: The API did not answer, or said no.
    """
    name = branch.removeprefix("refs/heads/")
    started = github.runs(workflow=WORKFLOW_NAME, event="workflow_dispatch", limit=_LISTED)
    return next((run for run in started if run.display_title == name), None)


def runs_by_nonce(github: GitHub, nonces: Iterable[str]) -> dict[str, RunView]:
    """The newest run of each of these requests, among the newest runs; the first few with their jobs.

    Raises:
        ApiError: The API did not answer, or said no.
    """
    wanted, found, asked = set(nonces), dict[str, RunView](), 0
    for run in github.runs(workflow=WORKFLOW_NAME, limit=_LISTED) if wanted else ():
        nonce = _nonce(run)
        if nonce is None or nonce not in wanted or nonce in found:
            continue
        if run.status == "in_progress" and asked < _DETAILED:
            asked += 1
            found[nonce] = detailed(github, run)
        else:
            found[nonce] = _view(run, None)
    return found


def detailed(github: GitHub, run: Run) -> RunView:
    """A run with its jobs, which is one call more.

    Raises:
        ApiError: The API did not answer, or said no.
    """
    return _view(run, github.jobs(run.id))


def _nonce(run: Run) -> str | None:
    for name in (run.head_branch or "", run.display_title):
        if (named := parse_request_ref(f"refs/heads/{name}")) is not None:
            return named.nonce
    return None


def _view(run: Run, jobs: list[Job] | None) -> RunView:
    mac = next((job for job in jobs or () if job.name.rpartition(" / ")[2] == _JOB), None)
    live = next((job for job in jobs or () if job.status == "in_progress"), None)
    step = None if live is None else live.step
    return RunView(
        id=run.id,
        url=clean_line(run.html_url),
        state=clean_line(run.status or "unknown"),
        conclusion=None if run.conclusion is None else clean_line(run.conclusion),
        attempt=run.run_attempt,
        machine=clean_line(mac.runner_name) if mac is not None and mac.runner_name else None,
        job=None if live is None else clean_line(live.name),
        step=None if step is None else clean_line(step.name),
        labels=() if mac is None else tuple(clean_line(label) for label in mac.labels),
        began=None if jobs is None else any(job.runner_name or job.steps for job in jobs),
        mac_job=None if mac is None else mac.id,
    )
