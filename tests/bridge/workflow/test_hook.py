"""The hook lets a job begin whose every part this machine knows, and ends the worker of every other one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bridge.errors import RequestRefused
from bridge.mac import hook_file
from bridge.protocol.manifest import REQUEST_PATH
from bridge.workflow.access import ssh_command
from bridge.workflow.hook import SHIPPED, alone
from bridge.workflow.worker import Ancestor, end
from tests.bridge.runner.bench import Bench
from tests.houses import Done, wait_for
from tests.worlds import World

PATH = ".github/workflows/mac-bridge.yaml"
POLICY = '[actions]\nrepository = "team/workload"\nfetch = "{remote}"\nactors = ["ann", "ci-*"]\n'


@dataclass
class Site:
    """A self-hosted runner's machine, and a repository whose default branch has the workflow."""

    bench: Bench
    world: World
    env: dict[str, str] = field(default_factory=dict)

    @property
    def remote(self) -> str:
        return str(self.bench.house.remote)

    def job(self, commit: str, ref: str, **changes: str) -> dict[str, str]:
        """What GitHub's runner says of a job that a push of a request started."""
        event = self.bench.house.root / "event.json"
        if not event.exists():
            event.write_text(json.dumps({"repository": {"default_branch": "main"}}))
        return {
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTOR": "ann",
            "GITHUB_TRIGGERING_ACTOR": "ann",
            "GITHUB_EVENT_NAME": "push",
            "GITHUB_EVENT_PATH": str(event),
            "GITHUB_REF": ref,
            "GITHUB_REPOSITORY": "team/workload",
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_SHA": commit,
            "GITHUB_WORKFLOW_REF": f"team/workload/{PATH}@{ref}",
            "GITHUB_WORKFLOW_SHA": commit,
            **changes,
        }

    def ask(self, preset: str = "echo", **changes: object) -> tuple[str, str]:
        manifest = self.bench.ask(preset, **{"transport": "actions", **changes})
        git = self.bench.house.git
        return git("rev-parse", manifest.result_ref, cwd=self.bench.house.remote), manifest.result_ref

    def hook(self, environ: dict[str, str], *args: str) -> Done:
        return self.bench.house.kakeya("runner", "hook", *args, cwd=self.bench.house.root, **environ)


@pytest.fixture
def site(world: World) -> Site:
    bench = Bench(world.house)
    bench.install({"echo": "print('hello from', arg)"})
    world.point("refs/heads/main", world.commit("main", {PATH: SHIPPED.read_bytes()}))
    world.house.git("pull", "--quiet", "origin", "main")
    world.house.git("config", "uploadpack.allowAnySHA1InWant", "true", cwd=world.house.remote)
    bench.policy(POLICY.format(remote=world.house.remote))
    return Site(bench, world)


def test_a_request_that_every_part_of_is_known_may_begin(site: Site) -> None:
    done = site.hook(site.job(*site.ask()), "--json")
    assert done.code == 0, done.out + done.err
    assert done.json["allowed"] is True
    assert len(done.json["found"]) == 5
    assert "actor ann" in done.out


def test_a_dispatched_run_of_the_default_branch_may_begin(site: Site) -> None:
    commit, ref = site.ask()
    event = site.bench.house.root / "event.json"
    inputs = {"branch": ref.removeprefix("refs/heads/"), "commit": commit}
    event.write_text(json.dumps({"repository": {"default_branch": "main"}, "inputs": inputs}))
    main = site.bench.house.git("rev-parse", "main", cwd=site.bench.house.remote)
    environ = site.job(main, "refs/heads/main", GITHUB_EVENT_NAME="workflow_dispatch")
    done = site.hook(environ, "--check", "--json")
    assert done.code == 0, done.out
    assert any("is one that this machine takes" in line for line in done.json["found"])


def edited(site: Site) -> dict[str, str]:
    """A request on a commit whose workflow file gives itself a writing token."""
    evil = SHIPPED.read_bytes().replace(b"contents: read", b"contents: write")
    workload = site.world.commit("main", {PATH: evil})
    site.bench.house.git("fetch", "-q", site.remote, workload)
    return site.job(*site.ask(workload_sha=workload))


