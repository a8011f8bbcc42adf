"""Whatever a row depends on changes the fingerprint, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.evaluation.journal import Fingerprint, boot_session, fingerprint
from engine.evaluation.prompts import Needle, raw_prompt
from evidence_format.model import ReportRequest

CARD = {"id": "demo", "weights_sha256": "a" * 64, "dtype": "float32", "quantization": None, "parameters": 5}
ENVIRONMENT: dict[str, Any] = {
    "machine": "x86_64",
    "chip": "A",
    "memory_bytes": 2**30,
    "power_source": "ac",
    "thermal_state": "nominal",
    "swapping": False,
    "versions": {"mlx": "0.32.4"},
    "git": {"sha": "b" * 40, "dirty": None, "source_sha256": "c" * 64},
    "models": {"target": CARD},
}
PROMPTS = [raw_prompt("x", "p-1"), raw_prompt("y", "p-2")]
REQUEST = ReportRequest(
    nonce="20260102t030405z0123456789ab",
    workload_sha="a" * 40,
    preset_digest="b" * 64,
    engine_source="installed",
)


def marks(**changes: Any) -> Fingerprint:
    given = {
        "environment": ENVIRONMENT,
        "configuration": {"max_tokens": 16},
        "prompts": PROMPTS,
        "encoded": [[1], [2]],
        "request": None,
    }
    return fingerprint(**given | changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"configuration": {"max_tokens": 17}}, "max_tokens"),
        ({"encoded": [[1], [3]]}, "prompts"),
        ({"prompts": PROMPTS[::-1]}, "prompts"),
        ({"prompts": [PROMPTS[0], replace(PROMPTS[1], needle=Needle("y", "y", 0.5))]}, "prompts"),
        ({"request": REQUEST}, "request nonce"),
        ({"environment": ENVIRONMENT | {"chip": "B"}}, "machine"),
        ({"environment": ENVIRONMENT | {"versions": {"mlx": "0.32.5"}}}, "version of mlx"),
        (
            {"environment": ENVIRONMENT | {"git": {"source_sha256": "d" * 64}}},
            "engine source",
        ),
        (
            {"environment": ENVIRONMENT | {"models": {"target": CARD | {"weights_sha256": "d" * 64}}}},
            "target weights_sha256",
        ),
    ],
)
def test_fingerprint_changes_with_what_rows_depend_on(changes: dict[str, Any], name: str):
    one, other = marks(), marks(**changes)
    assert one.get(name) != other.get(name)


def test_fingerprint_ignores_volatile_conditions():
    later = {"power_source": "battery", "swapping": True, "git": ENVIRONMENT["git"] | {"sha": "e" * 40}}
    assert marks(environment=ENVIRONMENT | later) == marks()


def test_a_reboot_changes_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = marks()
    assert before["boot"] == boot_session()
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr("engine.evaluation.journal.BOOT", tmp_path / "boot_id")
    monkeypatch.setattr("sys.platform", "linux")
    assert marks()["boot"] == "another"
    monkeypatch.setattr("engine.evaluation.journal.BOOT", tmp_path / "nowhere")
    assert marks()["boot"] is None
