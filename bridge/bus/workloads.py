"""A mirror's last few workloads, held on to: what the next request shares with them need not travel again."""

from __future__ import annotations

import time
from collections.abc import Mapping

from bridge.bus.git import Git
from bridge.errors import BusError
from bridge.protocol import refs

_KEPT = "refs/kept/"
_COUNT = 8


class Workloads:
    """Which workloads are kept, as refs to requests for them.

    Args:
        git: The mirror's repository.
    """

    def __init__(self, git: Git) -> None:
        self._git = git
        # Request commit -> its workload, of what is in the inbox or kept.
        self._known: dict[str, str | None] = {}
        # Refs are numbered as they come, so that nobody's nonce decides which one goes.
        self._number = int(time.time())

    def changes(self, held: Mapping[str, str]) -> list[str]:
        """Lines for ``update-ref`` that keep what is in the inbox and let go of the oldest.

        Args:
            held: The mirror's refs, before the next fetch prunes the inbox.
        """
        kept = {ref: commit for ref, commit in held.items() if ref.startswith(_KEPT)}
        inbox = {ref: commit for ref, commit in held.items() if ref.startswith(refs.INBOX)}
        self._known = {commit: self._workload(commit) for commit in {*kept.values(), *inbox.values()}}
        known = {self._known[commit] for commit in kept.values()}
        fresh: dict[str | None, str] = {}
        for ref, commit in inbox.items():
            workload = self._known[commit]
            if workload is not None and workload not in known and refs.nonce_of(ref, refs.INBOX):
                fresh[workload] = commit
        lines = []
        for commit in list(fresh.values())[-_COUNT:]:
            self._number += 1
            kept[f"{_KEPT}{self._number:09d}"] = commit
            lines.append(f"update {_KEPT}{self._number:09d} {commit}")
        return [*lines, *(f"delete {ref}" for ref in sorted(kept)[:-_COUNT] if ref in held)]

    def removal(self, held: Mapping[str, str]) -> list[str]:
        """Lines for ``update-ref`` that let go of all that are kept, among the mirror's refs."""
        return [f"delete {ref}" for ref in held if ref.startswith(_KEPT)]

    def _workload(self, commit: str) -> str | None:
        """The parent of a request commit; None where it has none, or is not to be read."""
        if commit in self._known:
            return self._known[commit]
        try:
            return next(iter(self._git.commit(commit).parents), None)
        except BusError:
            return None
