"""What ``doctor --role runner`` says of a machine: its policy, its trust, its hook, its interpreter."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bridge import interpreter, settings
from bridge.doctor import runner
from bridge.doctor.finding import Check, Level
from bridge.doctor.roles import detect
from bridge.mac import names
from tests.bridge.runner.bench import Bench
from tests.worlds import World


@pytest.fixture
def bench(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    monkeypatch.chdir(world.house.clone)
    monkeypatch.setattr(interpreter, "record_path", lambda: tmp_path / "interpreter.json")
    made = Bench(world.house)
    monkeypatch.setenv("KAKEYA_CONFIG", str(made.config))
    monkeypatch.setenv("KAKEYA_STATE", str(made.state))
    return made


def checks(prefix: Path) -> dict[str, Check]:
    found = list(runner.examine(settings.load(), Path.cwd(), prefix=prefix))
    assert all(check.looked_at and check.finding for check in found)
    assert all(check.fix for check in found if check.level is not Level.OK)
    return {check.name: check for check in found}


def test_every_check_of_a_plain_machine(bench: Bench, tmp_path: Path) -> None:
    found = checks(tmp_path)
    assert {"git", "policy", "interpreter", "hook", "service", "awake", "disk", "remote", "git-lfs"} <= set(
        found
    )
    assert found["interpreter"].level is Level.WARN
    assert "unsigned requests are taken" in found["policy"].finding
    assert any(name.startswith("jobs: ") for name in found)
    assert found["models: throughput"].level is Level.OK


def test_a_policy_that_is_wrong_is_a_failure(bench: Bench, tmp_path: Path) -> None:
    bench.policy("nonsense = 1\n")
    found = checks(tmp_path)["policy"]
    assert (found.level, "nonsense" in found.finding) == (Level.FAIL, True)


@pytest.mark.parametrize(
    ("policy", "said", "level"),
    [
        ('[actions]\nrepository = "a/b"\n', "level 1", Level.WARN),
        ('[actions]\nrepository = "a/b"\nexecute = "daemon"\n', "level 2", Level.OK),
        ("", "no workflow run may begin", Level.OK),
    ],
    ids=["trusted contributors", "walled", "no runs"],
)
def test_it_says_which_level_of_trust_a_machine_has(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, said: str, level: Level
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 501)
    bench.policy(policy)
    found = runner._trust(settings_policy(bench))
    assert (found.level, said in found.finding) == (level, True)


def settings_policy(bench: Bench):
    from bridge.runner.policy.reading import load

    return load(bench.config / "policy.toml")


def test_root_is_a_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert runner._trust(settings_policy(bench)).level is Level.FAIL


def test_a_runner_without_its_hook_is_a_failure(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / names.ACTIONS_RUNNER
    folder.mkdir()
    assert checks(tmp_path)["hook"].level is Level.FAIL
    (folder / ".env").write_text(f"LANG=C\n{names.HOOK_VARIABLE}={tmp_path}/hook.sh\n")
    assert "is not there" in checks(tmp_path)["hook"].finding
    (tmp_path / "hook.sh").write_text("#!/bin/sh\n")
    (tmp_path / "hook.sh").chmod(0o755)
    assert checks(tmp_path)["hook"].level is Level.OK


def test_an_interpreter_that_was_replaced_is_a_failure(bench: Bench, tmp_path: Path) -> None:
    seen = interpreter.observe()
    interpreter.write(interpreter.record_path(), seen)
    assert checks(tmp_path)["interpreter"].level is Level.OK
    assert detect({}) == "runner"
    interpreter.write(interpreter.record_path(), dataclasses.replace(seen, version="3.9.1"))
    found = checks(tmp_path)["interpreter"]
    assert (found.level, "Python was 3.9.1" in found.finding) == (Level.FAIL, True)


def test_the_role_is_told_from_where_it_is_asked(bench: Bench) -> None:
    assert detect({}) == "client"
    assert detect({"GITHUB_ACTIONS": "true"}) == "ci"


def test_the_command_says_the_role_and_its_exit_code(bench: Bench) -> None:
    house = bench.house
    client = house.kakeya("doctor", "--json").json
    assert (client["role"], client["exit_code"]) == ("client", 0)
    bench.policy("nonsense = 1\n")
    done = house.kakeya("doctor", "--role", "runner", "--json")
    assert (done.code, done.json["role"], done.json["status"]) == (6, "runner", "fail")
    done = house.kakeya("doctor", "--role", "ci")
    assert "event: none" in done.out
