"""What a machine's owner decides reaches the job: limits, variables, network; its result says what held."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from bridge.runner.sandbox import ITEMS, JobDirs, NoSandbox, environment
from tests.bridge.runner.jobs import SANDBOX, needs_sandbox
from tests.fixtures.runner import RunnerFixture


@pytest.mark.slow
def test_the_policys_limits_are_the_jobs(runner: RunnerFixture) -> None:
    runner.policy('[limits]\nmemory = "200 MiB"\nopen_files = 70\nfile_size = "100 KiB"\noutput = "1 KiB"\n')
    hog = "import time; print('up', flush=True); mine = bytearray(b'x') * (300 << 20); time.sleep(30)"
    limits = """
        import resource
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_FSIZE)[0])
    """
    runner.install({"hog": hog, "limits": limits, "chatter": "print('x' * 2000)"})
    asked = {name: runner.ask(name) for name in ("limits", "hog", "chatter")}
    daemon = runner.daemon()
    assert sum(daemon.serve(once=True, idle_timeout_s=20) for _ in asked) == 3
    assert runner.log(asked["limits"].nonce) == f"70 {100 << 10}\n"
    assert runner.verdict(asked["hog"].nonce) == ("failed", "resource_limit")
    message = runner.answer(asked["hog"].nonce).result.verdict.message
    assert "more memory than it may" in message
    assert "at most 0.195" in message
    assert runner.verdict(asked["chatter"].nonce) == ("failed", "output_limit")


@pytest.mark.slow
def test_a_named_variable_passes_and_no_other(runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.policy('environment = ["LOCAL_DATA"]\n')
    monkeypatch.setenv("LOCAL_DATA", "/data")
    monkeypatch.setenv("OTHER_DATA", "/other")
    asked = runner.ask("environment")
    assert runner.serve_once() == 1
    seen = json.loads(runner.log(asked.nonce))
    assert seen["LOCAL_DATA"] == "/data"
    assert "OTHER_DATA" not in seen


def test_no_named_variable_overrides_what_a_job_is_given(tmp_path: Path) -> None:
    dirs = JobDirs(tmp_path)
    ours = {"HOME": "/root", "PATH": "/evil", "TMPDIR": "/var", "PYTHONDONTWRITEBYTECODE": ""}
    given = environment(dirs, ours, tuple(ours))
    assert given["HOME"] == str(tmp_path / "home")
    assert "/evil" not in given["PATH"]
    assert given["TMPDIR"] == str(tmp_path / "tmp")


@pytest.mark.slow
@needs_sandbox
def test_only_preset_and_policy_together_open_the_network(runner: RunnerFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = f"""
            import socket
            try:
                socket.create_connection({listener.getsockname()!r}, 2)
                print('reached')
            except OSError:
                print('not reached')
        """
        runner.install({"asks": script, "does-not": script})
        asks = runner.config / "presets" / "asks.toml"
        asks.write_text("network = true\n" + asks.read_text())
        said = {}
        for policy in ("", "[presets.asks]\nnetwork = true\n"):
            runner.policy(policy)
            for preset in ("asks", "does-not"):
                asked = runner.ask(preset)
                assert runner.serve_once() == 1
                result = runner.answer(asked.nonce)
                said[policy[:8], preset] = (
                    result.files["log.txt"].decode().strip(),
                    result.result.runner.machine["isolation_network"] == "open",
                )
    assert said == {
        ("", "asks"): ("not reached", False),
        ("", "does-not"): ("not reached", False),
        ("[presets", "asks"): ("reached", True),
        ("[presets", "does-not"): ("not reached", False),
    }


@pytest.mark.slow
def test_a_result_says_of_each_item_what_held(runner: RunnerFixture) -> None:
    asked = runner.ask()
    assert runner.serve_once() == 1
    machine = runner.answer(asked.nonce).result.runner.machine
    items = {name.removeprefix("isolation_"): how for name, how in machine.items() if "isolation" in name}
    assert set(items) == set(ITEMS)
    assert items["memory"] == "watched"
    assert machine["sandbox"] == SANDBOX.enforced(network=False)["sandbox"]
    assert (items["writes"] == "not enforced") == isinstance(SANDBOX, NoSandbox)
