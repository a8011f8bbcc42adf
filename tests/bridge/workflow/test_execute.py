"""The Mac's job: what may run runs closed, the rest is refused, and every way out is a sealed result."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge.bus.cancels import Wished, draft, wish
from bridge.bus.git import Git
from bridge.bus.handles import Held
from bridge.errors import BusError, MachineError
from bridge.protocol import refs
from bridge.protocol.result import parse_result
from bridge.runner import wishes
from bridge.runner.child import Standby, Supervised
from bridge.runner.sessions import only_one
from bridge.workflow.asked import Asked
from bridge.workflow.execute import Executed
from bridge.workflow.parcel import digest, read
from tests.bridge.runner.bench import Bench
from tests.bridge.workflow.desk import Desk
from tests.bridge.workflow.runs import Run, ask
from tests.houses import BIN, wait_for


def test_a_sealed_result_lies_in_its_folder_as_it_is_described(desk: Desk) -> None:
    manifest = desk.request()
    done = desk.execute(manifest, attempt=3)
    assert done is not None
    found = read(desk.bench.house.root / "out-1")
    assert found is not None
    assert found.digest == done.parcel.digest
    result = parse_result(found.files["result.json"])
    assert result.attempt == 3
    assert result.workload_sha == manifest.workload_sha
    assert {file.path for file in result.files} == {"log.txt"}
    assert found.files["result.json.sig"] == done.signature
    root = f".mac-bridge/results/{manifest.nonce}/"
    assert digest({root + path: data for path, data in found.files.items()}) == found.digest


def test_phases_and_output_are_lines_of_the_log(desk: Desk) -> None:
    desk.execute(desk.request(params={"word": "::error::x"}))
    assert "| hello from ::error::x" in desk.lines
    assert any(line.startswith("passed/ok") for line in desk.lines)
    start = next(i for i, line in enumerate(desk.lines) if line.startswith("::stop-commands::"))
    end = desk.lines.index(desk.lines[start].replace("stop-commands::", "") + "::")
    assert start < desk.lines.index("| hello from ::error::x") < end


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"preset": "no-such"}, "unknown_preset"),
        ({"params": {"word": "-x"}}, "bad_parameter"),
        ({"preset": "tests"}, "policy"),
        ({"audience": "github.com/somebody/else"}, "wrong_audience"),
        (
            {
                "created_at": datetime.now(UTC).replace(microsecond=0) - timedelta(hours=3),
                "expires_at": datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1),
            },
            "expired",
        ),
    ],
)
@pytest.mark.sampled(5, 1)
def test_the_machines_own_policy_decides(desk: Desk, changes: dict[str, Any], reason: str) -> None:
    assert desk.verdict(desk.request(**changes)) == ("refused", reason)
    assert not any("hello" in line for line in desk.lines)


@pytest.mark.slow
def test_an_unsigned_request_is_refused_where_signatures_are_required(desk: Desk) -> None:
    desk.bench.policy("require_signature = true\n")
    assert desk.verdict(desk.request()) == ("refused", "bad_signature")


@pytest.mark.slow
def test_a_commit_that_changes_anything_else_is_refused(desk: Desk) -> None:
    house, manifest = desk.bench.house, desk.bench.manifest(transport="actions")
    (house.clone / ".mac-bridge").mkdir()
    (house.clone / ".mac-bridge" / "request.json").write_bytes(manifest.to_bytes())
    (house.clone / "sitecustomize.py").write_text("print('mine')\n")
    house.git("add", "--all")
    house.git("-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "--quiet", "-m", "x")
    desk.bench.push_commit(manifest, house.git("rev-parse", "HEAD"))
    assert desk.verdict(manifest) == ("refused", "bad_commit")


def test_the_commit_that_was_pushed_counts_wherever_its_branch_is_now(desk: Desk) -> None:
    house, manifest = desk.bench.house, desk.request()
    asked = desk.asked(manifest)
    named = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    commit = ("commit-tree", f"{asked.commit}^{{tree}}", "-p", asked.commit, "-m", "mine")
    other = house.git(*named, *commit, cwd=house.remote)
    house.git("update-ref", manifest.result_ref, other, cwd=house.remote)
    assert desk.result(asked).request_commit == asked.commit


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("comes_back", [True, False], ids=["comes back", "stays away"])
def test_a_branch_that_was_deleted_is_waited_for_and_then_a_wish_to_stop(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """A client without a token deletes and pushes a branch again, to start its run anew."""
    monkeypatch.setattr(wishes, "AWAY_S", 30.0 if comes_back else 1.5)
    asked = desk.asked(desk.request())
    house, done = desk.bench.house, list[Executed | None]()
    house.git("update-ref", "-d", asked.branch, cwd=house.remote)
    thread = threading.Thread(target=lambda: done.append(desk.execute(asked)))
    thread.start()
    wait_for(lambda: any("its branch is not there" in line for line in desk.lines))
    if comes_back:
        house.git("update-ref", asked.branch, asked.commit, cwd=house.remote)
    thread.join(30)
    assert done[0] is not None
    verdict = done[0].verdict
    expected = ("passed", "ok") if comes_back else ("cancelled", "requested")
    assert (verdict.status.value, verdict.reason.value) == expected
    assert any("hello" in line for line in desk.lines) is comes_back


def test_a_wish_to_stop_ends_a_request_before_it_starts(desk: Desk) -> None:
    manifest = desk.request()
    asked = desk.asked(manifest)
    git, remote = Git(desk.bench.house.clone), str(desk.bench.house.remote)
    cancel = draft(asked.nonce, asked.commit, requested_by="me")
    assert wish(git, remote, cancel, Held(asked.branch, asked.commit)) is Wished.ASKED
    assert desk.verdict(asked) == ("cancelled", "requested")


@pytest.mark.slow
def test_a_commit_that_is_nowhere_is_an_error_and_no_result(desk: Desk) -> None:
    manifest = desk.request()
    with pytest.raises(BusError, match="is no longer on the remote"):
        desk.execute(Asked(manifest.nonce, "1" * 40, manifest.result_ref))


def test_a_request_for_an_embedded_runner_is_left_alone_by_both_jobs(desk: Desk) -> None:
    asked = desk.asked(desk.request(transport="embedded"))
    assert desk.execute(asked) is None
    folder = desk.bench.house.root / "out-1"
    assert not list(folder.iterdir())
    outcome = desk.publish(asked, folder, "", run_result="success")
    assert (outcome.exit_code, outcome.verdict, outcome.commit) == (0, None, None)
    assert refs.inbox_ref(asked.nonce) in desk.bench.house.remote_refs()


def test_a_result_that_was_sealed_once_is_given_again_and_nothing_runs(desk: Desk) -> None:
    manifest = desk.request()
    first = desk.execute(manifest)
    said = len([line for line in desk.lines if "hello" in line])
    again = desk.execute(manifest, attempt=2)
    assert first is not None
    assert again is not None
    assert again.is_repeated
    assert again.parcel.digest == first.parcel.digest
    assert len([line for line in desk.lines if "hello" in line]) == said == 1


def test_another_commit_under_an_answered_name_is_a_replay(desk: Desk) -> None:
    manifest = desk.request()
    desk.execute(manifest)
    desk.bench.house.git("update-ref", "-d", manifest.result_ref, cwd=desk.bench.house.remote)
    desk.bench.house.git("update-ref", "-d", refs.inbox_ref(manifest.nonce), cwd=desk.bench.house.remote)
    other = desk.bench.ask(**{**manifest.model_dump(), "requested_by": "somebody else"})
    assert desk.verdict(other) == ("refused", "replayed")


@pytest.mark.slow
def test_what_a_daemon_of_this_machine_answered_is_not_run_again(desk: Desk) -> None:
    manifest = desk.request(transport="embedded")
    desk.bench.serve_once()
    commit = desk.bench.answer(manifest.nonce).result.request_commit
    desk.bench.house.git("update-ref", "-d", manifest.result_ref, cwd=desk.bench.house.remote)
    again = manifest.model_copy(update={"transport": "actions"})
    desk.bench.push_commit(again, desk.bench.request_commit(again))
    assert commit != desk.asked(again).commit
    assert desk.verdict(again, name="other") == ("refused", "replayed")


@pytest.mark.slow
def test_what_stands_answered_on_its_branch_is_not_run(desk: Desk) -> None:
    manifest, run = ask(desk.bench)
    assert run.publish("--run-result", "failure").code == 5
    assert desk.verdict(Asked(manifest.nonce, run.commit, run.branch)) == ("refused", "replayed")


@pytest.mark.slow
def test_it_waits_for_the_machine_and_says_so(desk: Desk) -> None:
    station = desk.bench.station()
    asked = desk.asked(desk.request())
    done: list[Executed | None] = []
    station.jobs.mkdir(exist_ok=True)
    with Supervised(Standby(station.lock, writable=[station.jobs])):
        thread = threading.Thread(target=lambda: done.append(desk.execute(asked)))
        thread.start()
        wait_for(lambda: any("waiting: another job" in line for line in desk.lines))
    thread.join(30)
    assert done[0] is not None
    assert done[0].verdict.status == "passed"
    assert sum("waiting" in line for line in desk.lines) == 1


@pytest.mark.slow
def test_it_waits_for_another_run_of_its_name(desk: Desk) -> None:
    asked = desk.asked(desk.request())
    done: list[Executed | None] = []
    with only_one(desk.bench.station()):
        thread = threading.Thread(target=lambda: done.append(desk.execute(asked)))
        thread.start()
        wait_for(lambda: any("already runs on this machine" in line for line in desk.lines))
    thread.join(30)
    assert done[0] is not None


@pytest.mark.slow
def test_a_run_that_is_cancelled_while_it_waits_seals_that(desk: Desk) -> None:
    station = desk.bench.station()
    asked = desk.asked(desk.request())
    done: list[Executed | None] = []
    station.jobs.mkdir(exist_ok=True)
    with Supervised(Standby(station.lock, writable=[station.jobs])):
        thread = threading.Thread(target=lambda: done.append(desk.execute(asked)))
        thread.start()
        wait_for(lambda: any("waiting" in line for line in desk.lines))
        desk.stop.set()
        thread.join(30)
    assert done[0] is not None
    verdict = done[0].verdict
    assert (verdict.status, verdict.reason) == ("cancelled", "requested")
    assert "had not been started" in verdict.message


@pytest.mark.slow
def test_outside_the_owners_hours_a_request_waits(desk: Desk) -> None:
    now = datetime.now().astimezone()
    begin, end = now + timedelta(hours=2), now + timedelta(hours=3)
    desk.bench.policy(f'hours = ["{begin:%H:%M}-{end:%H:%M}"]\n')
    asked = desk.asked(desk.request())
    done: list[Executed | None] = []
    thread = threading.Thread(target=lambda: done.append(desk.execute(asked)))
    thread.start()
    wait_for(lambda: any("waiting: jobs may begin within" in line for line in desk.lines))
    desk.stop.set()
    thread.join(30)
    assert done[0] is not None
    assert done[0].verdict.status == "cancelled"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.sampled(0, 1)
def test_a_cancelled_run_ends_its_job_and_seals_that(bench: Bench, number: int) -> None:
    _, run = ask(bench, "sleep")
    argv = [str(BIN / "kakeya_mac"), "runner", "execute", "--out", str(run.out), "--name", "mac"]
    process = subprocess.Popen(
        argv,
        env={**bench.house.env, **run.environment("run")},
        cwd=bench.house.root,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any("sleeping soundly" in line for line in lines)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 0
    outputs = run.outputs("run")
    assert (outputs["status"], outputs["reason"]) == ("cancelled", "requested")
    assert not bench.running("sleep.py")
    assert run.publish("--run-result", "cancelled").code == 5


def test_nothing_of_the_runs_environment_reaches_a_job(bench: Bench) -> None:
    _, run = ask(bench, "environment")
    secrets = {
        "KAKEYA_GITHUB_TOKEN": "ghs_secret_of_the_run",
        "GITHUB_TOKEN": "ghs_another_secret",
        "ACTIONS_RUNTIME_TOKEN": "a_runtime_token",
        "ACTIONS_ID_TOKEN_REQUEST_URL": "https://token.example",
        "RUNNER_TEMP": "/private/runner",
    }
    done = run.execute(**secrets)
    assert done.code == 0, done.err
    line = next(line for line in done.out.splitlines() if line.startswith("| {"))
    seen = json.loads(line.removeprefix("| "))
    assert not [name for name in seen if name.startswith(("GITHUB_", "ACTIONS_", "RUNNER_", "INPUT_"))]
    assert "KAKEYA_GITHUB_TOKEN" not in seen
    everything = done.out + done.err + "".join(path.read_text("utf-8", "replace") for path in files(run))
    assert not [value for name, value in secrets.items() if "TOKEN" in name and value in everything]


def test_a_secret_of_the_run_that_a_job_knows_is_cut_from_its_log(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_GITHUB_TOKEN", "ghs_secret_of_the_run")
    done = desk.execute(desk.request("leak", params={"word": "ghs_secret_of_the_run"}))
    assert "| the token is [redacted:KAKEYA_GITHUB_TOKEN]" in desk.lines
    assert done is not None
    assert b"ghs_secret" not in done.parcel.files["log.txt"]


def files(run: Run) -> list[Path]:
    return [path for path in run.folder.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_folder_that_holds_something_stops_it_before_the_job(desk: Desk) -> None:
    manifest = desk.request()
    (desk.bench.house.root / "out-1").mkdir()
    (desk.bench.house.root / "out-1" / "old").touch()
    with pytest.raises(MachineError, match="is not empty"):
        desk.execute(manifest)
    assert not any("hello" in line for line in desk.lines)


@pytest.mark.slow
def test_a_policy_that_is_wrong_runs_nothing(bench: Bench) -> None:
    bench.policy("allow_everything = true\n")
    _, run = ask(bench)
    done = run.execute()
    assert done.code == 2
    assert "allow_everything" in done.err
    assert not run.out.exists()
