"""The folder that passes from the job on the Mac to the job that publishes, and its digest.

It holds ``.mac-bridge/results/<nonce>/…`` and nothing else. As a workflow artifact it may have been replaced
by others, so it is read as hostile: plain files and folders with plain names only, counted and measured
before a byte is read. The digest travels as a job output and covers path, size and sha256 of every file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.bus.publish import ResultFiles
from bridge.bus.results import MAX_RESULT_BYTES, MAX_RESULT_FILES
from bridge.errors import MachineError, ResultError
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, RESULT_SIGNATURE_NAME, Verdict, parse_result
from bridge.protocol.sanitize import quoted

_FORMAT = "kakeya-mac parcel 1"  # part of what is digested
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_DEPTH = 12
_MAX_ENTRIES = 4 * MAX_RESULT_FILES
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class TamperedArtifact(ResultError):
    """The artifact is not the one that the run wrote."""


@dataclass(frozen=True)
class Artifact:
    """A result in its folder: contents by path relative to ``result.json``, and the whole folder's digest."""

    nonce: str
    files: Mapping[str, bytes]
    digest: str

    @property
    def verdict(self) -> Verdict:
        """How the request ended; raises `EvidenceError` where ``result.json`` is none."""
        return parse_result(self.files[RESULT_NAME]).verdict

    @property
    def signature(self) -> bytes | None:
        """Detached, of ``result.json``; None: unsigned."""
        return self.files.get(RESULT_SIGNATURE_NAME)


def digest_of(files: Mapping[str, bytes]) -> str:
    """The sha256 (hex) over sha256, size and path of every file, ordered by path."""
    lines = [
        f"{hashlib.sha256(data).hexdigest()} {len(data)} {path}\n"
        for path, data in sorted(files.items(), key=lambda item: item[0].encode())
    ]
    return hashlib.sha256(f"{_FORMAT} {len(lines)}\n{''.join(lines)}".encode()).hexdigest()


def require_empty(folder: Path) -> None:
    """Create a folder, or refuse one that holds something: before a job runs, not after.

    Raises:
        MachineError: It holds something, or cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        first = next(folder.iterdir(), None)
    except OSError as error:
        raise MachineError(
            f"cannot use {folder} for a result: {error.strerror or error}", "name another --out"
        ) from None
    if first is not None:
        raise MachineError(f"{folder} is not empty: it holds {first.name!r}", "name a new folder with --out")


def write_artifact(result: ResultFiles, folder: Path) -> Artifact:
    """Write a signed result into an empty folder.

    Raises:
        MachineError: It cannot be written.
    """
    files = {**result.files, RESULT_NAME: result.result}
    if result.signature is not None:
        files[RESULT_SIGNATURE_NAME] = result.signature
    placed = {f"{RESULT_ROOT}/{result.nonce}/{path}": data for path, data in files.items()}
    try:
        for path, data in placed.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(target, _CREATE, 0o644), "wb") as file:
                file.write(data)
    except OSError as error:
        raise MachineError(f"cannot write the result to {folder}: {error.strerror or error}") from None
    return Artifact(result.nonce, files, digest_of(placed))


def read_artifact(folder: Path) -> Artifact | None:
    """Read a hostile folder; None: it is missing or holds no file. Compare with `require_digest` afterwards.

    Raises:
        TamperedArtifact: It has not the shape of a result.
    """
    if not os.path.lexists(folder):
        return None
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise TamperedArtifact("the result folder is not a folder")
        sizes = _plain_files(folder)
        if len(sizes) > MAX_RESULT_FILES or sum(sizes.values()) > MAX_RESULT_BYTES:
            held = f"{len(sizes)} files of {sum(sizes.values())} bytes"
            raise TamperedArtifact(
                f"the result folder holds {held}; the limits are {MAX_RESULT_FILES} and {MAX_RESULT_BYTES}"
            )
        files = {path: (folder / path).read_bytes() for path in sizes}
    except OSError as error:
        raise TamperedArtifact(f"cannot read the result folder: {error.strerror or error}") from None
    if not files:
        return None
    nonces = {_nonce_in(path) for path in files}
    if len(nonces) > 1:
        raise TamperedArtifact(f"the result folder holds results of {len(nonces)} requests, not of one")
    nonce = nonces.pop()
    inside = {path.removeprefix(f"{RESULT_ROOT}/{nonce}/"): data for path, data in files.items()}
    if RESULT_NAME not in inside:
        raise TamperedArtifact(f"the result folder holds no {RESULT_NAME}")
    return Artifact(nonce, inside, digest_of(files))


def require_digest(artifact: Artifact, expected: str) -> None:
    """Refuse an artifact whose digest is not the one in the run's outputs.

    Raises:
        TamperedArtifact: It is another one.
    """
    if not _DIGEST.fullmatch(expected):
        raise TamperedArtifact(f"the run gave no digest of its result folder, but {quoted(expected)}")
    if not hmac.compare_digest(artifact.digest, expected):
        raise TamperedArtifact(
            f"the result folder was changed after the run wrote it: its digest is {artifact.digest},"
            f" the run gave {expected}"
        )


def _nonce_in(path: str) -> str:
    nonce, slash, rest = path.removeprefix(f"{RESULT_ROOT}/").partition("/")
    if not path.startswith(f"{RESULT_ROOT}/") or not (slash and rest and refs.is_nonce(nonce)):
        raise TamperedArtifact(f"the result folder holds {quoted(path)}, which is no file of a result")
    return nonce


def _plain_files(root: Path) -> dict[str, int]:
    """Sizes of all files by relative path; links, pipes, sockets and odd names are refused."""
    sizes: dict[str, int] = {}
    seen = 0
    for folder, folders, names in os.walk(root):  # enters no link
        for path in (Path(folder, name) for name in (*folders, *names)):
            status, shown = path.lstat(), quoted(path.relative_to(root))
            seen += 1
            if seen > _MAX_ENTRIES or len(path.relative_to(root).parts) > _MAX_DEPTH:
                raise TamperedArtifact(f"more than {_MAX_ENTRIES} entries or {_MAX_DEPTH} levels of folders")
            if not _NAME.fullmatch(path.name):
                raise TamperedArtifact(f"the result folder holds an entry named {shown}")
            if stat.S_ISREG(status.st_mode):
                sizes[path.relative_to(root).as_posix()] = status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                raise TamperedArtifact(f"{shown} in the result folder is neither a plain file nor a folder")
    return sizes
