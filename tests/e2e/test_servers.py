"""One life over a folder, HTTP with a password and SSH with a key: there and back, and through failures."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.buses import USER, Bus, Watch, open_bus, wait_for, wait_for_log
from tests.fixtures.repo import Done, build_repo
from tests.servers.daemon import git_daemon
from tests.servers.ssh import ssh_env

pytestmark = [pytest.mark.e2e, pytest.mark.unsandboxed]

KINDS = ("path", "http", "ssh")


@pytest.fixture(params=KINDS)
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bus]:
    with open_bus(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture(params=("http", "ssh"))
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bus]:
    """Only what has a connection that can break."""
    with open_bus(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
def http(tmp_path: Path) -> Iterator[Bus]:
    with open_bus("http", tmp_path) as opened:
        yield opened


def one_error(done: Done, code: int = 6) -> str:
    """The one message of a command that failed."""
    assert done.code == code, done.out + done.err
    lines = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, done.err
    assert "Traceback" not in done.err
    return lines[0]


def test_a_request_goes_there_and_its_result_comes_back(bus: Bus):
    bus.serve("mac")
    done = bus.kakeya("run", "--preset", "probe", "--wait", "60", "--json")
    assert done.code == 0, done.err + bus.logs()
    nonce = done.json["nonce"]
    for command in (("status",), ("logs",), ("result", "-o", str(bus.repo.root / "out"))):
        again = bus.kakeya(command[0], nonce, *command[1:], "--json")
        assert again.code == 0, again.err
        assert again.json["nonce"] == nonce
    assert (bus.repo.root / "out" / "result.json").exists()
    refused = bus.kakeya("run", "--preset", "tests", "--wait", "60", "--json")
    assert (refused.code, refused.json["reason"]) == (8, "policy"), refused.err
    assert "version 2" in (bus.repo.root / "packets.txt").read_text(errors="replace")
    if bus.server is not None and bus.server.scheme == "http":
        assert "version=2" in bus.server.log()
        assert f'as "{USER}"' in bus.server.log()


def test_two_runners_share_the_requests_and_each_is_answered_once(bus: Bus):
    for name in ("one", "two"):
        bus.serve(name)
    for name in ("one", "two"):
        wait_for_log(bus, f"as {name};")
    for nonce in bus.ask("echo", "echo", "echo"):
        done = bus.wait(nonce)
        assert done.code == 0, done.err + bus.logs()
        assert done.json["attempt"] == 1
        assert bus.results(nonce) == 1
        assert bus.logs().count(f"{nonce} (echo): claimed") == 1, bus.logs()
    assert not [ref for ref in bus.repo.remote_refs() if "/claims/" in ref or "/inbox/" in ref]


def test_a_result_outlives_its_runner_while_the_server_is_away(bus: Bus):
    runner = bus.serve("mac")
    [nonce] = bus.ask("pause")
    wait_for_log(bus, f"{nonce} (pause): claimed")
    bus.cut()
    wait_for(lambda: bus.is_kept(nonce), what="the runner to keep the result")
    runner.kill()
    runner.wait()
    one_error(bus.kakeya("status", nonce))
    bus.restore()
    bus.serve("mac")
    done = bus.wait(nonce)
    assert done.code == 0, done.err + bus.logs()
    assert done.json["attempt"] == 1
    assert bus.results(nonce) == 1
    wait_for(lambda: not bus.is_kept(nonce), what="the kept result to be published")


def test_request_is_answered_where_only_branches_are_allowed(bus: Bus):
    bus.hook("update", 'case "$1" in refs/heads/*) ;; *) echo "branches only"; exit 1;; esac')
    [nonce] = bus.ask("echo")
    bus.serve("mac")
    done = bus.wait(nonce)
    assert done.code == 0, done.err + bus.logs()
    assert all(ref.startswith("refs/heads/") for ref in bus.repo.remote_refs())


def test_a_server_that_declines_everything_is_quoted(bus: Bus):
    bus.hook("pre-receive", "echo 'no pushes on Sundays'; exit 1")
    message = one_error(bus.kakeya("run", "--preset", "probe"))
    assert "refused the push" in message
    assert "no pushes on Sundays" in message


def die_once(bus: Bus, hook: str) -> Path:
    """Let a hook kill the server's git when it takes its first result; the file that is gone afterwards.

    `update` runs before a ref changes, `post-receive` after all have.
    """
    armed = bus.remote / "armed"
    armed.touch()
    bus.remote.chmod(0o777)  # the hook removes the file
    die = f'case "$ref $old" in *00000000) ;; refs/heads/mac-bridge/*) rm {armed} && kill -9 $PPID;; esac'
    read = "ref=$1 old=$2" if hook == "update" else "while read old new ref; do"
    bus.hook(
        hook, f"{read}\ntest ! -e {armed} && exit 0\n{die}\n{'' if hook == 'update' else 'done'}\nexit 0"
    )
    return armed


def test_a_server_that_dies_while_it_takes_a_result_gets_it_once(bus: Bus):
    bus.serve("mac")
    for hook in ("update", "post-receive"):
        armed = die_once(bus, hook)
        [nonce] = bus.ask("echo")
        done = bus.wait(nonce)
        assert done.code == 0, done.err + bus.logs()
        assert done.json["attempt"] == 1
        assert not armed.exists()
        assert bus.results(nonce) == 1
        assert not bus.repo.remote_refs() & {
            f"refs/mac-bridge/{kind}/{nonce}" for kind in ("results", "inbox")
        }
        (bus.remote / "hooks" / hook).unlink()


def test_connection_that_breaks_during_a_push_publishes_once(served: Bus):
    proxy = served.proxy
    assert proxy is not None
    served.serve("mac")
    for arrives in (False, True):
        [nonce] = served.ask("large")
        before = proxy.killed
        (proxy.kill_before_answer if arrives else proxy.kill_after)(60_000)
        wait_for(lambda before=before: proxy.killed > before, what="a push to break")
        assert served.results(nonce) == arrives
        served.restore()
        done = served.wait(nonce)
        assert done.code == 0, done.err + served.logs()
        assert done.json["attempt"] == 1
        assert served.results(nonce) == 1


def test_a_wrong_password_is_one_message(http: Bus):
    assert http.server is not None
    wrong = http.server.address(password="wr%ng@:")
    message = one_error(http.kakeya("run", "--preset", "probe", KAKEYA_REMOTE=wrong))
    assert "refused the user name or password" in message
    assert "wr%" not in http.said[-1]
    without_user = f"http://127.0.0.1:{http.server.port}{http.server.path}"
    message = one_error(http.kakeya("run", "--preset", "probe", KAKEYA_REMOTE=without_user))
    assert "git knows none" in message


def test_a_runner_with_a_wrong_password_stops_with_the_same_message(http: Bus):
    assert http.server is not None
    runner = http.serve("mac", KAKEYA_REMOTE=http.server.address(password="wr%ng@:"))
    assert runner.wait(10) == 6, http.logs()
    assert http.logs().count("refused the user name or password") == 1
    assert "wr%" not in http.logs()


def test_a_key_the_server_does_not_know_is_one_message(tmp_path: Path):
    with open_bus("ssh", tmp_path) as bus:
        assert bus.server is not None
        folder = bus.server.folder
        key = str(folder / "stranger")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        stranger = ssh_env(folder, key="stranger")
        assert "refused the SSH key" in one_error(bus.kakeya("run", "--preset", "probe", **stranger))
        runner = bus.serve("mac", **stranger)
        assert runner.wait(10) == 6, bus.logs()
        (folder / "known_hosts").write_text("")
        assert "host key" in one_error(bus.kakeya("run", "--preset", "probe"))


def test_the_ssh_account_may_run_git_and_nothing_else(tmp_path: Path):
    with open_bus("ssh", tmp_path) as bus:
        assert bus.server is not None
        ssh = bus.server.env["GIT_SSH_COMMAND"].split()
        login = f"{bus.server.user}@127.0.0.1"
        argv = [*ssh, "-p", str(bus.server.port), login, "cat", "/etc/passwd"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
        assert done.returncode != 0
        assert "root:" not in done.stdout


def test_a_git_daemon_refuses_the_push(tmp_path: Path):
    repo = build_repo(tmp_path / "repo")
    with git_daemon(repo.remote, tmp_path / "server") as server:
        repo.git("remote", "set-url", "origin", server.address())
        message = one_error(repo.program("kakeya_mac", "run", "--preset", "probe"))
        assert "refused the push" in message
        assert "access denied or repository not exported" in message


def test_no_process_shows_the_password_during_a_slow_push(http: Bus):
    assert http.proxy is not None
    http.proxy.delay_s = 0.4
    with Watch() as watch:
        done = http.kakeya("run", "--preset", "probe")
    assert done.code == 0, done.err
    assert watch.names >= {"git", "git-remote-http"}
    assert not watch.leaked


def test_sigterm_drains_a_runner_whose_server_is_away(served: Bus):
    runner = served.serve("mac")
    wait_for_log(served, "serving")
    served.cut()
    wait_for_log(served, "retrying")
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(15) in (0, 143)
