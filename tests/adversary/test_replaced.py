"""A workload that brings presets, executor, interpreter and start-up files of its own changes nothing."""

from __future__ import annotations

import json
import sys

import pytest

from bridge import __version__, presets
from bridge.protocol.result import Reason, Status
from tests.adversary.attack import Request
from tests.adversary.attacked import attacked_runner
from tests.adversary.commits import REPLACED
from tests.adversary.trees import file
from tests.fixtures.repo import RepoFixture

WORKLOAD = (*REPLACED.values(), file("report.json", "{}"))
# Presets that take data alone, run by what is installed; and one that runs what the policy forbids.
ASKED = {
    "echo": Request(Reason.OK, {"params": {"word": "mine"}}, workload=WORKLOAD),
    "version": Request(Reason.OK, {"preset": "version"}, workload=WORKLOAD),
    "gate": Request(
        Reason.EVIDENCE, {"preset": "gate", "params": {"file": "report.json"}}, workload=WORKLOAD
    ),
    "tests": Request(Reason.POLICY, {"preset": "tests"}, workload=WORKLOAD),
}


@pytest.mark.slow
@pytest.mark.timeout(300)  # the wait below ends first
def test_what_runs_is_what_is_installed(repo: RepoFixture):
    with attacked_runner(repo) as attacked:
        hostile = {name: attacked.builder.make(name, attack) for name, attack in ASKED.items()}
        attacked.push(list(hostile.values()))
        with repo.runner("--idle", "0.2", trusted=False):
            attacked.wait([one.nonce for one in hostile.values()], 200)
        installed = presets.load_all(attacked.runner.config / "presets")
        for name, one in hostile.items():
            result = attacked.result(one.nonce, one.branch)
            assert result.verdict.reason is one.attack.expected, (name, result.verdict.message)
            assert result.preset_digest in (installed[name].digest, None)
            for command in result.commands:
                assert command.argv[:2] == (sys.executable, "-I")
        logs = {
            name: attacked.file(one.nonce, one.branch, "log.txt")
            for name, one in hostile.items()
            if name != "tests"
        }
        assert logs["echo"] == "'mine'"
        assert __version__ in logs["version"]
        assert attacked.result(hostile["tests"].nonce, hostile["tests"].branch).commands == ()
        assert (
            attacked.result(hostile["gate"].nonce, hostile["gate"].branch).verdict.status is Status.REJECTED
        )


@pytest.mark.parametrize("program", ["bridge", "engine"])
def test_installed_programs_import_nothing_from_the_working_directory(repo: RepoFixture, program: str):
    """The owner starts a runner in a checkout of anybody's, with that checkout's settings around it."""
    canary = repo.root / "canary"
    evil = f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n"
    for name in ("sitecustomize.py", "usercustomize.py", f"{program}/__init__.py", "json.py", "conftest.py"):
        path = repo.clone / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(evil)
    name = {"bridge": "kakeya_mac", "engine": "kakeya_engine"}[program]
    done = repo.program(name, "--version", PYTHONSAFEPATH="")
    assert done.code == 0, json.dumps([done.out, done.err])
    assert not canary.exists()
