"""Nothing that a workflow run holds reaches its job: no variable of the platform, and no token."""

from __future__ import annotations

import json

from tests.bridge.github.runs import ask
from tests.fixtures.runner import RunnerFixture

TOKEN = "ghs_0123456789abcdefghijklmnopqrstuvwxyz"
# All that a job can look at: its own variables, and those of every process that the system lets it read.
SPY = """
    import json, os, pathlib
    seen = {str(os.getpid()): dict(os.environ)}
    for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            seen[file.parent.name] = file.read_bytes().decode("utf-8", "replace")
        except OSError:
            pass
    text = json.dumps(seen)
    words = ("GITHUB_", "ACTIONS_", "RUNNER_", "KAKEYA_GITHUB_TOKEN")
    names = sorted(word for word in words if word in text)
    print("seen", json.dumps([names, "ghs_" + "0123456789" in text, len(seen)]))
"""
VARIABLES = {
    "KAKEYA_GITHUB_TOKEN": TOKEN,
    "GITHUB_TOKEN": TOKEN,
    "GH_TOKEN": TOKEN,
    "ACTIONS_RUNTIME_TOKEN": TOKEN,
    "ACTIONS_RUNTIME_URL": "https://example.org/",
    "RUNNER_NAME": "mac",
}


def seen(runner: RunnerFixture, nonce: str) -> tuple[list[str], bool]:
    line = next(row for row in runner.log(nonce).splitlines() if row.startswith("seen "))
    names, token, processes = json.loads(line.removeprefix("seen "))
    assert processes >= 1
    return names, token


def test_a_job_of_a_workflow_run_sees_nothing_of_the_run(runner: RunnerFixture) -> None:
    runner.install({"spy": SPY})
    manifest, run = ask(runner, "spy")
    done = run.execute(**VARIABLES)
    assert done.code == 0, done.err
    assert run.publish().code == 0
    assert seen(runner, manifest.nonce) == ([], False)
    assert TOKEN not in done.out + done.err
