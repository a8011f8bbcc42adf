"""The archive of finished requests: retire them, and find them again.

    refs/heads/mac-bridge-archive    a chain of commits; the first parent of each is the archive before
    ├── parents 2…n                  the retired branches and results as they were: signed bytes stay
    │                                reachable
    ├── message                      one line ``<nonce> <result commit>`` for each of them
    └── index/2026-03.jsonl          one line of JSON a request: which refs held which commits, for look-ups
                                     and lists

An archived result is read like a live one (`bridge.bus.results`), out of the commits that its refs held.
Archives of the first version held copies in folders (``2026-03/01/<nonce>/``); they stay in the tree and are
read, too.

Every push is a compare-and-swap on every ref it changes, so that several prunes at once, a runner at work and
a kill at any moment lose nothing. Where a server takes no atomic push the archive goes first and the
deletions follow.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from bridge.bus import results
from bridge.bus.claims import read_status
from bridge.bus.requests import (
    ALL_REFS,
    CANCELS,
    CLAIMS,
    MAX_SIGNATURE_BYTES,
    RESULTS,
    SKIP_CI,
    RefValue,
    RequestCommit,
    bound_manifest,
    names_of,
    read_request,
    state_of,
)
from bridge.bus.results import ExpectedRequest, FetchedResult
from bridge.errors import BusError, LeaseLost, ManifestError, PushRejected, ResultError, UnknownHandle
from bridge.git.cache import GitCache
from bridge.git.repo import FILE_MODE, TREE_MODE, FileChange, RefUpdate, Scratch
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES, RECORD, Moment, Nonce, PresetName, Sha, parse_time
from bridge.protocol.result import RESULT_ROOT, Reason, Result, Status
from bridge.protocol.sanitize import quoted

DEFAULT_OLDER_THAN = timedelta(days=14)
DEFAULT_KEEP = 500
BATCH = 100
# A result this young stays: a client may be about to fetch it.
SETTLED = timedelta(hours=1)
# A claim on a finished request whose heartbeat is this old was forgotten.
STALE_CLAIM = timedelta(days=1)
# Commits that are fetched of each branch: the result, the request, the workload.
DEPTH = 3
MAX_INDEX_BYTES = 16 * 1024**2
MAX_COPIED_RECORD_BYTES = 256 * 1024

_INDEX = "index"
_TRIES = 10
_FIRST_PAUSE_S = 0.05
# What a finished request needs no longer.
_SIGNALS = (*CLAIMS, *CANCELS)
_NONCE_START = re.compile(r"(?:(?P<preset>[a-z0-9-]{1,64}?)-)?(?P<nonce>[0-9]{8}(?:t[0-9a-z]{0,19})?)")
_INDEX_LINE = re.compile(rb'\{"nonce":"([0-9]{8}t[0-9]{6}z[0-9a-f]{12})",.*')
_REF = Annotated[str, Field(pattern=r"^refs/[A-Za-z0-9._/-]{1,250}$")]


class ResultSummary(BaseModel):
    """What a published result said of itself, for lists. It is not judged."""

    model_config = RECORD

    preset: PresetName | None
    status: Status
    reason: Reason
    runner: Annotated[str, Field(max_length=64)]
    attempt: Annotated[int, Field(ge=1)]
    started_at: Moment
    finished_at: Moment


class ArchivedRequest(BaseModel):
    """One line of the index."""

    model_config = RECORD

    nonce: Nonce
    preset: PresetName | None  # from the name of its branch; None: the branch was gone
    places: Annotated[dict[_REF, Sha], Field(min_length=1, max_length=4)]  # what each of its refs held
    summary: ResultSummary | None  # from ``result.json``; None: that could not be read


class _CopiedRequest(BaseModel):
    model_config = RECORD

    commit: Sha
    workload_sha: Sha | None
    preset: PresetName | None


class _CopiedRecord(BaseModel):
    """``archived.json`` of an archive of the first version: what the result's branch said by its place."""

    model_config = RECORD

    schema_version: Annotated[int, Field(ge=1, le=1)] = 1
    nonce: Nonce
    preset: PresetName | None
    ref: _REF
    result_commit: Sha
    parents: Annotated[tuple[Sha, ...], Field(max_length=1)]
    message: Annotated[str, Field(max_length=16 * 1024)]
    request: _CopiedRequest | None
    summary: ResultSummary | None


