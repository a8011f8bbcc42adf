"""A bare copy of the bus for one request at a time: its commit, its workload, and nothing else.

Nothing attacker-made reaches a work tree. The copy is kept between runs, so that what the next request shares
with the last few need not travel again; it holds nothing that cannot be fetched again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bridge.bus import room
from bridge.bus.git import Git
from bridge.bus.intake import Intake
from bridge.bus.mirror import Mirror, Standing
from bridge.bus.requests import bound_manifest, has_result, read_request
from bridge.bus.results import Asked as AskedFor
from bridge.errors import BusError, ManifestError
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.workflow.asked import Asked

# Which requests a workflow takes.
TRANSPORT = "actions"
LEFT = "it asks for the transport embedded, so a runner's daemon takes it"

_WATCHED = "refs/watched/"
_KEPT = 8
_FETCH_S = 300.0


@dataclass(frozen=True)
class Reading:
    """A request as far as it can be read.

    Attributes:
        asked: What was to be read.
        manifest: What it asks; None: that cannot be read.
        workload: The commit it is for; None: it has not the shape of a request.
        fault: Why it cannot be read; None: it can.
    """

    asked: Asked
    manifest: Manifest | None
    workload: str | None
    fault: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether a workflow answers it: the others are for an embedded runner."""
        return self.manifest is None or self.manifest.transport == TRANSPORT

    @property
    def branch(self) -> str:
        """Where its result goes."""
        return self.asked.branch if self.manifest is None else self.manifest.result_ref

    @property
    def expected(self) -> AskedFor:
        """What an answer is held against."""
        asked, manifest = self.asked, self.manifest
        if manifest is None:
            return AskedFor(asked.nonce, asked.commit, self.workload)
        return AskedFor(asked.nonce, asked.commit, self.workload, manifest.preset, manifest.params)


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
        self._fetch(asked.commit, asked)
        return standing

    def bring_alone(self, commit: str, asked: Asked) -> None:
        """Fetch a commit that a request is judged by, and nothing of the request.

        Args:
            commit: Which; whether it was to be had, `git` says.
            asked: The request.

        Raises:
            RemoteUnreachable: The remote did not answer.
            BusError: It sends more than is taken.
        """
        self.mirror.ready()
        self._tidy()
        self._fetch(commit, asked)

    def read(self, asked: Asked) -> Reading:
        """A request that `bring` brought.

        Raises:
            BusError: It was not to be had.
        """
        if not self.holds(asked.commit):
            raise unreachable(asked)
        workload = None
        try:
            request = read_request(self.git, asked.commit)
            workload = request.parent
            return Reading(asked, bound_manifest(request, asked.nonce), workload)
        except (ManifestError, BusError) as error:
            return Reading(asked, None, workload, error.message)

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

    def _fetch(self, commit: str, asked: Asked) -> None:
        if self.holds(commit):
            return
        spec = f"+{commit}:{_WATCHED}asked/{asked.nonce}"
        intake = Intake(self.git.directory, self._remote)
        try:
            self.git.fetch(self._remote, [spec], depth=2, guard=intake.guard)
        except BusError:
            room.remove_litter(self.git.directory / "objects")
            self.git.ls_remote(self._remote, asked.branch)  # one that answers has not got the commit

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
