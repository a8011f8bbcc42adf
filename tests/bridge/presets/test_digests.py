"""Digests of the installed presets are part of every result: a changed file is a changed job."""

import json
from pathlib import Path

from bridge import presets

FROZEN = json.loads((Path(__file__).parents[2] / "data/preset_digests.json").read_text())


def test_installed_presets_keep_their_digests() -> None:
    assert {name: preset.digest for name, preset in presets.load_all().items()} == FROZEN
