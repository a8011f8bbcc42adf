"""The published OpenAPI document against the server that publishes it, by schemathesis.

A larger run, of minutes, with other seeds: ``KAKEYA_FUZZ_EXAMPLES=200 KAKEYA_FUZZ_SEED=7 .venv/bin/python -m
pytest -m e2e tests/e2e/test_openapi.py --timeout=3600 -s``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.engines import KEY, ROOT, Serving, serving
from tests.fixtures.repo import BIN

pytestmark = pytest.mark.e2e

EXAMPLES = os.environ.get("KAKEYA_FUZZ_EXAMPLES", "8")
SEED = os.environ.get("KAKEYA_FUZZ_SEED", "1")
STORED = re.compile(r"(?<=^/v1/responses)/resp_.*")
ANSWERED = (  # the log has the paths with their version
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/ID"),
    ("DELETE", "/v1/responses/ID"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
)
# From an answer to its reading and forgetting: among all the paths such a sequence hardly ever comes about.
STATEFUL = ("--phases", "stateful", "--include-path-regex", "^/v1/responses")
# Fields that are good by themselves may not go together, or not with the model: the document cannot say so.
NOT_HELD = "positive_data_acceptance"


def test_generated_requests_never_end_in_5xx_or_undocumented_answers(
    tmp_path: Path,
):
    with serving(tmp_path / "server", "--default-tokens", "4", "--max-tokens", "8") as server:
        runs = [fuzz(server, tmp_path), fuzz(server, tmp_path, *STATEFUL)]
        code, _ = server.stop()
    for done in runs:
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    log = server.log.read_text()
    lines = (json.loads(line) for line in log.splitlines() if line.startswith("{"))
    found = Counter((line["method"], STORED.sub("/ID", line["path"]), line["status"]) for line in lines)
    assert not [each for each in found if each[-1] >= 500], found
    for method, path in ANSWERED:
        assert found[method, path, 200], f"{method} {path} never came past a refusal: {found}"
    assert "Traceback" not in log
    assert code == 0


def fuzz(server: Serving, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Every phase of schemathesis, or what ``more`` options say, with right data and with wrong data."""
    return subprocess.run(
        [
            *(str(BIN / "schemathesis"), "run", f"{server.root}/openapi.json", "--no-color"),
            *("-H", f"Authorization: Bearer {KEY}", "--seed", SEED, "--max-examples", EXAMPLES),
            *("--checks", "all", "--exclude-checks", NOT_HELD, "--continue-on-failure"),
            *more,
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.e2e.openapi_hooks", "PYTHONPATH": str(ROOT)},
    )
