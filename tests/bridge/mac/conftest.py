"""A Mac that has nothing yet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.bridge.mac.tools import Mac


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mac:
    made = Mac(tmp_path / "mac")
    for name in [name for name in os.environ if name.startswith(("KAKEYA_", "GITHUB_", "XDG_"))]:
        monkeypatch.delenv(name)
    return made
