"""A bare repository of our own for what is looked up on a remote more than once.

It holds nothing that cannot be fetched again: a broken or overgrown one is thrown away and rebuilt. Where the
server honours filters only the objects that are named come (a partial clone); a plain bare server ignores
filters and sends whole shallow trees, the first time all of them, later what changed. One process uses a
cache at a time; another one meanwhile works in a temporary repository.

The promise that missing objects are on the remote is made to git only in the commands that fetch, so that
nothing is ever fetched behind our back: what is not here is missing until `Cache.bring` brings it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from bridge.bus.address import for_git
from bridge.bus.aside import network_settings
from bridge.bus.command import FETCH_LIMIT_BYTES
from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.errors import (
    BusError,
    LeaseLost,
    MachineError,
    PushRejected,
    RemoteUnreachable,
    UnknownHandle,
)
from bridge.protocol import refs

# More packs than this slow every look-up down; then a cache begins anew.
MOST_PACKS = 400
MOST_BYTES = 4 * 1024**3
# Objects named in one fetch: the server answers none beyond its own limits.
_ONE_FETCH = 1000

# More than this is no folder of the bridge's.
MOST_FILES = 2000
MOST_FOLDERS = 64
_MOST_TREE_BYTES = 16 * 1024**2

_ROW = {digest: re.compile(rb"([0-7]{5,6}) ([^\0]+)\0(.{%d})" % digest, re.DOTALL) for digest in (20, 32)}
_KINDS = {"040000": "tree", "160000": "commit"}
_FORMATS = {40: "sha1", 64: "sha256"}
_Found = TypeVar("_Found")


class TooMuch(BusError):
    """The remote sends more than a cache takes."""


@dataclass(frozen=True)
class Listed:
    """A file below a tree: its path from there, its mode, its blob."""

    path: str
    mode: str
    sha: str


class Cache:
    """One remote's cache, open. Made by `open_cache`.

    Args:
        directory: The bare repository.
        remote: Address of the bus.
        object_format: The remote's hash.
        origin: A checkout whose own network settings (credentials, proxies) count; None: the user's only.
        timeout_s: Deadline of one command.
        limit_bytes: A fetch that brings more than this is ended.
    """

    def __init__(
        self,
        directory: Path,
        remote: str,
        *,
        object_format: str,
        origin: Git | None,
        timeout_s: float,
        limit_bytes: int = FETCH_LIMIT_BYTES,
    ) -> None:
        self._format = object_format
        self._digest_bytes = 32 if object_format == "sha256" else 20
        self._limit_bytes = limit_bytes
        own = {} if origin is None else network_settings(origin)
        # A name that git's configuration can hold, because a partial clone must promise by name.
        address = remote if refs.is_url(remote) else "file://" + quote(os.path.abspath(remote))
        self.remote, credentials = for_git(address, {**os.environ, **own})
        self._environment = {**own, **credentials}
        self.git = Git(directory, timeout_s=timeout_s, environment=self._environment)

    def refresh(self, wanted: Mapping[str, str], *, prefix: str, depth: int) -> dict[str, str]:
        """Fetch refs of the remote without the contents of files; returns what each holds, by name.

        Args:
            wanted: A local name below `prefix` by the remote's ref; refs that are gone are left out.
            prefix: Local refs; those below it that are not wanted are dropped.
            depth: Commits of each.

        Raises:
            RemoteUnreachable: The remote did not answer.
            BusError: It sends too much.
        """
        # The star makes an absent ref an empty answer instead of an error.
        specs = [f"+{ref}*:{prefix}{name}*" for ref, name in wanted.items()]
        if specs:
            self._fetch_standing(specs, wanted, depth)
        local = self.git.refs(prefix)
        known = {f"{prefix}{name}": ref for ref, name in wanted.items()}
        stale = [f"delete {name}\n" for name in local if name not in known and name.isascii()]
        if stale:
            self.git.run("update-ref", "--stdin", input="".join(stale).encode())
        return {known[name]: commit for name, commit in local.items() if name in known}

    def keep(self, ref: str, commit: str) -> None:
        """Note locally what a ref of the remote holds, so that the next fetch brings only what is new."""
        self.git.run("update-ref", ref, commit)

    def tip(self, ref: str, commit: str, local: str) -> bool:
        """Have a commit that a ref of the remote held a moment ago, its trees and files left behind.

        Returns:
            False: The ref has moved or vanished meanwhile.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        if not self.git.exists(commit):
            self._fetch_standing([f"+{ref}*:{local}*"], {ref: local}, 1, "tree:0")
        return self.git.exists(commit)

    def bring(self, shas: Iterable[str], *, below: bool = False) -> None:
        """Fetch exactly these objects where they are not here yet; `below`: also the trees inside them.

        What the server does not give stays missing: whoever reads it says so.

        Raises:
            RemoteUnreachable: The remote did not answer, or has none of it.
        """
        missing = [sha for sha in dict.fromkeys(shas) if not self.git.exists(sha)]
        for start in range(0, len(missing), _ONE_FETCH):
            chunk = missing[start : start + _ONE_FETCH]
            self._fetch(chunk, "blob:none" if below else "tree:0", alone=True)

    def list_folders(self, trees: Sequence[str]) -> list[list[Listed] | None]:
        """Everything below some trees, whose contents stay behind, brought level by level.

        Returns:
            For each tree its files; None: it holds more than the bridge ever writes, or cannot be read.
        """
        found: list[list[Listed] | None] = [[] for _ in trees]
        folders = [0] * len(trees)
        level = [(index, "", sha) for index, sha in enumerate(trees)]
        while level:
            self.bring([sha for _, _, sha in level], below=True)
            below = []
            for index, inside, sha in level:
                files, rows = found[index], self.entries(sha)
                folders[index] += 1
                if files is None or rows is None or folders[index] > MOST_FOLDERS:
                    found[index] = None
                    continue
                below += [(index, f"{inside}{row.name}/", row.sha) for row in rows if row.kind == "tree"]
                files += [Listed(inside + row.name, row.mode, row.sha) for row in rows if row.kind != "tree"]
                if len(files) > MOST_FILES or len(rows) > MOST_FILES:
                    found[index] = None
            level = [(index, inside, sha) for index, inside, sha in below if found[index] is not None]
        return found

    def entries(self, name: str) -> list[Entry] | None:
        """The rows of one tree that is here (``<sha>``, ``<commit>:folder``); None: it cannot be read."""
        kind, size = self.git.kind_and_size(name)
        if kind != "tree" or size > _MOST_TREE_BYTES:
            return None
        raw, end, rows = self.git.read_tree(name), 0, []
        for match in _ROW[self._digest_bytes].finditer(raw):
            mode = match[1].decode("ascii").zfill(6)
            if match.start() != end:
                return None
            rows.append(Entry(mode, _KINDS.get(mode, "blob"), match[3].hex(), os.fsdecode(match[2])))
            end = match.end()
        return rows if end == len(raw) else None

    def rows(self, tree: str) -> list[Entry]:
        """The rows of one tree that is brought if need be; none where it is too large or cannot be read."""
        self.bring([tree])
        return self.entries(tree) or []

    def probe(self) -> None:
        """Ask the remote for its refs, without the repository.

        Raises:
            RemoteUnreachable: It did not answer.
        """
        Git(self.git.directory.parent, environment=self._environment).ls_remote(self.remote)

    def rebuild(self) -> None:
        """Begin anew with an empty repository."""
        directory = self.git.directory
        self.git.close()
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        Git(directory.parent).run(
            *("init", "--quiet", "--bare", "--template=", f"--object-format={self._format}", str(directory))
        )
        self.git.forget_store()

    def tidy(self) -> None:
        """Rebuild when the repository is missing, of another hash, or has grown too large."""
        done = self.git.attempt("rev-parse", "--show-object-format", "--is-bare-repository")
        if done.exit_code != 0 or done.stdout.split() != [self._format.encode(), b"true"]:
            self.rebuild()
            return
        packs, size = 0, 0
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.git.directory / "objects" / "pack"):
                packs += entry.name.endswith(".pack")
                size += entry.stat().st_size
        if packs > MOST_PACKS or size > MOST_BYTES:
            self.rebuild()

    def _fetch_standing(
        self, specs: list[str], wanted: Mapping[str, str], depth: int, objects: str = "blob:none"
    ) -> None:
        try:
            self._fetch(specs, objects, depth=depth)
        except RemoteUnreachable:
            # A shallow fetch that matches nothing fails like one that reaches nothing: are they all gone?
            if wanted.keys() & self.git.ls_remote(self.remote).keys():
                raise

    def _fetch(
        self, specs: list[str], objects: str, *, depth: int | None = None, alone: bool = False
    ) -> None:
        """Fetch with a filter; `alone`: without telling the server what is here, for it would not count
        missing objects below what is here as missing.
        """
        settings = {
            f"remote.{self.remote}.promisor": "true",
            f"remote.{self.remote}.partialclonefilter": objects,
            **({"fetch.negotiationAlgorithm": "noop"} if alone else {}),
        }
        fetcher = Git(
            self.git.directory,
            timeout_s=self.git.timeout_s,
            environment={**self._environment, **_configured(settings, self._environment)},
        )
        try:
            fetcher.fetch(self.remote, specs, depth=depth, limit_bytes=self._limit_bytes)
        except BusError as error:
            if type(error) is BusError:  # no other failure of a fetch is one
                raise TooMuch(error.message) from None
            raise
        finally:
            fetcher.close()


