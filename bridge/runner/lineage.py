"""Whether a workload commit is on a branch that the owner trusts: a tip of one, or in the history of one.

The mirror of the queue is shallow, so histories are kept in a repository of their own, with only the branches
that the policy names; it is made when a commit is first looked for that is no tip. Who may move these
branches is for the server to protect: on one that protects nothing, this says nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from bridge.bus.git import Git
from bridge.bus.intake import Intake
from bridge.errors import BusError, RemoteUnreachable
from bridge.protocol import refs
from bridge.runner.policy import FILE_NAME, PolicyRefusal
from bridge.runner.policy.types import BRANCHES
from bridge.runner.station import Station

# Of more branches the histories are not fetched: a pattern that wide protects nothing.
MOST_BRANCHES = 100
FETCH_S = 600.0
_SHA1_DIGITS = 40
_PLAIN = re.compile(r"refs/heads/[A-Za-z0-9_][A-Za-z0-9_./+-]{0,240}")
# Branches of the bus itself: whoever asks writes them, so they vouch for nothing.
_OF_THE_BUS = (refs.BRANCHES, refs.AGENT_BRANCHES, "refs/heads/mac-bridge-")


class Lineage:
    """The histories of one remote's trusted branches.

    Args:
        station: The runner.
        git: Any repository of this machine, to list the remote's branches with.
        folder: Where histories are kept; made when they are needed.
    """

    def __init__(self, station: Station, git: Git, folder: Path) -> None:
        self._station = station
        self._git = git
        self._folder = folder

    def check(self, commit: str) -> None:
        """Refuse a commit that is on no branch of ``allow_workloads``.

        Raises:
            PolicyRefusal: It is on none of them, or too many match.
            RemoteUnreachable: The remote did not answer.
            BusError: The histories are larger than what is fetched.
        """
        patterns = self._station.policy.allow_workloads
        if patterns is None:
            return
        tips = self._tips(patterns)
        if commit in tips.values() or (tips and self._is_in_history(commit, tips)):
            return
        raise self._refusal(
            f"the commit {commit[:12]} is on no branch that this machine's policy trusts",
            "ask for a commit that was merged into one of them: " + (", ".join(patterns) or "none"),
        )

    def _tips(self, patterns: tuple[str, ...]) -> dict[str, str]:
        """The remote's branches that the policy trusts, with their commits."""
        found = self._git.ls_remote(self._station.remote, f"{BRANCHES}*")
        return {
            ref: commit
            for ref, commit in found.items()
            if _PLAIN.fullmatch(ref)
            and not ref.startswith(_OF_THE_BUS)
            and any(fnmatchcase(ref.removeprefix(BRANCHES), pattern) for pattern in patterns)
        }

    def _is_in_history(self, commit: str, tips: Mapping[str, str]) -> bool:
        if len(tips) > MOST_BRANCHES:
            raise self._refusal(
                f"the commit {commit[:12]} is no tip, and {len(tips)} branches match this machine's policy",
                f"its owner can name fewer than {MOST_BRANCHES} in allow_workloads in {FILE_NAME}",
            )
        try:
            return self._look(commit, tips)
        except RemoteUnreachable:
            raise
        except BusError:
            shutil.rmtree(self._folder, ignore_errors=True)  # it holds nothing that cannot be fetched again
            return self._look(commit, tips)

    def _look(self, commit: str, tips: Mapping[str, str]) -> bool:
        git = Git(self._folder)
        try:
            if not (self._folder / "HEAD").exists():
                kind = "sha1" if len(commit) == _SHA1_DIGITS else "sha256"
                options = ("--quiet", "--bare", "--template=", f"--object-format={kind}")
                Git(self._folder.parent).run("init", *options, str(self._folder))
            # A branch that is no more would be in the way of one below its name.
            gone = git.refs(BRANCHES).keys() - tips.keys()
            git.run("update-ref", "--stdin", input="".join(f"delete {ref}\n" for ref in gone).encode())
            specs = [f"+{ref}:{ref}" for ref in tips]
            intake = Intake(self._folder, self._station.remote)
            git.fetch(self._station.remote, specs, timeout_s=FETCH_S, guard=intake.guard)
            if git.attempt("cat-file", "-e", f"{commit}^{{commit}}").exit_code != 0:
                return False
            holding = git.run("for-each-ref", f"--contains={commit}", "--format=%(refname)", BRANCHES)
        finally:
            git.close()
        return not tips.keys().isdisjoint(holding.decode("utf-8", "replace").split("\n"))

    def _refusal(self, message: str, remedy: str) -> PolicyRefusal:
        return PolicyRefusal(("allow_workloads",), message, remedy)
