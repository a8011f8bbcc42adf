"""Results on disk until the bus has them.

Every result is written here before it is pushed and removed afterwards, so one that could not be pushed, or
whose runner was killed in between, is published later by the same runner.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_META, _RESULT, _SIGNATURE, _FILES = "entry.json", "result.json", "result.json.sig", "files"


@dataclass(frozen=True)
class Entry:
    """A result ready to be pushed: the request it answers, the ref it goes to, and its exact bytes."""

    nonce: str
    request_commit: str
    result_ref: str | None
    result: bytes
    signature: bytes | None
    files: Mapping[str, bytes]


class Spool:
    """A folder of entries, one sub-folder each; an entry is there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, entry: Entry) -> None:
        """Keep an entry, replacing one of the same nonce."""
        draft = self._folder / f".{entry.nonce}"
        shutil.rmtree(draft, ignore_errors=True)
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
        }
        _write(draft / _META, json.dumps(meta).encode())
        self.remove(entry.nonce)
        draft.rename(self._folder / entry.nonce)

    def remove(self, nonce: str) -> None:
        """Forget an entry, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder / nonce)

    def __contains__(self, nonce: object) -> bool:
        """Whether a result of this nonce waits here."""
        return (self._folder / str(nonce)).is_dir()

    def entries(self) -> Iterator[Entry]:
        """Every whole entry, oldest first."""
        for folder in sorted(self._folder.glob("[0-9]*")):
            meta = json.loads((folder / _META).read_bytes())
            signature = folder / _SIGNATURE
            yield Entry(
                nonce=meta["nonce"],
                request_commit=meta["request_commit"],
                result_ref=meta["result_ref"],
                result=(folder / _RESULT).read_bytes(),
                signature=signature.read_bytes() if signature.exists() else None,
                files={name: (folder / _FILES / index).read_bytes() for index, name in meta["files"].items()},
            )


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())