@contextlib.contextmanager
def open_cache(
    folder: Path | None,
    remote: str,
    found: Mapping[str, str],
    *,
    origin: Git | None = None,
    timeout_s: float = 300.0,
) -> Generator[Cache, None, None]:
    """The cache of a remote, for one process at a time; a temporary one while another process has it.

    Args:
        folder: Where caches live (the state folder); None: a temporary one.
        remote: Address of the bus.
        found: The remote's refs, which tell its hash.
        origin: A checkout whose own network settings count.
        timeout_s: Deadline of one command.

    Raises:
        MachineError: The folder cannot be written.
    """
    length = max((len(commit) for commit in found.values()), default=40)
    with contextlib.ExitStack() as stack:
        directory = None if folder is None else stack.enter_context(_locked(folder / "caches", remote))
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kakeya-mac-"))) / "git"
        cache = Cache(directory, remote, object_format=_FORMATS[length], origin=origin, timeout_s=timeout_s)
        stack.callback(cache.git.close)
        cache.tidy()
        yield cache


def sound(cache: Cache, work: Callable[[], _Found]) -> _Found:
    """Do something with a cache, and once more with a new one where the old one may be what is broken.

    Raises:
        BusError: The remote's fault, or the second time's.
    """
    try:
        return work()
    except (TooMuch, LeaseLost, PushRejected, UnknownHandle):
        raise
    except BusError:
        # Whose fault was it? A remote that lists its refs is well, so the cache is not.
        cache.probe()
        cache.rebuild()
        return work()


@contextlib.contextmanager
def _locked(folder: Path, remote: str) -> Generator[Path | None, None, None]:
    """The folder of a remote's cache, while no other process has it; None: one has."""
    name = hashlib.sha256(refs.audience_of(remote).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / f"{name}.lock").open("ab")
    except OSError as error:
        raise MachineError(f"cannot write {folder}: {error.strerror or error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield folder / f"{name}.git"


def _configured(settings: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Settings of git as environment variables, after those that the environment brings already."""
    count = given.get("GIT_CONFIG_COUNT") or os.environ.get("GIT_CONFIG_COUNT") or "0"
    if not count.isdigit():
        raise BusError(
            f"GIT_CONFIG_COUNT is {count!r}, and git wants a number there", "unset GIT_CONFIG_COUNT"
        )
    variables = {"GIT_CONFIG_COUNT": str(int(count) + len(settings))}
    for index, (key, value) in enumerate(settings.items(), start=int(count)):
        variables[f"GIT_CONFIG_KEY_{index}"] = key
        variables[f"GIT_CONFIG_VALUE_{index}"] = value
    return variables