@dataclass(frozen=True)
class Left:
    """A finished request that stays where it is, and why."""

    nonce: str
    ref: str
    reason: str


@dataclass(frozen=True)
class Pruned:
    """What a prune did."""

    archived: tuple[str, ...]  # nonces in the archive now, their refs deleted (with `dry_run`: would be)
    deleted: tuple[str, ...]  # refs that were deleted, stale claims and cancel requests included
    left: tuple[Left, ...]  # finished requests that stay, and why
    unfinished: int  # how many requests that old stay because they have no result yet, or a fresh one
    remaining: int  # how many were not looked at because of `limit`
    archive: str | None  # the archive commit on the remote; None: there is none
    refused: str | None  # the server's words where it archived and would not delete; None: it did


class Archive:
    """One state of a remote's archive, whose commit is in the cache."""

    def __init__(self, cache: GitCache, commit: str) -> None:
        self._cache = cache
        self.commit = commit
        self._months: dict[str, dict[str, list[bytes]]] = {}

    def find(self, handle: str) -> str | None:
        """The nonce that a handle names here, with at least its day; an `UnknownHandle`: several fit."""
        match = _NONCE_START.fullmatch(_spelled(handle))
        if match is None:
            return None
        start, preset = match["nonce"], match["preset"]
        nonces = sorted(nonce for nonce in self._nonces(_month_of(start)) if nonce.startswith(start))
        entries = [entry for entry in map(self.get, nonces) if entry and preset in (None, entry.preset)]
        if len(entries) > 1:
            some = ", ".join(entry.nonce for entry in entries[:5])
            message = f"{handle!r} names {len(entries)} archived requests: {some}"
            raise UnknownHandle(message, "give more of it")
        return entries[0].nonce if entries else None

    def get(self, nonce: str) -> ArchivedRequest | None:
        """What the archive says of a request; None: it is not archived."""
        if (entry := self._indexed(nonce)) is not None or (copy := self._copied(nonce)) is None:
            return entry
        places = {copy.ref: copy.result_commit}
        return ArchivedRequest(nonce=nonce, preset=copy.preset, places=places, summary=copy.summary)

    def newest(self) -> Iterator[ArchivedRequest]:
        """Every request that the archive can tell of, the newest nonce first."""
        months = {name.removesuffix(".jsonl") for name in self._entries(_INDEX, FILE_MODE)}
        months |= self._entries("", TREE_MODE) - {_INDEX}
        for month in sorted(months, reverse=True):
            found = map(self.get, sorted(self._nonces(month), reverse=True))
            yield from (entry for entry in found if entry is not None)

    def read(self, nonce: str) -> FetchedResult | None:
        """One archived result, as `results.fetch` gave it before; a `ResultError`: it cannot be one."""
        entry = self._indexed(nonce)
        if entry is None:
            copy = self._copied(nonce)
            return None if copy is None else self._read_copy(copy)
        for sha in entry.places.values():
            self._cache.bring_object(sha, depth=DEPTH)
        state = replace(state_of(entry.places, nonce), inbox=None, claim=None, cancel=None)
        places = [RefValue(ref, sha) for ref, sha in entry.places.items()]
        fetched = results.read(self._cache, state, places, None)
        return None if fetched is None else replace(fetched, ref=refs.ARCHIVE)

    def request(self, nonce: str) -> RequestCommit | None:
        """The request that an archived result answers; None: the archive does not have it."""
        if self._indexed(nonce) is None:
            copy = self._copied(nonce)
            return None if copy is None else self._copied_request(copy)
        fetched = self.read(nonce)
        with contextlib.suppress(ManifestError, BusError):
            if fetched is not None and fetched.expected is not None:
                return read_request(self._cache, fetched.expected.commit)
        return None

    def lines(self, month: str) -> dict[str, list[bytes]]:
        """The lines of one file of the index by nonce, unread: a month has thousands, anyone may add some."""
        if month not in self._months:
            found = self._months[month] = defaultdict(list)
            data = self._cache.read_file(self.commit, f"{_INDEX}/{month}.jsonl", MAX_INDEX_BYTES) or b""
            for match in map(_INDEX_LINE.fullmatch, data.splitlines()):
                if match is not None and _month_of(match[1].decode()) == month:
                    found[match[1].decode()].append(match[0])
        return self._months[month]

    def _indexed(self, nonce: str) -> ArchivedRequest | None:
        for line in reversed(self.lines(_month_of(nonce)).get(nonce, [])):
            with contextlib.suppress(ValidationError):
                entry = ArchivedRequest.model_validate_json(line)
                return entry if entry.nonce == nonce else None
        return None

    def _nonces(self, month: str) -> set[str]:
        """Requests of a month, in the index and in folders of copies."""
        days = self._entries(month, TREE_MODE)
        copied = {nonce for day in days for nonce in self._entries(f"{month}/{day}", TREE_MODE)}
        return self.lines(month).keys() | {nonce for nonce in copied if refs.is_nonce(nonce)}

    def _entries(self, path: str, mode: str) -> set[str]:
        """Names in a folder of the archive that have a mode."""
        try:
            found = self._cache.tree_entries(f"{self.commit}:{path}")
        except BusError:
            return set()
        return {name for name, (kind, _) in found.items() if kind == mode}

    # Archives of the first version ------------------------------------------------------------------------

    def _copied_file(self, nonce: str, name: str, limit: int) -> bytes | None:
        return self._cache.try_read_file(self.commit, f"{_copies_folder(nonce)}/{name}", limit)

    def _copied(self, nonce: str) -> _CopiedRecord | None:
        """What the archive says of a copied result; None: it has none, or one of another request."""
        data = self._copied_file(nonce, "archived.json", MAX_COPIED_RECORD_BYTES)
        try:
            record = _CopiedRecord.model_validate_json(data or b"")
        except ValidationError:
            return None
        return record if record.nonce == nonce else None

    def _read_copy(self, copy: _CopiedRecord) -> FetchedResult:
        inside = f"{RESULT_ROOT}/{copy.nonce}/"
        try:
            found = self._cache.changes(None, f"{self.commit}:{_copies_folder(copy.nonce)}/result")
        except BusError:
            raise ResultError(f"the archive's folder of {copy.nonce} holds no result/") from None
        asked, request, expected = copy.request, self._copied_request(copy), None
        if asked is not None:
            params = None
            with contextlib.suppress(ManifestError):
                params = None if request is None else bound_manifest(request, copy.nonce).params
            expected = ExpectedRequest(copy.nonce, asked.commit, asked.workload_sha, asked.preset, params)
        located = FetchedResult(
            nonce=copy.nonce,
            ref=refs.ARCHIVE,
            commit=copy.result_commit,
            parents=copy.parents,
            above=1,
            changes=tuple(FileChange("A", inside + file.path, file.mode, file.sha) for file in found),
            message=copy.message,
            files={},
            expected=expected,
            alone=expected is None and copy.preset is None,
        )
        return results.with_files(self._cache, located)

    def _copied_request(self, copy: _CopiedRecord) -> RequestCommit | None:
        asked = copy.request
        data = self._copied_file(copy.nonce, "request.json", MAX_BYTES)
        if asked is None or asked.workload_sha is None or data is None:
            return None
        signature = self._copied_file(copy.nonce, "request.json.sig", MAX_SIGNATURE_BYTES)
        return RequestCommit(asked.commit, asked.workload_sha, data, signature)


