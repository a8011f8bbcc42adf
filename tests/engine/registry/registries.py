"""Registry files and entries for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.registry import ModelEntry, Source

SHIPPED = Source(shipped=True)

MINIMAL = """\
default = "one"

[models.one]
summary = "a model"
target = "shipped"
"""


def write(folder: Path, text: str) -> Path:
    """A registry file of that text."""
    path = folder / "registry.toml"
    path.write_text(text, encoding="utf-8")
    return path


def with_model(lines: str) -> str:
    """The minimal registry with more lines in its model."""
    return MINIMAL + lines + "\n"


def model_of(target: Source, drafter: Source | None = None, name: str = "one", **more: Any) -> ModelEntry:
    return ModelEntry(name=name, summary="s", target=target, drafter=drafter, **more)


def published(folder: str, hub: str | None = None, revision: str | None = None) -> Source:
    return Source(folder=folder, hub=hub, revision=revision)


def at(path: object) -> Source:
    """A folder by its path, or the text of a drafter."""
    return Source(path=str(path))
