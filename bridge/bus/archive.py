"""Retire finished requests: first into the archive, then their refs are deleted.

    prune = look at the refs → for each batch: fetch, judge (`bridge.bus.retire`), add folders to the archive,
            push archive and deletions in one transaction

Every push is a compare-and-swap on every ref it changes, so that prunes beside each other, a runner at work
and a kill at any moment lose nothing: what was archived and not yet deleted is found archived the next time
and only deleted. Where a server takes no such transaction the archive goes first and the deletions follow.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from bridge.bus.archive_tree import extended
from bridge.bus.archived import TIP, Archive, archive_in
from bridge.bus.cache import Cache, TooMuch, open_cache, sound
from bridge.bus.git import Git, Update
from bridge.bus.handles import Held
from bridge.bus.retire import (
    Left,
    Retired,
    Standing,
    Unfinished,
    due,
    examine,
    look,
    orphans,
    standings,
)
from bridge.errors import LeaseLost, PushRejected
from bridge.protocol import refs

DEFAULT_OLDER_THAN = timedelta(days=14)
DEFAULT_KEEP = 500
BATCH = 100

_TRIES = 10
_FIRST_PAUSE_S = 0.05


@dataclass(frozen=True)
class Pruned:
    """What a prune did.

    Attributes:
        archived: Nonces of which the result is in the archive and the refs are deleted (with `dry_run`: would
            be).
        deleted: Refs that were deleted, stale claims and wishes to stop included.
        left: Finished requests that stay, and why.
        unfinished: How many requests that old stay because they have no result yet, or a fresh one.
        remaining: How many were not looked at because of `limit`.
        archive: The archive commit on the remote; None: there is none.
        refused: The server's words where it archived and would not delete; None: it did.
    """

    archived: tuple[str, ...]
    deleted: tuple[str, ...]
    left: tuple[Left, ...]
    unfinished: int
    remaining: int
    archive: str | None
    refused: str | None


def prune(
    folder: Path | None,
    remote: str,
    *,
    older_than: timedelta = DEFAULT_OLDER_THAN,
    keep: int | None = DEFAULT_KEEP,
    now: datetime,
    limit: int | None = None,
    dry_run: bool = False,
    origin: Git | None = None,
    progress: Callable[[int, int], object] | None = None,
    timeout_s: float = 300.0,
) -> Pruned:
    """Archive finished requests older than a retention or beyond the newest `keep`, and delete their refs.

    Never an unfinished one: with an inbox entry, a live claim, without a result, or unreadable. Doing it
    twice, or two at a time, is harmless.

    Args:
        folder: Where caches live (the state folder); None: a temporary one.
        remote: Address of the bus.
        older_than: Age of a request, by its nonce, from which it is retired.
        keep: So many of the newest finished ones stay, whatever their number; None: only age counts.
        now: The time of day, aware.
        limit: At most so many are retired by this call; None: all.
        dry_run: Change nothing on the remote.
        origin: A checkout whose own network settings count; None: the user's only.
        progress: Told how many of how many have been looked at.
        timeout_s: Deadline of one git command.

    Raises:
        PushRejected: The server takes no archive.
        RemoteUnreachable: It did not answer. What was done until then stands.
        LeaseLost: The archive moved on every try.
        BusError: What stands at the archive's ref is no archive.
    """
    git = origin or Git(Path.cwd())
    found = git.ls_remote(remote)
    with open_cache(folder, remote, found, origin=origin, timeout_s=timeout_s) as cache:
        pruner = _Pruner(cache, found, older_than=older_than, now=now, dry_run=dry_run)
        return pruner.run(keep=keep, limit=limit, progress=progress)


class _Refused(Exception):
    """The server would not delete refs."""

    def __init__(self, error: PushRejected) -> None:
        super().__init__(error.message)
        self.words = error.message


class _Pruner:
    def __init__(
        self, cache: Cache, found: Mapping[str, str], *, older_than: timedelta, now: datetime, dry_run: bool
    ) -> None:
        self._cache = cache
        self._listed(found)
        self._older_than = older_than
        self._now = now
        self._dry_run = dry_run
        self._archived: list[str] = []
        self._deleted: list[str] = []
        self._left: dict[tuple[str, str], Left] = {}
        self._unfinished: set[str] = set()
        self._one_by_one = False

    def _listed(self, found: Mapping[str, str]) -> None:
        self._found = dict(found)
        self._by_nonce = standings(found)

    def run(
        self, *, keep: int | None, limit: int | None, progress: Callable[[int, int], object] | None
    ) -> Pruned:
        by_nonce = self._by_nonce
        old = due(by_nonce, now=self._now, older_than=self._older_than, keep=keep)
        retiring = set(old)
        # A wish to stop, or a claim, of a request that is finished but stays.
        touched = [n for n, one in by_nonce.items() if one.may_be_finished and (one.cancels or one.claims)]
        nonces = [*old, *sorted(set(touched) - retiring)]
        refused, at = None, 0
        try:
            while at < len(nonces) and (limit is None or len(self._archived) < limit):
                size = BATCH if limit is None else min(BATCH, limit - len(self._archived))
                self._batch(nonces[at : at + size], retiring)
                at += size
                if progress is not None:
                    progress(min(at, len(nonces)), len(nonces))
                self._cache.tidy()
            self._delete_orphans()
        except _Refused as error:
            refused = error.words
        return Pruned(
            archived=tuple(self._archived),
            deleted=tuple(self._deleted),
            left=tuple(self._left[key] for key in sorted(self._left)),
            unfinished=len(self._unfinished & retiring),
            remaining=len(retiring & set(nonces[at:])),
            archive=self._found.get(refs.ARCHIVE),
            refused=refused,
        )

    def _batch(self, nonces: Sequence[str], retiring: set[str]) -> None:
        for attempt in range(_TRIES):
            by_nonce = self._by_nonce
            asked = [by_nonce[n] for n in nonces if n in by_nonce and by_nonce[n].may_be_finished]
            if not asked:
                return
            try:
                sound(self._cache, partial(self._attempt, asked, retiring))
            except TooMuch as error:
                if len(asked) == 1:
                    [place] = (*asked[0].branches, *asked[0].results)[:1]
                    self._leave(Left(asked[0].nonce, place.ref, error.message))
                    return
                half = len(asked) // 2
                for part in (asked[:half], asked[half:]):
                    self._batch([one.nonce for one in part], retiring)
            except LeaseLost:
                if attempt == _TRIES - 1:
                    raise
                time.sleep(_FIRST_PAUSE_S * 2**attempt * random.random())  # noqa: S311 - a pause, no secret
                self._listed(self._cache.git.ls_remote(self._cache.remote))
                continue
            return

    def _attempt(self, asked: Sequence[Standing], retiring: set[str]) -> None:
        judged = self._judge(asked)
        finished = [one for one in judged if isinstance(one, Retired)]
        chosen = [one for one in finished if one.record.nonce in retiring]
        stale = [held for one in judged if isinstance(one, Unfinished) for held in one.forgotten]
        stale += [
            held for one in finished if one not in chosen for held in one.ended if held in one.forgotten
        ]
        if self._dry_run:
            self._archived += [one.record.nonce for one in chosen]
        else:
            self._retire(chosen, stale)

    def _judge(self, asked: Sequence[Standing]) -> list[Retired | Unfinished | Left]:
        seen = look(self._cache, list(asked))
        judged = [examine(self._cache, one, seen, now=self._now) for one in asked]
        for one in judged:
            if isinstance(one, Left):
                self._leave(one)
            elif isinstance(one, Unfinished):
                self._unfinished.add(one.nonce)
        return judged

    def _retire(self, chosen: Sequence[Retired], stale: Sequence[Held]) -> None:
        """Put results into the archive and delete their refs, all at once where the server can.

        Raises:
            LeaseLost: Something moved meanwhile: look again.
            _Refused: They are archived, and the server does not delete.
        """
        archive = archive_in(self._cache, self._found)
        commit, chosen = self._extended(archive, chosen)
        before = None if archive is None else archive.commit
        adding = [] if commit is None else [Update(refs.ARCHIVE, commit, before or "")]
        ended = [*stale, *(held for one in chosen for held in one.ended)]
        deletions = [Update(held.ref, None, held.commit) for held in dict.fromkeys(ended)]
        if not self._one_by_one and adding and deletions:
            try:
                self._push([*adding, *deletions], atomic=True)
            except PushRejected:
                self._one_by_one = True  # whether it is the archive or the deletions, the next pushes tell
        if self._one_by_one or not (adding and deletions):
            if adding:
                self._push(adding, atomic=True)
            if deletions:
                self._delete(deletions)
        self._archived += [one.record.nonce for one in chosen]
        for one in chosen:
            if one.left is not None:
                self._leave(one.left)

    def _push(self, updates: Sequence[Update], *, atomic: bool) -> None:
        self._cache.git.push(self._cache.remote, updates, atomic=atomic)
        for update in updates:
            if update.new is None:
                self._deleted.append(update.ref)
                self._found.pop(update.ref, None)
            else:
                self._found[update.ref] = update.new
                self._cache.keep(TIP, update.new)

    def _delete(self, deletions: Sequence[Update]) -> None:
        try:
            self._push(deletions, atomic=False)
        except (PushRejected, LeaseLost) as error:
            now = self._cache.git.ls_remote(self._cache.remote)
            gone = [update.ref for update in deletions if update.ref not in now]
            self._deleted += gone
            self._listed(now)
            if isinstance(error, PushRejected) and any(now.get(u.ref) == u.expected for u in deletions):
                raise _Refused(error) from None
            raise

    def _delete_orphans(self) -> None:
        """Wishes to stop, and forgotten claims, of requests that are no longer there."""
        held = orphans(self._cache, standings(self._found), now=self._now, older_than=self._older_than)
        if held and not self._dry_run:
            try:
                self._delete([Update(one.ref, None, one.commit) for one in held])
            except LeaseLost:
                return  # somebody else is at them

    def _extended(
        self, archive: Archive | None, chosen: Sequence[Retired]
    ) -> tuple[str | None, list[Retired]]:
        """An archive commit with more folders, and the requests it (or the archive before) holds.

        A request that is archived already keeps what the archive says; one whose archived result is another
        is left alone.
        """
        present = {} if archive is None else archive.records_of([one.record.nonce for one in chosen])
        folders = set() if archive is None else {n for one in chosen if archive.folder(n := one.record.nonce)}
        kept, new = [], []
        for one in chosen:
            nonce = one.record.nonce
            if nonce not in folders:
                kept.append(one)
                new.append(one)
            elif nonce in present and present[nonce].result_commit == one.record.result_commit:
                kept.append(one)
            else:
                reason = "the archive holds another result of this name"
                self._leave(Left(nonce, one.record.ref, reason))
        if not new:
            return None, kept
        parents = [] if archive is None else [archive.commit]
        more = f" and {len(new) - 1} more" if len(new) > 1 else ""
        message = f"kakeya-mac archive: {new[0].record.nonce}{more} [skip ci]\n"
        root = extended(self._cache, archive, new)
        return self._cache.git.commit_tree(root, parents, message, when=self._now), kept

    def _leave(self, left: Left) -> None:
        self._left[left.nonce, left.ref] = left
