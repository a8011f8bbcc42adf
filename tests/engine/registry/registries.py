"""Registry files for tests."""

from __future__ import annotations

from pathlib import Path

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
