"""Is a model folder whole? Told from headers alone, so that a download that broke off is seen before a job.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header, JSON with the
place of each tensor behind it: https://github.com/huggingface/safetensors#format. So its size is known.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from bridge.errors import describe

LFS_MARK = b"version https://git-lfs.github.com/spec/"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_MAX_JSON = 64 << 20
_MAX_HEADER = 100_000_000  # as the format's own library takes
_LENGTH = 8


def faults(folder: Path) -> list[str]:
    """What a model folder in the layout of mlx-lm lacks, one sentence each; nothing: it is whole."""
    found = []
    if not isinstance(_document(folder / CONFIG), dict):
        found.append(f"{CONFIG} is missing or not readable")
    files = {path.name for path in folder.glob("*.safetensors")}
    if (folder / INDEX).exists():
        index = _document(folder / INDEX)
        named = index.get("weight_map") if isinstance(index, dict) else None
        if isinstance(named, dict) and all(isinstance(name, str) for name in named.values()):
            found += [f"{name} is missing" for name in sorted(set(named.values()) - files)]
        else:
            found.append(f"{INDEX} is not readable")
    elif not files:
        found.append("it holds no *.safetensors file")
    for name in sorted(files):
        try:
            status = (folder / name).stat()
            fault = _fault(str(folder / name), status.st_mtime_ns, status.st_size)
        except OSError as error:
            fault = f"cannot be read: {describe(error)}"
        if fault is not None:
            found.append(f"{name} {fault}")
    return found


def digest(folder: Path) -> str | None:
    """The digest by which an evidence report names a model's weights; None: the folder holds none.

    sha256 of the one ``model*.safetensors``, or of the lines ``<sha256>  <name>`` of several, as sha256sum
    prints them.
    """
    found = [(file_sha256(path), path.name) for path in sorted(folder.glob("model*.safetensors"))]
    if len(found) < 2:
        return found[0][0] if found else None
    return hashlib.sha256("".join(f"{value}  {name}\n" for value, name in found).encode()).hexdigest()


def file_sha256(path: str | Path) -> str:
    """The sha256 of a file; one that did not change since is not read again."""
    status = os.stat(path)
    return _sha256(str(path), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4096)
def _sha256(path: str, _mtime_ns: int, _size: int) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _document(path: Path) -> Any:
    try:
        with path.open("rb") as handle:
            return json.loads(handle.read(_MAX_JSON))
    except (OSError, ValueError, RecursionError):
        return None


@functools.lru_cache(maxsize=4096)
def _fault(path: str, _mtime_ns: int, size: int) -> str | None:
    with open(path, "rb") as handle:
        head = handle.read(len(LFS_MARK))
        if head == LFS_MARK:
            return "is a Git LFS pointer instead of weights"
        length = int.from_bytes(head[:_LENGTH], "little")
        if len(head) < _LENGTH or length > _MAX_HEADER:
            return "is no safetensors file"
        handle.seek(_LENGTH)
        header = handle.read(length)
    if len(header) < length:
        return f"breaks off in its header: it has {size} bytes"
    try:
        tensors = json.loads(header)
        ends = [int(row["data_offsets"][1]) for name, row in tensors.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return "is no safetensors file"
    whole = _LENGTH + length + max(ends, default=0)
    if size != whole:
        return f"has {size} bytes instead of {whole}: was its download broken off?"
    return None