def open_archive(cache: GitCache, found: Mapping[str, str]) -> Archive | None:
    """The archive that a remote holds by its listed refs; None: it has none."""
    for _ in range(_TRIES):
        tip = found.get(refs.ARCHIVE)
        if tip is None:
            return None
        if not cache.bring(found, [refs.ARCHIVE], depth=1):
            return Archive(cache, tip)
        found = cache.list_remote(refs.ARCHIVE)
    raise LeaseLost(f"{refs.ARCHIVE} moved on every look", "try again")


def find_archived(cache: GitCache, handle: str, *, found: Mapping[str, str] | None = None) -> FetchedResult:
    """The result of a retired request, by a nonce, a branch name, or the beginning of either with its day.

    `found` are the remote's refs where they are known. A `ResultError`: what is archived cannot be a result.
    """
    listed = cache.list_remote(refs.ARCHIVE) if found is None else found

    def look() -> FetchedResult | None:
        archive = open_archive(cache, listed)
        nonce = None if archive is None else archive.find(handle)
        return None if archive is None or nonce is None else archive.read(nonce)

    result = cache.recover(look)
    if result is None:
        raise UnknownHandle(
            f"no request on this remote is called {quoted(handle)}, and its archive holds none",
            "check the handle (at least the day of an archived one, as in 20260301), or name another"
            " --remote",
        )
    return result