def another_file(site: Site) -> dict[str, str]:
    commit, ref = site.ask()
    where = f"team/workload/.github/workflows/evil.yaml@{ref}"
    return site.job(commit, ref, GITHUB_WORKFLOW_REF=where)


def more_than_a_request(site: Site) -> dict[str, str]:
    commit, ref = site.ask()
    more = site.world.commit(commit + "^", {REQUEST_PATH: b"{}", "sitecustomize.py": b"evil\n"})
    site.world.point(ref, more)
    return site.job(more, ref)


def by_hand_elsewhere(site: Site) -> dict[str, str]:
    commit, ref = site.ask()
    event = site.bench.house.root / "event.json"
    inputs = {"branch": ref.removeprefix("refs/heads/"), "commit": commit}
    event.write_text(json.dumps({"repository": {"default_branch": "main"}, "inputs": inputs}))
    return site.job(commit, ref, GITHUB_EVENT_NAME="workflow_dispatch")


def from_a_fork(site: Site) -> dict[str, str]:
    commit, ref = site.ask()
    return site.job(commit, ref, GITHUB_WORKFLOW_REF=f"mallory/workload/{PATH}@{ref}")


def no_policy(site: Site) -> dict[str, str]:
    site.bench.policy("")
    return site.job(*site.ask())


def broken_policy(site: Site) -> dict[str, str]:
    environ = site.job(*site.ask())
    site.bench.policy("nonsense = 1\n")
    return environ


def no_remote(site: Site) -> dict[str, str]:
    environ = site.job(*site.ask())
    site.bench.policy(POLICY.format(remote="/no/such/repository.git"))
    return environ


def no_key(site: Site) -> dict[str, str]:
    environ = site.job(*site.ask())
    site.bench.policy(POLICY.format(remote=site.remote) + 'key = "/no/such/key"\n')
    return environ


HOSTILE: dict[str, tuple[Callable[[Site], dict[str, str]], str]] = {
    "an edited workflow file": (edited, "is no file that this machine knows"),
    "another workflow file": (another_file, "evil.yaml' may not run here"),
    "a file of a fork": (from_a_fork, "mallory/workload"),
    "a stranger": (lambda s: s.job(*s.ask(), GITHUB_ACTOR="mallory"), "'mallory' may not start runs"),
    "a stranger who runs it again": (
        lambda s: s.job(*s.ask(), GITHUB_TRIGGERING_ACTOR="mallory"),
        "'mallory' may not start runs",
    ),
    "another event": (
        lambda s: s.job(*s.ask(), GITHUB_EVENT_NAME="pull_request_target"),
        "may not begin here",
    ),
    "a branch of no request": (lambda s: s.job(s.ask()[0], "refs/heads/main"), "not a branch of a request"),
    "another repository": (lambda s: s.job(*s.ask(), GITHUB_REPOSITORY="team/other"), "team/other"),
    "by hand from a branch": (by_hand_elsewhere, "must be one of the default branch"),
    "more than a request": (more_than_a_request, "changes only"),
    "what the policy refuses": (lambda s: s.job(*s.ask(preset="tests")), "runs code of the requested commit"),
    "a commit that is not there": (lambda s: s.job("a" * 40, s.ask()[1]), "a" * 12),
    "an event that cannot be read": (
        lambda s: s.job(*s.ask(), GITHUB_EVENT_PATH="/dev/zero"),
        "cannot be read",
    ),
    "words that steer a log": (
        lambda s: s.job(*s.ask(), GITHUB_ACTOR="x\n::set-output name=a::b"),
        "may not start runs",
    ),
    "no policy": (no_policy, "names no repository"),
    "a broken policy": (broken_policy, "nonsense"),
    "a remote that does not answer": (no_remote, "/no/such/repository.git"),
    "a key that is not there": (no_key, "/no/such/key"),
    "nothing known": (lambda _: {}, "GITHUB_"),
}


@pytest.mark.sampled(4, 4)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_known_is_refused_with_its_reason(site: Site, name: str) -> None:
    make, said = HOSTILE[name]
    done = site.hook(make(site), "--check", "--json")
    assert done.code == 2, done.out
    assert said in done.json["message"]
    assert "::error title=kakeya-mac refused this job::" in done.out
    assert not [line for line in done.out.splitlines() if line.startswith("::set-output")]
    assert done.json["worker"] is None


