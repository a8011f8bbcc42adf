"""A request pushed once more, unchanged: what starts a workflow run anew where nobody has a token that does.

A server starts a run for a push that changes a branch, so the branch is deleted first. Its inbox entry stays
meanwhile, and with it the commit. A Mac takes a branch that stays away for a wish to stop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from bridge.bus.carriage import STARTS_NO_RUN
from bridge.bus.git import Git, Update
from bridge.client.runs import Request
from bridge.errors import BusError, LeaseLost, RemoteUnreachable

# All but the last are over long before `bridge.runner.wishes.AWAY_S`; that one is for what no Mac has yet.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 30.0)


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
        Whether it was pushed. False: the branch does not hold the request alone any more, no push of it
        starts a run (a dispatch did), or nobody answered that the branch was deleted and it stands there.

    Raises:
        PushRejected: The remote said no.
        RemoteUnreachable: The remote did not answer.
    """
    with git.scratch() as scratch:
        if not scratch.exists(commit):
            scratch.fetch(remote, [branch])
        if not scratch.exists(commit) or STARTS_NO_RUN in scratch.commit(commit).message:
            return False
        is_deleted, tries = True, 0
        try:
            scratch.push(remote, [Update(branch, None, commit)])
        except LeaseLost:
            return False
        except RemoteUnreachable:
            is_deleted = False  # nobody knows; the next push tells
        back = Update(branch, commit, "")
        try:
            for pause in (*_PAUSES_S, None):
                tries += 1
                try:
                    scratch.push(remote, [back])
                except LeaseLost:  # an earlier push took effect after all, or somebody else pushed it
                    return is_deleted or tries > 1
                except BusError as error:
                    if pause is None or not isinstance(error, RemoteUnreachable):
                        error.remedy = f"{branch} is deleted; ask for the same anew: kakeya_mac again"
                        raise
                    sleep(pause)
                else:
                    return True
        except KeyboardInterrupt:  # a branch that stays away is a wish to stop, which nobody had
            with contextlib.suppress(BusError):
                scratch.push(remote, [back])
            raise
    raise AssertionError("unreachable: the last try returns or raises")


class Resender:
    """Pushes a request again that nobody seems to have taken: what is left to do without a token that does.

    Args:
        git: Any checkout.
        remote: Address of the bus.
        request: Which.
        quiet_s: How old it may be until it is pushed; twice as long until the next time.
        age_s: How old the request is. Who comes late cannot tell whether others pushed it, and waits for a
            quarter of its age at least.
        clock: Monotonic seconds.
    """

    MOST = 3

    def __init__(
        self,
        git: Git,
        remote: str,
        request: Request,
        *,
        quiet_s: float,
        age_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._git = git
        self._remote = remote
        self._request = request
        self._quiet_s = quiet_s
        self._clock = clock
        self._since = clock() - age_s
        self._earliest = clock() + age_s / 4
        self._done = 0

    def look(self, *, is_taken: bool) -> list[str]:
        """Push it again if it is time; what was done, one sentence each.

        Args:
            is_taken: Whether somebody is known to have it, or asked for it to be stopped.
        """
        if is_taken or self._done >= self.MOST or not self._is_due():
            return []
        waited = self._clock() - self._since
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
            " evicted, which cannot be seen without a token that does (KAKEYA_GITHUB_TOKEN)"
        ]

    def _is_due(self) -> bool:
        now = self._clock()
        return now >= self._earliest and now - self._since >= self._quiet_s * 2**self._done
