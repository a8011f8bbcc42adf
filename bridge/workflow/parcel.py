"""The folder that passes from the job that runs to the job that publishes, and the digest beside it.

It holds ``.mac-bridge/results/<nonce>/…`` and nothing else. Between the two jobs it is an artifact that
others may have had their hands on, so it is read back as if somebody hostile had packed it: no link is
followed, nothing but plain files under plain names is opened, and counts and sizes are capped before a byte
is read. The digest covers the list of all files with their sizes and digests: what is changed, added, removed
or renamed shows.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.bus.answers import MAX_RESULT_BYTES, MAX_RESULT_FILES
from bridge.errors import MachineError, ResultError
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, RESULT_SIGNATURE_NAME
from bridge.protocol.sanitize import quoted
from bridge.runner.spool import Entry

_FORMAT = "kakeya-mac parcel 1"
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DEEPEST = 12
# Neither may the folders between the files be without number.
_MOST_ENTRIES = 4 * MAX_RESULT_FILES
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe without a writer would hold up who opens it.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class TamperedParcel(ResultError):
    """A parcel that is not the one that was sealed, or none that anybody seals."""


@dataclass(frozen=True)
class Parcel:
    """A result as it lies in its folder.

    Attributes:
        nonce: From the folder's name.
        files: Contents by path relative to ``result.json``, that one and its signature among them.
        digest: Of the whole folder.
    """

    nonce: str
    files: Mapping[str, bytes]
    digest: str


def digest(files: Mapping[str, bytes]) -> str:
    """The sha256 (hex) of the list of all files: path, size and sha256 of each, ordered by path."""
    lines = [
        f"{hashlib.sha256(data).hexdigest()} {len(data)} {path}\n"
        for path, data in sorted(files.items(), key=lambda item: item[0].encode())
    ]
    return hashlib.sha256(f"{_FORMAT} {len(lines)}\n{''.join(lines)}".encode()).hexdigest()


def require_free(folder: Path) -> None:
    """Refuse a folder that already holds something: before a job runs, not after.

    Raises:
        MachineError: It is no folder, holds something, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = next(folder.iterdir(), None)
    except OSError as error:
        raise MachineError(
            f"cannot use {folder} for a result: {error.strerror or error}", "name another --out"
        ) from None
    if taken is not None:
        raise MachineError(f"{folder} is not empty: it holds {taken.name!r}", "name a new folder with --out")


def write(entry: Entry, folder: Path) -> Parcel:
    """Lay a sealed result out in an empty folder.

    Args:
        entry: The result.
        folder: From `require_free`.

    Raises:
        MachineError: It cannot be written.
    """
    files = {**entry.files, RESULT_NAME: entry.result}
    if entry.signature is not None:
        files[RESULT_SIGNATURE_NAME] = entry.signature
    root = f"{RESULT_ROOT}/{entry.nonce}"
    try:
        for path, data in files.items():
            target = folder / root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(target, _NEW, 0o644), "wb") as sink:
                sink.write(data)
    except OSError as error:
        raise MachineError(f"cannot write the result to {folder}: {error.strerror or error}") from None
    return Parcel(entry.nonce, files, digest(_placed(files, root)))


def read(folder: Path) -> Parcel | None:
    """Read a parcel that somebody hostile may have packed; None: there is none, or an empty folder.

    Raises:
        TamperedParcel: It has not the shape of a parcel. Whether it is the one that was sealed is for
            `require_digest` to say.
    """
    try:
        root = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TamperedParcel(f"the result folder cannot be opened: {error.strerror or error}") from None
    try:
        files = dict(_read_files(root))
    except OSError as error:
        raise TamperedParcel(f"the result folder cannot be read: {error.strerror or error}") from None
    finally:
        os.close(root)
    if not files:
        return None
    nonces = {_nonce_of(path) for path in files}
    if len(nonces) > 1:
        raise TamperedParcel(f"the result folder holds results of {len(nonces)} requests, not of one")
    nonce = nonces.pop()
    prefix = f"{RESULT_ROOT}/{nonce}/"
    inside = {path.removeprefix(prefix): data for path, data in files.items()}
    if RESULT_NAME not in inside:
        raise TamperedParcel(f"the result folder holds no {RESULT_NAME}")
    return Parcel(nonce, inside, digest(files))


