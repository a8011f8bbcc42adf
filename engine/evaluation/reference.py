"""What our outputs are compared with: a name for people, and a digest over what made or holds the others."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx_lm

from engine.evaluation.golden import case_files, case_folders
from engine.evaluation.parity import Parity

UNNAMED = "unknown"  # the gate refuses it


@dataclass(frozen=True)
class Reference:
    """One side of a comparison.

    Attributes:
        implementation: its name for people.
        sha256: over the lines ``<sha256>  <name>`` of its files: those that hold its outputs, or its source.
    """

    implementation: str
    sha256: str


def stored_reference(folder: Path, parity: Parity, named: str | None) -> Reference:
    """The reference behind stored cases.

    Args:
        folder: one case, or a folder of cases.
        parity: what came of comparing with them.
        named: the implementation's name; None for what the cases say, or `UNNAMED`.
    """
    files = (
        (f"{case.resolve().name}/{file.relative_to(case).as_posix()}", file)
        for case in case_folders(folder)
        for file in case_files(case)
    )
    return Reference(named or "; ".join(parity.references) or UNNAMED, _digest(files))


def plain_reference() -> Reference:
    """mlx-lm's plain decoding, and the digest of mlx-lm's own Python files."""
    package = Path(mlx_lm.__file__).resolve().parent
    files = ((file.relative_to(package).as_posix(), file) for file in sorted(package.rglob("*.py")))
    name = f"mlx_lm {version('mlx-lm')} (generate_step's text, token by token on its own caches)"
    return Reference(name, _digest(files))


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {name}\n" for name, file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
