"""The job that may write publishes what the run sealed and nothing else, and answers every request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BusError, PushRejected
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import File, Phase, Reason, Result, Status, Verdict, parse_result
from bridge.runner.spool import Entry
from bridge.workflow.asked import Asked
from bridge.workflow.execute import Executed
from tests.bridge.runner.bench import Bench
from tests.bridge.workflow.desk import Desk
from tests.bridge.workflow.runs import ask


def sealed(desk: Desk, **changes: Any) -> tuple[Manifest, Asked, Path, Executed]:
    manifest = desk.request(**changes)
    asked = desk.asked(manifest)
    return (manifest, asked, *desk.sealed(asked))


def published_files(desk: Desk, nonce: str) -> dict[str, bytes]:
    return dict(desk.bench.answer(nonce).files)


def test_what_was_sealed_is_published_byte_for_byte(desk: Desk) -> None:
    manifest, asked, folder, done = sealed(desk)
    outcome = desk.publish(asked, folder, done.parcel.digest)
    assert (outcome.exit_code, outcome.is_news, outcome.ref) == (0, True, manifest.result_ref)
    house, root = desk.bench.house, f"{outcome.commit}:.mac-bridge/results/{manifest.nonce}/"
    for path, data in done.parcel.files.items():
        assert house.git("cat-file", "blob", root + path, cwd=house.remote) == data.decode().strip()


@pytest.mark.slow
def test_publishing_twice_is_publishing_once(desk: Desk) -> None:
    _, asked, folder, done = sealed(desk)
    first = desk.publish(asked, folder, done.parcel.digest)
    second = desk.publish(asked, folder, done.parcel.digest)
    assert (second.commit, second.exit_code, second.is_news) == (first.commit, 0, False)


@pytest.mark.parametrize("digest", ["", "0" * 64])
@pytest.mark.sampled(2, 1)
def test_another_digest_than_the_runs_publishes_nothing_of_the_folder(desk: Desk, digest: str) -> None:
    manifest, asked, folder, _ = sealed(desk)
    outcome = desk.publish(asked, folder, digest, run_url="https://git.example/runs/1")
    assert outcome.exit_code == 3
    assert outcome.verdict is not None
    assert outcome.verdict.reason is Reason.TAMPERED
    assert desk.bench.verdict(manifest.nonce) == ("rejected", "tampered")
    assert published_files(desk, manifest.nonce) == {}
    assert "https://git.example/runs/1" in desk.bench.answer(manifest.nonce).result.verdict.message


def another_nonce(entry: Entry, result: Result) -> Entry:
    return replace(entry, nonce="20260301t120000z0123456789ab")


def another_request(entry: Entry, result: Result) -> Entry:
    nonce = "20260301t120000z0123456789ab"
    return replace(entry, result=result.model_copy(update={"nonce": nonce}).to_bytes())


def another_commit(entry: Entry, result: Result) -> Entry:
    return replace(entry, result=result.model_copy(update={"request_commit": "1" * 40}).to_bytes())


def another_workload(entry: Entry, result: Result) -> Entry:
    return replace(entry, result=result.model_copy(update={"workload_sha": "1" * 40}).to_bytes())


def another_preset(entry: Entry, result: Result) -> Entry:
    return replace(entry, result=result.model_copy(update={"preset": "sleep"}).to_bytes())


def an_unlisted_file(entry: Entry, result: Result) -> Entry:
    return replace(entry, files={**entry.files, "evil.sh": b"#!/bin/sh\n"})


def a_listed_file_that_is_missing(entry: Entry, result: Result) -> Entry:
    return replace(entry, files={})


def a_file_that_was_altered(entry: Entry, result: Result) -> Entry:
    return replace(entry, files={"log.txt": b"hullo from test\n"})


def a_file_outside(entry: Entry, result: Result) -> Entry:
    data = result.to_bytes().replace(b'"log.txt"', b'"../../../.github/workflows/x.yaml"')
    return replace(entry, result=data)


def a_file_listed_twice(entry: Entry, result: Result) -> Entry:
    return replace(entry, result=result.model_copy(update={"files": result.files * 2}).to_bytes())


def no_json(entry: Entry, result: Result) -> Entry:
    return replace(entry, result=b"passed\n")


def a_key_given_twice(entry: Entry, result: Result) -> Entry:
    return replace(entry, result=entry.result.replace(b"{", b'{"nonce": "x",', 1))


def too_large(entry: Entry, result: Result) -> Entry:
    return replace(entry, result=entry.result + b" " * (5 << 20))


def hidden_words(entry: Entry, result: Result) -> Entry:
    return replace(entry, result=entry.result.replace(b'"version": "', b'"version": "\\u202e', 1))


def a_broken_signature(entry: Entry, result: Result) -> Entry:
    return replace(entry, result=entry.result + b"\n")


def no_signature_at_all(entry: Entry, result: Result) -> Entry:
    return replace(entry, signature=b"-----BEGIN SSH SIGNATURE-----\n")


@pytest.mark.parametrize(
    "forge",
    [
        *(another_nonce, another_request, another_commit, another_workload, another_preset),
        *(an_unlisted_file, a_listed_file_that_is_missing, a_file_that_was_altered, a_file_outside),
        *(a_file_listed_twice, no_json, a_key_given_twice, too_large, hidden_words),
        *(a_broken_signature, no_signature_at_all),
    ],
)
@pytest.mark.sampled(8, 2)
def test_whoever_holds_artifact_and_digest_still_cannot_publish_what_is_no_answer(
    desk: Desk, forge: Callable[[Entry, Result], Entry]
) -> None:
    manifest, asked, _, done = sealed(desk)
    forged = forge(desk.entry(done, asked), parse_result(done.parcel.files["result.json"]))
    outcome = desk.publish(asked, *desk.forge(forged))
    assert outcome.exit_code == 3
    assert desk.bench.verdict(manifest.nonce) == ("rejected", "tampered")
    assert published_files(desk, manifest.nonce) == {}


def test_what_the_gate_here_does_not_believe_is_published_and_red(desk: Desk) -> None:
    """Its bytes are signed, so they stay; a preset that promises a report and has none is not passed."""
    manifest, asked, _, done = sealed(desk)
    result = parse_result(done.parcel.files["result.json"])
    report = b'{"schema_version": 1}\n'
    listed = File(
        path="report.json", sha256=hashlib.sha256(report).hexdigest(), bytes=len(report), role="evidence"
    )
    claimed = result.model_copy(update={"files": (*result.files, listed)})
    entry = desk.entry(done, asked)
    forged = replace(
        entry, result=claimed.to_bytes(), signature=None, files={**entry.files, "report.json": report}
    )
    outcome = desk.publish(asked, *desk.forge(forged))
    assert outcome.exit_code == 3
    assert outcome.verdict is not None
    assert (outcome.verdict.status, outcome.verdict.reason) == (Status.REJECTED, Reason.EVIDENCE)
    assert outcome.notes
    assert desk.bench.verdict(manifest.nonce) == ("passed", "ok")
    assert published_files(desk, manifest.nonce)["report.json"] == report


@pytest.mark.parametrize(
    ("run_result", "digest", "status", "reason", "said"),
    [
        ("failure", "", "lost", "run_lost", "ended (failure) without a result"),
        ("skipped", "", "lost", "run_lost", "ended (skipped) without a result"),
        (None, "", "lost", "run_lost", "ended without a result"),
        ("success", "0" * 64, "lost", "run_lost", "its artifact is not there"),
        ("cancelled", "", "cancelled", "requested", "was cancelled"),
    ],
)
@pytest.mark.sampled(5, 1)
def test_a_run_that_left_nothing_is_answered_all_the_same(
    desk: Desk, run_result: str | None, digest: str, status: str, reason: str, said: str
) -> None:
    manifest = desk.request()
    asked, nowhere = desk.asked(manifest), desk.bench.house.root / "nowhere"
    outcome = desk.publish(asked, nowhere, digest, run_result=run_result, attempt=2)
    assert outcome.exit_code == 5
    assert desk.bench.verdict(manifest.nonce) == (status, reason)
    result = desk.bench.answer(manifest.nonce).result
    assert said in result.verdict.message
    assert (result.attempt, result.runner.name) == (2, "publisher")
    assert refs.inbox_ref(manifest.nonce) not in desk.bench.house.remote_refs()


def test_a_faster_forged_answer_makes_no_run_green(desk: Desk) -> None:
    manifest, asked, folder, done = sealed(desk, preset="fail")
    assert done.verdict.status is Status.FAILED
    result = parse_result(done.parcel.files["result.json"])
    passed = result.model_copy(update={"verdict": Verdict(status=Status.PASSED, reason=Reason.OK)})
    forged = replace(desk.entry(done, asked), result=passed.to_bytes(), signature=None)
    assert desk.publish(asked, *desk.forge(forged)).exit_code == 0  # pushed by hand, as anybody can
    outcome = desk.publish(asked, folder, done.parcel.digest)
    assert outcome.exit_code == 3
    assert outcome.verdict is not None
    assert "another answer stands in its place" in outcome.verdict.message
    assert not outcome.is_news
    assert desk.bench.verdict(manifest.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_a_run_that_came_again_ends_as_the_standing_answer_does(desk: Desk) -> None:
    manifest, asked, folder, done = sealed(desk)
    desk.publish(asked, folder, done.parcel.digest)
    replayed = desk.execute(asked, name="other")
    assert replayed is not None
    assert replayed.verdict.reason is Reason.REPLAYED
    again = desk.bench.house.root / f"out-{desk.number}"
    assert desk.publish(asked, again, replayed.parcel.digest).exit_code == 0
    assert desk.publish(asked, desk.bench.house.root / "none", "", run_result="cancelled").exit_code == 0
    assert desk.bench.verdict(manifest.nonce) == ("passed", "ok")


@pytest.mark.parametrize("run_result", ["failure", "skipped"])
@pytest.mark.sampled(0, 1)
def test_a_pass_beside_a_run_that_failed_makes_no_run_green(desk: Desk, run_result: str) -> None:
    _, asked, folder, done = sealed(desk)
    desk.publish(asked, folder, done.parcel.digest)
    nowhere = desk.bench.house.root / "nowhere"
    outcome = desk.publish(asked, nowhere, "", run_result=run_result)
    assert outcome.exit_code == 3
    assert outcome.verdict is not None
    assert f"the run ended as {run_result}" in outcome.verdict.message
    trusted = desk.trust(desk.bench.station())
    assert desk.publish(asked, nowhere, "", run_result=run_result, trusted=trusted).exit_code == 0


@pytest.mark.parametrize("comes", ["from the run", "from a pusher"])
def test_where_keys_are_listed_no_pass_counts_without_one_of_them(desk: Desk, comes: str) -> None:
    manifest, asked, _, done = sealed(desk)
    unsigned = desk.forge(replace(desk.entry(done, asked), signature=None))
    trusted = desk.trust(desk.bench.station())
    if comes == "from a pusher":
        assert desk.publish(asked, *unsigned).exit_code == 0  # pushed by hand, as anybody can
        outcome = desk.publish(asked, *unsigned, run_result="success", trusted=trusted)
    else:
        outcome = desk.publish(asked, *unsigned, trusted=trusted)
    assert (outcome.exit_code, outcome.is_news) == (3, comes == "from the run")
    assert outcome.verdict is not None
    assert "of the list of trusted keys" in outcome.verdict.message
    assert "unsigned" in outcome.verdict.message
    assert desk.bench.verdict(manifest.nonce) == ("passed", "ok"), "it stays as it was written"


def test_a_pass_that_a_listed_key_signed_counts(desk: Desk) -> None:
    _, asked, folder, done = sealed(desk)
    outcome = desk.publish(asked, folder, done.parcel.digest, trusted=desk.trust(desk.bench.station()))
    assert (outcome.exit_code, outcome.is_news) == (0, True)


@pytest.mark.parametrize("change", ["deleted", "moved"])
@pytest.mark.sampled(2, 1)
def test_where_the_branch_is_no_more_what_it_was_the_result_gets_a_ref_of_its_own(
    desk: Desk, change: str
) -> None:
    manifest, asked, folder, done = sealed(desk)
    house = desk.bench.house
    main = house.git("rev-parse", "refs/heads/main", cwd=house.remote)
    if change == "deleted":
        house.git("update-ref", "-d", manifest.result_ref, cwd=house.remote)
    else:
        house.git("update-ref", manifest.result_ref, main, cwd=house.remote)
    outcome = desk.publish(asked, folder, done.parcel.digest)
    assert (outcome.exit_code, outcome.ref) == (0, refs.result_ref(manifest.nonce))


def test_a_request_that_nobody_can_read_is_refused_and_that_is_published(desk: Desk) -> None:
    house, manifest = desk.bench.house, desk.bench.manifest(transport="actions")
    desk.bench.push_commit(manifest, house.git("rev-parse", "HEAD"))
    asked = desk.asked(manifest)
    folder, done = desk.sealed(asked)
    assert done.verdict.reason is Reason.BAD_COMMIT
    assert desk.publish(asked, folder, done.parcel.digest).exit_code == 2
    assert f"{manifest.nonce}/result.json" in house.git(
        "ls-tree", "-r", "--name-only", manifest.result_ref, cwd=house.remote
    )


@pytest.mark.slow
def test_a_request_that_nobody_can_read_and_whose_result_was_altered_is_lost(desk: Desk) -> None:
    house, manifest = desk.bench.house, desk.bench.manifest(transport="actions")
    desk.bench.push_commit(manifest, house.git("rev-parse", "HEAD"))
    asked = desk.asked(manifest)
    folder, _ = desk.sealed(asked)
    outcome = desk.publish(asked, folder, "0" * 64)
    assert outcome.verdict is not None
    assert (outcome.verdict.status, outcome.verdict.reason) == (Status.LOST, Reason.TAMPERED)


@pytest.mark.slow
def test_a_commit_that_is_gone_is_not_answered(desk: Desk) -> None:
    manifest = desk.request()
    with pytest.raises(BusError, match="no longer on the remote"):
        desk.publish(Asked(manifest.nonce, "1" * 40, manifest.result_ref), Path("/nowhere"), "")


@pytest.mark.slow
def test_what_the_server_declines_can_be_published_by_the_same_job_again(desk: Desk) -> None:
    manifest, asked, folder, done = sealed(desk)
    hook = desk.bench.house.remote / "hooks" / "pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho protected >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(PushRejected, match="protected"):
        desk.publish(asked, folder, done.parcel.digest)
    hook.unlink()
    assert desk.publish(asked, folder, done.parcel.digest).exit_code == 0
    assert desk.bench.verdict(manifest.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_hostile_words_of_a_result_are_words_in_log_summary_and_outputs(bench: Bench) -> None:
    desk = Desk(bench)
    manifest, run = ask(bench)
    asked = Asked(manifest.nonce, run.commit, run.branch)
    _, done = desk.sealed(asked)
    message = "::error::x ##[error]y <img src=x onerror=a> | [z](https://evil.example) `k` **b** @all"
    result = parse_result(done.parcel.files["result.json"])
    failed = Verdict(status=Status.FAILED, reason=Reason.EXIT_CODE, message=message)
    changes = {"verdict": failed, "phase_seconds": {Phase.RUNNING: 1.0, "<b>": 2.0}}
    hostile = result.model_copy(update=changes).to_bytes()
    folder, digest = desk.forge(replace(desk.entry(done, asked), result=hostile, signature=None))
    published = run.publish("--results", str(folder), digest=digest)
    assert published.code == 1, published.err
    text = run.summary()
    assert "evil.example" not in text
    assert not [mark for mark in ("<img", "](", "`", "**b**", "@all", "<b>") if mark in text]
    assert all(line.count("|") <= 3 for line in text.splitlines())
    lines = [line for line in published.out.splitlines() if "evil" in line]
    assert lines
    assert all(line.startswith("::error title=failed/exit_code::") for line in lines)
    assert "##[" not in published.out
