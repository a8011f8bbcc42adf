"""What an evaluation has measured so far, in a file, so that an interrupted one goes on where it was.

One line of JSON an entry, on the disk before the next prompt begins. The first says what the rows belong to
(see `engine.evaluation.fingerprint`); rows of anything else are refused, not mixed in. Every line carries a
sha256 over itself and the digest of the line before. A last line that was not finished never happened. A file
that does not prove to be a journal is refused and left as it is.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from engine.errors import ConfigurationError, EngineError
from engine.evaluation.report import now, stamp

Fingerprint = Mapping[str, str | int | float | bool | None]
KEPT = 20
SHOWN = 4  # differences that a refusal names
SHOWN_LENGTH = 40
BEGINNING = re.compile(rb'[0-9a-f]{64} \{"fingerprint":')  # of every journal
BEGINNING_LENGTH = 64 + len(' {"fingerprint":')


@dataclass(frozen=True)
class Entry:
    """Rows that one arm finished together: one, or those of a batch.

    Attributes:
        arm: its name.
        rows: as a report has them.
        drafter_forwards: of its drafter's network, behind all of these rows.
    """

    arm: str
    rows: list[dict[str, Any]]
    drafter_forwards: int = 0


@dataclass
class Journal:
    """An open journal; `open` makes it.

    Attributes:
        path: where it lies.
        started: when the first process began, UTC.
        taken: what earlier processes finished since the last restart, in the order run.
        restarts: measurements they gave up, as a report has them.
    """

    path: Path
    started: datetime
    _file: IO[bytes]
    taken: list[Entry] = field(default_factory=list)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    _digest: str = ""  # of the last line
    _entries: int = 0

    @classmethod
    def open(cls, path: Path, fingerprint: Fingerprint, *, resume: bool = True) -> "Journal":
        """Go on with the journal in ``path``, or begin one.

        Args:
            path: the file; its folder is made.
            fingerprint: what the rows belong to, as plain values by name.
            resume: False empties a journal that is there.

        Raises:
            ConfigurationError: it belongs to something else, is damaged or no journal, or another process
                writes it.
            EngineError: the file cannot be read or written.
        """
        try:
            if path.exists() and not path.is_file():
                raise ConfigurationError(f"the journal {path} is no plain file; give --journal another FILE")
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise EngineError(f"the journal {path} cannot be opened: {error.strerror}") from error
        journal = cls(path, now(), file)
        try:
            journal._lock()
            data = journal._proved()
            if data and resume:
                journal._take_over(data, fingerprint)
            else:
                journal._begin(fingerprint)
        except BaseException:
            file.close()
            raise
        return journal

    def add(self, entry: Entry) -> None:
        """Keep finished rows."""
        self._write({"arm": entry.arm, "rows": entry.rows, "drafter_forwards": entry.drafter_forwards})

    def restart(self, given_up: dict[str, Any]) -> None:
        """Note that all rows so far were given up, and why."""
        self._write({"restart": given_up})

    def remove(self) -> None:
        """Delete the file: its rows are in a report."""
        self._unlink()
        self._file.close()

    def close(self) -> bool:
        """Let go of the file, and delete one that holds nothing; whether it is still there."""
        if self._file.closed:
            return False
        if not self._entries:
            self._unlink()
        self._file.close()
        return self._entries > 0

    def _unlink(self) -> None:
        """Delete the file, unless its name has come to stand for another one."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                self.path.unlink()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another process writes the journal {self.path}; give --journal another FILE"
            ) from None

    def _proved(self) -> bytes:
        """The whole lines that are there, once the file's beginning shows that they are a journal's."""
        self._file.seek(0)
        beginning = self._file.read(BEGINNING_LENGTH)
        data = beginning + self._file.readall()  # type: ignore[attr-defined]  # unbuffered: a raw file
        whole: bytes = data[: data.rfind(b"\n") + 1]
        digest, _, body = whole.partition(b"\n")[0].partition(b" ")
        if data and not (
            BEGINNING.fullmatch(beginning) and (not whole or digest == _digest("", body).encode())
        ):
            raise ConfigurationError(
                f"the file {self.path} is no journal, or damaged in line 1; it is left as it is: "
                "delete it, or give --journal another FILE"
            )
        return whole

    def _begin(self, fingerprint: Fingerprint) -> None:
        """Empty the file and begin with the fingerprint."""
        self._file.truncate(0)
        self._write({"fingerprint": dict(fingerprint), "started_at": stamp(self.started)})
        self._entries = 0

    def _take_over(self, whole: bytes, fingerprint: Fingerprint) -> None:
        """Take over whole lines, and only then cut off what follows them."""
        head, *entries = self._entries_of(whole)
        self._compare(head["fingerprint"], fingerprint)
        self._file.truncate(len(whole))
        self.started = datetime.fromisoformat(head["started_at"])
        self._entries = len(entries)
        for entry in entries:
            if "restart" in entry:
                self.restarts.append(entry["restart"])
                self.taken.clear()
            else:
                self.taken.append(Entry(entry["arm"], entry["rows"], entry["drafter_forwards"]))

    def _entries_of(self, whole: bytes) -> Iterator[dict[str, Any]]:
        """The entries of whole lines, each proved by its digest."""
        for number, line in enumerate(whole.split(b"\n")[:-1], 1):
            digest, _, body = line.partition(b" ")
            self._digest = _digest(self._digest, body)
            if digest != self._digest.encode():
                raise ConfigurationError(
                    f"the journal {self.path} is damaged in line {number}; "
                    "--no-resume deletes it and begins anew"
                )
            entry: dict[str, Any] = json.loads(body)
            yield entry

    def _compare(self, found: dict[str, Any], wanted: Fingerprint) -> None:
        """Refuse a journal of something else, saying what differs."""
        names = sorted(found.keys() | wanted.keys())
        differing = [
            f"{name} was {_shown(found.get(name))}, is {_shown(wanted.get(name))}"
            for name in names
            if found.get(name) != wanted.get(name)
        ]
        if differing:
            more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise ConfigurationError(
                f"the journal {self.path} belongs to another run ({'; '.join(differing[:SHOWN])}{more}): "
                "give --no-resume to delete it and begin anew, or --journal another FILE"
            )

    def _write(self, entry: dict[str, Any]) -> None:
        """Append a line and wait until it is on the disk."""
        body = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode()
        self._digest = _digest(self._digest, body)
        line = self._digest.encode() + b" " + body + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise EngineError(f"the journal {self.path} cannot be written: {error.strerror}") from error
        self._entries += 1


def _digest(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= SHOWN_LENGTH else f"{text[: SHOWN_LENGTH - 1]}…"


@dataclass
class Journals:
    """Where the journal of a measurement goes, known before what it belongs to is.

    Attributes:
        path: the file; None for one in ``folder`` that is named after the fingerprint.
        folder: of journals that nobody named; the newest `KEPT` stay.
        resume: go on with a journal that is there; otherwise it is deleted.
        opened: the journal, once a measurement began it.
    """

    path: Path | None
    folder: Path
    resume: bool = True
    opened: Journal | None = None

    def open(self, fingerprint: Fingerprint) -> Journal:
        """Open the journal that belongs to the fingerprint; see `Journal.open`."""
        path = self.path or self.folder / f"{_key_of(fingerprint)}.jsonl"
        self.opened = Journal.open(path, fingerprint, resume=self.resume)
        if self.path is None:
            found = sorted(self.folder.glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
            for old in found[:-KEPT]:
                old.unlink(missing_ok=True)
        return self.opened


def _key_of(fingerprint: Fingerprint) -> str:
    return hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()[:32]
