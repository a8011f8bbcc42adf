"""What a runner knows of requests beyond one process: one SQLite file per runner and remote."""

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
from functools import partial
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
MAX_SESSIONS = 64  # of a runner's last processes: each may have left a claim when it was killed
_TYPICAL_OF = 9
_REMEDY = "free disk space"
# Not the file's fault.
_NO_DAMAGE = {
    *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM),
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
}

_SCHEMA_VERSION = 3
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS request(
  nonce TEXT PRIMARY KEY,
  preset TEXT,
  attempts INT NOT NULL DEFAULT 0,   -- how often it was started here
  not_before REAL,                   -- Unix time; left alone until then
  reason TEXT,                       -- why
  failures INT NOT NULL DEFAULT 0,   -- failures in a row, for the backoff
  refusals INT NOT NULL DEFAULT 0,   -- of these the last ones in which the server refused the result alone
  answered_at REAL,                  -- Unix time; it has its result
  seconds REAL                       -- how long the job took
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS result(
  nonce TEXT PRIMARY KEY,
  request_commit TEXT NOT NULL,
  result_ref TEXT,
  body BLOB NOT NULL,
  signature BLOB
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
PRAGMA user_version = {_SCHEMA_VERSION};
"""


@dataclass(frozen=True)
class RequestRecord:
    """What is known of a request. Times are Unix seconds."""

    attempts: int = 0
    not_before: float | None = None
    reason: str | None = None
    failures: int = 0
    refusals: int = 0
    answered_at: float | None = None


class Store:
    """The database of one runner on one remote; `clock` gives Unix seconds.

    Every method raises a `MachineError` when the file cannot be written, as on a full disk. A damaged file is
    set aside for an empty one: then a job may run once more than allowed.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self.clock = clock
        self._lock = threading.RLock()
        try:
            self._database = _connect(path)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            # Read-only is also said of a file whose header names a format that does not exist.
            if code in _NO_DAMAGE or (code == sqlite3.SQLITE_READONLY and not os.access(path, os.W_OK)):
                raise MachineError(f"cannot write {path}: {error}", _REMEDY) from None
            kept = f"{path.name}.damaged-{int(time.time())}"
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).rename(path.with_name(kept + suffix))
            said = "set aside as %s: a job that was running may run once more than allowed"
            log.error(f"%s cannot be used (%s); {said}", path, error, kept)
            self._database = _connect(path)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def get(self, nonce: str) -> RequestRecord:
        """What is known of a request; an empty record where nothing is."""
        columns = "SELECT CAST(attempts AS INT), CAST(not_before AS REAL), reason, CAST(failures AS INT)"
        columns += ", CAST(refusals AS INT), CAST(answered_at AS REAL)"
        rows = self._query(f"{columns} FROM request WHERE nonce = ?", nonce)
        return RequestRecord(*rows[0]) if rows else RequestRecord()

    def is_due(self, nonce: str) -> bool:
        """Whether a request may be tried now."""
        known = self.get(nonce)
        left_s = (known.not_before or 0.0) - self.clock()
        # No failure is paused for longer: the clock was set back.
        return left_s <= 0 or (known.failures > 0 and left_s > LONGEST_PAUSE_S)

    def begin(self, nonce: str, attempt: int) -> None:
        """Note that an attempt begins: durable before anything runs."""
        self._upsert(nonce, attempts=attempt, not_before=None, reason=None)

    def defer(self, nonce: str, until: float, reason: str) -> bool:
        """Leave a request alone until a Unix time, ending a row of failures; whether that reason is new."""
        known = self.get(nonce).reason == reason
        self._upsert(nonce, not_before=until, reason=reason, failures=0, refusals=0)
        return not known

    def back_off(self, nonce: str, reason: str, *, refusals: int = 0) -> None:
        """Log a failure, and leave its request alone: longer with each in a row."""
        with self._lock:
            failures = self.get(nonce).failures + 1
            pause = float(min(FIRST_PAUSE_S * 2 ** min(failures - 1, 16), LONGEST_PAUSE_S))
            log.warning("%s: retrying in %g s: %s", nonce, pause, reason)
            not_before = self.clock() + pause
            self._upsert(nonce, failures=failures, refusals=refusals, not_before=not_before, reason=reason)

    def release_deferred(self) -> None:
        """Try everything again: what deferred requests may have changed."""
        self._query("UPDATE request SET not_before = NULL, reason = NULL WHERE failures = 0")

    def answer(self, nonce: str) -> None:
        """Note that a request has its result; its own result is no longer waiting here."""
        self._upsert(nonce, answered_at=self.clock(), not_before=None, reason=None, failures=0, refusals=0)
        self.drop_result(nonce)

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

    def keep(self, result: ResultFiles) -> None:
        """Keep a result until it is published, in place of an older one; durable before it is pushed."""
        nonce = result.nonce
        values = (nonce, result.request_commit, result.result_ref, result.result, result.signature)
        files = [(nonce, path, data) for path, data in result.files.items()]
        with self._transaction() as database:
            database.execute("DELETE FROM result WHERE nonce = ?", (nonce,))
            database.execute("INSERT INTO result VALUES (?,?,?,?,?)", values)
            database.executemany("INSERT INTO file VALUES (?,?,?)", files)

    def unpublished(self) -> list[str]:
        """Nonces of the results that wait here, the oldest first."""
        return [row[0] for row in self._query("SELECT nonce FROM result ORDER BY nonce")]

    def result(self, nonce: str) -> ResultFiles | None:
        """A result that waits here; None: there is none."""
        columns = "request_commit, result_ref, CAST(body AS BLOB), CAST(signature AS BLOB)"
        rows = self._query(f"SELECT {columns} FROM result WHERE nonce = ?", nonce)  # noqa: S608 - no value in it
        files = dict(self._query("SELECT path, CAST(data AS BLOB) FROM file WHERE nonce = ?", nonce))
        for commit, ref, body, signature in rows:
            return ResultFiles(nonce, commit, ref, body, signature, files)
        return None

    def drop_result(self, nonce: str) -> None:
        """Forget a result that was published, or is not published after all."""
        self._query("DELETE FROM result WHERE nonce = ?", nonce)

    def add_session(self, session: str) -> frozenset[str]:
        """Note this process; returns the last few of this runner here, this one included.

        A claim of one of them is ours: the runner's name is locked, so no other process of ours has it.
        """
        folder = self._path.parent.stat().st_ino
        address = uuid.getnode()
        is_random = address >> 40 & 1  # and another one each time: the machine has no hardware address
        place = f"{0 if is_random else address:x}-{folder}"
        newest = "SELECT id FROM session WHERE place = ? ORDER BY started DESC LIMIT ?"
        self._query("INSERT OR REPLACE INTO session VALUES (?,?,?)", session, place, self.clock())
        self._query(f"DELETE FROM session WHERE id NOT IN ({newest})", place, MAX_SESSIONS)  # noqa: S608 - no value in it
        return frozenset(row[0] for row in self._query("SELECT id FROM session"))

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
            try:
                with self._database:  # commits, or rolls back after an error
                    yield self._database
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                raise MachineError(f"cannot write {self._path}: {error}", _REMEDY) from None


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
    database.text_factory = partial(str, encoding="utf-8", errors="replace")  # a damaged row harms no other
    try:
        database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON")
        [(tables,)] = database.execute("SELECT count(*) FROM sqlite_master")
        [(version,)] = database.execute("PRAGMA user_version")
        if tables and version != _SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"its schema has the version {version}, not {_SCHEMA_VERSION}")
        database.executescript(f"BEGIN; {_SCHEMA} COMMIT")
        [(verdict,)] = database.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
    except (sqlite3.Error, UnicodeDecodeError):
        database.close()
        raise
    return database