def find_request(cache: GitCache, nonce: str) -> RequestCommit | None:
    """The request of an archived result, as it was asked; None: the archive does not have it."""
    found = cache.list_remote(refs.ARCHIVE)

    def look() -> RequestCommit | None:
        archive = open_archive(cache, found)
        return None if archive is None else archive.request(nonce)

    return cache.recover(look)


def prune(
    cache: GitCache,
    *,
    older_than: timedelta = DEFAULT_OLDER_THAN,
    keep: int = DEFAULT_KEEP,
    now: datetime,
    limit: int | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Pruned:
    """Archive finished requests older than a retention or beyond the newest `keep`, and delete their refs.

    Never an unfinished one: with an inbox entry, a live claim, or without a result. Idempotent; what was done
    before an error stays done. At most `limit` are retired by this call; `progress` is told how many of how
    many have been looked at. Errors are those of a push: a server may take no archive.
    """
    return _Pruner(cache, older_than=older_than, now=now, dry_run=dry_run).run(keep, limit, progress)


class _Pruner:
    def __init__(self, cache: GitCache, *, older_than: timedelta, now: datetime, dry_run: bool) -> None:
        self._cache = cache
        self._cutoff = refs.nonce_time(now - older_than)
        self._now = now
        self._dry_run = dry_run
        self._archived: list[str] = []
        self._deleted: list[str] = []
        self._left: dict[str, Left] = {}
        self._unfinished: set[str] = set()
        self._one_by_one = False
        self._refused: str | None = None
        self._look()

    def run(self, keep: int, limit: int | None, progress: Callable[[int, int], object] | None) -> Pruned:
        due = self._due(keep)
        others = [
            nonce
            for nonce, held in sorted(self._held.items())
            if nonce not in due and not _waits(nonce, held) and _below(held, _SIGNALS)
        ]
        nonces, at = [*due, *others], 0
        while at < len(nonces) and (limit is None or len(self._archived) < limit):
            size = BATCH if limit is None else min(BATCH, limit - len(self._archived))
            self._batch(nonces[at : at + size], set(due))
            if self._refused is not None:
                break
            at += size
            if progress is not None:
                progress(min(at, len(nonces)), len(nonces))
        return Pruned(
            archived=tuple(self._archived),
            deleted=tuple(self._deleted),
            left=tuple(self._left[nonce] for nonce in sorted(self._left)),
            unfinished=len(self._unfinished & set(due)),
            remaining=len(set(due) & set(nonces[at:])),
            archive=self._found.get(refs.ARCHIVE),
            refused=self._refused,
        )

    def _look(self) -> None:
        self._found = self._cache.list_remote(*ALL_REFS)
        self._held: dict[str, dict[str, str]] = defaultdict(dict)  # the refs of each request
        for ref, commit in self._found.items():
            nonce, _ = names_of(ref)
            if nonce is not None:
                self._held[nonce][ref] = commit

    def _due(self, keep: int) -> list[str]:
        """Nonces that retention no longer covers, the oldest first; one of the future is not touched."""
        future = refs.nonce_time(self._now + timedelta(days=1))
        settled = refs.nonce_time(self._now - SETTLED)
        candidates = sorted(
            nonce
            for nonce, held in self._held.items()
            if nonce < future and _places(held) and not _waits(nonce, held)
        )
        beyond = set(candidates[: max(0, len(candidates) - keep)])
        return [
            nonce for nonce in candidates if nonce < self._cutoff or (nonce in beyond and nonce < settled)
        ]

    def _batch(self, nonces: Sequence[str], due: set[str]) -> None:
        for attempt in range(_TRIES):
            chosen = [nonce for nonce in nonces if nonce in self._held]
            if not chosen:
                return
            try:
                self._cache.recover(partial(self._retire, chosen, due))
            except LeaseLost:  # something moved meanwhile
                if attempt == _TRIES - 1:
                    raise
                time.sleep(_FIRST_PAUSE_S * 2**attempt * random.random())  # noqa: S311 - a pause, no secret
                self._look()
            else:
                return

    def _retire(self, chosen: Sequence[str], due: set[str]) -> None:
        """Put results into the archive and delete their refs, all at once where the server can."""
        wanted: dict[str, str] = {}
        for nonce in chosen:
            wanted |= _places(self._held[nonce]) | _below(self._held[nonce], CLAIMS)
        failures = self._cache.bring(wanted, list(wanted), depth=DEPTH)
        archive = open_archive(self._cache, self._found)
        entries: list[ArchivedRequest] = []
        ended: dict[str, str] = {}
        for nonce in chosen:
            held = self._held[nonce]
            places, signals = _places(held), _below(held, _SIGNALS)
            if not places:
                ended |= signals if nonce < self._cutoff and self._is_forgotten(held) else {}
                continue
            entry = self._judge(nonce, places, failures, None if archive is None else archive.get(nonce))
            if isinstance(entry, str):
                self._left[nonce] = Left(nonce, next(iter(places)), entry)
            elif entry is None:
                self._unfinished.add(nonce)
            else:
                ended |= signals
                if nonce in due:
                    entries.append(entry)
                    ended |= places
        if self._dry_run:
            self._archived += [entry.nonce for entry in entries]
        elif entries or ended:
            self._push_archive(archive, entries, ended)

    def _judge(
        self,
        nonce: str,
        places: dict[str, str],
        failures: Mapping[str, BusError],
        known: ArchivedRequest | None,
    ) -> ArchivedRequest | str | None:
        """What the index says of a finished request, or why it stays; None: not finished, or too fresh."""
        for ref in places.keys() & failures.keys():
            return failures[ref].message
        if known is not None and not set(places.values()) & set(known.places.values()):
            return "another result is archived under its name"
        apart = _below(places, RESULTS)
        if len(places) - len(apart) > 1 or len(set(apart.values())) > 1:
            return "several branches or several results carry its name"
        state = state_of(places, nonce)
        try:
            values = [RefValue(ref, commit) for ref, commit in places.items()]
            located = [results.locate(self._cache, state, value, None) for value in values]
        except (ResultError, BusError) as error:
            return error.message
        answers = {each.commit: each for each in located if each is not None}
        if not answers or not self._is_forgotten(self._held[nonce]):
            return None
        if len(answers) > 1:
            return "it has a result on its branch and another one elsewhere"
        [answer] = answers.values()
        if state.branch is not None and state.branch.commit not in (answer.commit, answer.request):
            return "the branch holds other commits: delete it by hand"
        if answer.parents and answer.above != 1:
            return "more than one commit is on top of the request"
        result = results.read_record(self._cache, answer)
        if result is not None and abs(self._now - parse_time(result.finished_at)) < SETTLED:
            return None
        # One that cannot be read is archived as it is: it is as little believed there.
        summary = None if result is None else summarize(result)
        return ArchivedRequest(nonce=nonce, preset=state.preset, places=places, summary=summary)

    def _is_forgotten(self, held: Mapping[str, str]) -> bool:
        """Whether no claim of a finished request is alive."""
        for commit in _below(held, CLAIMS).values():
            status = read_status(self._cache, commit)
            if status is None or parse_time(status.updated_at) >= self._now - STALE_CLAIM:
                return False
        return True

    def _push_archive(
        self, archive: Archive | None, entries: Sequence[ArchivedRequest], ended: Mapping[str, str]
    ) -> None:
        new = [entry for entry in entries if archive is None or archive.get(entry.nonce) is None]
        deletions = [RefUpdate(ref, None, commit) for ref, commit in ended.items()]
        with self._cache.scratch() as scratch:
            adding = []
            if new:
                tip = None if archive is None else archive.commit
                lines = "".join(f"{entry.nonce} {next(iter(entry.places.values()))}\n" for entry in new)
                more = f" and {len(new) - 1} more" if len(new) > 1 else ""
                commit = scratch.commit_files(
                    tip,
                    _index_files(archive, new),
                    f"kakeya-mac archive: {new[0].nonce}{more} {SKIP_CI}\n\n{lines}",
                    when=self._now,
                    merged=list(dict.fromkeys(sha for entry in new for sha in entry.places.values())),
                )
                adding = [RefUpdate(refs.ARCHIVE, commit, tip or "")]
            if adding and deletions and not self._one_by_one:
                try:
                    self._push(scratch, [*adding, *deletions])
                    adding = deletions = []
                except PushRejected:
                    self._one_by_one = True  # which of the two was refused, the next pushes tell
            if adding:
                self._push(scratch, adding)
            if deletions:
                self._delete(scratch, deletions)
        if self._refused is None:
            self._archived += [entry.nonce for entry in entries]

    def _push(self, scratch: Scratch, updates: Sequence[RefUpdate], *, atomic: bool = True) -> None:
        scratch.push(self._cache.remote, updates, atomic=atomic)
        for update in updates:
            if update.new is None:
                self._deleted.append(update.ref)
                self._found.pop(update.ref, None)
            else:
                self._found[update.ref] = update.new

    def _delete(self, scratch: Scratch, deletions: Sequence[RefUpdate]) -> None:
        try:
            self._push(scratch, deletions, atomic=False)
        except (PushRejected, LeaseLost) as error:
            self._look()
            self._deleted += [update.ref for update in deletions if update.ref not in self._found]
            held = any(self._found.get(update.ref) == update.expected for update in deletions)
            if not isinstance(error, PushRejected) or not held:
                raise
            self._refused = error.message


def summarize(result: Result) -> ResultSummary:
    """What lists show of a result."""
    return ResultSummary(
        preset=result.preset,
        status=result.verdict.status,
        reason=result.verdict.reason,
        runner=result.runner.name,
        attempt=result.attempt,
        started_at=result.started_at,
        finished_at=result.finished_at,
    )


def _below(held: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {ref: commit for ref, commit in held.items() if ref.startswith(prefixes)}


def _places(held: Mapping[str, str]) -> dict[str, str]:
    """Where a request's result may be: branches first."""
    return _below(held, (refs.BRANCHES, refs.AGENT_BRANCHES)) | _below(held, RESULTS)


def _waits(nonce: str, held: Mapping[str, str]) -> bool:
    return refs.inbox_ref(nonce) in held


def _index_files(archive: Archive | None, new: Sequence[ArchivedRequest]) -> dict[str, bytes | None]:
    """The files of the index that get more requests, by path."""
    files: dict[str, bytes | None] = {}
    for month in {_month_of(entry.nonce) for entry in new}:
        lines = {} if archive is None else dict(archive.lines(month))
        for entry in new:
            if _month_of(entry.nonce) == month:
                lines[entry.nonce] = [entry.model_dump_json().encode()]
        whole = [line + b"\n" for nonce in sorted(lines) for line in lines[nonce]]
        files[f"{_INDEX}/{month}.jsonl"] = b"".join(whole)
    return files


def _month_of(nonce: str) -> str:
    return f"{nonce[:4]}-{nonce[4:6]}"


def _copies_folder(nonce: str) -> str:
    return f"{_month_of(nonce)}/{nonce[6:8]}/{nonce}"


def _spelled(handle: str) -> str:
    """A handle as the archive knows it: a nonce or ``<preset>-<nonce>``, or the beginning of one."""
    asked = handle.strip().removeprefix("refs/heads/").removeprefix("origin/")
    named = refs.parse_request_ref(f"refs/heads/{asked}")
    if named is not None:
        return named.nonce
    return asked.rpartition("/")[2].removeprefix("mac-bridge-")
