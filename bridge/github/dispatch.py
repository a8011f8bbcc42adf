"""Find the workflow run of a request, and report on it while a client waits.

A run belongs to a request by its commit where a push started it, and by its title, the request's branch,
where a dispatch did. The API only informs: the result itself travels by git.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from bridge.errors import ApiError, ApiNotFound, ScopeMissing, TokenRejected
from bridge.github.api import GitHub, RunView, find_token, repository_of
from bridge.protocol.refs import parse_request_ref

INTERVAL_S = 10.0
MAX_RERUNS = 3
LATE_S = 60.0  # a run, and a machine for it, usually appear within seconds


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


def find_run(github: GitHub, request: RequestRef) -> RunView | None:
    """The newest run of a request with its jobs; None: none is known."""
    if request.run_id is not None:
        return _with_jobs(github, github.run(request.run_id))
    title = request.branch.removeprefix("refs/heads/")
    found = github.runs(head_sha=request.commit, limit=1)
    found = found or tuple(run for run in github.runs() if run.title == title)
    return _with_jobs(github, found[0]) if found else None


def runs_by_nonce(github: GitHub, nonces: Iterable[str]) -> dict[str, RunView]:
    """The newest run of each request among the last hundred; one in progress with its jobs."""
    wanted, found = set(nonces), dict[str, RunView]()
    for run in github.runs() if wanted else ():
        names = (parse_request_ref(f"refs/heads/{name}") for name in (run.branch, run.title))
        nonce = next((name.nonce for name in names if name is not None), None)
        if nonce in wanted and nonce not in found:
            found[nonce] = _with_jobs(github, run) if run.state == "in_progress" else run
    return found


def _with_jobs(github: GitHub, run: RunView) -> RunView:
    return run.model_copy(update={"jobs": github.jobs(run.id)})


class RunWatcher:
    """Reports on a request's run while a client waits, and re-runs it when it was evicted from the queue.

    API failures are reported once and never raised: the result comes by git.
    """

    def __init__(
        self, github: GitHub | None, request: RequestRef, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run: RunView | None = None
        self._github, self._request, self._clock = github, request, clock
        self._start_s = self._next_s = clock()
        self._reruns = 0
        self._reported: set[str] = set()

    def poll(self) -> list[str]:
        """What is new about the run, one sentence each; asks the API every `INTERVAL_S` at most."""
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
        run = self.run = find_run(github, self._request)
        if run is not None:
            yield run.sentence
            if run.is_evicted:
                yield self._rerun(github, run)
            elif is_late and run.state == "queued":
                labels = ", ".join(run.mac_job.labels) if run.mac_job else "unknown"
                yield f"no machine took the run for {LATE_S:.0f} s: is the Mac online? labels: {labels}"
        elif is_late:
            yield "no workflow run exists for it: are Actions enabled, and is the workflow on its commit?"

    def _rerun(self, github: GitHub, run: RunView) -> str:
        if self._reruns >= MAX_RERUNS:
            return f"it was re-run {MAX_RERUNS} times, which is the limit"
        try:
            github.rerun(run.id)
        except ApiError as error:  # another client may have re-run it
            return f"cannot re-run it: {error.message}"
        self._reruns += 1
        return f"re-run (attempt {run.attempt + 1}); `queue: max` in the workflow file prevents evictions"
