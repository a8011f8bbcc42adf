"""What ``doctor --role runner`` says of a machine: its policy, its trust, its services, its interpreter."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bridge import doctor, interpreter, settings
from bridge.cli.doctor import detect
from bridge.doctor import Check, Level
from bridge.mac import setup
from bridge.mac.options import ACTIONS_RUNNER, OPTIONS_FILE
from tests.fixtures.bus import BusFixture
from tests.fixtures.runner import RunnerFixture
from tests.servers.github import SLUG, github_server


@pytest.fixture
def runner(bus: BusFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunnerFixture:
    monkeypatch.chdir(bus.repo.clone)
    monkeypatch.setattr(interpreter, "record_path", lambda: tmp_path / "interpreter.json")
    made = RunnerFixture(bus.repo)
    monkeypatch.setenv("KAKEYA_CONFIG", str(made.config))
    monkeypatch.setenv("KAKEYA_STATE", str(made.state))
    return made


def checks(prefix: Path) -> dict[str, Check]:
    found = list(doctor.examine("runner", settings.load(), Path.cwd(), prefix=prefix))
    assert all(check.looked_at and check.finding for check in found)
    assert all(check.fix for check in found if check.level is not Level.OK)
    return {check.name: check for check in found}


def test_every_check_of_a_plain_machine(runner: RunnerFixture, tmp_path: Path) -> None:
    found = checks(tmp_path)
    assert {"git", "policy", "interpreter", "service", "disk", "remote", "git-lfs"} <= set(found)
    assert found["interpreter"].level is Level.WARN
    assert "unsigned requests are accepted" in found["policy"].finding
    assert any(name.startswith("jobs: ") for name in found)
    assert found["models: throughput"].level is Level.OK


def test_a_variable_that_names_no_model_folder_is_a_warning(
    runner: RunnerFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_MODEL_GEMMA_4_26B_A4B", "/absent")
    found = checks(tmp_path)["models: throughput"]
    assert (found.level, "/absent" in found.finding) == (Level.WARN, True)


def test_a_policy_that_is_wrong_is_a_failure(runner: RunnerFixture, tmp_path: Path) -> None:
    runner.policy("nonsense = 1\n")
    found = checks(tmp_path)["policy"]
    assert (found.level, "nonsense" in found.finding) == (Level.FAIL, True)


@pytest.mark.parametrize(
    ("uid", "has_runner", "said", "level"),
    [
        (501, True, "who can push", Level.WARN),
        (501, False, "daemon alone", Level.OK),
        (0, False, "root", Level.FAIL),
    ],
)
def test_it_says_who_can_run_code_as_this_account(
    monkeypatch: pytest.MonkeyPatch, uid: int, has_runner: bool, said: str, level: Level
) -> None:
    monkeypatch.setattr("os.getuid", lambda: uid)
    found = doctor.trust(has_runner)
    assert (found.level, said in found.finding) == (level, True)


def asked(prefix: Path, **values: object) -> None:
    (prefix / ACTIONS_RUNNER).mkdir(exist_ok=True)
    (prefix / OPTIONS_FILE).write_text(json.dumps(values))


def test_outside_of_a_clone_a_public_repository_is_still_a_failure(
    runner: RunnerFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ACTIONS_RUNNER).mkdir()
    remote = checks(tmp_path)["remote"]
    assert remote.level is Level.FAIL
    with github_server() as server:
        monkeypatch.setenv("KAKEYA_GITHUB_API", server.api)
        monkeypatch.setenv("KAKEYA_GITHUB_TOKEN", server.environ["KAKEYA_GITHUB_TOKEN"])
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", "url./no/such/folder/.insteadOf")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
        server.private = False
        asked(tmp_path, url=f"https://github.com/{SLUG}")
        found = checks(tmp_path)["repository visibility"]
    assert (found.level, "public" in found.finding) == (Level.FAIL, True)


@pytest.mark.parametrize("named", ["nowhere", "by setup", "by config.toml", "by a flag"])
def test_a_runner_need_not_be_asked_in_a_clone(
    runner: RunnerFixture, bus: BusFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    if named == "by setup":
        (tmp_path / OPTIONS_FILE).write_text(json.dumps({"remote": bus.remote}))
    elif named == "by config.toml":
        runner.config.mkdir()
        (runner.config / "config.toml").write_text(f'remote = "{bus.remote}"\n')
    own = settings.load(remote=bus.remote if named == "by a flag" else None)
    found = {each.name: each for each in doctor.examine("runner", own, Path.cwd(), prefix=tmp_path)}
    assert found["remote"].level is (Level.WARN if named == "nowhere" else Level.OK), found["remote"]
    assert ("git server" in found) == ("load" in found) == (named != "nowhere")
    assert ("setup" in found) == (named == "by setup")
    if (
        made := found.pop("setup", None)
    ) is not None:  # what `runner check` finds: this is no Mac that is set up
        assert (made.level, "machine: " in made.finding) == (Level.FAIL, True)
    said = " ".join(f"{check.finding} {check.fix}" for check in found.values())
    assert "git repository" not in said
    assert "checkout" not in said


def test_the_folders_that_setup_was_told_are_looked_at(
    runner: RunnerFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.policy("nonsense = 1\n")
    monkeypatch.delenv("KAKEYA_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert checks(tmp_path)["policy"].level is not Level.FAIL
    asked(tmp_path, config=str(runner.config))
    assert checks(tmp_path)["policy"].level is Level.FAIL


def test_a_service_that_does_not_run_is_a_failure(
    runner: RunnerFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = setup.staged(tmp_path, setup.SERVE_LABEL)
    staged.parent.mkdir()
    staged.write_text("<plist/>")
    monkeypatch.setattr(doctor, "find_program", lambda _: "/bin/launchctl")
    monkeypatch.setattr("bridge.mac.setup.read_installed", lambda _: "<plist/>")
    stopped = "state spawn scheduled, last exit code 78: EX_CONFIG"
    for known in (None, stopped, "running"):
        monkeypatch.setattr("bridge.mac.setup.query", lambda _, known=known: known)
        (found,) = doctor.services(tmp_path)
        assert found.level is (Level.OK if known == "running" else Level.FAIL), found
        if known == stopped:
            assert "78: EX_CONFIG" in found.finding
            assert str(tmp_path / "logs") in found.fix
    staged.write_text("<plist>another</plist>")
    (found,) = doctor.services(tmp_path)
    assert (found.level, "has to be restarted" in found.finding) == (Level.FAIL, True)


def test_an_interpreter_that_was_replaced_is_a_failure(runner: RunnerFixture, tmp_path: Path) -> None:
    seen = interpreter.observe()
    interpreter.write(interpreter.record_path(), seen)
    assert checks(tmp_path)["interpreter"].level is Level.OK
    assert detect() == "runner"
    interpreter.write(interpreter.record_path(), dataclasses.replace(seen, version="3.9.1"))
    found = checks(tmp_path)["interpreter"]
    assert (found.level, "version was 3.9.1" in found.finding) == (Level.FAIL, True)


def test_the_role_is_told_from_where_it_is_asked(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert detect() == "client"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert detect() == "ci"
