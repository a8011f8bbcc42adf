"""A bare copy of the bus for one request at a time: its commit, its workload, and nothing else.

Nothing attacker-made reaches a work tree. The copy is kept between runs, so that what the next request shares
with the last few need not travel again; it holds nothing that cannot be fetched again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bridge.bus import refs, room
from bridge.bus.git import Git
from bridge.bus.intake import Intake
from bridge.bus.mirror import Mirror, Standing
from bridge.bus.requests import has_result
from bridge.errors import BusError
from bridge.workflow.asked import Asked

_WATCHED = "refs/watched/"
_KEPT = 8
_FETCH_S = 300.0


class Copy:
    """The copy of one remote.

    Args:
        directory: The bare repository; made when missing, replaced when broken.
        remote: Address of the bus.
        say: Takes one line for the owner.
    """

    def __init__(self, directory: Path, remote: str, *, say: Callable[[str], None]) -> None:
        self.mirror = Mirror(directory, remote, timeout_s=_FETCH_S, say=say)
        self._remote = remote

    @property
    def git(self) -> Git:
        """The repository."""
        return self.mirror.git

    def bring(self, asked: Asked) -> Standing:
        """Fetch a request with its workload; what stands on the remote of it at this moment.

        The commit is the one that was asked for, wherever its branch is now. Afterwards `holds` says whether
        it was to be had.

        Raises:
            RemoteUnreachable: The remote did not answer.
            BusError: It sends more than is taken.
        """
        self.mirror.ready()
        self._tidy()
        standing = self.mirror.standing(asked.nonce, asked.branch)
        if not self.holds(asked.commit):
            spec = f"+{asked.commit}:{_WATCHED}asked/{asked.nonce}"
            intake = Intake(self.git.directory, self._remote)
            try:
                self.git.fetch(self._remote, [spec], depth=2, guard=intake.guard)
            except BusError:
                room.remove_litter(self.git.directory / "objects")
                self.git.ls_remote(self._remote, asked.branch)  # one that answers has not got the commit
        return standing

    def renew(self, asked: Asked) -> None:
        """Throw the copy away and make it anew, for this request.

        Raises:
            BusError: As `bring` does.
        """
        self.mirror.renew()
        self.bring(asked)

    def holds(self, commit: str) -> bool:
        """Whether a request commit is here with its workload."""
        if self.git.kind_and_size(commit)[0] == "missing":
            return False
        try:
            parents = self.git.commit(commit).parents
        except BusError:
            return True  # it is here, and no commit: `read_request` says so
        return all(self.git.exists(parent) for parent in parents)

    def is_answered(self, asked: Asked, standing: Standing) -> bool:
        """Whether an answer stands on the request's branch or in the place for those that could not go there.

        Args:
            asked: The request.
            standing: What `bring` saw.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        if standing.branch is not None and has_result(self.git, standing.branch, asked.nonce):
            return True
        places = (refs.result_ref(asked.nonce), refs.BRANCH_RESULTS + asked.nonce)
        return bool(self.git.ls_remote(self._remote, *places))

    def _tidy(self) -> None:
        """Let go of all but the last few requests, and of what nothing holds when that may be much."""
        held = sorted(self.git.refs(_WATCHED), key=lambda ref: ref.rpartition("/")[2])
        if lines := [f"delete {ref}\n" for ref in held[:-_KEPT]]:
            self.git.run("update-ref", "--stdin", input="".join(lines).encode())
        objects = self.git.directory / "objects"
        room.remove_litter(objects)
        if room.size_bytes(objects) > room.TIDY_BYTES:
            self.git.run("gc", "--quiet", "--prune=now")


def unreachable(asked: Asked) -> BusError:
    """The request commit is not to be had."""
    return BusError(
        f"the request commit {asked.commit[:12]} is no longer on the remote, nor on {asked.branch}",
        "ask again with kakeya_mac run",
    )
