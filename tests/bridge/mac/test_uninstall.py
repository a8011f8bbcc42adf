"""Uninstall removes what setup made, services first and the options last; what is the owner's stays."""

from __future__ import annotations

import json

import pytest

from tests.bridge.mac.tools import FULL, Mac

ACTIONS, SERVE = "org.kakeya-mac.actions-runner", "org.kakeya-mac.serve"


def launchds(mac: Mac) -> set[str]:
    return {path.name for path in (mac.fake / "launchd").iterdir()}


def plists(mac: Mac) -> set[str]:
    return {path.stem for path in (mac.fake / "root" / "Library" / "LaunchDaemons").iterdir()}


@pytest.mark.slow
def test_it_takes_all_back_and_leaves_what_is_the_owners(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    before = mac.tree()
    planned = mac.run("uninstall", "--sudo", "--dry-run")
    assert "would: sudo launchctl bootout" in planned.out
    assert mac.tree() == before
    done = mac.run("uninstall", "--sudo")
    assert done.code == 0, done.err
    assert (launchds(mac), plists(mac)) == (set(), set())
    assert {path.name for path in mac.prefix.iterdir()} <= {"logs"}
    assert (mac.home / "kakeya-models").is_dir()
    assert (mac.home / ".config" / "kakeya-mac" / "policy.toml").exists()
    last = done.out.splitlines()[-1]
    for part in (
        *("models", str(mac.home / ".config" / "kakeya-mac"), "the key that signs results", "logs"),
        *("git-lfs's filter", "power settings", "tailscale", "SSH key"),
    ):
        assert part in last, part
    assert mac.run("uninstall", "--sudo").code == 0, "a second time there is nothing left to do"


@pytest.mark.exhaustive
def test_uninstall_without_sudo_removes_nothing(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    before = mac.tree()
    done = mac.run("uninstall", "--json")
    assert done.code == 1
    assert mac.tree() == before
    assert [step["name"] for step in done.json["steps"]] == [f"service {ACTIONS}", f"service {SERVE}"]
    for step in done.json["steps"]:
        assert step["state"] == "missing"
        assert "sudo launchctl bootout" in step["fix"]
        assert "sudo rm -f /Library/LaunchDaemons/" in step["fix"]


@pytest.mark.exhaustive
def test_runner_that_stays_registered_keeps_its_folder(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    done = mac.run("uninstall", "--sudo", "--json", KAKEYA_RUNNER_TOKEN="")
    step = mac.step(done, "actions runner")
    assert (done.code, step["state"]) == (1, "missing")
    assert "https://github.com/team/workload/settings/actions/runners" in step["fix"]
    assert str(mac.prefix / "actions-runner") in step["fix"]
    assert (mac.prefix / "actions-runner" / ".runner").exists()
    assert (mac.prefix / "env" / "bin" / "kakeya_mac").exists(), "it is what uninstall goes on with"
    assert json.loads((mac.prefix / "setup.json").read_text())["service"] == "both"
    (mac.fake / "token").write_text("another")
    done = mac.run("uninstall", "--sudo", "--json")
    assert "404" in mac.step(done, "actions runner")["finding"]
    (mac.fake / "token").write_text(mac.env["KAKEYA_RUNNER_TOKEN"])
    done = mac.run("uninstall", "--sudo")
    assert done.code == 0, done.err
    assert not (mac.prefix / "setup.json").exists()


@pytest.mark.exhaustive
def test_service_that_is_no_longer_asked_for_is_removed(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    done = mac.setup("--service", "actions", "--tailnet", "--json")
    step = mac.step(done, f"service {SERVE}")
    assert (done.code, step["state"], "sudo launchctl bootout" in step["fix"]) == (1, "missing", True)
    done = mac.setup("--service", "actions", "--tailnet", "--sudo", "--json")
    assert done.code == 0, done.err
    assert (launchds(mac), plists(mac)) == ({ACTIONS}, {ACTIONS})
    assert not (mac.prefix / "services" / f"{SERVE}.plist").exists()
    assert mac.setup("--service", "actions", "--tailnet", "--sudo", "--json").json["changed"] is False


@pytest.mark.exhaustive
def test_unwanted_runner_is_removed_after_its_service(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    done = mac.setup("--service", "serve", "--json")
    assert (done.code, mac.step(done, "actions runner")["state"]) == (1, "missing")
    assert (mac.prefix / "actions-runner" / ".runner").exists()
    done = mac.setup("--service", "serve", "--sudo", "--json")
    assert done.code == 0, done.err
    assert launchds(mac) == {SERVE}
    assert not (mac.prefix / "actions-runner").exists()


@pytest.mark.slow
def test_uninstall_takes_both_services_whatever_was_asked_last(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    assert mac.setup("--service", "none").code == 1
    assert mac.run("uninstall", "--sudo").code == 0
    assert (launchds(mac), plists(mac)) == (set(), set())
