"""A short soak: every answer is that of the same request alone, also of a server that was killed before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.soak.__main__ import soak

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]


def test_16_clients_of_a_server_that_is_killed_get_answers_as_if_alone(tmp_path: Path):
    figures = soak(tmp_path, seconds=20, clients=16, seed=7, pool=36, kills=1)
    assert not figures["problems"], json.dumps(figures, indent=2, ensure_ascii=False)
    assert figures["whole"] > 60
    assert figures["disconnects"] > 0
    assert figures["compared_tokens"] > 500
    assert figures["batched"] > 30
    assert figures["cut"] > 0
    assert len(figures["long_from_disk"]) == 1
