"""Another runner, or the client itself, replays the report of a finished request."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.requests import Submitted, submit
from bridge.bus.results import ExpectedRequest
from bridge.client.binding import Agreement
from bridge.client.fetch import judge, verify
from bridge.client.signing_key import RequestSigner
from bridge.errors import EvidenceError, MachineError
from bridge.proc import run_program
from bridge.protocol.manifest import format_time
from bridge.protocol.result import RunnerFacts
from evidence_format.verification import parse_verification
from tests.bridge.evidence import reports
from tests.bridge.evidence.derived import Document
from tests.engine.verification import forgeries
from tests.fixtures.bus import RUNNER, BusFixture
from tests.fixtures.repo import RepoFixture, allowed_line
from tests.fixtures.runner import RunnerFixture

SHORT = ("quality", "--prompts", "code", "--limit", "1", "--max-tokens", "8", "--block", "4")


@dataclass
class Verifier:
    """A bus with an answered request, and a runner on it."""

    bus: BusFixture
    runner: RunnerFixture

    def publish(self, change=lambda _: None, **files: bytes) -> str:
        """Answer a request with a real report, changed perhaps; its nonce."""
        manifest = self.bus.manifest(preset="quality")
        submitted = self._submit(manifest)
        asked = ExpectedRequest(submitted.nonce, submitted.commit, manifest.workload_sha)
        began = datetime.now(UTC)
        report = files or {"report.json": self._report(asked, change)}
        facts = {} if files else reports.runner_facts(json.loads(report["report.json"]))
        result = self.bus.result(
            asked,
            report,
            dict.fromkeys(report, "other" if files else "evidence"),
            preset="quality",
            runner=RunnerFacts(name=RUNNER.name, id=RUNNER.id, version="0.1.0", machine=facts),
            started_at=format_time(began - timedelta(seconds=2)),
            finished_at=format_time(datetime.now(UTC) + timedelta(seconds=2)),
        )
        self.bus.answer(submitted, result=result, files=report)
        return submitted.nonce

    def _submit(self, manifest) -> Submitted:
        return submit(self.bus.git, self.bus.remote, manifest, None)

    def _report(self, asked: ExpectedRequest, change) -> bytes:
        path = self.bus.root / "made" / "report.json"
        binding = (
            *("--request-nonce", asked.nonce, "--workload-sha", str(asked.workload_sha)),
            *("--preset-digest", "0" * 64, "--engine-source", "installed"),
        )
        argv = [sys.executable, "-m", "engine", "eval", *SHORT, *forgeries.PAIR, *binding, "--no-resume"]
        done = run_program([*argv, "--report", str(path)], timeout_s=110)
        assert done.ok, done.stderr
        document: Document = json.loads(path.read_text())
        return forgeries.write(path, forgeries.forged(document, change)).read_bytes()

    def verify(self, handle: str, name: str = "other") -> str:
        """Ask a runner to verify a request; the nonce of that."""
        asked = self.runner.ask("verify", params={"request": handle, "sample": 1})
        self.runner.daemon(name).serve(once=True, idle_timeout_s=20)
        return asked.nonce


@pytest.fixture
def verifier(repo: RepoFixture, tmp_path: Path) -> Verifier:
    return Verifier(BusFixture(repo, tmp_path), RunnerFixture(repo))


@pytest.mark.slow
def test_request_that_is_not_there_or_not_finished_is_refused(verifier: Verifier) -> None:
    waiting = verifier._submit(verifier.bus.manifest(preset="elsewhere", transport="actions")).nonce
    for handle, said in (("20200101t000000z0123456789ab", "no request"), (waiting, "not finished")):
        asked = verifier.verify(handle)
        assert verifier.runner.verdict(asked) == ("refused", "bad_parameter")
        assert said in verifier.runner.answer(asked).result.verdict.message


@pytest.mark.slow
def test_result_without_a_report_is_refused(verifier: Verifier) -> None:
    asked = verifier.verify(verifier.publish(**{"notes.txt": b"nothing\n"}))
    assert verifier.runner.verdict(asked) == ("refused", "bad_parameter")
    assert "0 evidence reports" in verifier.runner.answer(asked).result.verdict.message


@pytest.mark.slow
def test_another_runner_confirms_a_report_and_says_whose_it_is(verifier: Verifier) -> None:
    first = verifier.publish()
    asked = verifier.verify(first)
    assert verifier.runner.verdict(asked) == ("passed", "ok"), verifier.runner.log(asked)
    believed = verifier.runner.answer(asked)
    record = parse_verification(believed.files["verification.json"])
    assert record.report.nonce == first
    assert record.request is not None
    assert record.request.nonce == asked
    judged = judge(believed)
    assert judged.verification == record
    assert judged.agreement == Agreement()
    asked_for = believed.result.params
    assert (asked_for["request"], asked_for["sample"]) == (first, 1)
    forged = {
        "report.nonce": {"report": record.report.model_copy(update={"nonce": asked})},
        "draw.sample": {"draw": record.draw.model_copy(update={"sample": 6})},
        "request.nonce": {"request": record.request.model_copy(update={"nonce": first})},
        "engine digest": {"environment": {**record.environment, "git": {"source_sha256": "0" * 64}}},
        "machine.cpu_count": {"environment": {**record.environment, "cpu_count": 1000}},
    }
    for field, change in forged.items():
        data = record.model_copy(update=change).model_dump_json(by_alias=True).encode()
        other = judge(replace(believed, files={**believed.files, "verification.json": data}))
        assert (other.verdict.status, other.verdict.reason) == ("rejected", "binding"), field
        [told] = other.agreement.differences
        assert (told.field, told.file) == (field, "verification.json")
    assert "another runner" in verifier.runner.log(asked)


@pytest.mark.slow
def test_forged_report_is_rejected_and_its_row_named(verifier: Verifier) -> None:
    asked = verifier.verify(verifier.publish(lambda document: forgeries.swap_token(document, "code-001")))
    assert verifier.runner.verdict(asked) == ("rejected", "evidence")
    assert "code-001" in verifier.runner.log(asked)


@pytest.mark.slow
@pytest.mark.parametrize("forged", [False, True])
def test_client_replays_a_result_and_signs_the_record(
    verifier: Verifier, repo: RepoFixture, tmp_path: Path, forged: bool
) -> None:
    key = signing.ensure_key(tmp_path / "key", "client")
    change = (lambda document: forgeries.swap_token(document, "code-001")) if forged else (lambda _: None)
    nonce, out = verifier.publish(change), tmp_path / "out"
    words = ("result", nonce, "--verify", "1", "-o", str(out), "--json")
    done = repo.kakeya(*words, KAKEYA_SIGNING_KEY=str(key))
    assert done.code == done.json["exit_code"] == (3 if forged else 7), done.err  # no trusted key signed it
    data = (out / "verification.json").read_bytes()
    record = parse_verification(data)
    assert record.confirmed is not forged
    assert done.json["verification"]["report"]["nonce"] == nonce
    allowed = tmp_path / "allowed"
    allowed.write_text(allowed_line(signing.public_key(key), "client", signing.VERIFICATION_NAMESPACE))
    signature = (out / "verification.json.sig").read_bytes()
    assert signing.identify(data, signature, signing.VERIFICATION_NAMESPACE, allowed).name == "client"


def test_client_without_the_engine_says_who_can_replay(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = verifier.bus.manifest(preset="quality")
    submitted = verifier._submit(manifest)
    asked = ExpectedRequest(submitted.nonce, submitted.commit, manifest.workload_sha)
    files = {"report.json": b"{}\n"}
    result = verifier.bus.result(asked, files, {"report.json": "evidence"}, preset="quality")
    verifier.bus.answer(submitted, result=result, files=files)
    believed = verifier.runner.answer(submitted.nonce)
    monkeypatch.setitem(sys.modules, "mlx", None)  # as on a client-only installation
    with pytest.raises(MachineError, match="engine is not installed") as caught:
        verify(believed, 1, RequestSigner(None), output=2)
    assert f"--preset verify -p request={submitted.nonce}" in str(caught.value.remedy)


def test_result_without_a_report_cannot_be_replayed_by_the_client(verifier: Verifier) -> None:
    believed = verifier.runner.answer(verifier.publish(**{"notes.txt": b"nothing\n"}))
    with pytest.raises(EvidenceError, match="nothing to verify"):
        verify(believed, 1, RequestSigner(None), output=2)
