"""The shipped folders: float16 weights, configurations, tokenizer, digests.

Loading and judging them is the engine's and `evaluate`'s business.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from tools.demo_models.trainer import named_parameters

DIGESTS = "DIGESTS.json"


def write_model(model: nn.Module, config: dict[str, Any], folder: Path) -> None:
    """Write `model.safetensors` in float16 and `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.astype(mx.float16) for name, value in named_parameters(model).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    text = json.dumps({**config, "dtype": "float16"}, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's two files."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)


def digests(root: Path) -> dict[str, str]:
    """SHA-256 of every file below `root` except the digest file, keyed by its path relative to `root`."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name != DIGESTS:
            found[path.relative_to(root).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def write_digests(root: Path) -> None:
    """Write the digests of everything below `root`."""
    (root / DIGESTS).write_text(json.dumps(digests(root), indent=2) + "\n", encoding="utf-8")
