"""A short soak: every answer is that of the same request alone, also of a server that was killed before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.engines import serving
from tests.e2e.soak.__main__ import soak
from tests.e2e.soak.pool import SEEDED, Ask, Asker, Expected, body_of
from tests.e2e.soak.protocols import FORMATS
from tests.e2e.soak.referee import Divergence, Judge

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


def test_the_judge_decodes_what_the_server_did(tmp_path: Path):
    said, judge = [("user", "Please name the capital of Sulland.")], Judge()
    common = {"model": "demo@affine8", "limit": 24, "return_token_ids": True}
    seeded = SEEDED | {"seed": 5, "n": 2}
    with serving(tmp_path / "quiet", "--cache-sessions", "0") as quiet:
        for kind, protocol, more in (
            ("chat", "messages", {}),
            ("chat", "chat", FORMATS["chat"]),
            ("seeded", "chat", seeded),
        ):
            body = body_of(protocol, said, common | more)
            ask = Ask(kind, kind, protocol, body, body.get("n", 1))
            expected = Expected(ask, Asker(quiet).ask(ask))
            for index, alone in enumerate(expected.answers):
                other = replace(alone, tokens=(*alone.tokens[:3], 9, *alone.tokens[4:]))
                chosen, gap = judge.chosen(Divergence(expected, index, other, 3))
                assert chosen == alone.tokens[:4]
                assert gap > 0  # infinite where the grammar allows one token
            part = judge.divergence_of(expected, 0, expected.answers[0].text[:6] + "…")
            assert 0 < part.at < len(expected.answers[0].tokens)
