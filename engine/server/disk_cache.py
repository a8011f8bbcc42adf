"""Snapshots on disk, for requests after a restart: one file each, written whole or not at all.

    KEY-SHA256.safetensors      the digest of what its numbers depend on, and that of the file's own bytes

A thread of its own writes a file under another name, synchronises and renames it: whatever ends the process
leaves the whole file or none. Its metadata have the tokens, so a start reads no arrays. A file of another
version, with other bytes than its name says, or one that cannot be read is removed and logged once, and no
request fails. The folder holds what was said to the model: it is its owner's alone. All but the writing is
for the engine's thread.
"""

import base64
import fcntl
import hashlib
import logging
import os
import re
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic

from engine.cache.saved import nbytes_of, pack, read_metadata, unpack
from engine.device import free_memory
from engine.errors import ConfigurationError
from engine.session import SessionSnapshot, common_length, filled

logger = logging.getLogger(__name__)
VERSION = "1"  # of the format; files of another are removed
SHORTEST = 256  # tokens that are worth a file
SERVED = 0.8  # a snapshot is not written where a file saves this share of its tokens already
WAITING = 2  # documents that wait to be written, in memory; more are dropped
HOUR_S = 3600.0
NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})\.safetensors")
PART = ".part"  # of a name that is not whole yet
LOCK = ".lock"


@dataclass(frozen=True)
class DiskLimits:
    """Where snapshots are written, and how much."""

    folder: Path
    most_bytes: int = 8 * 2**30
    hourly_bytes: int = 4 * 2**30  # written in any hour


@dataclass(eq=False)
class DiskEntry:
    """A file that is whole."""

    path: Path  # known once its bytes are
    key: str
    tokens: Sequence[int]
    back: int  # how many of the last tokens can be forgotten
    nbytes: int
    used: float  # as the file's modification time

    def common(self, prompt: Sequence[int]) -> int:
        """As `SessionSnapshot.common`, nothing read."""
        common = common_length(self.tokens, prompt[:-1])
        return common if len(self.tokens) - common <= self.back else 0


@dataclass(frozen=True)
class DiskStats:
    """What the folder holds, and what was done."""

    entries: int = 0
    nbytes: int = 0
    written_bytes: int = 0  # since the start
    skipped: int = 0  # snapshots that were not written, as the budget or the queue was full


