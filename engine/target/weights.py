"""A model folder's files, checked: `evidence_format.weights` with the engine's errors."""

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from evidence_format import weights


def require_folder(folder: Path) -> None:
    """Raise ModelError where a path is not that of a folder that can be looked into."""
    try:
        if not folder.is_dir():
            kind = "is a file, not a folder" if folder.is_file() else "is not a folder"
            raise ModelError(f"{folder} {kind}; give the path of a model's folder on this machine")
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from None


def require_file(path: Path) -> None:
    """Raise ModelError where a path is neither file nor folder."""
    if weights.is_special(path):
        raise ModelError(f"{path} is not a file")


def weight_files(folder: Path) -> list[Path]:
    """The ``model*.safetensors`` files of a model folder; ModelError where any is missing or broken."""
    require_folder(folder)
    if found := weights.weight_faults(folder):
        raise ModelError(found[0])
    return weights.weight_files(folder)


def tensor_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in files that `weight_files` has checked, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError where there is none."""
    try:
        return weights.read_json(path)
    except weights.Broken as error:
        raise ModelError(str(error)) from None
