"""Services are started again when what they read at their start has changed, and are seen to run."""

from __future__ import annotations

import plistlib
from pathlib import Path

import pytest

from bridge import mac as actions
from bridge.mac import setup
from tests.bridge.mac.tools import FULL, Mac

ACTIONS, SERVE = "org.kakeya-mac.actions-runner", "org.kakeya-mac.serve"
# As macOS 15 says it, shortened.
PRINTED = """system/org.kakeya-mac.serve = {
\tactive count = 0
\tpath = /Library/LaunchDaemons/org.kakeya-mac.serve.plist
\ttype = LaunchDaemon
\tstate = spawn scheduled

\tprogram = /Users/me/kakeya-mac/env/bin/kakeya_mac
\tdefault environment = {
\t\tPATH => /usr/bin:/bin:/usr/sbin:/sbin
\t}

\truns = 3
\tlast exit code = 78: EX_CONFIG

\tresource coalition = {
\t\tID = 1000
\t\tstate = active
\t}
}
"""


def ups(mac: Mac) -> list[str]:
    """The services that were started, in order."""
    said = "sudo launchctl bootstrap system "
    return [Path(call.removeprefix(said)).stem for call in mac.changes() if call.startswith(said)]


@pytest.mark.exhaustive
def test_service_with_an_older_environment_is_restarted(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    assert ups(mac) == [ACTIONS, SERVE]
    (mac.prefix / "env" / "changed").touch()
    done = mac.setup(*FULL)
    assert done.code == 0, done.err
    assert ups(mac) == [SERVE]
    assert mac.setup(*FULL).json["changed"] is False


@pytest.mark.exhaustive
def test_commands_are_printed_without_sudo(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    (mac.prefix / "env" / "changed").touch()
    done = mac.setup("--service", "both", "--tailnet", "--json")
    step = mac.step(done, f"service {SERVE}")
    assert (done.code, step["state"]) == (1, "missing")
    assert "has to be restarted" in step["finding"]
    commands = (
        f"sudo launchctl bootout system/{SERVE}; while launchctl print system/{SERVE} >/dev/null 2>&1; do",
        f"done; sudo install -o root -g wheel -m 644 {mac.prefix}/services/{SERVE}.plist",
        f"sudo launchctl bootstrap system /Library/LaunchDaemons/{SERVE}.plist;",
    )
    for command in commands:
        assert command in step["fix"], command
    assert mac.step(done, f"service {ACTIONS}")["state"] == "done"
    assert mac.run("check").code == 1
    assert mac.run("setup", "--sudo").code == 0


@pytest.mark.slow
def test_hook_of_an_old_version_is_removed_and_runner_restarted(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    mac.calls()
    settings = mac.prefix / "actions-runner" / ".env"
    settings.write_text("LANG=en_US.UTF-8\nACTIONS_RUNNER_HOOK_JOB_STARTED=/former/hook.sh\n")
    daemons = mac.fake / "root" / "Library" / "LaunchDaemons"
    old = plistlib.loads((daemons / f"{ACTIONS}.plist").read_bytes())
    old["EnvironmentVariables"]["KAKEYA_SETUP"] = "0123456789ab"
    (daemons / f"{ACTIONS}.plist").write_bytes(plistlib.dumps(old))
    done = mac.setup(*FULL)
    assert done.code == 0, done.err
    assert ups(mac) == [ACTIONS]
    assert "HOOK" not in settings.read_text()


@pytest.mark.slow
def test_a_sudo_that_says_no_is_an_error_at_once(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    (mac.prefix / "env" / "changed").touch()
    (mac.fake / "no-sudo").touch()
    done = mac.setup(*FULL)
    step = mac.step(done, f"service {SERVE}")
    assert (done.code, step["state"]) == (1, "missing")
    assert "sudo -v ended with 1" in step["finding"]
    assert (mac.fake / "launchd" / SERVE).exists(), "it runs on"


@pytest.mark.exhaustive
def test_service_of_another_setup_is_left_alone(mac: Mac) -> None:
    """A label is the whole machine's; there may be another account, or another --prefix."""
    assert mac.setup(*FULL).code == 0
    other = ("--prefix", str(mac.home / "second"), "--remote", "git@example.org:a/b.git", "--sudo", "--json")
    done = mac.run("setup", "--service", "serve", *other)
    step = mac.step(done, f"service {SERVE}")
    assert (done.code, step["finding"]) == (1, "it belongs to the setup of another folder")
    assert f"service {ACTIONS}" not in {step["name"] for step in done.json["steps"]}
    assert mac.run("uninstall", *other[:2], "--sudo").code == 0
    assert {path.name for path in (mac.fake / "launchd").iterdir()} == {ACTIONS, SERVE}
    checked = mac.run("check", "--json")
    # The doctor finds at least that no server is there.
    assert {step["name"] for step in checked.json["steps"] if step["state"] != "done"} == {"doctor"}
    assert "remote" in mac.step(checked, "doctor")["finding"]


@pytest.mark.exhaustive
def test_githubs_runner_is_stopped_only_when_it_has_no_job(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    calls = mac.calls()
    pgrep = f"pgrep -f {mac.prefix}/actions-runner/bin[^/]*/Runner.Worker"
    assert calls.index(pgrep) < calls.index(f"sudo launchctl bootout system/{ACTIONS}")


@pytest.mark.exhaustive
def test_job_of_githubs_runner_is_waited_for(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    (mac.fake / "busy").write_text("x\nx\nx\n")
    mac.calls()
    done = mac.run("uninstall", "--sudo")
    assert done.code == 0, done.err
    assert done.out.count("GitHub's runner has a job; waiting") == 3
    calls = mac.calls()
    assert calls.count("sudo -n -v") >= 3, "the password stays valid"
    assert [call for call in calls if call.startswith("pgrep")][3:] == [
        calls[calls.index("sudo launchctl bootout system/" + ACTIONS) - 1]
    ]


@pytest.mark.exhaustive
def test_stopped_service_is_reported_with_exit_code_and_log(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    (mac.fake / "stops").touch()
    done = mac.run("check", "--json")
    step = mac.step(done, f"service {SERVE}")
    assert (done.code, step["state"]) == (1, "missing")
    assert "state spawn scheduled, last exit code 78: EX_CONFIG" in step["finding"]
    assert f"{mac.prefix}/logs/{SERVE}.log" in step["fix"]


def test_what_launchd_says_is_the_services_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    said = PRINTED
    monkeypatch.setattr(actions, "answer", lambda *_: said)
    assert setup.query(SERVE) == "state spawn scheduled, last exit code 78: EX_CONFIG"
    said = PRINTED.replace("spawn scheduled", "running")
    assert setup.query(SERVE) == "running"
    said = ""
    assert setup.query(SERVE) != "running"
