"""The archive of finished requests: its layout, and reading one result, its request, or the newest ones.

    refs/heads/mac-bridge-archive
    └── 2026-03/01/20260301t120000z0123456789ab/
        ├── archived.json        what the branch said by its place: refs, commits, the commit message
        ├── request.json, .sig   as they were asked
        └── result/              the result's folder as it was published, file by file

A reader opens only the folders on its way (`bridge.bus.cache`). What comes out is as public as what stood on
a branch: `bridge.bus.results.believe` decides, by the same checks as before. Writing is `bridge.bus.archive`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bridge.bus.answers import MAX_RESULT_BYTES, Asked, FetchedResult
from bridge.bus.archive_record import (
    MAX_RECORD_BYTES,
    RECORD_NAME,
    RESULT_FOLDER,
    Archived,
    folder_of,
    parse_archived,
)
from bridge.bus.cache import Cache, open_cache, sound
from bridge.bus.changes import Change
from bridge.bus.git import Git
from bridge.bus.requests import FOLDER, MAX_SIGNATURE_BYTES, ReadRequest, bound_manifest
from bridge.errors import BusError, LeaseLost, ManifestError, ResultError, UnknownHandle
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES, NONCE_PATTERN, REQUEST_PATH, SIGNATURE_PATH, ParamValue
from bridge.protocol.result import RESULT_ROOT
from bridge.protocol.sanitize import quoted

TIP = "refs/archive/tip"

_NONCE = re.compile(NONCE_PATTERN)
_MONTH, _DAY = re.compile(r"[0-9]{4}-[0-9]{2}"), re.compile(r"[0-9]{2}")
_NONCE_START = re.compile(r"(?:(?P<preset>[a-z0-9-]{1,64}?)-)?(?P<nonce>[0-9]{8}(?:t[0-9a-z]{0,19})?)")
_TRIES = 4
_AT_ONCE = 50


class Archive:
    """One state of a remote's archive, read folder by folder.

    Args:
        cache: Where its objects are, or come to be.
        commit: The archive commit; it is in the cache.
    """

    def __init__(self, cache: Cache, commit: str) -> None:
        self._cache = cache
        self._git = cache.git
        self.commit = commit
        self._root = cache.git.commit(commit).tree
        self._known: dict[str, dict[str, str]] = {}

    def find(self, handle: str) -> str | None:
        """The nonce that a handle names here: a nonce, a branch, or the beginning of one with its day.

        Raises:
            UnknownHandle: It begins more than one.
        """
        match = _NONCE_START.fullmatch(_spelled(handle))
        if match is None:
            return None
        start, preset = match["nonce"], match["preset"]
        present = [nonce for nonce in self._nonces(start) if nonce.startswith(start)]
        if preset is not None:
            records = self.records_of(present)
            present = [record.nonce for record in records.values() if record.preset == preset]
        if len(present) > 1:
            some = ", ".join(sorted(present)[:5])
            raise UnknownHandle(
                f"{handle!r} names {len(present)} archived requests: {some}", "give more of it"
            )
        return present[0] if present else None

    def folder(self, nonce: str) -> str | None:
        """The tree of one request's folder; None: it is not archived."""
        month, day, name = folder_of(nonce)
        tree: str | None = self._root
        for part in (month, day, name):
            tree = None if tree is None else self._inside(tree).get(part)
        return tree

    def read(self, nonce: str) -> FetchedResult | None:
        """One archived result, as `bridge.bus.answers.fetch` would have given it; None: it is not archived.

        Raises:
            ResultError: What stands there cannot be one.
            RemoteUnreachable: The remote did not answer.
        """
        tree = self.folder(nonce)
        if tree is None:
            return None
        record = self.records_of([nonce], {nonce: tree}).get(nonce)
        if record is None:
            raise ResultError(f"the archive's folder of {nonce} holds no readable {RECORD_NAME}")
        result = {entry.name: entry.sha for entry in self._cache.rows(tree) if entry.kind == "tree"}
        if RESULT_FOLDER not in result:
            raise ResultError(f"the archive's folder of {nonce} holds no {RESULT_FOLDER}/")
        [listed] = self._cache.list_folders([result[RESULT_FOLDER]])
        if listed is None:
            raise ResultError(f"the archived result of {nonce} holds more files than a result has")
        plain = [file for file in listed if file.mode in ("100644", "100755")]
        self._cache.bring([file.sha for file in plain])
        contents = self._git.read_objects([file.sha for file in plain], MAX_RESULT_BYTES)
        request, folder = record.request, f"{RESULT_ROOT}/{nonce}/"
        return FetchedResult(
            nonce=nonce,
            ref=refs.ARCHIVE,
            commit=record.result_commit,
            parents=record.parents,
            above=1,
            changes=tuple(Change("A", folder + file.path, file.mode, file.sha) for file in listed),
            message=record.message,
            files={file.path: data for file, data in zip(plain, contents, strict=True)},
            asked=None
            if request is None
            else Asked(nonce, request.commit, request.workload_sha, request.preset, self._params(nonce)),
            alone=request is None and record.preset is None,
        )

    def _params(self, nonce: str) -> Mapping[str, ParamValue] | None:
        """What an archived request gave its preset; None: it cannot be read."""
        request = self.request(nonce)
        try:
            return None if request is None else bound_manifest(request, nonce).params
        except ManifestError:
            return None

    def request(self, nonce: str) -> ReadRequest | None:
        """The request that an archived result answers, as it was asked; None: the archive does not have it.

        Nobody read its bytes: `bridge.bus.requests.bound_manifest` does, and is as strict as on a branch.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        tree = self.folder(nonce)
        record = None if tree is None else self.records_of([nonce], {nonce: tree}).get(nonce)
        asked = None if record is None else record.request
        if tree is None or asked is None or asked.workload_sha is None:
            return None
        blobs = {row.name: row.sha for row in self._cache.rows(tree) if row.mode == "100644"}
        data = self._small(blobs.get(REQUEST_PATH.removeprefix(f"{FOLDER}/")), MAX_BYTES)
        signature = self._small(blobs.get(SIGNATURE_PATH.removeprefix(f"{FOLDER}/")), MAX_SIGNATURE_BYTES)
        return None if data is None else ReadRequest(asked.commit, asked.workload_sha, data, signature)

    def newest(self) -> Iterator[Archived]:
        """Every readable record, the newest nonce first; folders are opened as they are reached."""
        for month, days in self._latest(self._root, _MONTH):
            for day, nonces in self._latest(days, _DAY):
                found = [
                    pair for pair in self._latest(nonces, _NONCE) if folder_of(pair[0])[:2] == (month, day)
                ]
                for start in range(0, len(found), _AT_ONCE):
                    trees = dict(found[start : start + _AT_ONCE])
                    yield from self.records_of(list(trees), trees).values()

    def records_of(
        self, nonces: Sequence[str], trees: Mapping[str, str] | None = None
    ) -> dict[str, Archived]:
        """The records of some requests by nonce, those that can be read, in the order asked for."""
        if trees is None:
            trees = {nonce: tree for nonce in nonces if (tree := self.folder(nonce)) is not None}
        self._cache.bring(trees.values())
        blobs = {}
        for nonce in nonces:
            rows = self._cache.rows(trees[nonce]) if nonce in trees else []
            for row in rows:
                if (row.name, row.mode) == (RECORD_NAME, "100644"):
                    blobs[nonce] = row.sha
        self._cache.bring(blobs.values())
        records = {}
        for nonce, sha in blobs.items():
            with contextlib.suppress(ResultError, BusError):  # written by somebody else; others go on
                records[nonce] = parse_archived(self._git.read_objects([sha], MAX_RECORD_BYTES)[0], nonce)
        return records

    def _small(self, blob: str | None, limit: int) -> bytes | None:
        """The contents of a file of at most `limit` bytes; None: there is none, or it is larger."""
        if blob is None:
            return None
        self._cache.bring([blob])
        kind, size = self._git.kind_and_size(blob)
        return self._git.read_objects([blob], limit)[0] if kind == "blob" and size <= limit else None

    def _nonces(self, start: str) -> list[str]:
        if refs.is_nonce(start):
            return [start] if self.folder(start) is not None else []
        month, day, _ = folder_of(start)
        days = self._folders(self._root, _MONTH).get(month)
        nonces = None if days is None else self._folders(days, _DAY).get(day)
        return [] if nonces is None else list(self._folders(nonces, _NONCE))

    def _folders(self, tree: str, named: re.Pattern[str]) -> dict[str, str]:
        return {name: sha for name, sha in self._inside(tree).items() if named.fullmatch(name)}

    def _inside(self, tree: str) -> dict[str, str]:
        if tree not in self._known:
            rows = self._cache.rows(tree)
            self._known[tree] = {row.name: row.sha for row in rows if row.kind == "tree"}
        return self._known[tree]

    def _latest(self, tree: str, named: re.Pattern[str]) -> list[tuple[str, str]]:
        return sorted(self._folders(tree, named).items(), reverse=True)


def archive_in(cache: Cache, found: Mapping[str, str]) -> Archive | None:
    """The archive that a remote holds; None: it has none.

    Raises:
        LeaseLost: It moved on every look.
        RemoteUnreachable: The remote did not answer.
    """
    tip = found.get(refs.ARCHIVE)
    for _ in range(_TRIES):
        if tip is None:
            return None
        if cache.tip(refs.ARCHIVE, tip, TIP):
            if cache.git.kind_and_size(tip)[0] != "commit":
                raise BusError(f"{refs.ARCHIVE} holds no commit: {tip[:12]}")
            return Archive(cache, tip)
        tip = cache.git.ls_remote(cache.remote, refs.ARCHIVE).get(refs.ARCHIVE)
    raise LeaseLost(f"{refs.ARCHIVE} moved on every look", "try again")


def find_archived(
    folder: Path | None,
    remote: str,
    handle: str,
    *,
    found: Mapping[str, str] | None = None,
    origin: Git | None = None,
    timeout_s: float = 300.0,
) -> FetchedResult:
    """The result of a retired request.

    Args:
        folder: Where caches live (the state folder); None: nothing is kept for next time.
        remote: Address of the bus.
        handle: A nonce, a branch name, or the beginning of either with at least the day.
        found: The remote's refs where they are known.
        origin: A checkout whose own network settings count.
        timeout_s: Deadline of one command.

    Raises:
        UnknownHandle: The archive knows no such request, or several.
        ResultError: What is archived cannot be a result.
        RemoteUnreachable: The remote did not answer.
    """
    if found is None:
        found = (origin or Git(Path.cwd())).ls_remote(remote)
    known = found
    if refs.ARCHIVE in known:
        with open_cache(folder, remote, known, origin=origin, timeout_s=timeout_s) as cache:
            result = sound(cache, lambda: _found_in(cache, known, handle))
            if result is not None:
                return result
    raise UnknownHandle(
        f"no request on this remote is called {quoted(handle)}, and its archive holds none",
        "check the handle (at least the day of an archived one, as in 20260301), or name another --remote",
    )


def find_request(
    folder: Path | None, remote: str, nonce: str, *, origin: Git | None = None, timeout_s: float = 300.0
) -> ReadRequest | None:
    """The request of an archived result, as it was asked; None: the archive does not have it.

    Args:
        folder: Where caches live (the state folder); None: nothing is kept for next time.
        remote: Address of the bus.
        nonce: The request.
        origin: A checkout whose own network settings count.
        timeout_s: Deadline of one command.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    found = (origin or Git(Path.cwd())).ls_remote(remote)
    if refs.ARCHIVE not in found:
        return None
    with open_cache(folder, remote, found, origin=origin, timeout_s=timeout_s) as cache:
        return sound(cache, lambda: _request_in(cache, found, nonce))


