"""A workload that brings presets, executor, interpreter and start-up files of its own changes nothing."""

from __future__ import annotations

import json
import sys

import pytest

from bridge import __version__, presets
from bridge.protocol.result import Reason, Status
from tests.adversary.attack import Request
from tests.adversary.commits import REPLACED
from tests.adversary.siege import besieged
from tests.adversary.trees import file
from tests.houses import House

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
def test_what_runs_is_what_is_installed(house: House):
    with besieged(house) as siege:
        forged = {name: siege.forge.make(name, attack) for name, attack in ASKED.items()}
        siege.push(list(forged.values()))
        with house.runner("--idle", "0.2", trusted=False):
            siege.wait([one.nonce for one in forged.values()], 200)
        installed = presets.load_all(siege.bench.config / "presets")
        for name, one in forged.items():
            result = siege.result(one.nonce, one.branch)
            assert result.verdict.reason is one.attack.expected, (name, result.verdict.message)
            assert result.preset_digest in (installed[name].digest, None)
            for command in result.commands:
                assert command.argv[:2] == (sys.executable, "-I")
        logs = {
            name: siege.file(one.nonce, one.branch, "log.txt")
            for name, one in forged.items()
            if name != "tests"
        }
        assert logs["echo"] == "'mine'"
        assert __version__ in logs["version"]
        assert siege.result(forged["tests"].nonce, forged["tests"].branch).commands == ()
        assert siege.result(forged["gate"].nonce, forged["gate"].branch).verdict.status is Status.REJECTED


@pytest.mark.parametrize("program", ["bridge", "engine"])
def test_the_installed_programs_take_nothing_from_where_they_stand(house: House, program: str):
    """The owner starts a runner in a checkout of anybody's, with that checkout's settings around it."""
    canary = house.root / "canary"
    evil = f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n"
    for name in ("sitecustomize.py", "usercustomize.py", f"{program}/__init__.py", "json.py", "conftest.py"):
        path = house.clone / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(evil)
    name = {"bridge": "kakeya_mac", "engine": "kakeya_engine"}[program]
    done = house.program(name, "--version", PYTHONSAFEPATH="")
    assert done.code == 0, json.dumps([done.out, done.err])
    assert not canary.exists()
