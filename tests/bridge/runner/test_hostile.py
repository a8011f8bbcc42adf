"""What anyone with push rights, or a job, leaves behind stops neither the runner nor the next request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bridge.bus.claims import MAX_LEASE_S
from bridge.protocol import refs
from bridge.runner.daemon import Daemon
from tests.bridge.runner.jobs import needs_sandbox
from tests.fixtures.runner import RunnerFixture


def store(runner: RunnerFixture, kind: str, data: str) -> str:
    """Write any object into the remote."""
    words = ("hash-object", "-t", kind, "--literally", "-w", "--stdin")
    return runner.repo.git(*words, cwd=runner.repo.remote, input=data)


def tree(runner: RunnerFixture, **files: str) -> str:
    """A tree of the remote: mode, kind and sha by name."""
    rows = "".join(f"{entry}\t{name}\n" for name, entry in files.items())
    return runner.repo.git("mktree", "--missing", cwd=runner.repo.remote, input=rows)


def commit(runner: RunnerFixture, root: str, *parents: str) -> str:
    who = "Mallory <m@example.org> 1700000000 +0000"
    lines = [f"tree {root}", *(f"parent {each}" for each in parents), f"author {who}", f"committer {who}"]
    return store(runner, "commit", "\n".join(lines) + "\n\nhello\n")


def main(runner: RunnerFixture) -> str:
    return runner.tip("refs/heads/main") or ""


def put(runner: RunnerFixture, sha: str) -> None:
    """As a request in the inbox and on its branch."""
    asked = runner.manifest()
    for ref in (refs.INBOX + asked.nonce, asked.result_ref):
        runner.point(ref, sha)


def huge_status(runner: RunnerFixture) -> None:
    blob = store(runner, "blob", "{" + " " * 5_000_000 + "}")
    claim = commit(runner, tree(runner, **{"status.json": f"100644 blob {blob}"}))
    runner.point(refs.CLAIMS + runner.ask().nonce, claim)


def refs_below_a_claim(runner: RunnerFixture) -> None:
    """The server can never make the claim itself."""
    asked = runner.ask()
    runner.point(f"{refs.CLAIMS + asked.nonce}/x", main(runner))
    runner.point(f"{refs.BRANCH_CLAIMS}{asked.nonce}/x", main(runner))


def more_files_than_any_memory_holds(runner: RunnerFixture) -> None:
    """Twelve objects that name ten thousand million files."""
    names = [f"n{number}" for number in range(10)]
    root = tree(runner, **dict.fromkeys(names, f"100644 blob {store(runner, 'blob', 'x')}"))
    for _ in range(9):
        root = tree(runner, **dict.fromkeys(names, f"040000 tree {root}"))
    put(runner, commit(runner, root, main(runner)))


def parent_in_the_wrong_place(runner: RunnerFixture) -> None:
    """A commit that git takes for a root, with an abbreviated parent where no parent belongs."""
    who = "Mallory <m@example.org> 1700000000 +0000"
    head = f"tree {tree(runner)}\nauthor {who}\ncommitter {who}\n"
    put(runner, store(runner, "commit", f"{head}parent 0123456789ab\n\nhello\n"))


ATTACKS = (
    more_files_than_any_memory_holds,
    huge_status,
    refs_below_a_claim,
    parent_in_the_wrong_place,
)


@pytest.mark.sampled(9, 1)
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_anyone_can_push_does_not_stop_others(
    runner: RunnerFixture, attack: Callable[[RunnerFixture], None]
) -> None:
    attack(runner)
    asked, daemon = runner.ask(), runner.daemon()
    for _ in range(20):
        daemon.serve(once=True, idle_timeout_s=0)
        if runner.has_said(asked.nonce, "published as"):
            break
    assert runner.log(asked.nonce) == "hello from test\n", runner.said
    assert not runner.has_said("a bug of kakeya-mac")


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("attempt", [pytest.param(10**4000, id="4,001 digits"), 1, 10**6])
def test_made_up_claim_holds_a_request_no_longer_than_a_lease(runner: RunnerFixture, attempt: int) -> None:
    asked, clock = runner.ask(), [0.0]
    status = {
        "schema_version": 1,
        "nonce": asked.nonce,
        "request_commit": runner.tip(asked.result_ref),
        "runner": "mallory",
        "runner_id": "f" * 16,
        "pid": 1,
        "unique": "0" * 16,
        "attempt": attempt,
        "beat": 0,
        "lease_s": 1e9,
        "session": "e" * 16,
        "updated_at": "2026-03-01T12:00:00Z",
        "phase": "running",
        "elapsed_s": 1.0,
    }
    digits = json.dumps({**status, "attempt": 0}).replace(
        '"attempt": 0', f'"attempt": 1{"0" * (len_of(attempt) - 1)}'
    )
    blob = store(runner, "blob", digits)
    claim = commit(runner, tree(runner, **{"status.json": f"100644 blob {blob}"}))
    runner.point(refs.CLAIMS + asked.nonce, claim)
    daemon = runner.daemon(clock=lambda: clock[0])
    assert daemon.serve(once=True, idle_timeout_s=0) == 0
    clock[0] += MAX_LEASE_S + 1
    assert daemon.serve(once=True, idle_timeout_s=0) == 1
    assert runner.verdict(asked.nonce) in (("passed", "ok"), ("lost", "attempts"))


def len_of(number: int) -> int:
    """Decimal digits of a power of ten, which Python refuses to print beyond 4,300."""
    return 1 if number == 1 else 7 if number == 10**6 else 4001


def again(daemon: Daemon) -> None:
    """End all pauses after failures."""
    with daemon._store._transaction() as database:
        database.execute("UPDATE request SET not_before = NULL")


@pytest.mark.slow
def test_server_that_says_no_for_a_while_is_asked_again(runner: RunnerFixture) -> None:
    asked, daemon = runner.ask(), runner.daemon()
    hook = runner.hook("pre-receive", "echo read-only for maintenance; exit 1")
    for _ in range(6):
        assert daemon.serve(once=True, idle_timeout_s=0) == 0
        again(daemon)
    hook.unlink()
    assert daemon.serve(once=True, idle_timeout_s=0) == 1
    assert runner.log(asked.nonce) == "hello from test\n"


@contextmanager
def raising(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> Iterator[None]:
    """Inside the block, calling the function of this name raises."""

    def fail(*_: object, **__: object) -> str:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(name, fail)
        yield


@pytest.mark.slow
def test_bug_of_the_runner_is_logged_with_its_place(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, daemon = runner.ask(), runner.daemon()
    with raising(monkeypatch, "bridge.runner.admission.decide", ZeroDivisionError("seven")):
        assert daemon.serve(once=True, idle_timeout_s=0) == 0
    assert runner.has_said(first.nonce, "ZeroDivisionError: seven at ", "test_hostile.py:")
    again(daemon)
    assert daemon.serve(once=True, idle_timeout_s=0) == 1
    assert runner.log(first.nonce) == "hello from test\n"


DEEP = """
import os
os.chdir('..')
for _ in range(1000):  # a job ends at 400, or soon after
    os.mkdir('d' * 50)
    os.chdir('d' * 50)
