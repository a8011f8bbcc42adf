"""The job that may write publishes what the run sealed and nothing else, and answers every request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge.bus.publish import ResultFiles
from bridge.errors import BusError, PushRejected
from bridge.github.api import GitHub
from bridge.github.dispatch import RequestRef
from bridge.github.publish import PublishOutcome
from bridge.github.workflow import Artifact
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import File, Phase, Reason, Result, Status, Verdict, parse_result
from tests.bridge.github.jobs import WorkflowJobs
from tests.bridge.github.runs import ask
from tests.fixtures.runner import RunnerFixture
from tests.servers.github import GitHubServer


def sealed(jobs: WorkflowJobs, **changes: Any) -> tuple[Manifest, RequestRef, Path, Artifact]:
    manifest = jobs.request(**changes)
    asked = jobs.ref(manifest)
    return (manifest, asked, *jobs.sealed(asked))


def counted(outcome: PublishOutcome) -> Verdict:
    assert outcome.judged is not None
    return outcome.judged.verdict


def published_files(jobs: WorkflowJobs, nonce: str) -> dict[str, bytes]:
    return dict(jobs.runner.answer(nonce).files)


def test_result_is_published_byte_for_byte(jobs: WorkflowJobs) -> None:
    manifest, asked, folder, done = sealed(jobs)
    outcome = jobs.publish(asked, folder, done.digest)
    assert outcome.judged is not None
    believed = outcome.judged.believed
    assert (outcome.exit_code, outcome.is_news, believed.ref) == (0, True, manifest.result_ref)
    repo, root = jobs.runner.repo, f"{believed.commit}:.mac-bridge/results/{manifest.nonce}/"
    for path, data in done.files.items():
        assert repo.git("cat-file", "blob", root + path, cwd=repo.remote) == data.decode().strip()


@pytest.mark.slow
def test_publishing_twice_is_publishing_once(jobs: WorkflowJobs) -> None:
    _, asked, folder, done = sealed(jobs)
    first = jobs.publish(asked, folder, done.digest)
    second = jobs.publish(asked, folder, done.digest)
    assert (second.judged, second.exit_code, second.is_news) == (first.judged, 0, False)


@pytest.mark.parametrize("digest", ["", "0" * 64])
@pytest.mark.sampled(0, 1)
def test_wrong_digest_publishes_nothing_of_the_folder(jobs: WorkflowJobs, digest: str) -> None:
    manifest, asked, folder, _ = sealed(jobs)
    outcome = jobs.publish(asked, folder, digest, run_url="https://git.example/runs/1")
    assert outcome.exit_code == 3
    assert counted(outcome).reason is Reason.TAMPERED
    assert jobs.runner.verdict(manifest.nonce) == ("rejected", "tampered")
    assert published_files(jobs, manifest.nonce) == {}
    assert "https://git.example/runs/1" in jobs.runner.answer(manifest.nonce).result.verdict.message


OTHER = "20260301t120000z0123456789ab"


def changed(entry: ResultFiles, result: Result, **values: object) -> ResultFiles:
    return replace(entry, result=result.model_copy(update=values).to_bytes())


def edited(entry: ResultFiles, old: bytes, new: bytes) -> ResultFiles:
    return replace(entry, result=entry.result.replace(old, new, 1))


FORGERIES: dict[str, Callable[[ResultFiles, Result], ResultFiles]] = {
    "another nonce": lambda entry, _: replace(entry, nonce=OTHER),
    "another request": lambda entry, result: changed(entry, result, nonce=OTHER),
    "another commit": lambda entry, result: changed(entry, result, request_commit="1" * 40),
    "another workload": lambda entry, result: changed(entry, result, workload_sha="1" * 40),
    "another preset": lambda entry, result: changed(entry, result, preset="sleep"),
    "unlisted file": lambda entry, _: replace(entry, files={**entry.files, "evil.sh": b"#!/bin/sh\n"}),
    "missing file": lambda entry, _: replace(entry, files={}),
    "altered file": lambda entry, _: replace(entry, files={"log.txt": b"hullo from test\n"}),
    "file outside": lambda entry, _: edited(entry, b'"log.txt"', b'"../../../.github/workflows/x.yaml"'),
    "file listed twice": lambda entry, result: changed(entry, result, files=result.files * 2),
    "no JSON": lambda entry, _: replace(entry, result=b"passed\n"),
    "key given twice": lambda entry, _: edited(entry, b"{", b'{"nonce": "x",'),
    "too large": lambda entry, _: replace(entry, result=entry.result + b" " * (5 << 20)),
    "hidden words": lambda entry, _: edited(entry, b'"version": "', b'"version": "\\u202e'),
    "broken signature": lambda entry, _: replace(entry, result=entry.result + b"\n"),
    "no signature": lambda entry, _: replace(entry, signature=b"-----BEGIN SSH SIGNATURE-----\n"),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.sampled(72, 1)
def test_forged_artifact_with_its_digest_is_rejected(
    jobs: WorkflowJobs, forge: Callable[[ResultFiles, Result], ResultFiles]
) -> None:
    manifest, asked, _, done = sealed(jobs)
    forged = forge(jobs.entry(done, asked), parse_result(done.files["result.json"]))
    outcome = jobs.publish(asked, *jobs.forge(forged))
    assert outcome.exit_code == 3
    assert jobs.runner.verdict(manifest.nonce) == ("rejected", "tampered")
    assert published_files(jobs, manifest.nonce) == {}


@pytest.mark.slow
def test_signed_result_that_the_gate_rejects_fails_the_job(jobs: WorkflowJobs) -> None:
    """Its bytes are signed, so they stay; a preset that promises a report and has none is not passed."""
    manifest, asked, _, done = sealed(jobs)
    result = parse_result(done.files["result.json"])
    report = b'{"schema_version": 1}\n'
    listed = File(
        path="report.json", sha256=hashlib.sha256(report).hexdigest(), bytes=len(report), role="evidence"
    )
    claimed = result.model_copy(update={"files": (*result.files, listed)})
    entry = jobs.entry(done, asked)
    forged = replace(
        entry, result=claimed.to_bytes(), signature=None, files={**entry.files, "report.json": report}
    )
    outcome = jobs.publish(asked, *jobs.forge(forged))
    assert outcome.exit_code == 3
    assert (counted(outcome).status, counted(outcome).reason) == (
        Status.REJECTED,
        Reason.EVIDENCE,
    )
    assert jobs.runner.verdict(manifest.nonce) == ("passed", "ok")
    assert published_files(jobs, manifest.nonce)["report.json"] == report


@pytest.mark.parametrize(
    ("run_result", "digest", "status", "reason", "said"),
    [
        ("failure", "", "lost", "run_lost", "ended (failure) without a result"),
        ("skipped", "", "lost", "run_lost", "ended (skipped) without a result"),
        (None, "", "lost", "run_lost", "ended (unknown) without a result"),
        ("success", "0" * 64, "lost", "run_lost", "its artifact is missing"),
        ("cancelled", "", "cancelled", "requested", "was cancelled"),
    ],
)
@pytest.mark.sampled(5, 1)
def test_run_without_a_result_is_answered(
    jobs: WorkflowJobs, run_result: str | None, digest: str, status: str, reason: str, said: str
) -> None:
    manifest = jobs.request()
    asked, nowhere = jobs.ref(manifest), jobs.runner.repo.root / "nowhere"
    outcome = jobs.publish(asked, nowhere, digest, run_result=run_result, attempt=2)
    assert outcome.exit_code == 5
    assert jobs.runner.verdict(manifest.nonce) == (status, reason)
    result = jobs.runner.answer(manifest.nonce).result
    assert said in result.verdict.message
    assert (result.attempt, result.runner.name) == (2, "publisher")
    assert refs.INBOX + manifest.nonce not in jobs.runner.repo.remote_refs()


QUEUED, STARTED = "2026-03-01T12:00:00Z", "2026-03-01T12:05:00+00:00"


@pytest.mark.parametrize(
    ("job", "run_result", "verdict", "said"),
    [
        # GitHub reports a time limit, the 24 hours and a person who cancels as the same conclusion.
        (
            {"completed_at": "2026-03-02T12:00:01Z"},
            "cancelled",
            ("lost", "no_runner"),
            "no machine took the workflow job within 24 h",
        ),
        ({"completed_at": "2026-03-01T14:00:00Z"}, "cancelled", ("cancelled", "requested"), "was cancelled"),
        (
            {"runner_name": "studio", "started_at": STARTED, "completed_at": "2026-03-01T13:05:07Z"},
            "cancelled",
            ("failed", "timeout"),
            "reached its time limit of 60 min (KAKEYA_RUN_MINUTES)",
        ),
        (
            {"runner_name": "studio", "started_at": STARTED, "completed_at": "2026-03-01T13:04:00Z"},
            "cancelled",
            ("cancelled", "requested"),
            "was cancelled",
        ),
        (
            {
                "runner_name": "studio",
                "started_at": STARTED,
                "completed_at": "2026-03-01T12:30:00Z",
                "conclusion": "failure",
            },
            "failure",
            ("lost", "run_lost"),
            "ended (failure) without a result",
        ),
        ({"created_at": None, "completed_at": "soon"}, "cancelled", ("cancelled", "requested"), "cancelled"),
        ({"name": "other"}, "failure", ("lost", "run_lost"), "ended (failure)"),
    ],
    ids=["24 h", "cancelled in the queue", "time limit", "cancelled", "lost", "no times", "no such job"],
)
@pytest.mark.sampled(0, 1, 2)
def test_the_api_tells_how_a_run_without_a_result_ended(
    jobs: WorkflowJobs,
    server: GitHubServer,
    github: GitHub,
    job: dict[str, Any],
    run_result: str,
    verdict: tuple[str, str],
    said: str,
) -> None:
    run = server.add_run()
    known = {"created_at": QUEUED, "started_at": QUEUED, "status": "completed", "conclusion": "cancelled"}
    server.add_job(run, **{"name": "run", **known, **job})
    manifest = jobs.request()
    asked, nowhere = jobs.ref(manifest), jobs.runner.repo.root / "nowhere"
    given = {"run_result": run_result, "run_id": run, "limit_s": 3600.0, "github": github}
    jobs.publish(asked, nowhere, "", **given)
    assert jobs.runner.verdict(manifest.nonce) == verdict
    assert said in jobs.runner.answer(manifest.nonce).result.verdict.message


@pytest.mark.slow
def test_an_api_that_does_not_answer_is_logged(
    jobs: WorkflowJobs, server: GitHubServer, github: GitHub
) -> None:
    manifest = jobs.request()
    asked, nowhere = jobs.ref(manifest), jobs.runner.repo.root / "nowhere"
    jobs.publish(asked, nowhere, "", run_result="cancelled", run_id=1, github=github)
    assert jobs.runner.verdict(manifest.nonce) == ("cancelled", "requested")
    assert any("going by how the job ended (cancelled): the jobs of the run 1" in line for line in jobs.lines)


def test_a_faster_forged_answer_makes_no_run_green(jobs: WorkflowJobs) -> None:
    manifest, asked, folder, done = sealed(jobs, preset="fail")
    assert done.verdict.status is Status.FAILED
    result = parse_result(done.files["result.json"])
    passed = result.model_copy(update={"verdict": Verdict(status=Status.PASSED, reason=Reason.OK)})
    forged = replace(jobs.entry(done, asked), result=passed.to_bytes(), signature=None)
    assert jobs.publish(asked, *jobs.forge(forged)).exit_code == 0  # pushed by hand, as anybody can
    outcome = jobs.publish(asked, folder, done.digest)
    assert outcome.exit_code == 3
    assert "another result was published first" in counted(outcome).message
    assert not outcome.is_news
    assert jobs.runner.verdict(manifest.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_a_run_that_came_again_ends_as_the_first_answer_does(jobs: WorkflowJobs) -> None:
    manifest, asked, folder, done = sealed(jobs)
    jobs.publish(asked, folder, done.digest)
    replayed = jobs.execute(asked, name="other")
    assert replayed is not None
    assert replayed.verdict.reason is Reason.REPLAYED
    again = jobs.runner.repo.root / f"out-{jobs.number}"
    assert jobs.publish(asked, again, replayed.digest).exit_code == 0
    assert jobs.publish(asked, jobs.runner.repo.root / "none", "", run_result="cancelled").exit_code == 0
    assert jobs.runner.verdict(manifest.nonce) == ("passed", "ok")


@pytest.mark.parametrize("run_result", ["failure", "skipped"])
@pytest.mark.sampled(0, 1)
def test_published_pass_of_a_failed_run_fails_the_job(jobs: WorkflowJobs, run_result: str) -> None:
    _, asked, folder, done = sealed(jobs)
    jobs.publish(asked, folder, done.digest)
    nowhere = jobs.runner.repo.root / "nowhere"
    outcome = jobs.publish(asked, nowhere, "", run_result=run_result)
    assert outcome.exit_code == 3
    assert f"the run ended as {run_result}" in counted(outcome).message
    trusted = jobs.trust()
    assert jobs.publish(asked, nowhere, "", run_result=run_result, trusted=trusted).exit_code == 0


@pytest.mark.slow
def test_sealed_pass_of_a_run_that_failed_later_counts(jobs: WorkflowJobs) -> None:
    _, asked, folder, done = sealed(jobs)
    outcome = jobs.publish(asked, folder, done.digest, run_result="failure")
    assert (outcome.exit_code, outcome.is_news) == (0, True)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("comes", ["from the run", "from a pusher"])
def test_pass_needs_a_trusted_key_if_any_is_listed(jobs: WorkflowJobs, comes: str) -> None:
    manifest, asked, _, done = sealed(jobs)
    unsigned = jobs.forge(replace(jobs.entry(done, asked), signature=None))
    trusted = jobs.trust()
    if comes == "from a pusher":
        assert jobs.publish(asked, *unsigned).exit_code == 0  # pushed by hand, as anybody can
        outcome = jobs.publish(asked, *unsigned, run_result="success", trusted=trusted)
    else:
        outcome = jobs.publish(asked, *unsigned, trusted=trusted)
    assert (outcome.exit_code, outcome.is_news) == (3, comes == "from the run")
    assert "a trusted runner key signed it" in counted(outcome).message
    assert "unsigned" in counted(outcome).message
    assert counted(outcome).reason is Reason.UNTRUSTED
    assert jobs.runner.verdict(manifest.nonce) == ("passed", "ok"), "it stays as it was written"


def test_a_pass_of_a_key_that_is_not_listed_says_what_to_add(jobs: WorkflowJobs) -> None:
    manifest, asked, folder, done = sealed(jobs)
    other = jobs.runner.config_of("other")
    trusted = jobs.runner.repo.root / "pinned"
    trusted.write_text(f"other {other.public_key}\n")
    outcome = jobs.publish(asked, folder, done.digest, trusted=trusted)
    assert outcome.exit_code == 3
    assert (counted(outcome).status, counted(outcome).reason) == (Status.REJECTED, Reason.UNTRUSTED)
    key = " ".join(str(jobs.runner.config_of().public_key).split()[:2])
    assert counted(outcome).message.endswith(f"to the variable KAKEYA_TRUSTED_RUNNERS: mac {key}")
    assert jobs.runner.verdict(manifest.nonce) == ("passed", "ok"), "it stays as it was written"


@pytest.mark.slow
def test_a_pass_that_a_listed_key_signed_counts(jobs: WorkflowJobs) -> None:
    _, asked, folder, done = sealed(jobs)
    outcome = jobs.publish(asked, folder, done.digest, trusted=jobs.trust())
    assert (outcome.exit_code, outcome.is_news) == (0, True)


@pytest.mark.parametrize("change", ["deleted", "moved"])
@pytest.mark.sampled(0, 1)
def test_result_gets_its_own_ref_if_the_branch_moved(jobs: WorkflowJobs, change: str) -> None:
    manifest, asked, folder, done = sealed(jobs)
    repo = jobs.runner.repo
    main = repo.git("rev-parse", "refs/heads/main", cwd=repo.remote)
    if change == "deleted":
        repo.git("update-ref", "-d", manifest.result_ref, cwd=repo.remote)
    else:
        repo.git("update-ref", manifest.result_ref, main, cwd=repo.remote)
    outcome = jobs.publish(asked, folder, done.digest)
    assert outcome.judged is not None
    assert (outcome.exit_code, outcome.judged.believed.ref) == (0, refs.RESULTS + manifest.nonce)


def test_unreadable_request_is_refused_and_answered(jobs: WorkflowJobs) -> None:
    repo, manifest = jobs.runner.repo, jobs.runner.manifest(transport="actions")
    jobs.runner.push_commit(manifest, repo.head())
    asked = jobs.ref(manifest)
    folder, done = jobs.sealed(asked)
    assert done.verdict.reason is Reason.BAD_COMMIT
    assert jobs.publish(asked, folder, done.digest).exit_code == 8
    assert f"{manifest.nonce}/result.json" in repo.git(
        "ls-tree", "-r", "--name-only", manifest.result_ref, cwd=repo.remote
    )


@pytest.mark.slow
def test_a_commit_that_is_gone_is_not_answered(jobs: WorkflowJobs) -> None:
    manifest = jobs.request()
    with pytest.raises(BusError, match=r"is not on the remote, and its branch .* holds "):
        jobs.publish(RequestRef(manifest.nonce, manifest.result_ref, "1" * 40), Path("/nowhere"), "")


@pytest.mark.slow
def test_publish_works_after_a_rejected_push(jobs: WorkflowJobs) -> None:
    manifest, asked, folder, done = sealed(jobs)
    hook = jobs.runner.repo.remote / "hooks" / "pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho protected >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(PushRejected, match="protected"):
        jobs.publish(asked, folder, done.digest)
    hook.unlink()
    assert jobs.publish(asked, folder, done.digest).exit_code == 0
    assert jobs.runner.verdict(manifest.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_hostile_text_is_plain_in_log_summary_and_outputs(runner: RunnerFixture) -> None:
    jobs = WorkflowJobs(runner)
    manifest, run = ask(runner)
    asked = RequestRef(manifest.nonce, run.branch, run.commit)
    _, done = jobs.sealed(asked)
    message = "::error::x ##[error]y <img src=x onerror=a> | [z](https://evil.example) `k` **b** @all"
    result = parse_result(done.files["result.json"])
    failed = Verdict(status=Status.FAILED, reason=Reason.EXIT_CODE, message=message)
    changes = {"verdict": failed, "phase_seconds": {Phase.RUNNING: 1.0, "<b>": 2.0}}
    hostile = result.model_copy(update=changes).to_bytes()
    folder, digest = jobs.forge(replace(jobs.entry(done, asked), result=hostile, signature=None))
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