def require_digest(parcel: Parcel, expected: str) -> None:
    """Refuse a parcel that is not the one whose digest the run gave.

    Args:
        parcel: As it was read.
        expected: From the run's outputs.

    Raises:
        TamperedParcel: It is another one.
    """
    if not _DIGEST.fullmatch(expected):
        raise TamperedParcel(f"the run gave no digest of its result folder, but {quoted(expected)}")
    if not hmac.compare_digest(parcel.digest, expected):
        raise TamperedParcel(
            f"the result folder was changed after the run sealed it: its digest is {parcel.digest},"
            f" the run gave {expected}"
        )


def _placed(files: Mapping[str, bytes], root: str) -> dict[str, bytes]:
    return {f"{root}/{path}": data for path, data in files.items()}


def _nonce_of(path: str) -> str:
    """The nonce in a path of a parcel."""
    prefix, nonce = f"{RESULT_ROOT}/", ""
    if path.startswith(prefix):
        nonce, slash, rest = path.removeprefix(prefix).partition("/")
        if not (slash and rest and refs.is_nonce(nonce)):
            nonce = ""
    if not nonce:
        raise TamperedParcel(f"the result folder holds {quoted(path)}, which is no file of a result")
    return nonce


def _read_files(root: int) -> Iterator[tuple[str, bytes]]:
    """Every file below an open folder: first all are looked at and counted, then they are read."""
    found = list(_look(root, "", 0, [0]))
    if len(found) > MAX_RESULT_FILES:
        raise TamperedParcel(f"the result folder holds {len(found)} files; a result has {MAX_RESULT_FILES}")
    total = sum(size for _, size in found)
    if total > MAX_RESULT_BYTES:
        raise TamperedParcel(f"the result folder holds {total} bytes; at most {MAX_RESULT_BYTES} are read")
    for path, size in found:
        yield path, _read_file(root, path, size)


def _look(folder: int, prefix: str, depth: int, seen: list[int]) -> Iterator[tuple[str, int]]:
    """Paths and sizes of all plain files; whatever else there is, is refused.

    Args:
        folder: Open descriptor.
        prefix: Of its paths.
        depth: How deep it lies.
        seen: How many entries were looked at in all; one number.
    """
    if depth > _DEEPEST:
        raise TamperedParcel(f"the result folder is deeper than {_DEEPEST} levels")
    names: list[tuple[str, bool]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            seen[0] += 1
            if seen[0] > _MOST_ENTRIES:
                raise TamperedParcel(f"the result folder holds more than {_MOST_ENTRIES} entries")
            path, status = f"{prefix}{entry.name}", entry.stat(follow_symlinks=False)
            if entry.name in (".", "..") or not _NAME.fullmatch(entry.name):
                raise TamperedParcel(f"the result folder holds an entry of the name {quoted(entry.name)}")
            if stat.S_ISDIR(status.st_mode):
                names.append((entry.name, True))
            elif stat.S_ISREG(status.st_mode):
                yield path, status.st_size
            else:
                raise TamperedParcel(f"{path} in the result folder is neither a plain file nor a folder")
    for name, _ in sorted(names):
        inner = os.open(name, _FOLDER, dir_fd=folder)
        try:
            yield from _look(inner, f"{prefix}{name}/", depth + 1, seen)
        finally:
            os.close(inner)


def _read_file(root: int, path: str, size: int) -> bytes:
    """A file's bytes, if it is the one that was looked at."""
    *folders, name = path.split("/")
    at = os.dup(root)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER, dir_fd=at)
            os.close(at)
            at = inner
        descriptor = os.open(name, _FILE, dir_fd=at)
    finally:
        os.close(at)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(size + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    if len(data) != size:
        raise TamperedParcel(f"{path} in the result folder changed while it was read")
    return data
