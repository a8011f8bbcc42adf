"""Start the workflow run of a request, find it, and report on it while a client waits.

A run belongs to a request by its commit where a push started it, and by its title where a dispatch did: the
workflow titles its runs with the request's branch. The API only informs: the result itself travels by git.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bridge.bus.requests import WORKFLOW_NAME
from bridge.errors import ApiConflict, ApiError, ApiFault, ApiNotFound, ScopeMissing, TokenRejected
from bridge.github.api import GitHub, JobRecord, RunRecord, find_token, repository_of
from bridge.protocol.refs import parse_request_ref
from bridge.protocol.sanitize import clean_line

INTERVAL_S = 10.0
MAX_INTERVAL_S = 300.0
MAX_RERUNS = 3
# A run, and a machine for it, usually appear within seconds.
LATE_S = 60.0
# Pauses before looking for a run whose dispatch got no answer: lists of runs lag behind.
_LOOKUP_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
_QUICK_TIMEOUT_S = 10.0
_WITH_JOBS = 5  # runs of a list whose jobs are fetched, one call each
_MAC_JOB = "run"  # its name in mac-bridge.yaml


@dataclass(frozen=True)
class RequestRef:
    """A request as a workflow run names it; `run_id` is that of a run that a dispatch started, if known."""

    nonce: str
    branch: str
    commit: str
    run_id: int | None = None


@dataclass(frozen=True)
class RunView:
    """A workflow run at one moment, its texts sanitised; None: there is none, or it is not known."""

    id: int
    url: str
    state: str  # ``queued``, ``pending``, ``waiting``, ``requested``, ``in_progress`` or ``completed``
    conclusion: str | None = None
    attempt: int = 1
    machine: str | None = None  # the runner of the Mac's job
    job: str | None = None  # the job in progress
    step: str | None = None  # its step in progress
    labels: tuple[str, ...] = ()  # the runner labels that the Mac's job asks for
    started: bool | None = None  # whether any machine had a job of this attempt
    mac_job: int | None = None  # id of the Mac's job

    @property
    def is_done(self) -> bool:
        """Whether the run has ended."""
        return self.state == "completed"

    @property
    def is_evicted(self) -> bool:
        """Whether the run was cancelled before any machine had it."""
        return self.is_done and self.conclusion == "cancelled" and self.started is False

    @property
    def is_on_a_machine(self) -> bool:
        """Whether the Mac has the run now."""
        return not self.is_done and self.machine is not None

    def as_json(self) -> dict[str, Any]:
        """The keys that commands print with ``--json``."""
        hidden = {"labels", "started", "mac_job"}
        return {name: value for name, value in asdict(self).items() if name not in hidden}


@dataclass(frozen=True)
class Dispatch:
    """The call that starts a run with the workflow file of a branch."""

    github: GitHub
    ref: str

    def start(self, branch: str, commit: str) -> int | None:
        """Start the run of a request whose branch, with or without ``refs/heads/``, is on the remote.

        Returns:
            The run's id; None: the server does not tell it.

        Raises:
            ApiFault: The server did not answer, and whether a run was started is unknown.
            ApiError: No run was started.
        """
        inputs = {"branch": branch.removeprefix("refs/heads/"), "commit": commit}
        try:
            return self.github.dispatch(WORKFLOW_NAME, self.ref, inputs)
        except ApiFault as error:
            fault = error
        is_known = False
        for pause in _LOOKUP_PAUSES_S:
            time.sleep(pause)
            try:
                run, is_known = _find_dispatched(_quick(self.github), branch), True
            except ApiError:
                run, is_known = None, False
            if run is not None:
                return run.id
        raise ApiError(f"{fault.message}; no run was started", fault.remedy) if is_known else fault


def api_of(address: str) -> GitHub | None:
    """The API of a remote's repository with one quick try a call; None: no GitHub repository, or no token.

    Raises:
        ApiError: A variable holds an invalid API address or token.
    """
    repository = repository_of(address)
    token = None if repository is None else find_token()
    return None if repository is None or token is None else _quick(GitHub(repository, token))


def _quick(github: GitHub) -> GitHub:
    """The same API for calls that must not delay other work."""
    return GitHub(github.repository, github.token, retries=0, timeout_s=_QUICK_TIMEOUT_S)


def find_run(github: GitHub, request: RequestRef) -> RunView | None:
    """The newest run of a request with its jobs; None: none is known."""
    if request.run_id is not None:
        run: RunRecord | None = github.run(request.run_id)
    else:
        pushed = github.runs(workflow=WORKFLOW_NAME, head_sha=request.commit, limit=1)
        run = pushed[0] if pushed else _find_dispatched(github, request.branch)
    return None if run is None else _view(run, github.jobs(run.id))


def _find_dispatched(github: GitHub, branch: str) -> RunRecord | None:
    """The newest of the last hundred dispatched runs that has a request's branch as its title."""
    title = branch.removeprefix("refs/heads/")
    dispatched = github.runs(workflow=WORKFLOW_NAME, event="workflow_dispatch")
    return next((run for run in dispatched if run.display_title == title), None)


