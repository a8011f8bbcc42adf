"""Environments lie side by side, and nothing in the current folder is executed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge.mac.options import SetupUsage, prefix_around, read_stored
from tests.bridge.mac.tools import FULL, SCRIPT, Mac


@pytest.mark.slow
def test_failed_installation_leaves_the_old_one_working(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    env = mac.prefix / "env"
    first = env.resolve()
    (env / "changed").touch()
    (mac.fake / "no-packages").touch()
    done = mac.setup(*FULL)
    assert done.code == 1
    assert "no network" in mac.step(done, "environment")["finding"]
    assert env.resolve() == first
    assert (first / "bin" / "kakeya_mac").exists()
    (mac.fake / "no-packages").unlink()
    assert mac.setup(*FULL).code == 0
    second = env.resolve()
    assert second != first
    assert {path.name for path in (mac.prefix / "envs").iterdir()} == {first.name, second.name}
    assert first.name.rpartition("-")[0] == second.name.rpartition("-")[0]
    (env / "changed").touch()
    assert mac.setup(*FULL).code == 0
    assert not first.exists(), "the one before is kept until the next"
    assert second.exists()


@pytest.mark.slow
def test_nothing_in_the_current_folder_is_ever_executed(mac: Mac, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    for name in ("venv", "pip", "bridge", "argparse", "json", "sitecustomize"):
        (hostile / name).mkdir(parents=True)
        (hostile / name / "__init__.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write('x')\n")
    done = mac.setup(*FULL, cwd=hostile, PYTHONPATH=str(hostile), PYTHONSTARTUP=str(hostile / "pip"))
    assert done.code == 0, done.err
    assert not (tmp_path / "executed").exists()
    for line in done.err.splitlines():
        assert not line.startswith("      $") or "/python " not in line or " -I " in line, line


@pytest.mark.parametrize("name", ["old python", "/no/such/python"])
def test_a_python_that_is_named_and_will_not_do_is_an_error(mac: Mac, tmp_path: Path, name: str) -> None:
    old = tmp_path / "old python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    named = str(tmp_path / name)
    done = mac.setup(*FULL, KAKEYA_PYTHON=named)
    assert done.code == 1
    assert f"KAKEYA_PYTHON={named} is no Python 3.11" in done.err


def test_a_python_whose_path_has_blanks_is_used(mac: Mac, tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "python").symlink_to(mac.env["KAKEYA_PYTHON"])
    done = mac.setup(*FULL, "--dry-run", cwd=tmp_path, KAKEYA_PYTHON="a b/python")
    assert done.code == 0, done.err
    assert f"'{folder}/python' -I -m venv" in done.err


@pytest.mark.exhaustive
def test_the_self_test_measures_and_leaves_nothing(mac: Mac) -> None:
    done = mac.setup(*FULL)
    for part in ("generate --max-tokens 8", "eval throughput --prompts code --limit 1", "kakeya_mac gate"):
        assert part in done.err, part
    assert not (mac.home / ".local").exists()
    (mac.fake / "bad-report").touch()
    done = mac.setup(*FULL)
    step = mac.step(done, "self-test")
    assert (done.code, step["state"]) == (1, "missing")
    assert "kakeya_mac gate" in step["finding"]


@pytest.mark.exhaustive
def test_the_owners_folders_are_remembered(mac: Mac, tmp_path: Path) -> None:
    config, state = tmp_path / "config", tmp_path / "state"
    done = mac.setup(*FULL, KAKEYA_CONFIG=str(config), KAKEYA_STATE=str(state))
    assert done.code == 0, done.err
    assert (config / "policy.toml").exists()
    before = mac.tree()
    again = mac.setup(*FULL)
    assert (again.code, again.json["changed"]) == (0, False), again.err
    assert mac.tree() == before
    assert mac.step(again, "policy")["looked_at"] == str(config / "policy.toml")
    assert f"<string>{state}<" in (mac.prefix / "services" / "org.kakeya-mac.serve.plist").read_text()
    assert str(state) in mac.run("uninstall", "--sudo").out


@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize("text", ["[]", "{", "[" * 9999])
def test_damaged_stored_options_are_an_error(mac: Mac, text: str) -> None:
    """If they were ignored, setup would remove every service."""
    mac.prefix.mkdir()
    (mac.prefix / "setup.json").write_text(text)
    with pytest.raises(SetupUsage, match="is damaged"):
        read_stored(mac.prefix)
    for command in ("check", "setup", "uninstall"):
        done = mac.run(command, "--sudo")
        assert (done.code, "give --url, --remote, --service" in done.err) == (2, True)
    assert not [call for call in mac.calls() if call.startswith("sudo")]


def test_prefix_is_found_from_both_names_of_its_environment(mac: Mac, tmp_path: Path) -> None:
    inside = mac.prefix / "envs" / "0123-1"
    inside.mkdir(parents=True)
    assert prefix_around(inside) is None, "not made by setup"
    (mac.prefix / "setup.json").write_text(json.dumps({}))
    assert prefix_around(inside) == mac.prefix
    assert prefix_around(mac.prefix / "env") == mac.prefix
    assert prefix_around(tmp_path / ".venv") is None


@pytest.mark.slow
def test_root_and_places_that_others_can_write_are_refused(mac: Mac, tmp_path: Path) -> None:
    (mac.fake / "user").write_text("0\n")
    done = mac.setup(*FULL)
    assert (done.code, "this is root" in mac.step(done, "machine")["finding"]) == (1, True)
    (mac.fake / "user").write_text("501\n")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    where = shared / "a" / "b"
    done = mac.setup(*FULL, "--prefix", str(where))
    step = mac.step(done, "machine")
    assert (done.code, step["looked_at"], "others" in step["fix"]) == (1, str(shared), False)
    assert "other accounts may write there" in step["finding"]
    assert not where.exists()
    shared.chmod(0o1777)
    assert mac.step(mac.run("check", "--prefix", str(where), "--json"), "machine")["state"] == "done"


def test_the_script_starts_its_python_isolated() -> None:
    text = SCRIPT.read_text()
    assert "\ncd " not in text
    assert text.count('" -I -c') == 2