class DiskCache:
    """The files of one folder, which no other process uses."""

    def __init__(self, limits: DiskLimits, *, clock: Callable[[], float] = monotonic) -> None:
        """Index the folder, made if need be; ConfigurationError where it cannot be used or is not private."""
        self._limits, self._clock, self._folder = limits, clock, limits.folder
        self._lock = _lock(self._folder)
        self._entries = self._indexed()
        self._written: deque[tuple[float, int]] = deque()  # when and how much, of the last hour
        self._written_bytes = self._skipped = 0
        self._jobs: SimpleQueue[tuple[DiskEntry, bytes] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[DiskEntry, bool]] = SimpleQueue()
        self._pending: list[DiskEntry] = []  # handed to the thread
        self._thread = Thread(target=self._write_all, name="prompt cache", daemon=True)
        self._thread.start()
        self._shrink()

    @property
    def stats(self) -> DiskStats:
        self._collect()
        held = sum(entry.nbytes for entry in self._entries)
        return DiskStats(len(self._entries), held, self._written_bytes, self._skipped)

    def best(self, key: str, prompt: Sequence[int]) -> tuple[DiskEntry | None, int]:
        """The file that saves most of a prompt, and how many tokens."""
        self._collect()
        own = [(entry.common(prompt), entry) for entry in self._entries if entry.key == key]
        count, found = max(own, key=lambda pair: pair[0], default=(0, None))
        return (found, count) if count else (None, 0)

    def read(self, entry: DiskEntry, empty: SessionSnapshot) -> SessionSnapshot | None:
        """Read a file into an ``empty`` snapshot of its kind; None where it is not what it should be."""
        try:
            document = entry.path.read_bytes()
            _check_digest(entry.path, document)
            snapshot = filled(empty, entry.tokens, unpack(document))
            os.utime(entry.path)  # the order in which a later process removes files
        except (OSError, ValueError) as error:  # a damaged file only means that the prompt is computed again
            self._remove(entry, str(error))
            return None
        self._entries.remove(entry)
        self._entries.append(entry)
        return snapshot

    def save(self, key: str, snapshot: SessionSnapshot) -> None:
        """Write a snapshot in the background if it is long enough, files serve too little of it, and the
        budget of the hour is not used up.
        """
        self._collect()
        tokens = snapshot.tokens
        known = [entry for entry in (*self._entries, *self._pending) if entry.key == key]
        served = max((entry.common((*tokens, -1)) for entry in known), default=0)
        if len(tokens) < SHORTEST or served >= SERVED * len(tokens):
            return
        while self._written and self._clock() - self._written[0][0] > HOUR_S:
            self._written.popleft()
        left = self._limits.hourly_bytes - sum(count for _, count in self._written)
        back = _furthest(snapshot)
        metadata = {
            "format": "kakeya-prompt-cache",
            "version": VERSION,
            "key": key,
            "tokens": base64.b64encode(array("i", tokens).tobytes()).decode(),
            "back": str(back),
        }
        try:
            state = snapshot.state()
            most = min(left, self._limits.most_bytes, free_memory() // 2)  # the document is a copy
            if len(self._pending) >= WAITING or nbytes_of(state) > most:
                self._skipped += 1
                return
            document = pack(state, metadata)
        except TypeError as error:  # a cache of a kind that the format does not know
            logger.warning("a prompt is kept in memory alone: %s", error)
            return
        entry = DiskEntry(self._folder, key, array("i", tokens), back, len(document), 0.0)
        self._written.append((self._clock(), entry.nbytes))
        self._pending.append(entry)
        self._jobs.put((entry, document))

    def close(self) -> None:
        """Write what waits, and leave the folder to others."""
        self._jobs.put(None)
        self._thread.join()
        self._collect()
        os.close(self._lock)

    def _collect(self) -> None:
        """Take over what the thread has written, and remove what that makes superfluous."""
        while True:
            try:
                entry, whole = self._done.get_nowait()
            except Empty:
                break
            self._pending.remove(entry)
            if not whole:
                continue
            self._written_bytes += entry.nbytes
            for old in [each for each in self._entries if each.key == entry.key]:
                count = len(old.tokens)
                if common_length(old.tokens, entry.tokens) == count >= len(entry.tokens) - entry.back:
                    self._remove(old)
            self._entries.append(entry)
            self._shrink()

    def _shrink(self) -> None:
        while self._entries and sum(entry.nbytes for entry in self._entries) > self._limits.most_bytes:
            self._remove(self._entries[0])

    def _remove(self, entry: DiskEntry, why: str | None = None) -> None:
        if why is not None:
            logger.warning("removed %s from the prompt cache: %s", entry.path.name, why)
        self._entries.remove(entry)
        entry.path.unlink(missing_ok=True)

    def _indexed(self) -> list[DiskEntry]:
        """The folder's whole files, the least recently used first; what is left of others is removed."""
        entries = []
        for path in self._folder.iterdir():
            if path.suffix == PART:
                path.unlink(missing_ok=True)  # of a process that ended while it wrote
            elif name := NAME.fullmatch(path.name):
                try:
                    entries.append(_entry(path, name[1]))
                except (OSError, ValueError, KeyError, TypeError) as error:
                    logger.warning("removed %s from the prompt cache: %s", path.name, error)
                    path.unlink(missing_ok=True)
        return sorted(entries, key=lambda entry: entry.used)

    # --- the thread -----------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            entry, document = job
            name = f"{entry.key}-{hashlib.sha256(document).hexdigest()}.safetensors"
            entry.path = self._folder / name
            try:
                _write(entry.path, document)
            except OSError as error:
                logger.warning("a prompt is kept in memory alone: %s", error)
                self._done.put((entry, False))
            else:
                self._done.put((entry, True))
            del job, document


def _check_digest(path: Path, document: bytes) -> None:
    if hashlib.sha256(document).hexdigest() != path.stem.partition("-")[2]:
        raise ValueError("its bytes have another digest")


def _write(path: Path, document: bytes) -> None:
    """Write a file, whole or not at all, also when the machine stops."""
    part = path.with_suffix(PART)
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(document)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(folder: Path) -> int:
    """Make the folder, private, and hold it until the process ends or the file number returned is closed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            text = f"--cache-dir {folder}: others may read it, and it holds what was said"
            raise ConfigurationError(f"{text}; run: chmod 700 {folder}")
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(f"--cache-dir {folder} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        text = f"--cache-dir {folder}: another server uses it; give each its own"
        raise ConfigurationError(text) from None
    return lock


def _entry(path: Path, key: str) -> DiskEntry:
    metadata = read_metadata(path)
    if (found := (metadata["format"], metadata["version"])) != ("kakeya-prompt-cache", VERSION):
        raise ValueError(f"it has another format: {' '.join(map(str, found))[:80]}")
    if metadata["key"] != key:
        raise ValueError("its name has another key")
    tokens = array("i")
    tokens.frombytes(base64.b64decode(metadata["tokens"]))
    status = path.stat()
    return DiskEntry(path, key, tokens, int(metadata["back"]), status.st_size, status.st_mtime)


def _furthest(snapshot: SessionSnapshot) -> int:
    """How many of the last tokens a snapshot can forget: that many, and any number less."""
    counts = range(len(snapshot.tokens) + 1)
    return bisect_left(counts, True, key=lambda count: not snapshot.rewindable(count)) - 1
