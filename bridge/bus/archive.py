"""The archive of finished requests, in the shape that docs/bus.md shows: retire them, and find them again.

Archives of the first version held copies in folders (``2026-03/01/<nonce>/``), which are read, too.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from bridge.bus import requests, results
from bridge.bus.claims import read_status
from bridge.bus.results import ExpectedRequest, FetchedResult
from bridge.errors import BusError, LeaseLost, ManifestError, PushRejected, ResultError, UnknownHandle
from bridge.git.cache import GitCache
from bridge.git.repo import FILE_MODE, TREE_MODE, FileChange, RefUpdate, Scratch
from bridge.protocol import manifest, refs
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
_SIGNALS = (*requests.CLAIMS, *requests.CANCELS)
_NONCE_START = re.compile(r"(?:(?P<preset>[a-z0-9-]{1,64}?)-)?(?P<nonce>[0-9]{8}(?:t[0-9a-z]{0,19})?)")
_INDEX_LINE = re.compile(rb'\{"nonce":"([0-9]{8}t[0-9]{6}z[0-9a-f]{12})",.*')
_REF = Annotated[str, Field(pattern=r"^refs/[A-Za-z0-9._/-]{1,250}$")]


class ResultSummary(BaseModel):
    """What a published result said of itself, for lists. It is not judged."""

    model_config = manifest.RECORD

    preset: manifest.PresetName | None
    status: Status
    reason: Reason
    runner: Annotated[str, Field(max_length=64)]
    attempt: Annotated[int, Field(ge=1)]
    started_at: manifest.Moment
    finished_at: manifest.Moment


class ArchivedRequest(BaseModel):
    """One line of the index."""

    model_config = manifest.RECORD

    nonce: manifest.Nonce
    preset: manifest.PresetName | None  # from the name of its branch; None: the branch was gone
    # What each of its refs held.
    places: Annotated[dict[_REF, manifest.Sha], Field(min_length=1, max_length=4)]
    summary: ResultSummary | None  # from ``result.json``; None: that could not be read
    requested_by: Annotated[str, Field(max_length=200)] | None = None  # as the request says; None: not known


class _CopiedRequest(BaseModel):
    model_config = manifest.RECORD

    commit: manifest.Sha
    workload_sha: manifest.Sha | None
    preset: manifest.PresetName | None


class _CopiedRecord(BaseModel):
    """``archived.json`` of an archive of the first version: what the result's branch said by its place."""

    model_config = manifest.RECORD

    schema_version: manifest.SchemaVersion = 1
    nonce: manifest.Nonce
    preset: manifest.PresetName | None
    ref: _REF
    result_commit: manifest.Sha
    parents: Annotated[tuple[manifest.Sha, ...], Field(max_length=1)]
    message: Annotated[str, Field(max_length=16 * 1024)]
    request: _CopiedRequest | None
    summary: ResultSummary | None


@dataclass(frozen=True)
class Left:
    """A finished request that stays where it is, and why."""

    nonce: str
    ref: str
    reason: str


@dataclass
class Pruned:
    """What a prune did."""

    archived: list[str] = field(default_factory=list)  # nonces whose refs are deleted (or would be)
    deleted: list[str] = field(default_factory=list)  # refs, also of stale claims and cancel requests
    left: list[Left] = field(default_factory=list)  # finished requests that stay, and why
    unfinished: int = 0  # how many that old stay because they have no result yet, or a fresh one
    remaining: int = 0  # how many were not looked at because of `limit`
    archive: str | None = None  # the archive commit on the remote; None: there is none
    refused: str | None = None  # the server's words where it archived and would not delete; None: it did


