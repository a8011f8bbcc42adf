"""Is a model folder whole, and which weights does it hold? Told from headers alone.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header, JSON with the
place of each tensor behind it: https://github.com/huggingface/safetensors#format. So its size is known.
Standard library only: setup of a Mac imports this before anything is installed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

POINTER = b"version https://git-lfs.github.com/spec/"
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
# Bytes an element takes, by the names of the safetensors format. Types of less than a byte are not here:
# mlx does not read them.
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2}
SIZES |= {"BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8}
LARGEST_HEADER = 100_000_000  # bytes, the format's own limit
_LARGEST_JSON = 64 << 20


class Broken(ValueError):
    """A file of a model folder is missing, or not what it should be."""


def weight_files(folder: Path) -> list[Path]:
    """The ``model*.safetensors`` files of a folder, sorted."""
    return sorted(path for path in folder.iterdir() if path.match("model*.safetensors"))


def faults(folder: Path) -> list[str]:
    """What a model folder in the layout of mlx-lm lacks, one sentence each; nothing: it is whole."""
    try:
        read_json(folder / CONFIG)
        found = []
    except Broken as error:
        found = [str(error)]
    return found + weight_faults(folder)


def weight_faults(folder: Path) -> list[str]:
    """What of a folder's weights is missing or broken, one sentence each."""
    try:
        return missing_weights(folder) + [
            f"{path} {fault}" for path in weight_files(folder) if (fault := _fault(path)) is not None
        ]
    except OSError as error:
        return [f"{folder} cannot be read: {error.strerror or error}"]


def missing_weights(folder: Path) -> list[str]:
    """Which files of a folder's weights are not there, one sentence each; no file is opened but the index."""
    files = {path.name for path in weight_files(folder)}
    found = _index_faults(folder, files)
    return found or ([] if files else [f"{folder} holds no model*.safetensors"])


def digest(files: Sequence[Path]) -> str:
    """sha256 of the one file, or of the lines ``<sha256>  <name>`` of several, as sha256sum prints them."""
    digests = [file_sha256(file) for file in files]
    if len(digests) == 1:
        return digests[0]
    lines = "".join(f"{value}  {file.name}\n" for value, file in zip(digests, files, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def file_sha256(path: str | Path) -> str:
    """The sha256 of a file; one that did not change since is not read again."""
    status = os.stat(path)
    return _sha256(str(path), status.st_mtime_ns, status.st_size)


def source_digest(engine: Path) -> str:
    """sha256 over the lines ``<sha256>  <path>`` of the engine's Python files, and of this package's."""
    here = Path(__file__).parent
    files = [(file.relative_to(engine), file) for file in sorted(engine.rglob("*.py"))]
    files += [(file.relative_to(here.parent), file) for file in sorted(here.rglob("*.py"))]
    lines = "".join(f"{file_sha256(file)}  {name.as_posix()}\n" for name, file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


@functools.lru_cache(maxsize=4096)
def _sha256(path: str, _mtime_ns: int, _size: int) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; Broken, with the file's path, where there is none."""
    try:
        if is_special(path):
            raise Broken(f"{path} is not a file")
        with path.open("rb") as handle:
            content = handle.read(_LARGEST_JSON)
    except FileNotFoundError:
        raise Broken(f"{path} is missing") from None
    except OSError as error:
        raise Broken(f"{path} cannot be read: {error.strerror or error}") from None
    if content.startswith(POINTER):
        raise Broken(f"{path} is a git-lfs pointer; run: git lfs pull")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Broken(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Broken(f"{path} does not hold a JSON object")
    return value


def is_special(path: Path) -> bool:
    """Whether a path is neither file nor folder: reading from a pipe may wait for ever."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _index_faults(folder: Path, files: set[str]) -> list[str]:
    if not os.path.lexists(folder / INDEX):
        return []
    try:
        names = read_json(folder / INDEX).get("weight_map")
    except Broken as error:
        return [str(error)]
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        return [f"{folder / INDEX} has no weight_map of tensor names to file names"]
    missing = sorted(set(names.values()) - files)
    return [f"{folder} lacks {', '.join(missing)}, named in {INDEX}"] if missing else []


def _fault(file: Path) -> str | None:
    """The header must parse, its tensors must lie end to end, and the file must end with the last of them."""
    try:
        if is_special(file):
            return "is not a file"
        with file.open("rb") as stream:
            if stream.read(len(POINTER)) == POINTER:
                return "is a git-lfs pointer, not the weights; run: git lfs pull"
            stream.seek(0)
            length, size = int.from_bytes(stream.read(8), "little"), file.stat().st_size
            whole = length <= min(size - 8, LARGEST_HEADER)
            expected = 8 + length + _data_bytes(json.loads(stream.read(length) if whole else b""))
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"is corrupt: its safetensors header cannot be used ({error})"
    return None if size == expected else f"is corrupt: {size} bytes where its header promises {expected}"


def _data_bytes(header: dict[str, Any]) -> int:
    """Bytes of tensor data that a header describes; an error where they do not lie end to end."""
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: list(item[1]["data_offsets"])):
        begin, end = entry["data_offsets"]
        if min(entry["shape"], default=0) < 0 or begin != position:
            raise ValueError(f"{name} is out of place")
        if entry["dtype"] not in SIZES:
            raise ValueError(f"{name} is of type {entry['dtype']}")
        if end - begin != prod(entry["shape"]) * SIZES[entry["dtype"]]:
            raise ValueError(f"{name} is {entry['dtype']} {entry['shape']} in {end - begin} bytes")
        position = end
    return position