def worker(site: Site, environ: dict[str, str], python: str = sys.executable) -> subprocess.Popen[bytes]:
    """A process that does as GitHub's: its shell calls the hook, then there is a step with `always()`."""
    root = site.bench.house.root
    house = site.bench.house.env
    kept = {name: house[name] for name in ("HOME", "KAKEYA_CONFIG", "KAKEYA_STATE")}
    (root / "hook.sh").write_text(hook_file.text(python, kept))
    program = root / "bin" / "Runner.Worker"
    program.parent.mkdir(exist_ok=True)
    program.write_text(
        f"#!/bin/sh\nbash -e {root}/hook.sh >{root}/hook.log 2>&1\ncode=$?\n"
        f"[ $code -le 2 ] || {{ touch {root}/gone; sleep 20; }}\necho $code >{root}/always\n"
    )
    program.chmod(0o755)
    return subprocess.Popen([str(program)], env={**house, **environ}, start_new_session=True)


def log(site: Site) -> str:
    return (site.bench.house.root / "hook.log").read_text()


def test_the_worker_goes_on_with_a_job_that_may_begin(site: Site) -> None:
    process = worker(site, site.job(*site.ask()))
    assert process.wait(60) == 0
    assert (site.bench.house.root / "always").read_text() == "0\n", log(site)


def test_the_worker_of_a_refused_job_is_ended_so_that_no_always_step_runs(site: Site) -> None:
    process = worker(site, site.job(*site.ask(), GITHUB_ACTOR="mallory"))
    assert process.wait(60) == -signal.SIGKILL
    time.sleep(0.3)
    assert not (site.bench.house.root / "always").exists()
    assert "'mallory' may not start runs" in log(site)
    assert f"(process {process.pid}) is ended" in log(site)


def test_a_hook_whose_program_cannot_start_ends_the_worker_too(site: Site) -> None:
    process = worker(site, site.job(*site.ask()), python="/no/such/python")
    assert process.wait(60) == -signal.SIGKILL
    assert not (site.bench.house.root / "always").exists()


