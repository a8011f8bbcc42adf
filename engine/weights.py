"""Files of a model folder: finding them, telling broken ones apart, their digest. Reads no tensor data."""

import hashlib
import json
from math import prod
from pathlib import Path
from typing import Any

from engine.errors import ModelError

POINTER = b"version https://git-lfs"
# Bytes an element takes, by the names of the safetensors format. Types of less than a byte are not here:
# mlx does not read them.
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2}
SIZES |= {"BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8}
LARGEST_HEADER = 100_000_000  # bytes, the format's own limit


def require_folder(folder: Path) -> None:
    """Raise ModelError where a path is not that of a folder that can be looked into."""
    try:
        if not folder.is_dir():
            kind = "is a file, not a folder" if folder.is_file() else "is not a folder"
            raise ModelError(f"{folder} {kind}; give the path of a model's folder on this machine")
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from None


def require_file(path: Path) -> None:
    """Raise ModelError where a path is neither file nor folder: reading from a pipe may wait for ever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ModelError(f"{path} is not a file")


def weight_files(folder: Path) -> list[Path]:
    """The ``model*.safetensors`` files of a model folder, checked.

    Raises:
        ModelError: the folder is missing, cannot be read or holds none, an index names a file that is not
            there, or a file is a git-lfs pointer, cut off or no safetensors file at all.
    """
    require_folder(folder)
    try:
        files = sorted(file for file in folder.iterdir() if file.match("model*.safetensors"))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from None
    index = folder / "model.safetensors.index.json"
    if index in folder.iterdir():
        named = _named(index)
        if missing := sorted(named - {file.name for file in files}):
            raise ModelError(f"{folder} lacks {', '.join(missing)}, named in {index.name}")
    if not files:
        raise ModelError(f"{folder} holds no model*.safetensors")
    for file in files:
        try:
            require_file(file)
            _check(file)
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    return files


def tensor_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in files that `weight_files` has checked, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelError: the file is missing, cannot be read, or does not hold a JSON object.
    """
    try:
        require_file(path)
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if content.startswith(POINTER):
        raise ModelError(f"{path} is a git-lfs pointer; run: git lfs pull")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def digest(files: list[Path]) -> str:
    """sha256 of the one file, or of the lines ``<sha256>  <name>`` of several, as sha256sum prints them."""
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    if len(files) == 1:
        return digests[0]
    lines = "".join(f"{value}  {file.name}\n" for value, file in zip(digests, files, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def _named(index: Path) -> set[str]:
    """The files an index names."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{index} has no weight_map of tensor names to file names")
    return set(names.values())


def _check(file: Path) -> None:
    """The header must parse, its tensors must lie end to end, and the file must end with the last of them."""
    with file.open("rb") as stream:
        start = stream.read(len(POINTER))
        if start == POINTER:
            raise ModelError(f"{file} is a git-lfs pointer, not the weights; run: git lfs pull")
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        size = file.stat().st_size
        whole = length <= min(size - 8, LARGEST_HEADER)
        try:
            expected = 8 + length + _data_bytes(json.loads(stream.read(length) if whole else b""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{file} is corrupt: its safetensors header cannot be used ({error})") from None
    if size != expected:
        raise ModelError(f"{file} is corrupt: {size} bytes where its header promises {expected}")


def _data_bytes(header: dict[str, Any]) -> int:
    """Bytes of tensor data that a header describes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it does not describe tensors that lie end to end.
    """
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
