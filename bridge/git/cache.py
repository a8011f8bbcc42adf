"""The one bare repository that this machine keeps of a remote: rebuilt when it is broken or overgrown.

Names that others chose never become refs here: commits are fetched by exact names and kept by their sha.
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

from bridge.errors import BrokenObject, BusError, LeaseLost, MachineError, RemoteUnreachable
from bridge.git.remote import config_variables
from bridge.git.repo import FETCH_LIMIT_BYTES, GitRepo, Scratch, size_of

log = logging.getLogger(__name__)

# Packs beyond this slow every read down, bytes beyond this fill the disk: then unused objects are dropped.
MAX_PACKS = 50
MAX_BYTES = 1024**3
# Commits fetched in the last hour are kept: what a later request shares with them need not travel again.
KEPT_S = 3600
# What the thread of the heartbeat may fetch before it renews the lease again.
HEARTBEAT_FETCH_S, HEARTBEAT_FETCH_BYTES = 15.0, 64 * 1024**2
# A repository that may be broken is rebuilt at most so often: what others push can look like damage.
REPAIR_S = 600.0

_KEPT = "refs/kept/"
_NETWORK_SETTINGS = r"^(credential|http|https|protocol|ssh|url)\.|^core\.(sshcommand|gitproxy|askpass)$"
_Found = TypeVar("_Found")


class GitCache(GitRepo):
    """The local repository of one remote, made when it is missing. Several processes may use it.

    Network settings (credentials, proxies) of the checkout `origin` count, next to the user's.
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
        settings = [] if origin is None else origin.settings(_NETWORK_SETTINGS, local=True)
        environment = config_variables(settings, os.environ) if settings else {}
        super().__init__(directory, timeout_s=timeout_s, environment=environment)
        self.remote = remote
        self._limit_bytes = limit_bytes
        self._busy = threading.Lock()
        self._thread = threading.local()
        self._repaired_at: float | None = None

    def prepare(self) -> None:
        """Make the repository if it is missing."""
        head = self.directory / "HEAD"
        if not head.is_file():
            with self._exclusive():
                if not head.is_file():
                    self._make()

    def list_remote(self, *prefixes: str, timeout_s: float | None = None) -> dict[str, str]:
        """Refs of the remote below some prefixes; see `GitRepo.list_refs`."""
        self.prepare()
        return self.list_refs(self.remote, *prefixes, timeout_s=timeout_s or self._left_s())

    @contextlib.contextmanager
    def deadline(self) -> Generator[None, None, None]:
        """Give lists and fetches of this thread `HEARTBEAT_FETCH_S` in all, and leave clean-ups to others.

        A heartbeat waits for them, and a running job may need what is here.
        """
        self._thread.deadline = time.monotonic() + HEARTBEAT_FETCH_S
        try:
            yield
        finally:
            del self._thread.deadline

    def _left_s(self) -> float | None:
        """Seconds that this thread has left, at least a moment; None: it has no `deadline`."""
        deadline = getattr(self._thread, "deadline", None)
        return None if deadline is None else max(0.1, deadline - time.monotonic())

    @contextlib.contextmanager
    def scratch(self) -> Generator[Scratch, None, None]:
        """See `GitRepo.scratch`."""
        self.prepare()
        with super().scratch() as scratch:
            yield scratch

    def bring(
        self, found: Mapping[str, str], names: Collection[str], *, depth: int = 2
    ) -> dict[str, BusError]:
        """Fetch the commits that some refs (`names`) held when they were listed, where they are not here yet.

        A name may also be a commit's own sha, which some ref of the remote reaches. Commits that are here
        with a shorter history than `depth` are not fetched again. Returns what went wrong, by name: too
        large, or not what was listed any more. The others are here.
        """
        if names:
            self.prepare()
        # Git fetches no two refs into one, so of those that hold the same commit one is fetched.
        missing = {found[name]: name for name in names if not self.exists(found[name])}
        failed = self._fetch_each(missing, depth)
        broken = {sha: missing[sha] for sha, failure in failed.items() if type(failure) is BusError}
        if broken and self._left_s() is None and self.repair():
            failed = {sha: failed[sha] for sha in failed.keys() - broken.keys()}
            failed |= self._fetch_each(broken, depth)
        if missing and self._left_s() is None:
            self._collect_garbage({found[name] for name in names})
        for sha in missing.keys() - failed.keys():
            if not self.exists(sha):
                failed[sha] = LeaseLost(f"{missing[sha]} moved while it was fetched", "look again")
        return {name: failed[found[name]] for name in names if found[name] in failed}

    def recover(self, work: Callable[[], _Found]) -> _Found:
        """Do something, and once more with a new repository where this one may be what is broken."""
        try:
            return work()
        except BusError as error:
            if type(error) not in (BusError, BrokenObject):
                raise
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
        """Throw the repository away and begin an empty one, unless the remote is unreachable."""
        folder = next(folder for folder in self.directory.parents if folder.is_dir())
        GitRepo(folder, environment=self._environment).list_refs(self.remote, "refs/mac-bridge/")
        log.warning("%s is damaged, fetching again what is needed", self.directory)
        with self._exclusive():
            self._make()

    def _make(self) -> None:
        # Put in place whole, because others look at it without the lock.
        new = self.directory.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        GitRepo(self.directory.parent).run(
            *("init", "--quiet", "--bare", "--template=", "--object-format=sha1", str(new))
        )
        shutil.rmtree(self.directory, ignore_errors=True)
        new.rename(self.directory)
        self.close()

    def _fetch_each(self, missing: Mapping[str, str], depth: int) -> dict[str, BusError]:
        """Fetch commits, named by sha with a ref that holds each; returns what failed, by sha.

        All at once; if that fails, in halves, so that one bad ref does not hide the others.
        """
        if not missing:
            return {}
        left_s, limit = self._left_s(), self._limit_bytes
        if left_s is not None:
            if left_s <= 0.1:
                late = RemoteUnreachable(f"{self.remote} answers too slowly for a heartbeat")
                return dict.fromkeys(missing, late)
            limit = min(limit, HEARTBEAT_FETCH_BYTES)
        wanted = {name: f"{_KEPT}{int(time.time()):012d}-{sha}" for sha, name in missing.items()}
        try:
            with self._exclusive():
                for part in (self.directory / "objects" / "pack").glob("tmp_*"):  # of a fetch that broke off
                    part.unlink(missing_ok=True)
                self.fetch(self.remote, wanted, depth=depth, timeout_s=left_s, limit_bytes=limit)
        except BusError as error:
            rows = list(missing.items())
            if len(rows) > 1:
                halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
                first, rest = (self._fetch_each(dict(half), depth) for half in halves)
                return first | rest
            [(sha, name)] = rows
            if isinstance(error, RemoteUnreachable) and name not in self.list_remote(name):
                return {sha: LeaseLost(f"{name} is gone from the remote", "look again")}
            return {sha: error}
        return {}

    def _collect_garbage(self, fetched: Collection[str]) -> None:
        """Drop what is no longer needed, where much of it may be here; never what was fetched just now."""
        packs = list((self.directory / "objects" / "pack").glob("*.pack"))
        size = size_of(packs)
        if len(packs) <= MAX_PACKS and size <= MAX_BYTES:
            return
        with self._exclusive():
            refs = self.run("for-each-ref", "--format=%(refname)", _KEPT).decode().split()
            oldest = f"{_KEPT}{int(time.time()) - (0 if size > MAX_BYTES else KEPT_S):012d}."
            self.delete_refs(ref for ref in refs if ref < oldest and ref.rpartition("-")[2] not in fetched)
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
