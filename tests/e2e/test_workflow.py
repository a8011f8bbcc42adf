"""The real mac-bridge.yaml, executed: request branch in, result commit out, whatever comes."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.github.execute import runner_name
from tests.e2e.acts import ACT, Acted, Workshop
from tests.fixtures.repo import build_repo
from tests.servers.github import TOKEN, github_server

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.unsandboxed,
    pytest.mark.skipif(not ACT.exists(), reason="act is not built: scripts/install_act.sh"),
    pytest.mark.xdist_group("workflow"),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    made = Workshop(build_repo(tmp_path_factory.mktemp("workshop")))
    made.move_in()
    return made


def test_a_request_comes_in_and_its_result_goes_out(workshop: Workshop):
    nonce, ref = workshop.ask("throughput", params={"prompts": "code", "limit": 1, "max_tokens": 16})
    name = runner_name()
    trusted = f"{name} {workshop.runner.config_of(name).public_key}"
    acted = workshop.push_event(ref, variables={"KAKEYA_TRUSTED_RUNNERS": trusted})
    assert acted.code == 0, acted.log
    assert acted.job("run")
    assert acted.job("publish")
    believed = workshop.runner.answer(nonce)
    assert believed.result.verdict.status == "passed", believed.result.verdict
    assert believed.ref == ref
    assert "report.json" in believed.files
    assert not workshop.has_inbox(nonce)
    message = workshop.repo.git("log", "-1", "--format=%s", ref, cwd=workshop.repo.remote)
    assert "[skip ci]" in message


def test_hostile_manifest_is_refused_and_answered(workshop: Workshop):
    nonce, ref = workshop.ask("gate", params={"path": "../../etc/passwd"})
    acted = workshop.push_event(ref)
    assert acted.code != 0
    assert acted.job("run")
    assert not acted.job("publish")
    assert workshop.runner.verdict(nonce) == ("refused", "bad_parameter")
    assert not workshop.has_inbox(nonce)


def test_artifact_changed_between_the_jobs_is_rejected(workshop: Workshop):
    nonce, ref = workshop.ask()
    change = "it = next(store.rglob('log.txt'))\nit.write_bytes(it.read_bytes() + b'and more')"
    acted = workshop.push_event(ref, STAND_IN_INTRUDER=workshop.intruder(change))
    assert acted.code != 0
    assert acted.job("run")
    assert not acted.job("publish")
    assert workshop.runner.verdict(nonce) == ("rejected", "tampered")
    assert "its digest is" in workshop.runner.answer(nonce).result.verdict.message


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [("12:59:00", ("lost", "run_lost")), ("13:00:05", ("failed", "timeout"))],
    ids=["an empty Mac", "the time limit, as the API tells it"],
)
def test_a_run_without_a_result_is_answered_by_what_the_api_says(
    workshop: Workshop, tmp_path: Path, ended: str, verdict: tuple[str, str]
):
    nonce, ref = workshop.ask()
    (tmp_path / "kakeya_mac").write_text("#!/bin/sh\nexit 41\n")
    (tmp_path / "kakeya_mac").chmod(0o755)
    times = {"started_at": "2026-03-01T12:00:00Z", "completed_at": f"2026-03-01T{ended}Z"}
    with github_server() as server:
        server.runs[1] = server.runs[server.add_run()]  # as act numbers its runs
        server.add_job(1, "run", runner_name="studio", **times)
        environ = {**server.environ, "GITHUB_TOKEN": TOKEN, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        del environ["KAKEYA_GITHUB_TOKEN"]  # the step has it of the job
        acted = workshop.push_event(ref, variables={"KAKEYA_RUN_MINUTES": "60"}, **environ)
        assert server.of("GET", "/actions/runs/1/jobs")
    assert not acted.job("run")
    assert not acted.job("publish")
    assert workshop.runner.verdict(nonce) == verdict


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_requests_at_once_all_come_home(workshop: Workshop, number: int):
    """On one machine, and without a token: no run ends another."""
    asked = [workshop.ask() for _ in range(number)]

    def push(place: int) -> Acted:
        return replace(workshop, workdir_name=f"at-once-{place}").push_event(asked[place][1])

    with ThreadPoolExecutor(number) as pool:
        acted = list(pool.map(push, range(number)))
    assert [each.code for each in acted] == [0] * number, next(each.log for each in acted if each.code)
    assert {workshop.runner.verdict(nonce) for nonce, _ in asked} == {("passed", "ok")}


def test_a_dispatched_run_serves_the_request_that_it_names(workshop: Workshop):
    nonce, ref = workshop.ask()
    commit = workshop.repo.git("rev-parse", ref, cwd=workshop.repo.remote)
    acted = workshop.dispatch_event(
        "mac-bridge.yaml", {"branch": ref.removeprefix("refs/heads/"), "commit": commit}
    )
    assert acted.code == 0, acted.log
    assert workshop.runner.verdict(nonce) == ("passed", "ok")


@pytest.mark.parametrize(
    ("inputs", "verdict"),
    [
        ({"preset": "probe"}, ("passed", "ok")),
        ({"preset": "gate", "params": "path=../../etc/passwd"}, ("error", "")),
    ],
    ids=["a probe", "a parameter that no preset takes"],
)
def test_another_workflow_asks_waits_and_gates_on_the_verdict(
    workshop: Workshop, inputs: dict[str, str], verdict: tuple[str, str]
):
    """mac-run.yaml and action.yml: a request is dispatched by the API, which starts mac-bridge.yaml."""
    started: list[threading.Thread] = []
    mac = replace(workshop, workdir_name="mac")

    def start(workflow: str, ref: str, given: dict[str, str]) -> None:
        assert (workflow, ref) == ("mac-bridge.yaml", "main")
        started.append(threading.Thread(target=mac.dispatch_event, args=(workflow, given)))
        started[-1].start()

    with github_server() as server:
        server.on_dispatch = start
        environ = {**server.environ, "GITHUB_TOKEN": TOKEN}
        del environ["KAKEYA_GITHUB_TOKEN"]  # the step has it of the job
        asked = {"params": "", "ref": "", "wait": "300", **inputs}
        acted = workshop.dispatch_event("mac-run.yaml", asked, **environ)
        for thread in started:
            thread.join()
    status, reason = verdict
    assert acted.job("request") is (status == "passed"), acted.log
    assert f"::set-output:: status={status}" in acted.log
    assert TOKEN not in acted.log
    if reason:
        assert f"::set-output:: verdict={status}/{reason}" in acted.log
        nonce = re.search(r"::set-output:: nonce=(\S+)", acted.log)
        assert nonce is not None
        assert workshop.runner.verdict(nonce[1]) == verdict
        kept = [path.name for path in (workshop.store / f"kakeya-mac-{nonce[1]}").rglob("result.json")]
        assert kept == ["result.json"]
    else:
        assert started == []
