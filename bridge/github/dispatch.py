"""Find the workflow run of a request, and report on it while a client waits.

A run belongs to a request by its commit where a push started it, and by its title, the request's branch,
where a dispatch did. The API only informs: the result itself travels by git.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from bridge.errors import ApiError, ApiNotFound, ScopeMissing, TokenRejected
from bridge.github.api import GitHub, RunView, find_token, repository_of
from bridge.protocol.refs import nonce_moment, parse_request_ref

INTERVAL_S = 10.0
LATE_S = 60.0  # a run, and a machine for it, usually appear within seconds
# A request this old whose run is not listed has none: a push and its run are minutes apart at most.
GONE_AFTER_S = 300.0


@dataclass(frozen=True)
class RequestRef:
    """A request as a workflow run names it; `run_id` is that of a run that a dispatch started, if known."""

    nonce: str
    branch: str
    commit: str
    run_id: int | None = None


def api_of(address: str) -> GitHub | None:
    """The API of a remote's repository with one quick try a call; None: no GitHub repository, or no token."""
    repository = repository_of(address)
    token = find_token() if repository else None
    return GitHub(repository, token, retries=0, timeout_s=10.0) if repository and token else None


@dataclass(frozen=True)
class FoundRun:
    """The newest workflow run of a request."""

    run: RunView | None  # None: none is known
    is_missing: bool = False  # whether every run since the request is listed, and none is its

    def problem(self, nonce: str) -> str | None:
        """Why a request for a workflow that has no result gets none, and what to do; None: it may get one."""
        if self.run is not None and self.run.is_over:
            said = f"its run ended ({self.run.conclusion or 'unknown'}) without a result"
        elif self.is_missing:
            said = "no workflow run of it exists"
        else:
            return None
        return f"{said}: kakeya_mac cancel {nonce} ends it, kakeya_mac again {nonce} asks again"


def find_run(github: GitHub, request: RequestRef) -> FoundRun:
    """Find the newest run of a request, with its jobs."""
    if request.run_id is not None:
        with contextlib.suppress(ApiNotFound):  # it was deleted; the list tells it from a missing repository
            return FoundRun(_with_jobs(github, github.run(request.run_id)))
    title = request.branch.removeprefix("refs/heads/")
    found = list(github.runs(head_sha=request.commit, limit=1).rows)
    if not found:
        listed = github.runs()
        found = [run for run in listed.rows if run.title == title]
        if not found:
            return FoundRun(None, is_missing=_should_exist(request.nonce, listed.since))
    return FoundRun(_with_jobs(github, found[0]))


def runs_by_nonce(github: GitHub, nonces: Iterable[str]) -> dict[str, FoundRun]:
    """The newest run of each request among the last hundred; one in progress with its jobs."""
    wanted, found = set(nonces), dict[str, FoundRun]()
    if not wanted:
        return found
    listed = github.runs()
    for run in listed.rows:
        names = (parse_request_ref(f"refs/heads/{name}") for name in (run.branch, run.title))
        nonce = next((name.nonce for name in names if name is not None), None)
        if nonce in wanted and nonce not in found:
            found[nonce] = FoundRun(_with_jobs(github, run) if run.state == "in_progress" else run)
    missing = {nonce for nonce in wanted - found.keys() if _should_exist(nonce, listed.since)}
    return found | {nonce: FoundRun(None, is_missing=True) for nonce in missing}


def _should_exist(nonce: str, since: datetime) -> bool:
    """Whether a run of this request would be in a list that is complete `since` then."""
    try:
        made = nonce_moment(nonce)
    except ValueError:
        return False
    return made > since and (datetime.now(UTC) - made).total_seconds() > GONE_AFTER_S


def _with_jobs(github: GitHub, run: RunView) -> RunView:
    return run.model_copy(update={"jobs": github.jobs(run.id)})


class RunWatcher:
    """Reports on a request's run while a client waits.

    API failures are reported once and never raised: the result comes by git.
    """

    def __init__(
        self, github: GitHub | None, request: RequestRef, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run: RunView | None = None
        self.problem: str | None = None  # see `FoundRun.problem`
        self._suspected: str | None = None
        self._github, self._request, self._clock = github, request, clock
        self._start_s = self._next_s = clock()
        self._reported: set[str] = set()

    def poll(self) -> list[str]:
        """What is new about the run, one sentence each; asks the API every `INTERVAL_S` at most.

        The caller looks for the result between two polls.
        """
        now = self._clock()
        if self._github is None or now < self._next_s:
            return []
        self._next_s = now + INTERVAL_S
        try:
            sentences = list(self._look(self._github, is_late=now - self._start_s >= LATE_S))
        except ApiError as error:
            self._next_s = now + max(INTERVAL_S, error.wait_s or 0.0)
            if isinstance(error, TokenRejected | ScopeMissing | ApiNotFound):
                self._github = None  # it will not get better
            remedy = f" ({error.remedy})" if error.remedy else ""
            sentences = [f"{error.message}{remedy}; waiting goes on over git"]
        news = [sentence for sentence in sentences if sentence not in self._reported]
        self._reported.update(news)
        return news

    def _look(self, github: GitHub, *, is_late: bool) -> Iterator[str]:
        found = find_run(github, self._request)
        run, problem = found.run, found.problem(self._request.nonce)
        # A run may have ended after the last look for its result.
        self.problem = problem if problem == self._suspected else None
        self.run, self._suspected = run, problem
        if run is not None:
            yield run.sentence
            if is_late and run.state == "queued":
                labels = ", ".join((run.mac_job and run.mac_job.labels) or ["unknown"])
                yield f"no machine took the run for {LATE_S:.0f} s: is the Mac online? labels: {labels}"
        elif is_late:
            yield "no workflow run was found for it: are Actions enabled, and is the workflow on its commit?"
        if self.problem is not None:
            yield self.problem
