"""The workflow files under act: what `make forge` cannot show, whose server takes no list of labels.

`mac-run.yaml` over Actions, too: the artifact that it keeps is of github.com alone.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from bridge.github.execute import runner_name
from tests.e2e.acts import ACT, Acted, Workshop
from tests.fixtures.repo import build_repo
from tests.servers.github import TOKEN, github_server

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.unsandboxed,
    pytest.mark.skipif(not ACT.exists(), reason="act is not built: scripts/install_act.sh"),
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


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_twenty_requests_at_once_all_come_home(workshop: Workshop):
    """On one machine, and without a token: no run ends another."""
    asked = [workshop.ask() for _ in range(20)]

    def push(place: int) -> Acted:
        return replace(workshop, workdir_name=f"at-once-{place}").push_event(asked[place][1])

    with ThreadPoolExecutor(20) as pool:
        acted = list(pool.map(push, range(20)))
    assert [each.code for each in acted] == [0] * 20, next(each.log for each in acted if each.code)
    assert {workshop.runner.verdict(nonce) for nonce, _ in asked} == {("passed", "ok")}


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
        # By its address the remote is a folder.
        actions = {"KAKEYA_TRANSPORT": "actions"}
        acted = workshop.dispatch_event("mac-run.yaml", asked, variables=actions, **environ)
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
        kept = [path.name for path in workshop.store.glob(f"*/kakeya-mac-{nonce[1]}/**/result.json")]
        assert kept == ["result.json"]
    else:
        assert started == []
