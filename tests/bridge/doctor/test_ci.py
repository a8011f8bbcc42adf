"""What ``doctor --role ci`` concludes: that a job can ask is said only where no check speaks against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.requests import WORKFLOW_PATH
from bridge.cli.doctor import doctor
from tests.bridge.cli.calls import call
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import Done, allowed_line
from tests.servers.github import github_server

SHIPPED = Path(__file__).resolve().parents[3] / WORKFLOW_PATH
READY = "ci: ready"


@pytest.fixture
def job(bus: BusFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BusFixture:
    """A step of a workflow with everything it needs."""
    key = signing.public_key(signing.ensure_key(tmp_path / "mac", "mac"))
    config = tmp_path / "config"
    config.mkdir()
    (config / "trusted_runners").write_text(allowed_line(key, "mac", signing.RESULT_NAMESPACE))
    for name, value in {
        "GITHUB_ACTIONS": "true",
        "GITHUB_EVENT_NAME": "push",
        "KAKEYA_CONFIG": str(config),
        "KAKEYA_REMOTE": bus.remote,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(bus.repo.clone)
    return bus


def examined(capsys: pytest.CaptureFixture[str]) -> Done:
    return call(doctor, capsys, "--role", "ci")


def test_a_job_that_lacks_nothing_can_ask(job: BusFixture, capsys: pytest.CaptureFixture[str]) -> None:
    done = examined(capsys)
    assert (done.code, READY in done.out) == (0, True), done.out


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"GITHUB_ACTIONS": ""}, 0),
        ({"GITHUB_EVENT_NAME": "pull_request"}, 0),
        ({"GITHUB_EVENT_NAME": "pull_request_target"}, 6),
        ({"KAKEYA_REMOTE": "/no/such/remote"}, 6),
    ],
    ids=["no workflow", "a fork's event", "a stranger's commit", "no remote"],
)
def test_a_job_with_a_check_against_it_is_not_said_to_be_able_to_ask(
    job: BusFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    code: int,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = examined(capsys)
    assert done.code == code, done.out
    last = done.out.strip().splitlines()[-1]
    assert last == f"ci: {int(code != 0)} failed, {int(code == 0)} warning(s)"


def test_a_job_whose_only_way_needs_a_token_it_lacks_cannot_ask(
    job: BusFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.point("refs/heads/main", job.commit("main", {WORKFLOW_PATH: SHIPPED.read_bytes()}))
    job.put_on_github(monkeypatch)
    with github_server() as server:
        monkeypatch.setenv("KAKEYA_GITHUB_API", server.api)
        done = examined(capsys)
    assert done.code == 6, done.out
    assert "FAIL  transport" in done.out
    assert READY not in done.out
