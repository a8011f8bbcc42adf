"""Which folders on this machine hold the models that a report names, told by the digests of their weights.

Looked at, in this order: the folder that was given; the shipped models, and folders given for any role; the
environment's ``KAKEYA_MODEL_…``, ``~/kakeya-models`` and the hub's cache, where a folder has the name that
the report gives. Names choose which folders are hashed, digests decide. A path in a report is never opened.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigurationError, ModelError
from engine.registry import Places, Registry
from engine.target.folder import identity, weight_files
from engine.target.loading import SHIPPED
from engine.verification.record import finding
from evidence_format.model import Model, Role
from evidence_format.verification import ReplayFinding
from evidence_format.weights import digest

FLAGS = {"target": "--model", "drafter": "--drafter", "projector": "--projector"}
SHIPPED_FOLDERS = ("target", "drafter", "proposer", "projector")


@dataclass(frozen=True)
class Folders:
    """Folders by role, and what speaks against them."""

    found: Mapping[str, Path]
    findings: tuple[ReplayFinding, ...]


def find_models(
    models: Mapping[Role, Model],
    given: Mapping[str, Path | None],
    among: Sequence[Path],
    places: Places,
) -> Folders:
    """The folder of every model that a report names.

    Args:
        models: of the report, by role.
        given: folders from the command line, by role.
        among: further folders that may hold a model of any role.
        places: where else to look.

    Returns:
        The folders with the claimed digests; a finding for each model whose folder has another one.

    Raises:
        ConfigurationError: a model is not at hand.
    """
    found: dict[str, Path] = {}
    findings: list[ReplayFinding] = []
    for role, model in models.items():
        folder = given.get(role)
        candidates = [folder] if folder is not None else list(_candidates(model, among, places))
        digests = {each: _digest(each, strict=each == folder) for each in candidates}
        right = [each for each, value in digests.items() if value == model.weights_sha256]
        if right:
            found[role] = right[0]
            continue
        named = [
            (folder, value)
            for folder, value in digests.items()
            if value and (folder == given.get(role) or _is(folder, model))
        ]
        if not named:
            raise ConfigurationError(
                f"the {role} {model.id!r} (weights {model.weights_sha256[:12]}…) is not on this machine; "
                f"give its folder with {FLAGS[role]}"
            )
        folder, value = named[0]
        findings.append(
            finding(
                role,
                "models",
                f"the report ran the {role} {model.id!r} with weights {model.weights_sha256[:12]}…, "
                f"but {folder} has {value[:12]}…",
            )
        )
    return Folders(found, tuple(findings))


def folder_with(weights: str, among: Sequence[Path]) -> Path | None:
    """The folder with these weights, of the shipped ones and some others; None: none of them."""
    return next((folder for folder in (*_shipped(), *among) if _digest(folder) == weights), None)


def _candidates(model: Model, among: Sequence[Path], places: Places) -> Iterator[Path]:
    yield from _shipped()
    yield from among
    yield from (folder for folder in _named(places) if _is(folder, model))


def _shipped() -> Iterator[Path]:
    return (SHIPPED / name for name in SHIPPED_FOLDERS if (SHIPPED / name).is_dir())


def _named(places: Places) -> Iterator[Path]:
    """Folders that this machine's owner, or the hub, put where models are looked for."""
    for name, value in places.environment.items():
        if name.startswith("KAKEYA_MODEL_") and value:
            yield Path(os.path.expanduser(value))
    own = places.home / "kakeya-models"
    yield from sorted(own.iterdir()) if own.is_dir() else ()
    for entry in Registry.load().entries:
        for source in (entry.target, entry.drafter):
            if source is not None and source.folder is not None:
                yield from (path for _, path in places.of(source) if path is not None)


def _is(folder: Path, model: Model) -> bool:
    return folder.is_dir() and identity(folder) == model.id


def _digest(folder: Path, *, strict: bool = False) -> str | None:
    """Digest of a folder's weights; None for a folder that holds none, where nobody named it."""
    try:
        return digest(weight_files(folder))
    except ModelError:
        if strict:
            raise
        return None
