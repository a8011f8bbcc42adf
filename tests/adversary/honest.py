"""Honest documents of every kind, whose readers take them: what the hostile ones are made of."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from bridge.protocol.manifest import Manifest, new_cancel
from bridge.protocol.result import Phase, RunStatus
from tests.bridge.registrations import info

NONCE = "20260301t120000z0123456789ab"
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)

MANIFEST = Manifest(
    nonce=NONCE,
    preset="throughput",
    params={"limit": 4, "prompts": "code", "chat": True},
    workload_sha="a" * 40,
    result_ref=f"refs/heads/mac-bridge/throughput-{NONCE}",
    created_at=NOON,
    expires_at=NOON.replace(day=2),
    audience="example.org/team/repo",
    requested_by="somebody",
    timeout_s=60,
).to_bytes()

CLAIM = RunStatus(
    nonce=NONCE,
    request_commit="b" * 40,
    runner="mac",
    runner_id="0123456789abcdef",
    pid=7,
    unique="0" * 16,
    attempt=1,
    beat=0,
    lease_s=120.0,
    session="00000000000000aa",
    updated_at="2026-03-01T12:00:00Z",
    phase=Phase.RUNNING,
    elapsed_s=1.0,
).to_bytes()

REGISTRATION = info().to_bytes()

CANCEL = new_cancel(NONCE, "b" * 40, requested_by="somebody", reason="no longer needed", now=NOON).to_bytes()

PRESET = b"""name = "guarded"
summary = "A program with bounds."
argv = ["/bin/true", "{n}", "--word={word}"]
timeout_s = 10
engine = "installed"
workspace = "none"

[params.n]
type = "integer"
minimum = 1
maximum = 9
default = 5
description = "a number"

[params.word]
type = "string"
pattern = "[a-z]+"
default = "a"
description = "a word"
"""

POLICY = b"""allow_presets = ["probe"]
allow_repo_code = false
require_signature = true
max_timeout_s = 60
environment = ["TZ"]

[quotas]
unsigned = 2

[limits]
memory = "1 GiB"

[models]
x = "/models/x"
"""

REPORT = (Path(__file__).parents[1] / "data" / "evidence" / "probe.json").read_bytes()
