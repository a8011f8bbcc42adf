"""What a client that waits does for its request's workflow run: it tells of the run, and starts it anew.

With a token the API says where the run is, and that it was evicted: another took its place in the queue, or
somebody cancelled it before a machine had it. It is then started again, `MOST_AGAIN` times. Without a token
that does, none of this can be seen or done (`bridge.client.resend`).

The result comes by git, whatever happens here: each failure is told once, and git goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bridge.client.runs import Request, RunView, run_of
from bridge.errors import (
    ApiConflict,
    ApiError,
    ApiFault,
    ApiNotFound,
    RateLimited,
    ScopeMissing,
    TokenRejected,
)
from bridge.github import GitHub

MOST_AGAIN = 5
INTERVAL_S = 10.0
# A run, or a machine for it, is there within seconds as a rule.
PATIENCE_S = 60.0
_SLOWEST_S = 300.0
_GOES_ON = "git goes on without the API"


class Attendant:
    """Attends one request's run. Call `look` as often as you like: it asks no more than every `INTERVAL_S`.

    Args:
        request: Which.
        github: The repository's API, with a token; None: there is none.
        is_wished_away: Whether somebody asked for the request to be stopped: then it is not started anew.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        request: Request,
        github: GitHub | None,
        *,
        is_wished_away: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run: RunView | None = None
        self._request = request
        self._github = github
        self._is_wished_away = is_wished_away
        self._clock = clock
        self._began = self._next = clock()
        self._pause_s = INTERVAL_S
        self._again = 0
        self._told: set[str] = set()
        self._line = ""
        self._refused: int | None = None  # the attempt that the API gave no successor

    @property
    def is_helpless(self) -> bool:
        """Whether it could not start an evicted run anew: it has lost the API, or that says no to it."""
        refused = self.run is not None and self.run.is_evicted and self.run.attempt == self._refused
        return refused or self._github is None or self._pause_s >= _SLOWEST_S

    def look(self) -> list[str]:
        """News of the run since the last look, one sentence each; never raises what the API does."""
        now = self._clock()
        if self._github is None or now < self._next:
            return []
        self._next = now + INTERVAL_S
        try:
            return self._look(self._github, now)
        except ApiError as error:
            return self._failed(error, now)

    def _look(self, github: GitHub, now: float) -> list[str]:
        run = self.run = run_of(github, self._request)
        self._pause_s = INTERVAL_S
        waited = now - self._began
        if run is None:
            missing = "no run was started for it: are Actions enabled, and is the workflow on its commit?"
            return self._once(missing) if waited >= PATIENCE_S else []
        news = self._once(f"run {run.url}")
        if run.is_evicted:
            return [*news, *self._evicted(github, run)]
        if (line := _line(run)) != self._line:
            self._line = line
            news.append(line)
        if run.state == "queued" and run.machine is None and waited >= PATIENCE_S:
            labels = f" with the labels {', '.join(run.labels)}" if run.labels else ""
            news += self._once(f"no machine{labels} has taken it for {PATIENCE_S:.0f} s: is the Mac online?")
        return news

    def _evicted(self, github: GitHub, run: RunView) -> list[str]:
        if run.attempt == self._refused:
            return []
        if self._is_wished_away():
            return self._once("its run was cancelled, and so was the request")
        said = f"its run was evicted before a machine had it (attempt {run.attempt})"
        if self._again >= MOST_AGAIN:
            return self._once(f"{said}; it was started anew {MOST_AGAIN} times, and is not once more")
        self._again += 1
        try:
            github.rerun(run.id)
        except (
            ApiConflict,
            ApiNotFound,
            ScopeMissing,
        ) as error:  # as of a run that somebody else just started
            self._refused = run.attempt
            return [f"{said}, and is not started anew from here: {error.message}"]
        return [f"{said}: started anew; `queue: max` in the workflow file keeps runs from evicting others"]

    def _failed(self, error: ApiError, now: float) -> list[str]:
        """The failure in a sentence, once; and when the API is asked again, if it is."""
        if isinstance(error, TokenRejected | ScopeMissing):
            self._github = None
        elif isinstance(error, RateLimited):
            self._next = now + max(INTERVAL_S, error.wait_s or PATIENCE_S)
        else:
            self._pause_s = min(self._pause_s * 2, _SLOWEST_S)
            asked = error.wait_s if isinstance(error, ApiFault) else None
            self._next = now + max(self._pause_s, asked or 0.0)
        if isinstance(error, ApiNotFound) and not self._told:
            self._github = None
        remedy = f" ({error.remedy})" if error.remedy else ""
        return [f"{sentence}; {_GOES_ON}" for sentence in self._once(f"{error.message}{remedy}")]

    def _once(self, sentence: str) -> list[str]:
        if sentence in self._told:
            return []
        self._told.add(sentence)
        return [sentence]


def _line(run: RunView) -> str:
    if run.is_done:
        return f"its run has ended: {run.conclusion or 'unknown'}"
    if run.state != "in_progress":
        return f"its run is {run.state}"
    where = f" on {run.machine}" if run.machine is not None and run.job == "run" else ""
    doing = " / ".join(part for part in (run.job, run.step) if part)
    return f"its run goes on{where}{': ' if doing else ''}{doing}"
