"""Results on disk until the bus has them.

Every result is written here before it is pushed and removed afterwards, so one that could not be pushed, or
whose runner was killed in between, is published later by the same runner.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.protocol import refs
from bridge.protocol.manifest import format_time, parse_time
from bridge.runner.folders import remove_tree

_META, _RESULT, _SIGNATURE, _FILES = "entry.json", "result.json", "result.json.sig", "files"
_REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """A result ready to be pushed: the request it answers, the ref it goes to, and its exact bytes.

    Attributes:
        until: When the request expires, if it is signed: as long it could be put back.
    """

    nonce: str
    request_commit: str
    result_ref: str | None
    result: bytes
    signature: bytes | None
    files: Mapping[str, bytes]
    until: str | None = None


class Spool:
    """A folder of entries, one sub-folder each; an entry is there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tidy(self) -> None:
        """Remove what a process that was killed left half written or half removed."""
        for left in (*self._folder.glob(".new-*"), *self._folder.glob(".old-*")):
            remove_tree(left)

    def put(self, entry: Entry) -> None:
        """Keep an entry, replacing one of the same nonce."""
        draft = self._folder / f".new-{entry.nonce}"
        remove_tree(draft)
        (draft / _FILES).mkdir(parents=True, mode=0o700)
        names = {f"{index}": name for index, name in enumerate(entry.files)}
        for index, name in names.items():
            _write(draft / _FILES / index, entry.files[name])
        _write(draft / _RESULT, entry.result)
        if entry.signature is not None:
            _write(draft / _SIGNATURE, entry.signature)
        meta = {
            "nonce": entry.nonce,
            "request_commit": entry.request_commit,
            "result_ref": entry.result_ref,
            "files": names,
            "until": entry.until,
        }
        _write(draft / _META, json.dumps(meta).encode())
        self.remove(entry.nonce)
        draft.rename(self._folder / entry.nonce)

    def remove(self, nonce: str) -> None:
        """Forget an entry, if it is there. One that was only half removed is no entry any more."""
        self._put_away(nonce, ".old-")
        remove_tree(self._folder / f".old-{nonce}")

    def set_aside(self, nonce: str) -> Path:
        """Keep an entry that cannot be published for the owner to look at; where it lies now."""
        return self._put_away(nonce, "unusable-")

    def mark_refused(self, nonce: str) -> None:
        """Note that another result may stand in the place of this entry, which the server does not take.

        Raises:
            OSError: There is no such entry, or the note cannot be written.
        """
        _write(self._folder / nonce / _REFUSED, b"")

    def is_refused(self, nonce: str) -> bool:
        """Whether `mark_refused` was called for this entry, be it by an earlier process."""
        return (self._folder / nonce / _REFUSED).exists()

    def __contains__(self, nonce: object) -> bool:
        """Whether a result of this nonce waits here."""
        return (self._folder / str(nonce)).is_dir()

    def nonces(self) -> list[str]:
        """What waits here, oldest first."""
        return sorted(path.name for path in self._folder.glob("[0-9]*"))

    def read(self, nonce: str) -> Entry:
        """An entry.

        Raises:
            OSError: A file is missing or cannot be read.
            ValueError: It is not an entry, or not one of this nonce.
        """
        folder = self._folder / nonce
        meta = json.loads((folder / _META).read_bytes())
        signature = folder / _SIGNATURE
        entry = Entry(
            nonce=nonce,
            request_commit=str(meta["request_commit"]),
            result_ref=None if meta["result_ref"] is None else str(meta["result_ref"]),
            result=(folder / _RESULT).read_bytes(),
            signature=signature.read_bytes() if signature.exists() else None,
            files={name: (folder / _FILES / index).read_bytes() for index, name in meta["files"].items()},
            until=None if meta.get("until") is None else format_time(parse_time(str(meta["until"]))),
        )
        named = None if entry.result_ref is None else refs.parse_request_ref(entry.result_ref)
        if entry.result_ref is not None and (named is None or named.nonce != nonce):
            raise ValueError(f"{entry.result_ref!r} is not a branch of the request {nonce}")
        return entry

    def _put_away(self, nonce: str, prefix: str) -> Path:
        there = self._folder / f"{prefix}{nonce}"
        if os.path.lexists(self._folder / nonce):
            remove_tree(there)
            os.rename(self._folder / nonce, there)
        return there


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())