"""
PLANT = """
import os
folder = os.path.dirname(os.getcwd())
try:
    os.mkdir('../../planted')
    os.rename(folder, os.path.join(os.path.dirname(folder), 'moved'))
except OSError:  # where the machine lets it write nowhere else
    pass
print('tried')
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        pytest.param(PLANT, ("passed", "ok"), id="files elsewhere"),
        pytest.param(DEEP, ("failed", "resource_limit"), id="a deep tree"),
    ],
)
def test_what_a_job_leaves_is_removed(runner: RunnerFixture, script: str, verdict: tuple[str, str]) -> None:
    runner.install({"job": script})
    asked = runner.ask("job")
    assert runner.serve_once() == 1
    assert runner.verdict(asked.nonce) == verdict
    assert list(runner.config_of().jobs.iterdir()) == []


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("trick", ["os.symlink('/etc/passwd', '../log')", "os.mkfifo('../log')", "pass"])
def test_log_is_what_was_printed(runner: RunnerFixture, trick: str) -> None:
    runner.install({"trick": f"import os\nprint('printed', flush=True)\n{trick}"})
    asked = runner.ask("trick")
    assert runner.serve_once() == 1
    assert runner.log(asked.nonce) == "printed\n"


@needs_sandbox
def test_job_reaches_nothing_of_any_runner_but_its_own_folders(runner: RunnerFixture) -> None:
    other = runner.config_of("other")
    script = f"""
        import os, pathlib
        for folder in ({str(runner.state)!r}, {str(runner.config)!r}):
            for path, _, files in os.walk(folder):
                print(*(os.path.join(path, name) for name in files), sep='\\n', end='')
        for path in (pathlib.Path({str(runner.state)!r}), pathlib.Path({str(runner.config)!r})):
            try:
                (path / 'mine').write_text('x')
            except OSError as error:
                print('refused', error.errno, flush=True)
        (pathlib.Path.cwd() / 'here').write_text('x')
        print('own folder', (pathlib.Path.cwd() / 'here').read_text())
    """
    runner.install({"look": script})
    asked = runner.ask("look")
    assert runner.serve_once() == 1
    assert other.key is not None
    log = runner.log(asked.nonce)
    assert "id_ed25519" not in log
    assert "look.toml" not in log
    assert log.endswith("own folder x\n")
    assert not (runner.state / "mine").exists()
    assert not (runner.config / "mine").exists()
