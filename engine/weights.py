"""Weight files on disk: finding them, telling broken ones apart, and their digest. Reads no tensor data."""

import hashlib
import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError

POINTER = b"version https://git-lfs"


def weight_files(folder: Path) -> list[Path]:
    """The ``model*.safetensors`` files of a model folder, checked.

    Raises:
        ModelError: the folder is missing or holds none, or a file is a git-lfs pointer, cut off or no
            safetensors file at all.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give the path of a model on this machine")
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no model*.safetensors")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = set(read_json(index).get("weight_map", {}).values())
        if missing := sorted(named - {file.name for file in files}):
            raise ModelError(f"{folder} lacks {', '.join(missing)}, named in {index.name}")
    for file in files:
        _check(file)
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelError: the file is missing or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
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


def _check(file: Path) -> None:
    """The header must parse and the file must be exactly as long as it says (safetensors format 0.x)."""
    with file.open("rb") as stream:
        start = stream.read(len(POINTER))
        if start == POINTER:
            raise ModelError(f"{file} is a git-lfs pointer, not the weights; run: git lfs pull")
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        size = file.stat().st_size
        try:
            header = json.loads(stream.read(length) if length <= size - 8 else b"")
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise ModelError(f"{file} is corrupt: its safetensors header cannot be read") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{file} is corrupt: {size} bytes where its header promises {expected}")
