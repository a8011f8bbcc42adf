"""Services are started again when what they read at their start has changed, and are seen to run."""

from __future__ import annotations

import logging
import plistlib
from pathlib import Path

import pytest

from bridge.errors import MachineError
from bridge.mac.launchd import EXIT_S, LaunchdService, parse_print, wait_while
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
def test_a_change_of_the_runners_settings_restarts_it(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    mac.calls()
    settings = mac.prefix / "actions-runner" / ".env"
    settings.write_text("LANG=en_US.UTF-8\nACTIONS_RUNNER_HOOK_JOB_STARTED=/former/hook.sh\n")
    daemons = mac.fake / "root" / "Library" / "LaunchDaemons"
    old = plistlib.loads((daemons / f"{ACTIONS}.plist").read_bytes())
    del old["EnvironmentVariables"]["KAKEYA_SETUP"]
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
    assert (done.code, step["finding"]) == (1, f"it is of the setup in {mac.prefix}")
    assert f"service {ACTIONS}" not in {step["name"] for step in done.json["steps"]}
    assert mac.run("uninstall", *other[:2], "--sudo").code == 0
    assert {path.name for path in (mac.fake / "launchd").iterdir()} == {ACTIONS, SERVE}
    assert mac.run("check").code == 0


@pytest.mark.exhaustive
def test_githubs_runner_is_stopped_only_when_it_has_no_job(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    calls = mac.calls()
    pgrep = f"pgrep -f {mac.prefix}/actions-runner/bin[^/]*/Runner.Worker"
    assert calls.index(pgrep) < calls.index(f"sudo launchctl bootout system/{ACTIONS}")


@pytest.mark.exhaustive
def test_launchd_that_still_refuses_for_a_moment_is_asked_again(mac: Mac) -> None:
    (mac.fake / "refuses-once").touch()
    done = mac.setup(*FULL)
    assert done.code == 0, done.err
    assert "trying again in" in done.err


@pytest.mark.exhaustive
def test_stopped_service_is_reported_with_exit_code_and_log(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    (mac.fake / "stops").touch()
    done = mac.run("check", "--json")
    step = mac.step(done, f"service {SERVE}")
    assert (done.code, step["state"]) == (1, "missing")
    assert "its state is spawn scheduled, its last exit code 78: EX_CONFIG" in step["finding"]
    assert f"{mac.prefix}/logs/{SERVE}.log" in step["fix"]


def test_what_launchd_says_is_the_services_own_state() -> None:
    assert parse_print(PRINTED) == LaunchdService("spawn scheduled", "78: EX_CONFIG")
    assert parse_print(PRINTED.replace("spawn scheduled", "running")).runs
    assert not parse_print("").runs


def test_long_job_is_waited_for_with_a_line_every_half_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    looks = iter([True] * 100 + [False])
    with caplog.at_level(logging.INFO, logger="bridge.mac"):
        wait_while(lambda: next(looks), "a job")
    assert [record.getMessage().strip() for record in caplog.records] == [
        f"a job; waiting for {seconds} s" for seconds in (30, 60, 90)
    ]
    with pytest.raises(MachineError, match=f"a job, still after {EXIT_S} s"):
        wait_while(lambda: True, "a job")


@pytest.mark.exhaustive
def test_service_that_ends_at_once_is_reported(mac: Mac) -> None:
    (mac.fake / "stops").touch()
    done = mac.setup(*FULL)
    step = mac.step(done, f"service {SERVE}")
    assert (done.code, step["state"]) == (1, "missing")
    assert "it does not run: its state is spawn scheduled" in step["finding"]
    assert f"{mac.prefix}/logs/{SERVE}.log" in step["fix"]
