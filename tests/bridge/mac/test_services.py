"""Services are started again when what they read at their start has changed, and are seen to run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.errors import MachineError
from bridge.mac import launchd
from bridge.mac.launchd import Gone, Idle, Known, Running
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
def test_a_service_that_runs_an_older_environment_is_started_again(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    assert ups(mac) == [ACTIONS, SERVE]
    (mac.prefix / "env" / "changed").touch()
    done = mac.setup(*FULL)
    assert done.code == 0, done.err
    assert ups(mac) == [SERVE]
    assert mac.setup(*FULL).json["changed"] is False


@pytest.mark.exhaustive
def test_githubs_runner_is_started_again_when_its_variables_have_changed(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    mac.calls()
    (mac.prefix / "actions-runner" / ".env").write_text("LANG=C\n")
    assert mac.setup(*FULL).code == 0
    assert ups(mac) == [ACTIONS]


@pytest.mark.exhaustive
def test_without_sudo_the_commands_wait_for_the_job_and_forget_that_it_was_due(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    (mac.prefix / "env" / "changed").touch()
    done = mac.setup("--service", "both", "--tailnet", "--json")
    step = mac.step(done, f"service {SERVE}")
    assert (done.code, step["state"], step["finding"]) == (1, "missing", "it is to be started again")
    commands = (
        f"sudo install -o root -g wheel -m 644 {mac.prefix}/services/{SERVE}.plist",
        f"sudo launchctl bootout system/{SERVE}; while launchctl print system/{SERVE} >/dev/null 2>&1; do",
        f"done; sudo launchctl bootstrap system /Library/LaunchDaemons/{SERVE}.plist;",
        f"sudo rm -f {mac.prefix}/services/{SERVE}.due",
    )
    for command in commands:
        assert command in step["fix"], command
    assert mac.step(done, f"service {ACTIONS}")["state"] == "done"
    assert mac.run("check").code == 1, "it is still due"
    assert mac.run("setup", "--sudo").code == 0


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
def test_a_service_of_another_setup_is_neither_replaced_nor_taken_away(mac: Mac) -> None:
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


def test_githubs_runner_is_stopped_only_when_it_has_no_job() -> None:
    busy, said, clock = iter([True, True, False]), list[str](), ticks(40.0)
    idle = Idle(Path("/p/actions-runner"), 7260.0, lambda _: next(busy), lambda: next(clock), lambda _: None)
    idle.do(said.append)
    assert "GitHub's runner has a job; waiting since 40 s" in said[0]
    assert (
        idle.said == "while pgrep -f '/p/actions-runner/bin[^/]*/Runner.Worker' >/dev/null; do sleep 5; done"
    )


@pytest.mark.exhaustive
def test_launchd_that_still_refuses_for_a_moment_is_asked_again(mac: Mac) -> None:
    (mac.fake / "refuses-once").touch()
    done = mac.setup(*FULL)
    assert done.code == 0, done.err
    assert "is tried again in" in done.err


@pytest.mark.exhaustive
def test_a_service_that_does_not_run_is_said_with_its_exit_code_and_its_log(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    (mac.fake / "stops").touch()
    done = mac.run("check", "--json")
    step = mac.step(done, f"service {SERVE}")
    assert (done.code, step["state"]) == (1, "missing")
    assert "its state is spawn scheduled, its last exit code 78: EX_CONFIG" in step["finding"]
    assert f"{mac.prefix}/logs/{SERVE}.log" in step["fix"]


def test_what_launchd_says_is_the_services_own_state() -> None:
    assert launchd.parsed(PRINTED) == Known("spawn scheduled", "78: EX_CONFIG")
    assert launchd.parsed(PRINTED.replace("spawn scheduled", "running")).runs
    assert not launchd.parsed("").runs


def ticks(step: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step


def test_a_long_job_is_waited_for_with_a_line_every_half_minute() -> None:
    looks = iter([Known("running", None)] * 10 + [None])
    clock, said = ticks(10.0), list[str]()
    Gone("a", 7260.0, lambda _: next(looks), lambda: next(clock), lambda _: None).do(said.append)
    assert len(said) == 3
    assert "finishes its job; waiting since 30 s" in said[0]
    clock = ticks(100.0)
    with pytest.raises(MachineError, match="finishes its job, after 5 minutes still"):
        Gone("a", 300.0, lambda _: Known("running", None), lambda: next(clock), lambda _: None).do()


def test_a_service_that_runs_for_a_moment_only_does_not_run(tmp_path: Path) -> None:
    flapping = [Known("running", None), Known("running", None), Known("spawn scheduled", "1")]
    looks, clock = iter(flapping * 20), ticks(1.0)
    with pytest.raises(MachineError, match="last exit code") as failed:
        Running("a", tmp_path / "log", 20.0, lambda _: next(looks), lambda: next(clock), lambda _: None).do()
    assert str(tmp_path / "log") in str(failed.value.remedy)
    looks, clock = iter([None, *[Known("running", None)] * 6]), ticks(1.0)
    Running("a", tmp_path / "log", 20.0, lambda _: next(looks), lambda: next(clock), lambda _: None).do()