class Archive:
    """One state of a remote's archive, whose commit is in the cache."""

    def __init__(self, cache: GitCache, commit: str) -> None:
        self._cache = cache
        self.commit = commit
        self._months: dict[str, dict[str, list[bytes]]] = {}

    def find(self, handle: str) -> str | None:
        """The nonce that a handle names here, with at least its day; an `UnknownHandle`: several fit."""
        asked = requests.spelled(handle)
        named = refs.parse_request_ref(f"refs/heads/{asked}")
        start = asked.rpartition("/")[2].removeprefix("mac-bridge-") if named is None else named.nonce
        if (match := _NONCE_START.fullmatch(start)) is None:
            return None
        month = self._nonces(_month_of(match["nonce"]))
        entries = [self.get(nonce) for nonce in sorted(month) if nonce.startswith(match["nonce"])]
        nonces = [entry.nonce for entry in entries if entry and match["preset"] in (None, entry.preset)]
        if len(nonces) > 1:
            message = f"{handle!r} names {len(nonces)} archived requests: {', '.join(nonces[:5])}"
            raise UnknownHandle(message, "give more of it")
        return nonces[0] if nonces else None

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
        shas = {sha: sha for sha in entry.places.values()}
        for failure in self._cache.bring(shas, shas, depth=DEPTH).values():
            raise failure
        places = _places(entry.places)
        values = [requests.RefValue(ref, sha) for ref, sha in places.items()]
        fetched = results.read(self._cache, requests.state_of(places, nonce), values, None)
        if fetched is None:
            return None
        fetched = replace(fetched, ref=refs.ARCHIVE)
        with contextlib.suppress(ManifestError, BusError):
            if fetched.expected is not None:
                return replace(fetched, asked=requests.read_request(self._cache, fetched.expected.commit))
        return fetched

    def bring(self, nonces: Iterable[str]) -> None:
        """Fetch the commits of several requests at once; what is missing then, `read` tells."""
        entries = filter(None, map(self._indexed, nonces))
        shas = {sha: sha for entry in entries for sha in entry.places.values()}
        self._cache.bring(shas, shas, depth=DEPTH)

    def lines(self, month: str) -> dict[str, list[bytes]]:
        """The lines of one file of the index by nonce, unread: a month has thousands, anyone may add some."""
        if month not in self._months:
            found = self._months[month] = defaultdict(list)
            data = self._cache.read_file(self.commit, f"{_INDEX}/{month}.jsonl", MAX_INDEX_BYTES) or b""
            for match in filter(None, map(_INDEX_LINE.fullmatch, data.splitlines())):
                if _month_of(match[1].decode()) == month:
                    found[match[1].decode()].append(match[0])
        return self._months[month]

    def _indexed(self, nonce: str) -> ArchivedRequest | None:
        for line in reversed(self.lines(_month_of(nonce)).get(nonce, [])):
            with contextlib.suppress(ValidationError):
                return ArchivedRequest.model_validate_json(line)
        return None

    def _nonces(self, month: str) -> set[str]:
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
        changes = tuple(FileChange("A", inside + file.path, file.mode, file.sha) for file in found)
        located = FetchedResult(
            copy.nonce, refs.ARCHIVE, copy.result_commit, copy.parents, 1, changes, copy.message, {}, None
        )
        if (asked := copy.request) is None:
            return results.with_files(self._cache, replace(located, alone=copy.preset is None))
        expected, request = ExpectedRequest(copy.nonce, asked.commit, asked.workload_sha, asked.preset), None
        data = self._copied_file(copy.nonce, "request.json", manifest.MAX_BYTES)
        signature = self._copied_file(copy.nonce, "request.json.sig", requests.MAX_SIGNATURE_BYTES)
        if asked.workload_sha is not None and data is not None:
            request = requests.RequestCommit(asked.commit, (asked.workload_sha,), data, signature)
            with contextlib.suppress(ManifestError):
                own = requests.bound_manifest(request, copy.nonce)
                expected = replace(expected, params=own.params, requested_by=own.requested_by)
        return results.with_files(self._cache, replace(located, expected=expected, asked=request))


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


