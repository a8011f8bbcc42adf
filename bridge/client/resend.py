"""A request pushed once more, unchanged: what starts a workflow run anew where nobody has a token.

A server starts a run for a push that changes a branch, so the branch is deleted first. Its inbox entry stays
meanwhile, and with it the commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bridge.bus.git import Git, Update
from bridge.client.runs import Request
from bridge.errors import BusError, LeaseLost, RemoteUnreachable

_PAUSES_S = (0.5, 2.0, 5.0, 15.0, 30.0)


def resend(
    git: Git, remote: str, branch: str, commit: str, *, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Delete a request's branch and push the same commit there again.

    Args:
        git: Any checkout; nothing is left in it.
        remote: Address of the bus.
        branch: Full name.
        commit: The request commit, which the branch must hold.
        sleep: Waits that many seconds.

    Returns:
        False: the branch does not hold the request alone any more, so nothing was done.

    Raises:
        PushRejected: The remote said no.
        RemoteUnreachable: The remote did not answer.
    """
    with git.scratch() as scratch:
        if not scratch.exists(commit):
            scratch.fetch(remote, [branch])
        try:
            scratch.push(remote, [Update(branch, None, commit)])
        except LeaseLost:
            return False
        except RemoteUnreachable:
            pass  # nobody knows what became of it; the next push tells
        for pause in (*_PAUSES_S, None):
            try:
                scratch.push(remote, [Update(branch, commit, "")])
            except LeaseLost:  # an earlier push took effect after all, or somebody else pushed it
                return True
            except BusError as error:
                if pause is None or not isinstance(error, RemoteUnreachable):
                    error.remedy = f"{branch} is deleted; ask for the same anew: kakeya_mac again"
                    raise
                sleep(pause)
            else:
                return True
    raise AssertionError("unreachable: the last try returns or raises")


class Resender:
    """Pushes a request again that nobody seems to have taken: what is left to do without a token.

    Args:
        git: Any checkout.
        remote: Address of the bus.
        request: Which.
        after_s: Seconds without a sign until it is pushed again; twice as long until the next time.
        clock: Monotonic seconds.
    """

    MOST = 3

    def __init__(
        self,
        git: Git,
        remote: str,
        request: Request,
        *,
        after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._git = git
        self._remote = remote
        self._request = request
        self._after_s = after_s
        self._clock = clock
        self._since = clock()
        self._done = 0

    def look(self, *, is_taken: bool) -> list[str]:
        """Push it again if it is time; what was done, one sentence each.

        Args:
            is_taken: Whether somebody is known to have it, or asked for it to be stopped.
        """
        waited = self._clock() - self._since
        if is_taken or self._done >= self.MOST or waited < self._after_s * 2**self._done:
            return []
        self._done += 1
        self._since = self._clock()
        try:
            sent = resend(self._git, self._remote, self._request.branch, self._request.commit)
        except BusError as error:
            remedy = f" ({error.remedy})" if error.remedy else ""
            return [f"it could not be pushed again: {error.message}{remedy}"]
        if not sent:
            self._done = self.MOST
            return []
        return [
            f"no sign of it for {waited / 60:.0f} min: the same commit was pushed again, in case its run was"
            " evicted, which cannot be seen without a token (KAKEYA_GITHUB_TOKEN)"
        ]
