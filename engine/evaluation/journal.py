"""Finished rows in a file, so that an interrupted evaluation continues where it was.

A line is on the disk before the next prompt starts: a sha256 over the previous line's digest and this entry,
then the entry as JSON. The first is the fingerprint of the run; rows of another run are refused. An
unfinished last line is dropped. A file that is not a journal is refused and not changed.
"""

import fcntl
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.errors import ConfigurationError, EngineError
from engine.evaluation.environment import content, sysctl
from engine.evaluation.prompts import Prompt
from engine.evaluation.report import now, stamp
from evidence_format.model import ReportRequest
from evidence_format.text import text_digest, tokens_digest

Fingerprint = Mapping[str, str | int | float | bool | None]
KEPT = 20
SHOWN = 4  # differences that a refusal names
SHOWN_LENGTH = 40
BEGINNING = re.compile(rb'[0-9a-f]{64} \{"fingerprint":')  # of every journal
BOOT = Path("/proc/sys/kernel/random/boot_id")
VOLATILE = ("power_source", "thermal_state", "swapping", "load", "versions", "git", "models")


@dataclass(frozen=True)
class Entry:
    """Rows that one arm finished together (one, or those of a batch), and its drafter's forwards for them."""

    arm: str
    rows: list[dict[str, Any]]
    drafter_forwards: int = 0


@dataclass
class Journal:
    """A journal: where it goes, and from `open` on what it holds."""

    path: Path | None  # None for one in `folder` named after the fingerprint, where the newest `KEPT` stay
    folder: Path = Path()
    resume: bool = True  # continue an existing journal, or empty it
    started: datetime = field(default_factory=now)  # when the first process opened it, UTC
    kept: list[Entry] = field(default_factory=list)  # of earlier processes, since the last restart
    restarts: list[dict[str, Any]] = field(default_factory=list)  # of earlier processes
    _file: Any = None
    _digest: str = ""  # of the last line
    _entries: int = 0

    def open(self, fingerprint: Fingerprint) -> "Journal":
        key = text_digest(json.dumps(dict(fingerprint), sort_keys=True))[:32]
        is_named, path = self.path is not None, self.path or self.folder / f"{key}.jsonl"
        self.path, self.started = path, now()
        try:
            if path.exists() and not path.is_file():
                raise ConfigurationError(f"the journal {path} is no plain file; give --journal another FILE")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise EngineError(f"the journal {path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            data: bytes = self._file.readall()
            entries = self._checked(data)
            if entries and self.resume:
                self._continue(entries[0], entries[1:], fingerprint)
                self._file.truncate(data.rfind(b"\n") + 1)  # drops an unfinished line; nothing is refused now
            else:
                self._digest = ""
                self._file.truncate(0)
                self._write({"fingerprint": dict(fingerprint), "started_at": stamp(self.started)})
                self._entries = 0
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise ConfigurationError(
                    f"another process writes the journal {path}; give --journal another FILE"
                ) from None
            raise
        if not is_named:
            found = sorted(self.folder.glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
            for old in found[:-KEPT]:
                old.unlink(missing_ok=True)
        return self

    def add(self, entry: Entry) -> None:
        self._write(asdict(entry))

    def restart(self, abandoned: dict[str, Any]) -> None:
        self._write({"restart": abandoned})

    def remove(self) -> None:
        """Delete the file: its rows are in a report."""
        self._entries = 0
        self.close()

    def close(self) -> bool:
        """Close the file, delete one that holds no entries; return whether an open one remains."""
        if self._file is None or self._file.closed:
            return False
        if not self._entries:
            with suppress(FileNotFoundError):
                path = Path(self._file.name)
                if os.path.samestat(path.stat(), os.fstat(self._file.fileno())):  # not replaced meanwhile
                    path.unlink()
        self._file.close()
        return self._entries > 0

    def _checked(self, data: bytes) -> list[dict[str, Any]]:
        """The entries of the complete lines; without `resume` only the first is looked at."""
        no_journal = ConfigurationError(
            f"the file {self.path} is no journal, or damaged in line 1; it was not changed: "
            "delete it, or give --journal another FILE"
        )
        if data and not BEGINNING.match(data):
            raise no_journal
        entries, lines = [], data.split(b"\n")[:-1]
        for number, line in enumerate(lines if self.resume else lines[:1], 1):
            digest, _, body = line.partition(b" ")
            self._digest = sha256(self._digest.encode() + body).hexdigest()
            if digest != self._digest.encode():
                if number == 1:
                    raise no_journal
                raise ConfigurationError(
                    f"the journal {self.path} is damaged in line {number}; "
                    "use --no-resume to delete it and start over"
                )
            entries.append(json.loads(body))
        return entries

    def _continue(self, head: dict[str, Any], entries: list[dict[str, Any]], wanted: Fingerprint) -> None:
        found = head["fingerprint"]
        differing = [
            f"{name} was {_shown(found.get(name))}, is {_shown(wanted.get(name))}"
            for name in sorted(found.keys() | wanted.keys())
            if found.get(name) != wanted.get(name)
        ]
        if differing:
            more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise ConfigurationError(
                f"the journal {self.path} belongs to another run ({'; '.join(differing[:SHOWN])}{more}): "
                "use --no-resume to delete it and start over, or --journal FILE for another one"
            )
        self.started = datetime.fromisoformat(head["started_at"])
        self._entries = len(entries)
        for entry in entries:
            if "restart" in entry:
                self.restarts.append(entry["restart"])
                self.kept.clear()
            else:
                self.kept.append(Entry(**entry))

    def _write(self, entry: dict[str, Any]) -> None:
        body = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode()
        self._digest = sha256(self._digest.encode() + body).hexdigest()
        line = self._digest.encode() + b" " + body + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise EngineError(f"the journal {self.path} cannot be written: {error.strerror}") from error
        self._entries += 1


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= SHOWN_LENGTH else f"{text[: SHOWN_LENGTH - 1]}…"


def fingerprint(
    environment: Mapping[str, Any],
    configuration: Mapping[str, Any],
    prompts: Sequence[Prompt],
    encoded: Sequence[Sequence[int]],
    request: ReportRequest | None,
) -> Fingerprint:
    """What must be equal for rows to be continued: two machines, or two states of one, do not mix."""
    machine = {key: value for key, value in environment.items() if key not in VOLATILE}
    models = {
        f"{role} {key}": value
        for role, card in environment["models"].items()
        for key, value in card.items()
        if key != "cache_layers"  # a list; the weights and the engine's source determine it
    }
    lines = [
        [prompt.id, tokens_digest(tokens), prompt.instruction, prompt.needle and asdict(prompt.needle)]
        for prompt, tokens in zip(prompts, encoded, strict=True)
    ]
    return {
        **configuration,
        **{f"version of {name}": value for name, value in environment["versions"].items()},
        **models,
        **{f"request {name}": value for name, value in (request.model_dump() if request else {}).items()},
        "engine source": environment["git"]["source_sha256"],
        "prompts": text_digest(json.dumps(lines)),
        "machine": text_digest(json.dumps(machine, sort_keys=True)),
        "boot": boot_session(),
    }


def boot_session() -> str | None:
    """The system's id of the time since it was started; None where there is none."""
    if sys.platform == "darwin":
        return sysctl("kern.bootsessionuuid") or None
    return content(BOOT) or None