def find_archived(cache: GitCache, handle: str, *, found: Mapping[str, str]) -> FetchedResult:
    """The result of a retired request, by a nonce, a branch name, or the beginning of either with its day.

    `found` are the remote's refs. A `ResultError`: what is archived cannot be a result.
    """

    def look() -> FetchedResult | None:
        archive = open_archive(cache, found)
        nonce = None if archive is None else archive.find(handle)
        return None if archive is None or nonce is None else archive.read(nonce)

    result = cache.recover(look)
    if result is None:
        raise UnknownHandle(
            f"no request on this remote is called {quoted(handle)}, and its archive holds none",
            "check the handle (an archived one needs its day, as in 20260301), or name another --remote",
        )
    return result


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
    before an error stays done. At most `limit` are retired by this call. Every push is a compare-and-swap on
    each ref it changes. Before each batch `progress` hears how many of how many requests were looked at.
    """
    return _Pruner(cache, refs.nonce_time(now - older_than), now, dry_run).run(keep, limit, progress)


class _Pruner:
    def __init__(self, cache: GitCache, cutoff: str, now: datetime, dry_run: bool) -> None:
        self._cache = cache
        self._cutoff = cutoff
        self._now = now
        self._dry_run = dry_run
        self._done = Pruned()
        self._left: dict[str, Left] = {}
        self._unfinished: set[str] = set()
        self._due: set[str] = set()  # what retention no longer covers
        self._look()

    def run(self, keep: int, limit: int | None, progress: Callable[[int, int], object] | None) -> Pruned:
        done = self._done
        # One of the future is not touched.
        future, settled = (refs.nonce_time(self._now + by) for by in (timedelta(days=1), -SETTLED))
        finished = sorted(nonce for nonce, held in self._held.items() if nonce < future and _places(held))
        beyond = finished[: max(0, len(finished) - keep)]
        self._due = {nonce for nonce in beyond if nonce < settled}
        self._due |= {nonce for nonce in finished if nonce < self._cutoff}
        others = {nonce for nonce, held in self._held.items() if _below(held, _SIGNALS)} - self._due
        nonces = [*sorted(self._due), *sorted(others)]
        total = len(nonces)
        while nonces and done.refused is None and (limit is None or len(done.archived) < limit):
            size = BATCH if limit is None else min(BATCH, limit - len(done.archived))
            if progress is not None:
                progress(total - len(nonces), total)
            self._batch(nonces[:size])
            nonces = nonces[size:]
        done.left = [self._left[nonce] for nonce in sorted(self._left)]
        done.unfinished = len(self._unfinished & self._due)
        done.remaining = len(self._due & set(nonces))
        done.archive = self._found.get(refs.ARCHIVE)
        return done

    def _look(self) -> None:
        """List the refs of each request that does not wait in the inbox."""
        self._found = self._cache.list_remote(*requests.ALL_REFS)
        held: dict[str, dict[str, str]] = defaultdict(dict)
        for ref, commit in self._found.items():
            held[requests.names_of(ref)[0] or ""][ref] = commit
        self._held = {nonce: own for nonce, own in held.items() if nonce and refs.INBOX + nonce not in own}

    def _batch(self, nonces: Sequence[str]) -> None:
        for attempt in range(_TRIES):
            try:
                return self._cache.recover(lambda: self._retire([one for one in nonces if one in self._held]))
            except LeaseLost:  # something moved meanwhile
                if attempt == _TRIES - 1:
                    raise
                time.sleep(_FIRST_PAUSE_S * 2**attempt * random.random())  # noqa: S311 - a pause, no secret
                self._look()
        return None

    def _retire(self, chosen: Sequence[str]) -> None:
        """Put results into the archive and delete their refs, all at once where the server can."""
        wanted: dict[str, str] = {}
        for nonce in chosen:
            wanted |= _places(self._held[nonce]) | _below(self._held[nonce], requests.CLAIMS)
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
                if nonce in self._due:
                    entries.append(entry)
                    ended |= places
        if not self._dry_run and ended:
            self._push_archive(archive, entries, ended)
        if self._done.refused is None:
            self._done.archived += [entry.nonce for entry in entries]

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
        state = requests.state_of(places, nonce)
        try:
            values = [requests.RefValue(ref, commit) for ref, commit in places.items()]
            located = [results.locate(self._cache, state, value, None) for value in values]
        except (ResultError, BusError) as error:
            return error.message
        answers = {each.commit: each for each in located if each is not None}
        if not answers or not self._is_forgotten(self._held[nonce]):
            return None
        answer = next(iter(answers.values()))
        is_alone = len(answers) == 1 and len(state.branches) < 2 and (answer.above == 1 or not answer.parents)
        if not is_alone or set(places.values()) - {answer.commit, answer.request}:
            return "its refs hold more than the request and one result on top of it: delete the rest by hand"
        result = results.read_record(self._cache, answer)
        if result is not None and abs(self._now - manifest.parse_time(result.finished_at)) < SETTLED:
            return None
        # One that cannot be read is archived as it is: it is as little believed there.
        summary = None if result is None else summarize(result)
        asked = None if answer.request is None else results.read_manifest(self._cache, answer.request)
        by = None if asked is None else asked.requested_by
        return ArchivedRequest(
            nonce=nonce, preset=state.preset, places=places, summary=summary, requested_by=by
        )

    def _is_forgotten(self, held: Mapping[str, str]) -> bool:
        """Whether no claim of a finished request is alive."""
        for commit in _below(held, requests.CLAIMS).values():
            status = read_status(self._cache, commit)
            if status is None or manifest.parse_time(status.updated_at) >= self._now - STALE_CLAIM:
                return False
        return True

    def _push_archive(
        self, archive: Archive | None, entries: Sequence[ArchivedRequest], ended: Mapping[str, str]
    ) -> None:
        new = [entry for entry in entries if archive is None or archive.get(entry.nonce) is None]
        adding, deletions = [], [RefUpdate(ref, None, commit) for ref, commit in ended.items()]
        with self._cache.scratch() as scratch:
            if new:
                tip = None if archive is None else archive.commit
                lines = "".join(f"{entry.nonce} {next(iter(entry.places.values()))}\n" for entry in new)
                more = f" and {len(new) - 1} more" if len(new) > 1 else ""
                message = f"kakeya-mac archive: {new[0].nonce}{more} {requests.SKIP_CI}\n\n{lines}"
                merged = list(dict.fromkeys(sha for entry in new for sha in entry.places.values()))
                files = _index_files(archive, new)
                commit = scratch.commit_files(tip, files, message, when=self._now, merged=merged)
                adding = [RefUpdate(refs.ARCHIVE, commit, tip or "")]
                try:
                    return self._push(scratch, [*adding, *deletions])
                except PushRejected:  # of which of the two, the next pushes tell
                    self._push(scratch, adding)
            try:
                self._push(scratch, deletions, atomic=False)
            except (PushRejected, LeaseLost) as error:
                self._look()
                self._done.deleted += [update.ref for update in deletions if update.ref not in self._found]
                held = any(self._found.get(update.ref) == update.expected for update in deletions)
                if not isinstance(error, PushRejected) or not held:
                    raise
                self._done.refused = error.message

    def _push(self, scratch: Scratch, updates: Sequence[RefUpdate], *, atomic: bool = True) -> None:
        scratch.push(self._cache.remote, updates, atomic=atomic)
        for update in updates:
            if update.new is None:
                self._done.deleted.append(update.ref)
                self._found.pop(update.ref, None)
            else:
                self._found[update.ref] = update.new


def summarize(result: Result) -> ResultSummary:
    """What lists show of a result."""
    same = result.model_dump(include={"preset", "attempt", "started_at", "finished_at"})
    verdict, runner = result.verdict, result.runner.name
    return ResultSummary(status=verdict.status, reason=verdict.reason, runner=runner, **same)


def _below(held: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {ref: commit for ref, commit in held.items() if ref.startswith(prefixes)}


def _places(held: Mapping[str, str]) -> dict[str, str]:
    """Where a request's result may be: branches first."""
    return _below(held, (refs.BRANCHES, refs.AGENT_BRANCHES)) | _below(held, requests.RESULTS)


def _index_files(archive: Archive | None, new: Sequence[ArchivedRequest]) -> dict[str, bytes | None]:
    files: dict[str, bytes | None] = {}
    for month in {_month_of(entry.nonce) for entry in new}:
        lines = {} if archive is None else dict(archive.lines(month))
        ours = [entry for entry in new if _month_of(entry.nonce) == month]
        lines |= {entry.nonce: [entry.model_dump_json().encode()] for entry in ours}
        rows = (line + b"\n" for nonce in sorted(lines) for line in lines[nonce])
        files[f"{_INDEX}/{month}.jsonl"] = b"".join(rows)
    return files


def _month_of(nonce: str) -> str:
    return f"{nonce[:4]}-{nonce[4:6]}"


def _copies_folder(nonce: str) -> str:
    return f"{_month_of(nonce)}/{nonce[6:8]}/{nonce}"