def runs_by_nonce(github: GitHub, nonces: Iterable[str]) -> dict[str, RunView]:
    """The newest run of each request among the last hundred; the first few in progress with their jobs."""
    wanted, found, in_progress = set(nonces), dict[str, RunView](), 0
    for run in github.runs(workflow=WORKFLOW_NAME) if wanted else ():
        names = (parse_request_ref(f"refs/heads/{name}") for name in (run.head_branch, run.display_title))
        nonce = next((name.nonce for name in names if name is not None), None)
        if nonce is None or nonce not in wanted or nonce in found:
            continue
        in_progress += run.status == "in_progress"
        has_jobs = run.status == "in_progress" and in_progress <= _WITH_JOBS
        found[nonce] = _view(run, github.jobs(run.id) if has_jobs else None)
    return found


def _view(run: RunRecord, jobs: list[JobRecord] | None) -> RunView:
    mac = next((job for job in jobs or () if job.name.rpartition(" / ")[2] == _MAC_JOB), None)
    live = next((job for job in jobs or () if job.status == "in_progress"), None)
    return RunView(
        id=run.id,
        url=clean_line(run.html_url),
        state=clean_line(run.status or "unknown"),
        conclusion=clean_line(run.conclusion) if run.conclusion else None,
        attempt=run.run_attempt,
        machine=clean_line(mac.runner_name) if mac and mac.runner_name else None,
        job=clean_line(live.name) if live else None,
        step=clean_line(live.step.name) if live and live.step else None,
        labels=tuple(clean_line(label) for label in mac.labels) if mac else (),
        started=None if jobs is None else any(job.runner_name or job.steps for job in jobs),
        mac_job=mac.id if mac else None,
    )


class RunWatcher:
    """Reports on a request's run while a client waits, and re-runs it when it was evicted from the queue.

    API failures are reported once and never raised: the result comes by git.
    """

    def __init__(
        self, github: GitHub | None, request: RequestRef, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run: RunView | None = None
        self._github = github
        self._request = request
        self._clock = clock
        self._start_s = self._next_s = clock()
        self._pause_s = INTERVAL_S
        self._reruns = 0
        self._reported: set[str] = set()

    def poll(self) -> list[str]:
        """What is new about the run, one sentence each; asks the API every `INTERVAL_S` at most."""
        now = self._clock()
        if self._github is None or now < self._next_s:
            return []
        self._next_s = now + INTERVAL_S
        try:
            sentences = list(self._look(self._github, now - self._start_s))
            self._pause_s = INTERVAL_S
        except ApiError as error:
            sentences = [self._give_up_or_back_off(error, now)]
        news = [sentence for sentence in sentences if sentence not in self._reported]
        self._reported.update(news)
        return news

    def _look(self, github: GitHub, waited_s: float) -> Iterator[str]:
        run = self.run = find_run(github, self._request)
        is_late = waited_s >= LATE_S
        if run is None:
            if is_late:
                yield "no workflow run exists for it: are Actions enabled, and is the workflow on its commit?"
            return
        yield f"run {run.url}"
        if run.is_evicted:
            yield self._rerun(github, run)
            return
        yield _progress(run)
        if is_late and run.state == "queued" and run.machine is None:
            labels = f" with the labels {', '.join(run.labels)}" if run.labels else ""
            yield f"no machine{labels} took the run for {LATE_S:.0f} s: is the Mac online?"

    def _rerun(self, github: GitHub, run: RunView) -> str:
        evicted = f"the run was evicted before a machine had it (attempt {run.attempt})"
        if self._reruns >= MAX_RERUNS:
            return f"{evicted}; it was re-run {MAX_RERUNS} times, which is the limit"
        try:
            github.rerun(run.id)
        except (ApiConflict, ApiNotFound) as error:  # another client may have re-run it
            return f"{evicted}; cannot re-run it: {error.message}"
        self._reruns += 1
        return f"{evicted}: re-run; `queue: max` in the workflow file prevents evictions"

    def _give_up_or_back_off(self, error: ApiError, now: float) -> str:
        is_hidden = isinstance(error, ApiNotFound) and not self._reported
        if is_hidden or isinstance(error, TokenRejected | ScopeMissing):
            self._github = None
        else:
            self._pause_s = min(self._pause_s * 2, MAX_INTERVAL_S)
            self._next_s = now + max(self._pause_s, error.wait_s or 0.0)
        remedy = f" ({error.remedy})" if error.remedy else ""
        return f"{error.message}{remedy}; waiting goes on over git"


def _progress(run: RunView) -> str:
    again = "" if run.attempt == 1 else f" (attempt {run.attempt})"
    if run.is_done:
        return f"the run ended{again}: {run.conclusion or 'unknown'}"
    if run.state != "in_progress":
        return f"the run is {run.state}{again}"
    where = f" on {run.machine}" if run.machine is not None and run.job == _MAC_JOB else ""
    step = " / ".join(part for part in (run.job, run.step) if part)
    return f"the run is in progress{where}{again}{': ' if step else ''}{step}"