def is_archived(
    folder: Path | None,
    remote: str,
    nonce: str,
    *,
    found: Mapping[str, str],
    origin: Git | None = None,
    timeout_s: float = 300.0,
) -> bool:
    """Whether a request has been answered and retired: one of this name that comes again is a replay.

    Args:
        folder: Where caches live (the state folder); None: nothing is kept for next time.
        remote: Address of the bus.
        nonce: The request.
        found: The remote's refs, `refs.ARCHIVE` among them if there is one.
        origin: A checkout whose own network settings count.
        timeout_s: Deadline of one command.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    if refs.ARCHIVE not in found:
        return False
    with open_cache(folder, remote, found, origin=origin, timeout_s=timeout_s) as cache:
        return sound(cache, lambda: _holds(cache, found, nonce))


def _holds(cache: Cache, found: Mapping[str, str], nonce: str) -> bool:
    archive = archive_in(cache, found)
    return archive is not None and archive.folder(nonce) is not None


def _request_in(cache: Cache, found: Mapping[str, str], nonce: str) -> ReadRequest | None:
    archive = archive_in(cache, found)
    return None if archive is None else archive.request(nonce)


def _found_in(cache: Cache, found: Mapping[str, str], handle: str) -> FetchedResult | None:
    archive = archive_in(cache, found)
    nonce = None if archive is None else archive.find(handle)
    return None if archive is None or nonce is None else archive.read(nonce)


def _spelled(handle: str) -> str:
    """A handle as the archive knows it: a nonce or ``<preset>-<nonce>``, or the beginning of one."""
    asked = handle.strip().removeprefix("refs/heads/").removeprefix("origin/")
    named = refs.parse_request_ref(f"refs/heads/{asked}")
    if named is not None:
        return named.nonce
    return asked.rpartition("/")[2].removeprefix("mac-bridge-")
