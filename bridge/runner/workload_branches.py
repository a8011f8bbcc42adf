"""Whether a workload commit is on a branch that the owner trusts: a tip of one, or in the history of one.

The runner's repository of the remote is shallow, so histories are kept in one of their own, with only the
branches that the policy names; it is made when a commit is first looked for that is no tip. Who may move
these branches is for the server to protect: on one that protects nothing, this says nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from bridge.errors import BusError, RemoteUnreachable
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.runner.config import RunnerConfig
from bridge.runner.policy import BRANCHES, FILE_NAME, PolicyRefusal

# Of more branches the histories are not fetched: a pattern that wide protects nothing.
MAX_BRANCHES = 100
FETCH_S = 600.0
_PLAIN = re.compile(r"refs/heads/[A-Za-z0-9_][A-Za-z0-9_./+-]{0,240}")
_KEY = ("allow_workloads",)
# Branches of the bus itself: requesters write them, so they vouch for nothing.
_BUS_BRANCHES = (refs.BRANCHES, refs.AGENT_BRANCHES, "refs/heads/mac-bridge-")


def check_workload(config: RunnerConfig, cache: GitCache, commit: str) -> None:
    """Refuse a commit that is on no branch of ``allow_workloads``.

    Raises:
        PolicyRefusal: It is on none of them, or too many match.
        BusError: The remote did not answer, or the histories are larger than what is fetched.
    """
    patterns = config.policy.allow_workloads
    if patterns is None:
        return
    tips = {
        ref: tip
        for ref, tip in cache.list_remote(BRANCHES).items()
        if _PLAIN.fullmatch(ref)
        and not ref.startswith(_BUS_BRANCHES)
        and any(fnmatchcase(ref.removeprefix(BRANCHES), pattern) for pattern in patterns)
    }
    if commit in tips.values():
        return
    if len(tips) > MAX_BRANCHES:
        raise PolicyRefusal(
            _KEY,
            f"the commit {commit[:12]} is no tip, and {len(tips)} branches match this machine's policy",
            f"its owner can name fewer than {MAX_BRANCHES} in allow_workloads in {FILE_NAME}",
        )
    folder = cache.directory.with_name(f"histories-{config.tag}.git")
    try:
        if tips and _is_in_history(folder, config.remote, commit, tips):
            return
    except BusError as error:
        if isinstance(error, RemoteUnreachable):
            raise
        shutil.rmtree(folder, ignore_errors=True)  # it holds nothing that cannot be fetched again
        if _is_in_history(folder, config.remote, commit, tips):
            return
    raise PolicyRefusal(
        _KEY,
        f"the commit {commit[:12]} is on no branch that this machine's policy trusts",
        "ask for a commit that was merged into one of them: " + (", ".join(patterns) or "none"),
    )


def _is_in_history(folder: Path, remote: str, commit: str, tips: Iterable[str]) -> bool:
    if not (folder / "HEAD").exists():
        GitRepo(folder.parent).run(
            "init", "--quiet", "--bare", "--template=", "--object-format=sha1", str(folder)
        )
    # Numbered here, so that no name is in the way of another.
    places = {ref: f"refs/trusted/{number}" for number, ref in enumerate(sorted(tips))}
    git = GitRepo(folder)
    try:
        git.fetch(remote, places, timeout_s=FETCH_S)
        if not git.exists(commit):
            return False
        holding = git.run("for-each-ref", f"--contains={commit}", "--format=%(refname)", "refs/trusted/")
    finally:
        git.close()
    return not set(places.values()).isdisjoint(holding.decode("ascii").split())
