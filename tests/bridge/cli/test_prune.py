"""`prune`, `history`, `queue` and `fetch` as they are typed; handles go on working after a prune."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest

from bridge import signing
from bridge.cli import run_edge
from bridge.cli.fetch import fetch
from bridge.cli.history import history
from bridge.cli.logs import logs
from bridge.cli.prune import prune
from bridge.cli.queue import queue
from bridge.cli.result import result
from bridge.cli.status import status
from bridge.cli.wait import wait
from bridge.protocol import refs
from tests.bridge.bus.archives import answered, bridge_refs
from tests.fixtures.bus import FILES, BusFixture
from tests.fixtures.repo import allowed_line

FAILED = {"verdict": {"status": "failed", "reason": "exit_code", "message": "exit 3"}}

Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def run(bus: BusFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A command in the clone: its code, its last line as JSON (or its text), its standard error."""
    monkeypatch.chdir(bus.repo.clone)

    def call(command: click.Command, *arguments: str) -> tuple[int, Any, str]:
        code = run_edge(command, list(arguments))
        said = capsys.readouterr()
        if "--json" not in arguments:
            return code, said.out, said.err
        return code, json.loads(said.out.strip().splitlines()[-1]), said.err

    return call


@pytest.mark.slow
def test_a_pruned_request_is_shown_saved_and_listed_as_before(bus: BusFixture, run: Run, tmp_path: Path):
    passed, failed = answered(bus), answered(bus, timedelta(days=32), **FAILED)
    waiting = bus.submit()
    before = {nonce: run(result, nonce, "--json") for nonce in (passed.nonce, failed.nonce)}
    code, done, _ = run(prune, "--older-than", "30m", "--json")
    assert (code, sorted(done["archived"])) == (0, sorted([passed.nonce, failed.nonce]))
    assert done["unfinished"] == 0
    assert bridge_refs(bus) == {waiting.ref, refs.INBOX + waiting.nonce}
    for nonce, (code, document, _) in before.items():
        for command in (result, status, wait):
            now, shown, _ = run(command, nonce, "--json")
            assert (now, shown) == (code, {**document, "result_ref": refs.ARCHIVE})
    assert run(logs, failed.nonce[:20], "--json")[0] == 0
    code, listed, _ = run(history, "--json")
    assert [row["nonce"] for row in listed["requests"]] == [passed.nonce, failed.nonce]
    assert [row["status"] for row in listed["requests"]] == ["passed", "failed"]
    assert all(row["archived"] for row in listed["requests"])
    assert [row["nonce"] for row in run(history, "--status", "failed", "--json")[1]["requests"]] == [
        failed.nonce
    ]
    code, fetched, _ = run(fetch, passed.nonce, failed.nonce, "-o", str(tmp_path / "out"), "--json")
    assert (code, [row["status"] for row in fetched["requests"]]) == (0, ["passed", "failed"])
    for nonce in (passed.nonce, failed.nonce):
        for name, data in FILES.items():
            assert (tmp_path / "out" / nonce / name).read_bytes() == data
    code, open_, _ = run(queue, "--json")
    assert (code, open_["waiting"], open_["running"]) == (0, 1, 0)
    assert open_["requests"][0]["state"] == "queued"


def test_a_server_that_keeps_its_refs_ends_in_6(bus: BusFixture, run: Run):
    answered(bus)
    bus.repo.git("config", "receive.denyDeletes", "true", cwd=bus.repo.remote)
    code, _, err = run(prune)
    assert code == 6
    assert "looked at 0 of 1 requests" in err
    assert "nothing is lost" in err
    code, done, _ = run(prune, "--json")
    assert (code, done["exit_code"]) == (6, 6)
    assert "delet" in done["refused"]


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("text", ["14", "d", "-1d", "1.5h", "14 days", "999999999d", "२d"])
def test_a_duration_is_a_number_and_a_unit(run: Run, text: str):
    code, _, err = run(prune, "--older-than", text)
    assert code == 2
    assert "duration" in err or "longer than" in err


def test_fetch_says_what_it_could_not_fetch(bus: BusFixture, run: Run, tmp_path: Path):
    unsigned, waiting = answered(bus), bus.submit()
    key = signing.ensure_key(tmp_path / "key", "runner")
    config = Path(bus.repo.env["KAKEYA_CONFIG"])
    config.mkdir(parents=True, exist_ok=True)
    line = allowed_line(signing.public_key(key), "testmac", signing.RESULT_NAMESPACE)
    (config / "trusted_runners").write_text(line)
    out = ("-o", str(tmp_path / "out"))
    code, done, _ = run(fetch, unsigned.nonce, waiting.nonce, "nothing", *out, "--json")
    assert (code, [one["exit_code"] for one in done["requests"]]) == (3, [3, 4, 2])
    assert not (tmp_path / "out").exists()
    assert run(fetch, waiting.nonce, *out)[0] == 4
    code, text, _ = run(fetch, unsigned.nonce, *out, "--allow-unsigned")
    assert code == 0
    assert "anyone with push rights" in text
    assert (tmp_path / "out" / unsigned.nonce / "result.json").exists()
    code, _, err = run(fetch, unsigned.nonce, *out, "--allow-unsigned")
    assert code == 2
    assert "is not empty" in err
