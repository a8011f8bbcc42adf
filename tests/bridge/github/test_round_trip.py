"""A request over GitHub Actions: executed on one machine, published from another, believed by a client."""

from pathlib import Path

import pytest

from bridge.protocol import refs
from bridge.signing.trust import TrustLevel
from tests.bridge.github.runs import ask
from tests.fixtures.runner import RunnerFixture


def test_request_is_executed_published_and_believed(runner: RunnerFixture) -> None:
    manifest, run = ask(runner, params={"word": "workflow"})
    executed = run.execute("--json")
    assert executed.code == 0, executed.err
    assert "| hello from workflow" in executed.out
    given = run.outputs("run")
    assert given["nonce"] == manifest.nonce
    assert (given["status"], given["reason"]) == ("passed", "ok")
    assert executed.json["digest"] == given["digest"]
    published = run.publish("--json")
    assert published.code == 0, published.out + published.err
    believed = runner.answer(manifest.nonce)
    assert believed.result.verdict.status == "passed"
    assert believed.signature is TrustLevel.UNTRUSTED_KEY
    assert believed.files["log.txt"] == b"hello from workflow\n"
    outputs = run.outputs("publish")
    assert outputs["verdict"] == "passed/ok"
    assert outputs["result_commit"] == believed.commit == published.json["result_commit"]
    assert outputs["result_ref"] == manifest.result_ref
    assert refs.INBOX + manifest.nonce not in runner.repo.remote_refs()
    summary = run.summary()
    assert summary.startswith("## ✅ PASSED echo\n")
    assert manifest.nonce in summary
    assert believed.commit in summary


@pytest.mark.slow
def test_attestations_are_published_with_the_result(runner: RunnerFixture, tmp_path: Path) -> None:
    repo = runner.repo
    manifest, run = ask(runner)
    runner.policy("attestations = true\n")
    assert run.execute().code == 6, "there is no key for them"
    assert repo.kakeya("runner", "key", "--attestation", "--make", "--name", "mac").code == 0
    assert run.execute().code == 0
    repo.trust_runner("mac")
    assert run.publish().code == 0
    words = ("attest", manifest.nonce, "-o", str(tmp_path / "out"), "--json")
    attested = repo.kakeya(*words, KAKEYA_STATE=str(tmp_path))
    assert (attested.code, attested.json["source"]) == (0, "published")


@pytest.mark.slow
def test_a_request_for_an_embedded_runner_is_left_to_it(runner: RunnerFixture) -> None:
    manifest, run = ask(runner, transport="embedded")
    executed = run.execute()
    assert executed.code == 0, executed.err
    assert run.outputs("run") == {
        **dict.fromkeys(("status", "reason", "digest", "signature"), ""),
        "nonce": manifest.nonce,
    }
    assert not list(run.out.rglob("*"))
    published = run.publish("--run-result", "success")
    assert published.code == 0, published.err
    runner.serve_once()
    assert runner.verdict(manifest.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_run_without_a_result_is_lost_and_names_its_page(runner: RunnerFixture) -> None:
    manifest, run = ask(runner)
    published = run.publish("--run-result", "failure")
    assert published.code == 5, published.out + published.err
    assert runner.verdict(manifest.nonce) == ("lost", "run_lost")
    message = runner.answer(manifest.nonce).result.verdict.message
    assert "https://git.example/team/workload/actions/runs/4711" in message