def held_up(site: Site, **changes: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A worker whose hook waits for the event of its job, which the file's writer holds back."""
    fifo = site.bench.house.root / "event.json"
    os.mkfifo(fifo)
    process = worker(site, site.job(*site.ask(), **changes))
    wait_for(lambda: _below(process.pid, b"bridge") is not None, what="the hook")
    hook = _below(process.pid, b"bridge")
    assert hook is not None
    wait_for(lambda: _catches(hook, signal.SIGINT), what="the hook's own handlers")
    return process, fifo


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("whom", [b"hook.sh", b"bridge"], ids=["the shell", "the program"])
def test_an_interrupted_hook_ends_the_worker_at_once(site: Site, number: signal.Signals, whom: bytes) -> None:
    """GitHub's runner interrupts the shell that it started, and would go on to the steps with `always()`."""
    process, _ = held_up(site)
    interrupted = _below(process.pid, whom)
    assert interrupted is not None
    os.kill(interrupted, number)
    assert process.wait(10) == -signal.SIGKILL
    assert not (site.bench.house.root / "always").exists()
    assert "interrupted before the job was known" in log(site)


@pytest.mark.slow
def test_a_hook_whose_shell_is_killed_still_knows_the_worker(site: Site) -> None:
    process, fifo = held_up(site, GITHUB_ACTOR="mallory")
    shell = _below(process.pid, b"hook.sh")
    assert shell is not None
    os.kill(shell, signal.SIGKILL)
    wait_for((site.bench.house.root / "gone").exists, what="the worker's next step")
    fifo.write_text(json.dumps({"repository": {"default_branch": "main"}}))
    assert process.wait(30) == -signal.SIGKILL
    assert "'mallory' may not start runs" in log(site)


def test_only_a_process_that_is_still_the_worker_is_ended() -> None:
    mine = Ancestor(os.getpid(), 1, os.getuid(), "bash")
    end(os.getpid(), lambda _: mine)
    end(os.getpid(), lambda _: None)


@pytest.mark.slow
def test_the_workflow_file_is_judged_before_anything_of_the_request_comes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = site.world.commit("main", {PATH: SHIPPED.read_bytes() + b"#\n"})
    site.world.point("refs/heads/other", evil)
    commit, ref = site.ask()
    done = site.hook(site.job(commit, ref, GITHUB_WORKFLOW_SHA=evil), "--check", "--json")
    assert "is no file that this machine knows" in done.json["message"]
    (copy,) = (site.bench.state / "hook").glob("*.git")
    held = subprocess.run(["git", "-C", str(copy), "cat-file", "-e", commit], capture_output=True)
    assert held.returncode != 0


def test_a_hook_does_not_wait_for_ever_for_another_one(tmp_path: Path) -> None:
    path, times = tmp_path / "lock", iter((0.0, 60.0, 121.0))
    other = alone(path, clock=lambda: next(times), sleep=lambda _: None)
    with alone(path), pytest.raises(RequestRefused, match="has not ended for 120 s"), other:
        pass
    with alone(path):
        pass


@pytest.mark.slow
def test_the_probe_says_whether_the_repository_can_be_read(site: Site) -> None:
    done = site.hook({}, "--probe", "--json")
    assert done.code == 0, done.out + done.err
    assert (done.json["reads"], done.json["repository"]) == (True, "team/workload")
    site.bench.policy(POLICY.format(remote="/no/such/repository.git"))
    done = site.hook({}, "--probe", "--json")
    assert (done.code, done.json["reads"]) == (2, False)
    assert "/no/such/repository.git" in done.json["message"]
    assert "/no/such/repository.git" in site.hook({}, "--probe").out
    site.bench.policy(POLICY.format(remote=site.remote) + 'key = "/no/such/key"\n')
    assert "/no/such/key" in site.hook({}, "--probe", "--json").json["message"]
    site.bench.policy("")
    done = site.hook({}, "--probe", "--json")
    assert (done.code, done.json["repository"]) == (2, None)
    assert "names no repository" in done.json["message"]


def test_ssh_asks_nobody_and_knows_the_server_from_the_list_beside_the_key(tmp_path: Path) -> None:
    key = tmp_path / "a b" / "deploy_key"
    key.parent.mkdir()
    assert shlex.split(ssh_command(key))[-1] == "StrictHostKeyChecking=accept-new"
    (key.parent / "known_hosts").touch()
    words = shlex.split(ssh_command(key))
    assert words[:5] == ["ssh", "-F", "/dev/null", "-i", str(key)]
    assert "BatchMode=yes" in words
    assert words[-1] == f'UserKnownHostsFile="{key.parent}/known_hosts"'


@pytest.mark.slow
def test_variables_of_a_workflow_do_not_reach_the_hook(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(0)\n")
    (tmp_path / "git").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "git").chmod(0o755)
    hostile = {
        "PYTHONPATH": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "KAKEYA_CONFIG": str(tmp_path),
        "GIT_SSH_COMMAND": "touch /tmp/never",
        "LD_PRELOAD": "",
    }
    process = worker(site, {**site.job(*site.ask(), GITHUB_ACTOR="mallory"), **hostile})
    assert process.wait(60) == -signal.SIGKILL
    assert "'mallory' may not start runs" in log(site)


def test_no_process_but_a_worker_above_is_ended(site: Site) -> None:
    done = site.hook(site.job(*site.ask(), GITHUB_ACTOR="mallory"), "--json")
    assert done.code == 2
    assert done.json["worker"] is None
    assert "no process named Runner.Worker" in done.out


def _below(top: int, word: bytes) -> int | None:
    """The process below another one that has a word in its arguments, alone or at the end of a path."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if any(each.split(b"/")[-1] == word for each in words) and _is_below(int(folder.name), top):
                return int(folder.name)
        except OSError:
            continue
    return None


def _is_below(pid: int, top: int) -> bool:
    while pid > 1 and pid != top:
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2].split()[1])
        if pid == top:
            return True
    return False


def _catches(pid: int, number: int) -> bool:
    status = (Path("/proc") / str(pid) / "status").read_text()
    mask = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(mask >> (number - 1) & 1)
