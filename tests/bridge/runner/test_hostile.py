"""What anyone with push rights, or a job, leaves behind stops neither the runner nor the next request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bridge.bus.claims import MAX_LEASE_S
from bridge.protocol import refs
from bridge.runner.daemon import Daemon
from tests.bridge.runner.bench import Bench
from tests.bridge.runner.jobs import needs_sandbox


def store(bench: Bench, kind: str, data: str) -> str:
    """Write any object into the remote."""
    words = ("hash-object", "-t", kind, "--literally", "-w", "--stdin")
    return bench.house.git(*words, cwd=bench.house.remote, input=data)


def tree(bench: Bench, **files: str) -> str:
    """A tree of the remote: mode, kind and sha by name."""
    rows = "".join(f"{entry}\t{name}\n" for name, entry in files.items())
    return bench.house.git("mktree", "--missing", cwd=bench.house.remote, input=rows)


def commit(bench: Bench, root: str, *parents: str) -> str:
    who = "Mallory <m@example.org> 1700000000 +0000"
    lines = [f"tree {root}", *(f"parent {each}" for each in parents), f"author {who}", f"committer {who}"]
    return store(bench, "commit", "\n".join(lines) + "\n\nhello\n")


def main(bench: Bench) -> str:
    return bench.tip("refs/heads/main") or ""


def put(bench: Bench, sha: str) -> None:
    """As a request in the inbox and on its branch."""
    asked = bench.manifest()
    for ref in (refs.INBOX + asked.nonce, asked.result_ref):
        bench.point(ref, sha)


def huge_status(bench: Bench) -> None:
    blob = store(bench, "blob", "{" + " " * 5_000_000 + "}")
    claim = commit(bench, tree(bench, **{"status.json": f"100644 blob {blob}"}))
    bench.point(refs.CLAIMS + bench.ask().nonce, claim)


def refs_below_a_claim(bench: Bench) -> None:
    """The server can never make the claim itself."""
    asked = bench.ask()
    bench.point(f"{refs.CLAIMS + asked.nonce}/x", main(bench))
    bench.point(f"{refs.BRANCH_CLAIMS}{asked.nonce}/x", main(bench))


def more_files_than_any_memory_holds(bench: Bench) -> None:
    """Twelve objects that name ten thousand million files."""
    names = [f"n{number}" for number in range(10)]
    root = tree(bench, **dict.fromkeys(names, f"100644 blob {store(bench, 'blob', 'x')}"))
    for _ in range(9):
        root = tree(bench, **dict.fromkeys(names, f"040000 tree {root}"))
    put(bench, commit(bench, root, main(bench)))


def parent_in_the_wrong_place(bench: Bench) -> None:
    """A commit that git takes for a root, with an abbreviated parent where no parent belongs."""
    who = "Mallory <m@example.org> 1700000000 +0000"
    head = f"tree {tree(bench)}\nauthor {who}\ncommitter {who}\n"
    put(bench, store(bench, "commit", f"{head}parent 0123456789ab\n\nhello\n"))


ATTACKS = (
    more_files_than_any_memory_holds,
    huge_status,
    refs_below_a_claim,
    parent_in_the_wrong_place,
)


@pytest.mark.sampled(9, 1)
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_anyone_can_push_does_not_stop_others(bench: Bench, attack: Callable[[Bench], None]) -> None:
    attack(bench)
    asked, runner = bench.ask(), bench.runner()
    for _ in range(20):
        runner.serve(once=True, idle_timeout_s=0)
        if bench.has_said(asked.nonce, "published as"):
            break
    assert bench.log(asked.nonce) == "hello from test\n", bench.said
    assert not bench.has_said("a bug of kakeya-mac")


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("attempt", [pytest.param(10**4000, id="4,001 digits"), 1, 10**6])
def test_made_up_claim_holds_a_request_no_longer_than_a_lease(bench: Bench, attempt: int) -> None:
    asked, clock = bench.ask(), [0.0]
    status = {
        "schema_version": 1,
        "nonce": asked.nonce,
        "request_commit": bench.tip(asked.result_ref),
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
    blob = store(bench, "blob", digits)
    claim = commit(bench, tree(bench, **{"status.json": f"100644 blob {blob}"}))
    bench.point(refs.CLAIMS + asked.nonce, claim)
    runner = bench.runner(clock=lambda: clock[0])
    assert runner.serve(once=True, idle_timeout_s=0) == 0
    clock[0] += MAX_LEASE_S + 1
    assert runner.serve(once=True, idle_timeout_s=0) == 1
    assert bench.verdict(asked.nonce) in (("passed", "ok"), ("lost", "attempts"))


def len_of(number: int) -> int:
    """Decimal digits of a power of ten, which Python refuses to print beyond 4,300."""
    return 1 if number == 1 else 7 if number == 10**6 else 4001


def again(runner: Daemon) -> None:
    """End all pauses after failures."""
    with runner._store._transaction() as database:
        database.execute("UPDATE request SET not_before = NULL")


@pytest.mark.slow
def test_server_that_says_no_for_a_while_is_asked_again(bench: Bench) -> None:
    asked, runner = bench.ask(), bench.runner()
    hook = bench.hook("pre-receive", "echo read-only for maintenance; exit 1")
    for _ in range(6):
        assert runner.serve(once=True, idle_timeout_s=0) == 0
        again(runner)
    hook.unlink()
    assert runner.serve(once=True, idle_timeout_s=0) == 1
    assert bench.log(asked.nonce) == "hello from test\n"


@contextmanager
def raising(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> Iterator[None]:
    """Inside the block, calling the function of this name raises."""

    def fail(*_: object, **__: object) -> str:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(name, fail)
        yield


@pytest.mark.slow
def test_bug_of_the_runner_is_logged_with_its_place(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first, runner = bench.ask(), bench.runner()
    with raising(monkeypatch, "bridge.runner.admission.decide", ZeroDivisionError("seven")):
        assert runner.serve(once=True, idle_timeout_s=0) == 0
    assert bench.has_said(first.nonce, "ZeroDivisionError: seven at ", "test_hostile.py:")
    again(runner)
    assert runner.serve(once=True, idle_timeout_s=0) == 1
    assert bench.log(first.nonce) == "hello from test\n"


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
def test_what_a_job_leaves_is_removed(bench: Bench, script: str, verdict: tuple[str, str]) -> None:
    bench.install({"job": script})
    asked = bench.ask("job")
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == verdict
    assert list(bench.config_of().jobs.iterdir()) == []


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("trick", ["os.symlink('/etc/passwd', '../log')", "os.mkfifo('../log')", "pass"])
def test_log_is_what_was_printed(bench: Bench, trick: str) -> None:
    bench.install({"trick": f"import os\nprint('printed', flush=True)\n{trick}"})
    asked = bench.ask("trick")
    assert bench.serve_once() == 1
    assert bench.log(asked.nonce) == "printed\n"


@needs_sandbox
def test_job_reaches_nothing_of_any_runner_but_its_own_folders(bench: Bench) -> None:
    other = bench.config_of("other")
    script = f"""
        import os, pathlib
        for folder in ({str(bench.state)!r}, {str(bench.config)!r}):
            for path, _, files in os.walk(folder):
                print(*(os.path.join(path, name) for name in files), sep='\\n', end='')
        for path in (pathlib.Path({str(bench.state)!r}), pathlib.Path({str(bench.config)!r})):
            try:
                (path / 'mine').write_text('x')
            except OSError as error:
                print('refused', error.errno, flush=True)
        (pathlib.Path.cwd() / 'here').write_text('x')
        print('own folder', (pathlib.Path.cwd() / 'here').read_text())
    """
    bench.install({"look": script})
    asked = bench.ask("look")
    assert bench.serve_once() == 1
    assert other.key is not None
    log = bench.log(asked.nonce)
    assert "id_ed25519" not in log
    assert "look.toml" not in log
    assert log.endswith("own folder x\n")
    assert not (bench.state / "mine").exists()
    assert not (bench.config / "mine").exists()
