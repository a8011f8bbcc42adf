from __future__ import annotations

from pathlib import Path

import pytest

from tests.bridge.bus.world import World, make_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)
