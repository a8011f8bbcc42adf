"""What ``doctor --role runner`` says of a machine: its policy, its trust, its hook, its interpreter."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from bridge import interpreter, settings
from bridge.doctor import installed, runner
from bridge.doctor.finding import Check, Level
from bridge.doctor.roles import detect
from bridge.mac import names
from bridge.mac.launchd import Known
from tests.bridge.runner.bench import Bench
from tests.servers.github import SLUG, github_server
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


def test_a_variable_that_names_no_model_folder_is_a_failure(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_MODEL_GEMMA_4_26B_A4B", "/absent")
    found = checks(tmp_path)
    named = found["models: KAKEYA_MODEL_GEMMA_4_26B_A4B"]
    assert (named.level, named.finding) == (Level.FAIL, "it is '/absent', which is no folder")
    assert found["models: throughput"].level is Level.WARN


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


def test_a_runner_whose_policy_names_no_repository_is_a_failure(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 501)
    found = runner._trust(settings_policy(bench), has_runner=True)
    assert (found.level, "no job may begin" in found.finding) == (Level.FAIL, True)


def settings_policy(bench: Bench):
    from bridge.runner.policy.reading import load

    return load(bench.config / "policy.toml")


def test_root_is_a_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert runner._trust(settings_policy(bench)).level is Level.FAIL


@pytest.mark.slow
def test_a_runner_without_its_hook_is_a_failure(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / names.ACTIONS_RUNNER
    folder.mkdir()
    assert checks(tmp_path)["hook"].level is Level.FAIL
    (folder / ".env").write_text(f"LANG=C\n{names.HOOK_VARIABLE}={tmp_path}/hook.sh\n")
    assert "is not there" in checks(tmp_path)["hook"].finding
    (tmp_path / "hook.sh").write_text("#!/bin/sh\n")
    (tmp_path / "hook.sh").chmod(0o755)
    assert checks(tmp_path)["hook"].level is Level.OK


def test_a_hook_whose_path_a_shell_would_cut_is_a_failure(bench: Bench, tmp_path: Path) -> None:
    prefix = tmp_path / "a b"
    (prefix / names.ACTIONS_RUNNER).mkdir(parents=True)
    (prefix / "hook.sh").write_text("#!/bin/sh\n")
    (prefix / "hook.sh").chmod(0o755)
    (prefix / names.ACTIONS_RUNNER / ".env").write_text(f"{names.HOOK_VARIABLE}={prefix}/hook.sh\n")
    found = checks(prefix)["hook"]
    assert (found.level, "unquoted" in found.finding) == (Level.FAIL, True)


def asked(prefix: Path, **values: object) -> None:
    (prefix / names.ACTIONS_RUNNER).mkdir(exist_ok=True)
    (prefix / names.ASKED).write_text(json.dumps(values))


@pytest.mark.slow
def test_the_hooks_access_is_looked_at_where_there_is_a_runner(bench: Bench, tmp_path: Path) -> None:
    assert "hook access" not in checks(tmp_path)
    asked(tmp_path, url="https://github.com/team/workload")
    assert "names no repository" in checks(tmp_path)["hook access"].finding
    rule = '[actions]\nrepository = "team/workload"\nfetch = "{}"\n'
    bench.policy(rule.format(bench.house.remote))
    assert checks(tmp_path)["hook access"].level is Level.OK
    bench.policy(rule.format("/no/such/repository.git"))
    found = checks(tmp_path)["hook access"]
    assert found.level is Level.FAIL
    assert "https://github.com/team/workload/settings/keys" in found.fix
    asked(tmp_path, url="https://github.com/team/other")
    assert "registered for https://github.com/team/other" in checks(tmp_path)["hook access"].finding


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("source", ["setup", "policy", "organisation"])
def test_outside_of_a_clone_a_public_repository_is_still_a_failure(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / names.ACTIONS_RUNNER).mkdir()
    remote = checks(tmp_path)["remote"]
    assert (remote.level, "policy" in remote.looked_at) == (Level.FAIL, True)
    with github_server() as server:
        monkeypatch.setenv("KAKEYA_GITHUB_API", server.api)
        monkeypatch.setenv("KAKEYA_GITHUB_TOKEN", server.environ["KAKEYA_GITHUB_TOKEN"])
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", "url./no/such/folder/.insteadOf")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
        server.private = False
        if source == "setup":
            asked(tmp_path, url=f"https://github.com/{SLUG}")
        else:
            bench.policy(f'[actions]\nrepository = "{SLUG}"\n')
            if source == "organisation":
                asked(tmp_path, url="https://github.com/octo")
        found = checks(tmp_path)["repository visibility"]
    assert (found.level, "public" in found.finding) == (Level.FAIL, True)


def test_a_private_repository_is_read_as_the_hook_reads_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked(tmp_path, url="https://github.com/Team/workload")
    (tmp_path / "key").touch()
    (tmp_path / "ssh").write_text(
        f'#!/bin/sh\n[ "$4" = {tmp_path}/key ] && git upload-pack {bench.house.remote}\n'
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    names_it = 'repository = "team/workload"\nfetch = "git@github.com:team/workload.git"\n'
    bench.policy(f'[actions]\n{names_it}key = "{tmp_path}/key"\n')
    found = checks(tmp_path)
    assert found["hook access"].level is Level.OK, found
    assert (found["remote"].level, found["remote"].looked_at) == (
        Level.OK,
        "git@github.com:team/workload.git",
    )


def test_the_folders_that_setup_was_told_are_looked_at(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.policy("nonsense = 1\n")
    monkeypatch.delenv("KAKEYA_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert checks(tmp_path)["policy"].level is not Level.FAIL
    asked(tmp_path, config=str(bench.config))
    assert checks(tmp_path)["policy"].level is Level.FAIL


def test_a_service_that_does_not_run_is_a_failure(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = names.staged(tmp_path, names.SERVE_LABEL)
    staged.parent.mkdir()
    staged.touch()
    monkeypatch.setattr(installed, "find_program", lambda _: "/bin/launchctl")
    states = {
        None: Level.FAIL,
        Known("spawn scheduled", "78: EX_CONFIG"): Level.FAIL,
        Known("running", None): Level.OK,
    }
    for known, level in states.items():
        monkeypatch.setattr("bridge.mac.launchd.known", lambda _, known=known: known)
        (found,) = installed.services(tmp_path)
        assert found.level is level, found
        if known is not None and not known.runs:
            assert "78: EX_CONFIG" in found.finding
            assert str(tmp_path / "logs") in found.fix
    names.due(tmp_path, names.SERVE_LABEL).touch()
    (found,) = installed.services(tmp_path)
    assert found.level is Level.WARN


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


@pytest.mark.slow
def test_the_command_says_the_role_and_its_exit_code(bench: Bench) -> None:
    house = bench.house
    client = house.kakeya("doctor", "--json").json
    assert (client["role"], client["exit_code"]) == ("client", 0)
    bench.policy("nonsense = 1\n")
    done = house.kakeya("doctor", "--role", "runner", "--json")
    assert (done.code, done.json["role"], done.json["status"]) == (6, "runner", "fail")
    done = house.kakeya("doctor", "--role", "ci")
    assert "event: none" in done.out
