"""The one bare repository that this machine keeps of a remote, for what is fetched from it.

It holds nothing that cannot be fetched again, so a broken or overgrown one is thrown away and rebuilt. Names
that others chose never become refs here: commits are fetched by exact names, one failure at a time, and kept
under the sha that was listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import TypeVar

from bridge.errors import (
    BusError,
    FetchTooLarge,
    LeaseLost,
    MachineError,
    PushRejected,
    RemoteUnreachable,
    UnknownHandle,
)
from bridge.git.credentials import config_variables
from bridge.git.repo import FETCH_LIMIT_BYTES, GitRepo, Scratch

log = logging.getLogger(__name__)

# Packs beyond this slow every read down, bytes beyond this fill the disk: then unused objects are dropped.
MAX_PACKS = 50
MAX_BYTES = 1024**3
# So many fetched commits, and those of the last hour, are kept: what a later request shares with them need
# not travel again.
KEPT_COMMITS = 16
KEPT_S = 3600
# A repository that may be broken is rebuilt at most so often: what others push can look like damage.
REPAIR_S = 600.0

_KEPT = "refs/kept/"
_NETWORK_SETTINGS = r"^(credential|http|https|protocol|ssh|url)\.|^core\.(sshcommand|gitproxy|askpass)$"
_Found = TypeVar("_Found")


class GitCache(GitRepo):
    """The local repository of one remote. Several processes may use it at the same time.

    Args:
        directory: The bare repository; made when it is missing.
        remote: Address of the bus.
        origin: A checkout whose own network settings (credentials, proxies) count; None: the user's only.
        timeout_s: Deadline of one command.
        limit_bytes: Most that one fetch may bring.
    """

    def __init__(
        self,
        directory: Path,
        remote: str,
        *,
        origin: GitRepo | None = None,
        timeout_s: float = 300.0,
        limit_bytes: int = FETCH_LIMIT_BYTES,
    ) -> None:
        settings = {} if origin is None else network_settings(origin)
        super().__init__(directory, timeout_s=timeout_s, environment=settings)
        self.remote = remote
        self._limit_bytes = limit_bytes
        self._busy = threading.RLock()
        self._seen: tuple[int, int] | None = None
        self._repaired_at: float | None = None

    def prepare(self) -> None:
        """Make the repository if it is missing."""
        found = self._identity()
        if found is None:
            with self._exclusive():
                found = self._identity()
                if found is None:
                    self._make()
                    found = self._identity()
        if found != self._seen:  # another process rebuilt it
            self.close()
            self._seen = found

    def list_remote(self, *prefixes: str, timeout_s: float | None = None) -> dict[str, str]:
        """Refs of the remote below some prefixes; see `GitRepo.list_refs`."""
        self.prepare()
        return self.list_refs(self.remote, *prefixes, timeout_s=timeout_s)

    @contextlib.contextmanager
    def scratch(self) -> Generator[Scratch, None, None]:
        """See `GitRepo.scratch`."""
        self.prepare()
        with super().scratch() as scratch:
            yield scratch

    def bring(
        self, found: Mapping[str, str], names: Collection[str], *, depth: int = 2
    ) -> dict[str, BusError]:
        """Fetch the commits that some refs held when they were listed, where they are not here yet.

        Args:
            found: Shas by name, as the remote listed them.
            names: Which of them are wanted.
            depth: Commits of each history; those that are here with a shorter one are not fetched again.

        Returns:
            What went wrong, by name: too large, or not what was listed any more. The others are here.
        """
        if names:
            self.prepare()
        missing = [name for name in names if not self.exists(found[name])]
        if not missing:
            return {}
        failures = self._fetch_missing(found, missing, depth)
        broken = [name for name, failure in failures.items() if type(failure) is BusError]
        if broken and self.repair():
            kept = {name: failure for name, failure in failures.items() if name not in broken}
            failures = {**kept, **self._fetch_missing(found, broken, depth)}
        for name in missing:
            if name not in failures and not self.exists(found[name]):
                failures[name] = LeaseLost(f"{name} moved while it was fetched", "look again")
        return failures

    def bring_object(self, sha: str, *, depth: int | None = 2) -> None:
        """Fetch one commit by its sha, which some ref of the remote reaches."""
        self.prepare()
        if not self.exists(sha):
            with self._exclusive():
                self._fetch({sha: _kept_ref(sha)}, depth)
                self._collect_garbage({sha})

    def recover(self, work: Callable[[], _Found]) -> _Found:
        """Do something, and once more with a new repository where this one may be what is broken."""
        try:
            return work()
        except (FetchTooLarge, LeaseLost, PushRejected, RemoteUnreachable, UnknownHandle):
            raise
        except BusError:
            self.rebuild()
            return work()

    def repair(self) -> bool:
        """Rebuild the repository, which may be broken, unless that was done lately; whether it was done."""
        now = time.monotonic()
        if self._repaired_at is not None and now - self._repaired_at < REPAIR_S:
            return False
        self.rebuild()
        self._repaired_at = now
        return True

    def rebuild(self) -> None:
        """Throw the repository away and begin an empty one.

        Raises:
            RemoteUnreachable: The remote did not answer, so nothing is thrown away.
        """
        parent = GitRepo(_existing(self.directory.parent), timeout_s=60.0, environment=self._environment)
        parent.list_refs(self.remote, "refs/mac-bridge/")
        log.warning("%s is damaged, fetching again what is needed", self.directory)
        with self._exclusive():
            self._make()

    def _identity(self) -> tuple[int, int] | None:
        """Tells this repository from one that takes its place; None: there is none."""
        try:
            found = os.stat(self.directory / "HEAD")
        except OSError:
            return None
        return found.st_ino, found.st_ctime_ns

    def _make(self) -> None:
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise MachineError(f"cannot write {self.directory.parent}: {error.strerror or error}") from None
        # Put in place whole, because others look at it without the lock.
        new = self.directory.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        GitRepo(self.directory.parent).run(
            *("init", "--quiet", "--bare", "--template=", "--object-format=sha1", str(new))
        )
        shutil.rmtree(self.directory, ignore_errors=True)
        new.rename(self.directory)
        self.close()

    def _fetch_missing(self, found: Mapping[str, str], names: list[str], depth: int) -> dict[str, BusError]:
        # Git fetches no two refs into one, so of those that hold the same commit one is fetched.
        by_sha = {found[name]: name for name in names}
        with self._exclusive():
            failed = self._fetch_each(found, list(by_sha.values()), depth)
            self._collect_garbage(by_sha.keys())
        return {name: failed[by_sha[found[name]]] for name in names if by_sha[found[name]] in failed}

    def _fetch_each(self, found: Mapping[str, str], names: list[str], depth: int) -> dict[str, BusError]:
        """Fetch all at once; if that fails, in halves, so that one bad ref does not hide the others."""
        try:
            self._fetch({name: _kept_ref(found[name]) for name in names}, depth)
        except BusError as error:
            if isinstance(error, RemoteUnreachable) and len(names) == 1:
                if names[0] in self.list_remote(names[0]):  # a remote that is away fails here
                    return {names[0]: error}
                return {names[0]: LeaseLost(f"{names[0]} is gone from the remote", "look again")}
            if len(names) == 1:
                return {names[0]: error}
            half = len(names) // 2
            first = self._fetch_each(found, names[:half], depth)
            return {**first, **self._fetch_each(found, names[half:], depth)}
        return {}

    def _fetch(self, wanted: Mapping[str, str], depth: int | None) -> None:
        self.fetch(self.remote, wanted, depth=depth, limit_bytes=self._limit_bytes)

    def _collect_garbage(self, fetched: Collection[str]) -> None:
        """Drop what is no longer needed, where much of it may be here; never what was fetched just now."""
        packs = list((self.directory / "objects" / "pack").glob("*.pack"))
        size = 0
        for pack in packs:
            with contextlib.suppress(FileNotFoundError):
                size += pack.stat().st_size
        if len(packs) <= MAX_PACKS and size <= MAX_BYTES:
            return
        refs = sorted(self.refs(_KEPT))
        if size <= MAX_BYTES:
            oldest = f"{_KEPT}{int(time.time()) - KEPT_S:012d}-"
            refs = [ref for ref in refs[:-KEPT_COMMITS] if ref < oldest]
        dropped = [ref for ref in refs if ref.rpartition("-")[2] not in fetched]
        self.run("update-ref", "--stdin", input="".join(f"delete {ref}\n" for ref in dropped).encode())
        self.run("gc", "--quiet", "--prune=now")
        self.close()

    @contextlib.contextmanager
    def _exclusive(self) -> Generator[None, None, None]:
        """Hold the repository against other fetches and clean-ups, of this and other processes."""
        with self._busy:
            lock = self.directory.with_suffix(".lock")
            try:
                lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise MachineError(f"cannot write {lock}: {error.strerror or error}") from None
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                yield
            finally:
                os.close(handle)


def network_settings(repo: GitRepo) -> dict[str, str]:
    """A checkout's own settings for reaching remotes, as environment variables for another repository."""
    done = repo.attempt("config", "--show-scope", "--null", "--get-regexp", _NETWORK_SETTINGS)
    fields = done.stdout.decode("utf-8", "surrogateescape").split("\0")
    own = [
        pair.partition("\n")
        for scope, pair in zip(fields[::2], fields[1::2], strict=False)
        if scope in ("local", "worktree")
    ]
    if not own:
        return {}
    return config_variables(
        [(key, value if line_end else "true") for key, line_end, value in own], os.environ
    )


def _kept_ref(sha: str) -> str:
    return f"{_KEPT}{int(time.time()):012d}-{sha}"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not folder.is_dir():
        folder = folder.parent
    return folder
