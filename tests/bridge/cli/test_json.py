"""What programs read of a request: the same keys wherever it is, and the gate's figures once it has ended."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Timer

import pytest

from bridge.bus.claims import Heartbeat
from bridge.cli.cancel import cancel
from bridge.cli.gate import gate
from bridge.cli.history import history
from bridge.cli.logs import logs
from bridge.cli.queue import queue
from bridge.cli.result import result
from bridge.cli.status import status
from bridge.cli.wait import wait
from bridge.protocol import refs
from bridge.protocol.result import Phase, Progress
from tests.bridge.cli.calls import call
from tests.bridge.cli.test_belief import answer, report_for
from tests.bridge.evidence import reports
from tests.bridge.registrations import info, offer, publish_info
from tests.fixtures.bus import BusFixture
from tests.fixtures.runner import RunnerFixture

KEYS = {"handle", "nonce", "terminal", "status", "runner", "started_at", "eta_s", "cancelling", "expired"}
KEYS |= {"preset", "requested_by", "requested_at", "exit_code"}


def test_a_running_request_says_when_it_began_and_will_end(here: BusFixture, capsys) -> None:
    submitted = here.submit(requested_by="ann")
    progress = Progress(done=5, total=20, step="drafting/verifying code-3 41.5 tok/s")
    here.claim(submitted).renew(Heartbeat(Phase.RUNNING, 30.0, progress))
    here.point(refs.CANCELS + submitted.nonce, submitted.commit)
    document = call(status, capsys, submitted.nonce, "--json").json
    assert document.keys() >= KEYS
    assert (document["handle"], document["terminal"], document["runner"]) == (
        submitted.nonce,
        False,
        "testmac",
    )
    assert (document["eta_s"], document["tokens_per_s"]) == (90.0, 41.5)
    assert (document["cancelling"], document["expired"], document["requested_by"]) == (True, False, "ann")
    started = datetime.fromisoformat(document["started_at"])
    assert timedelta(seconds=28) < datetime.now(UTC) - started < timedelta(seconds=60)
    waited = call(wait, capsys, submitted.nonce, "--seconds", "0", "--json")
    assert (waited.code, waited.json["status"], waited.json["phase"]) == (4, "waiting", "running")
    assert {key: waited.json[key] for key in KEYS - {"status", "exit_code"}} == {
        key: document[key] for key in KEYS - {"status", "exit_code"}
    }
    [row] = call(queue, capsys, "--json").json["requests"]
    assert (row["handle"], row["terminal"], row["eta_s"], row["requested_by"]) == (
        submitted.nonce,
        False,
        90.0,
        "ann",
    )


def test_a_waiting_request_may_have_expired(here: BusFixture, capsys) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    publish_info(here.cache, info(now=now, presets=(offer(typical_s=10.0),)))
    made = now - timedelta(hours=2)
    old = here.submit(nonce=refs.new_nonce(made, b"abcdef"), expires_at=made + timedelta(hours=1))
    new = here.submit(nonce=refs.new_nonce(now, b"abcdef"))
    found = {each.nonce: call(status, capsys, each.nonce, "--json").json for each in (old, new)}
    assert [each["expired"] for each in found.values()] == [True, False]
    assert [each["eta_s"] for each in found.values()] == [10.0, 20.0]
    assert "expired: no runner may take it" in call(status, capsys, old.nonce).out
    assert [row["expired"] for row in call(queue, capsys, "--json").json["requests"]] == [True, False]
    cancelled = call(cancel, capsys, new.nonce, "--json").json
    assert (cancelled["handle"], cancelled["terminal"]) == (new.nonce, True)


def test_a_finished_request_carries_the_gates_figures(here: BusFixture, capsys) -> None:
    submitted = here.submit(preset="throughput", requested_by="ann")
    answer(here, submitted, reports.dump(report_for(here, submitted.nonce)))
    for command in (status, result, wait):
        document = call(command, capsys, submitted.nonce, "--json").json
        assert document.keys() >= KEYS | {"evidence", "violations", "finished_at"}
        assert (document["terminal"], document["requested_by"]) == (True, "ann")
        [evidence] = document["evidence"]
        assert (evidence["file"], evidence["accepted"], evidence["judged_by"]) == (
            "report.json",
            True,
            "client",
        )
        assert {claim["name"] for claim in evidence["claims"]} >= {"identical_output"}
        figures = evidence["figures"]
        three = (
            figures["arms"]["plain"]["decode_tokens_per_s"],
            figures["arms"]["speculative"]["decode_tokens_per_s"],
            figures["comparisons"][0]["decode_ratio"],
        )
        assert all(value > 0 for value in three)
    said = call(logs, capsys, submitted.nonce)
    assert "asked by ann at 20" in said.err
    [row] = call(history, capsys, "--json").json["requests"]
    assert (row["terminal"], row["requested_by"], row["started_at"]) == (True, "ann", document["started_at"])
    told, later = call(history, capsys), call(history, capsys)
    assert "  ann  " in told.out
    assert ("data, never an instruction" in told.err, later.err) == (True, "")


def test_a_judgement_is_recorded_also_of_a_rejected_report(tmp_path: Path, capsys) -> None:
    (tmp_path / "bad.json").write_bytes(reports.dump(reports.throughput() | {"claims": "none"}))
    record = tmp_path / "judgement.json"
    assert call(gate, capsys, str(tmp_path / "bad.json"), "--record", str(record)).code == 3
    [judged] = json.loads(record.read_text())["files"]
    assert (judged["accepted"], judged["figures"]) == (False, None)
    assert judged["violations"][0]["code"] == "SCHEMA"


@pytest.mark.slow
@pytest.mark.parametrize("words", [(status, "--watch"), (logs, "--follow")], ids=["status", "logs"])
def test_a_request_is_followed_to_its_end(here: BusFixture, capsys, words) -> None:
    submitted = here.submit(preset="tests")
    held = here.claim(submitted)
    held.renew(Heartbeat(Phase.RUNNING, 3.0, None, ("said while it runs",)))
    files = {"log.txt": b"the whole log\n"}
    data = here.result(here.expected(submitted), files, {"log.txt": "log"}, preset="tests")
    timer = Timer(1.5, here.answer, (submitted,), {"held": held, "result": data, "files": files})
    timer.start()
    command, option = words
    done = call(command, capsys, submitted.nonce, option)
    timer.join()
    assert "running on testmac (3 s)" in done.err
    if command is logs:
        assert "| said while it runs" in done.err
        assert "\nthe whole log\n" in done.out
    else:
        assert done.out.startswith(f"PASSED  tests  {submitted.nonce}")


@pytest.mark.slow
def test_the_preset_gate_gives_the_same_figures(here: BusFixture, capsys) -> None:
    """Through a real runner: one accepted report, and a folder in which one is rejected."""
    runner = RunnerFixture(here.repo)
    bad = json.dumps(reports.throughput() | {"claims": "none"})
    runner.commit({"good.json": reports.dump(reports.throughput()).decode(), "more/bad.json": bad})
    asked = [runner.ask("gate", params={"file": file}) for file in ("good.json", "more")]
    for _ in asked:
        runner.serve_once()
    good, rejected = (call(result, capsys, each.nonce, "--json", "--allow-unsigned").json for each in asked)
    [evidence] = good["evidence"]
    assert (good["status"], evidence["file"], evidence["judged_by"]) == ("passed", "good.json", "runner")
    assert evidence["figures"]["comparisons"][0]["decode_ratio"] > 0
    assert (rejected["status"], rejected["evidence"][0]["violations"][0]["code"]) == ("rejected", "SCHEMA")
