"""What a runner knows of requests beyond one process: one SQLite file per runner and remote.

A request's attempts, deferrals, result and answer are columns of one row, so what is known of it is asked
here and nowhere else. Results are kept here until the remote was seen to hold them. A damaged database is set
aside and an empty one takes its place: then a job may run once more than allowed, and nothing else is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bridge.bus.publish import ResultFiles
from bridge.errors import MachineError
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW

log = logging.getLogger(__name__)

# What fails is tried again after so many seconds, doubled each time, up to the longest.
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 300.0
# How many earlier processes of a runner are remembered: each may have left a claim when it was killed.
MAX_SESSIONS = 64
_TYPICAL_OF = 9
# What sqlite says of a full disk, missing rights or another process; everything else is damage.
_NO_DAMAGE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
}
_REMEDY = "free disk space"

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS request(
  nonce TEXT PRIMARY KEY,
  preset TEXT,
  attempts INT NOT NULL DEFAULT 0,   -- how often it was started here
  not_before REAL,                   -- Unix time; left alone until then
  reason TEXT,                       -- why
  failures INT NOT NULL DEFAULT 0,   -- failures in a row, for the backoff
  answered_at REAL,                  -- Unix time; it has its result
  seconds REAL                       -- how long the job took
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS result(
  nonce TEXT PRIMARY KEY,
  request_commit TEXT NOT NULL,
  result_ref TEXT,
  body BLOB NOT NULL,
  signature BLOB,
  rejections INT NOT NULL DEFAULT 0, -- pushes in a row that the remote refused although it is there
  rejected_at REAL                   -- Unix time of the first of them
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS file(
  nonce TEXT NOT NULL REFERENCES result ON DELETE CASCADE,
  path TEXT NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (nonce, path)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS session(
  id TEXT PRIMARY KEY,
  place TEXT NOT NULL,               -- machine and folder: a copy of the folder takes over no claims
  started REAL NOT NULL
) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class RequestRecord:
    """What is known of a request. Times are Unix seconds."""

    attempts: int = 0
    not_before: float | None = None
    reason: str | None = None
    failures: int = 0
    answered_at: float | None = None


class Store:
    """The database of one runner on one remote. Safe for use by several threads.

    Every method raises a `MachineError` when the file cannot be written, as on a full disk; `clock` gives
    Unix seconds.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self.clock = clock
        self._lock = threading.RLock()
        try:
            self._database = _connect(path)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if not _is_damage(error, path):
                raise MachineError(f"cannot open {path}: {error}", _REMEDY) from None
            self._database = _replaced(path, error)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    # Requests ---------------------------------------------------------------------------------------------

    def get(self, nonce: str) -> RequestRecord:
        """What is known of a request; an empty record where nothing is."""
        columns = "SELECT attempts, not_before, reason, failures, answered_at"
        rows = self._query(f"{columns} FROM request WHERE nonce = ?", nonce)
        return RequestRecord(*rows[0]) if rows else RequestRecord()

    def is_due(self, nonce: str) -> bool:
        """Whether a request may be tried now."""
        not_before = self.get(nonce).not_before
        return not_before is None or self.clock() >= not_before

    def begin(self, nonce: str, attempt: int) -> None:
        """Note that an attempt begins: durable before anything runs."""
        self._upsert(nonce, attempts=attempt, not_before=None, reason=None)

    def defer(self, nonce: str, until: float, reason: str) -> bool:
        """Leave a request alone until a Unix time, ending a row of failures; whether that reason is new."""
        with self._transaction():
            known = self.get(nonce).reason == reason
            self._upsert(nonce, not_before=until, reason=reason, failures=0)
        return not known

    def back_off(self, nonce: str, reason: str, *, longest_s: float = LONGEST_PAUSE_S) -> float:
        """Log a failure, and leave its request alone: longer with each in a row; for how many seconds."""
        with self._transaction():
            failures = self.get(nonce).failures + 1
            pause = float(min(FIRST_PAUSE_S * 2 ** min(failures - 1, 16), longest_s))
            self._upsert(nonce, failures=failures, not_before=self.clock() + pause, reason=reason)
        log.warning("%s: retrying in %g s: %s", nonce, pause, reason)
        return pause

    def release_deferred(self) -> None:
        """Try everything again: what deferred requests may have changed."""
        self._query("UPDATE request SET not_before = NULL, reason = NULL WHERE failures = 0")

    def answer(self, nonce: str) -> None:
        """Note that a request has its result; its own result is no longer waiting here."""
        with self._transaction():
            self._upsert(nonce, answered_at=self.clock(), not_before=None, reason=None, failures=0)
            self.drop_result(nonce)

    def is_answered(self, nonce: str) -> bool:
        """Whether this runner saw the request's result."""
        return self.get(nonce).answered_at is not None

    def note_duration(self, nonce: str, preset: str, seconds: float) -> None:
        """Note how long a finished job took."""
        self._upsert(nonce, preset=preset, seconds=seconds)

    def typical_seconds(self, preset: str) -> float | None:
        """Median duration of the last few finished jobs of a preset; None: there was none."""
        finished = "SELECT seconds FROM request WHERE preset = ? AND seconds IS NOT NULL"
        rows = self._query(f"{finished} ORDER BY nonce DESC LIMIT ?", preset, _TYPICAL_OF)
        return statistics.median(row[0] for row in rows) if rows else None

    def forget_old(self, now: datetime) -> None:
        """Drop what no request that is still valid can be about: older ones are refused as expired."""
        oldest = refs.nonce_time(now - MAX_LIFETIME - 2 * MAX_NONCE_SKEW - timedelta(hours=1))
        self._query("DELETE FROM request WHERE nonce < ? AND nonce NOT IN (SELECT nonce FROM result)", oldest)

    # Results that wait to be published --------------------------------------------------------------------

    def keep(self, result: ResultFiles) -> None:
        """Keep a result until it is published, in place of an older one; durable before it is pushed."""
        values = (result.nonce, result.request_commit, result.result_ref, result.result, result.signature)
        insert = "INSERT INTO result(nonce, request_commit, result_ref, body, signature) VALUES (?,?,?,?,?)"
        with self._transaction():
            self.drop_result(result.nonce)
            self._query(insert, *values)
            for path, data in result.files.items():
                self._query("INSERT INTO file(nonce, path, data) VALUES (?,?,?)", result.nonce, path, data)

    def unpublished(self) -> list[str]:
        """Nonces of the results that wait here, the oldest first."""
        return [row[0] for row in self._query("SELECT nonce FROM result ORDER BY nonce")]

    def result(self, nonce: str) -> ResultFiles | None:
        """A result that waits here; None: there is none."""
        columns = "SELECT request_commit, result_ref, body, signature"
        with self._transaction():
            rows = self._query(f"{columns} FROM result WHERE nonce = ?", nonce)
            files = dict(self._query("SELECT path, data FROM file WHERE nonce = ?", nonce))
        for request_commit, result_ref, body, signature in rows:
            return ResultFiles(nonce, request_commit, result_ref, body, signature, files)
        return None

    def drop_result(self, nonce: str) -> None:
        """Forget a result that was published, or is not published after all."""
        self._query("DELETE FROM result WHERE nonce = ?", nonce)

    def note_rejection(self, nonce: str, *, rejected: bool) -> tuple[int, float]:
        """Count a push that the remote refused although it is there, or else start again from 0.

        Returns:
            How many there were in a row, and since when (Unix time).
        """
        with self._transaction():
            if rejected:
                counted = "rejections = rejections + 1, rejected_at = coalesce(rejected_at, ?)"
                self._query(f"UPDATE result SET {counted} WHERE nonce = ?", self.clock(), nonce)  # noqa: S608 - no value in it
            else:
                self._query("UPDATE result SET rejections = 0, rejected_at = NULL WHERE nonce = ?", nonce)
            rows = self._query("SELECT rejections, rejected_at FROM result WHERE nonce = ?", nonce)
        count, since = rows[0] if rows else (0, None)
        return count, self.clock() if since is None else since

    # Processes --------------------------------------------------------------------------------------------

    def add_session(self, session: str) -> frozenset[str]:
        """Note this process; returns the last few of this runner here, this one included.

        A claim of one of them is ours: the runner's name is locked, so no other process of ours has it.
        """
        place = self._place()
        newest = "SELECT id FROM session WHERE place = ? ORDER BY started DESC LIMIT ?"
        with self._transaction():
            self._query("INSERT OR REPLACE INTO session VALUES (?, ?, ?)", session, place, self.clock())
            self._query(f"DELETE FROM session WHERE id NOT IN ({newest})", place, MAX_SESSIONS)  # noqa: S608 - no value in it
            return frozenset(row[0] for row in self._query("SELECT id FROM session"))

    def _place(self) -> str:
        """Tells the folder from its copies."""
        node, status = uuid.getnode(), self._path.parent.stat()
        is_random = node >> 40 & 1  # where there is no hardware address: another one the next time
        return f"{0 if is_random else node:x}-{status.st_dev}-{status.st_ino}"

    # ------------------------------------------------------------------------------------------------------

    def _query(self, statement: str, *values: object) -> list[Any]:
        with self._transaction() as database:
            return database.execute(statement, values).fetchall()

    def _upsert(self, nonce: str, **values: object) -> None:
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        changes = ", ".join(f"{name} = excluded.{name}" for name in values)
        self._query(
            f"INSERT INTO request(nonce, {names}) VALUES (?, {marks})"  # noqa: S608 - names of columns
            f" ON CONFLICT(nonce) DO UPDATE SET {changes}",
            nonce,
            *values.values(),
        )

    @contextlib.contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection, None, None]:
        with self._lock:
            outer = self._database.in_transaction
            try:
                if not outer:
                    self._database.execute("BEGIN IMMEDIATE")
                yield self._database
                if not outer:
                    self._database.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    if self._database.in_transaction:
                        self._database.execute("ROLLBACK")
                bugs = (sqlite3.IntegrityError, sqlite3.ProgrammingError)
                if not isinstance(error, sqlite3.Error | UnicodeDecodeError) or isinstance(error, bugs):
                    raise
                if not _is_damage(error, self._path):
                    raise MachineError(f"cannot write {self._path}: {error}", _REMEDY) from None
                self._database.close()
                self._database = _replaced(self._path, error)
                said = f"{self._path} was damaged: {error}; an empty one takes its place"
                raise MachineError(said) from None


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA foreign_keys = ON")
        [(tables,)] = database.execute("SELECT count(*) FROM sqlite_master").fetchall()
        [(version,)] = database.execute("PRAGMA user_version").fetchall()
        if tables and version != _SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"its schema has the version {version}, not {_SCHEMA_VERSION}")
        # IMMEDIATE: a reader that turns writer while another process writes is refused without any waiting.
        database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}; PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT")
        [(verdict,)] = database.execute("PRAGMA quick_check(1)").fetchall()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
    except (sqlite3.Error, UnicodeDecodeError):
        database.close()
        raise
    return database


def _is_damage(error: Exception, path: Path) -> bool:
    """Whether the file is at fault, not the disk, its rights or another process."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if code == sqlite3.SQLITE_READONLY:  # also said of a file whose header has a version that does not exist
        return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return code not in _NO_DAMAGE


def _replaced(path: Path, error: Exception) -> sqlite3.Connection:
    """An empty database in place of a damaged one, which is set aside."""
    kept = path.with_name(f"{path.name}.damaged-{int(time.time())}")
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(kept.with_name(kept.name + suffix))
    log.error(
        "%s cannot be used (%s); set aside as %s, starting with an empty one: a job that was running may run"
        " once more than allowed",
        path,
        error,
        kept.name,
    )
    return _connect(path)
