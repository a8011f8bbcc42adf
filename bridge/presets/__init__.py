"""Presets: the jobs a machine may be asked for, one TOML file each.

`load_all` and `get` find them, `validate` and `parse_cli` check values, `argv` gives what runs. The format is
``schema.json``. A Mac's owner may add a folder of presets of the same format; none may take a bundled name.
"""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

from bridge.errors import PresetError
from bridge.presets.parameters import check_value, left_out, parse_cli, validate
from bridge.presets.preset import ModelNeed, Parameter, Preset, Promise, Requires, read
from bridge.presets.template import argv, evidence_name, show

__all__ = [
    "ModelNeed",
    "Parameter",
    "Preset",
    "Promise",
    "Requires",
    "argv",
    "check_value",
    "evidence_name",
    "find",
    "get",
    "left_out",
    "load_all",
    "parse_cli",
    "read",
    "show",
    "validate",
]

BUNDLED = Path(__file__).parent


def load_all(extra: Path | None = None) -> dict[str, Preset]:
    """Every preset by its own name, sorted; with the owner's from the folder `extra`.

    Raises:
        PresetError: A file is broken, or two presets share a name or alias.
    """
    presets = dict(_bundled())
    if extra is not None:
        presets = _index([*presets.values(), *(read(path) for path in sorted(extra.glob("*.toml")))])
    return presets


def get(name: str, extra: Path | None = None) -> Preset:
    """The preset of that name or alias.

    Raises:
        PresetError: There is none; the remedy names the closest ones.
    """
    return find(name, load_all(extra))


def find(name: str, presets: dict[str, Preset]) -> Preset:
    """The preset of that name or alias among `presets`.

    Raises:
        PresetError: There is none; the remedy names the closest ones.
    """
    if name in presets:
        return presets[name]
    names = {alias: preset.name for preset in presets.values() for alias in (preset.name, *preset.aliases)}
    if name in names:
        return presets[names[name]]
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise PresetError(f"no preset is named {ascii(name)[:100]}", f"{hint}presets: {', '.join(presets)}")


@cache
def _bundled() -> dict[str, Preset]:
    return _index([read(path) for path in sorted(BUNDLED.glob("*.toml"))])


def _index(presets: list[Preset]) -> dict[str, Preset]:
    owner: dict[str, str] = {}
    for preset in presets:
        for name in (preset.name, *preset.aliases):
            if name in owner:
                raise PresetError(f"the presets {owner[name]} and {preset.name} both answer to {name!r}")
            owner[name] = preset.name
    return {preset.name: preset for preset in sorted(presets, key=lambda preset: preset.name)}
