"""What somebody with push rights, or a job, leaves behind stops neither the runner nor the next request."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.errors import BusError
from bridge.protocol import refs
from bridge.runner.isolation import namespaces
from bridge.runner.serve import Runner
from tests.bridge.runner.bench import Bench

LEVEL = namespaces.best_level(network=False)
needs_namespaces = pytest.mark.skipif(LEVEL != "full", reason="this machine permits no process namespace")
FIRST = "00010101t000000z000000000000"  # sorts before every honest request


def program(bench: Bench, name: str, script: str) -> None:
    bench.install({name: script, "echo": "print('hello from', arg)"})


def served(bench: Bench) -> str:
    """The log of one more honest request, in its turn, served by a runner that just started."""
    asked = bench.ask()
    runner = bench.runner()
    while not any(f"{asked.nonce}: passed" in line for line in bench.said):
        assert runner.serve(once=True, idle_timeout_s=20), bench.said
    assert bench.answer(asked.nonce).result.verdict.status == "passed"
    return bench.log(asked.nonce)


def squat_with_a_huge_status(bench: Bench) -> None:
    git = Git(bench.house.remote)
    asked = bench.ask()
    blob = git.write_blob(b"{" + b" " * 5_000_000 + b"}")
    commit = git.commit_tree(git.write_tree([Entry("100644", "blob", blob, "status.json")]), [], "squat\n")
    bench.house.git("update-ref", refs.claim_ref(asked.nonce), commit, cwd=bench.house.remote)


def name_a_ref_in_no_encoding(bench: Bench) -> None:
    main = bench.house.git("rev-parse", "main")
    for folder in (refs.INBOX, refs.CLAIMS, "refs/heads/mac-bridge/"):
        ref = bench.house.remote / os.fsdecode(folder.encode() + b"\xff\xfe\xe2\x80\xa8x")
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(main + "\n")


def put_anything_into_the_inbox(bench: Bench) -> None:
    git = Git(bench.house.remote)
    things = {
        "blob": git.write_blob(b"x"),
        "tree": git.write_tree([]),
        "orphan": git.commit_tree(git.write_tree([]), [], "nothing\n"),
    }
    for number, thing in enumerate(things.values()):
        ref = f"{refs.INBOX}{FIRST[:-1]}{number}"
        bench.house.git("update-ref", ref, thing, cwd=bench.house.remote)


def claim_below_a_claim(bench: Bench) -> None:
    """A ref below the claim's name: the server can never make the claim itself."""
    asked = bench.ask()
    main = bench.house.git("rev-parse", "main")
    bench.house.git("update-ref", f"{refs.claim_ref(asked.nonce)}/x", main, cwd=bench.house.remote)
    bench.house.git("update-ref", f"{refs.BRANCH_CLAIMS}{asked.nonce}/x", main, cwd=bench.house.remote)


def name_more_files_than_any_memory_holds(bench: Bench) -> None:
    """Twelve objects that name ten thousand million files."""
    git = Git(bench.house.remote)
    tree = git.write_tree([Entry("100644", "blob", git.write_blob(b"x"), str(n)) for n in range(10)])
    for _ in range(9):
        tree = git.write_tree([Entry("040000", "tree", tree, str(n)) for n in range(10)])
    main = bench.house.git("rev-parse", "main")
    commit = git.commit_tree(tree, [main], "bomb\n")
    asked = bench.manifest()
    for ref in (refs.inbox_ref(asked.nonce), asked.result_ref):
        bench.house.git("update-ref", ref, commit, cwd=bench.house.remote)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(
    "attack",
    [
        name_more_files_than_any_memory_holds,
        squat_with_a_huge_status,
        name_a_ref_in_no_encoding,
        put_anything_into_the_inbox,
        claim_below_a_claim,
    ],
)
def test_what_anyone_can_push_does_not_keep_others_from_being_served(
    bench: Bench, attack: Callable[[Bench], None]
) -> None:
    attack(bench)
    asked = bench.ask()
    runner = bench.runner()
    for _ in range(20):
        runner.serve(once=True, idle_timeout_s=0)
        if any(f"{asked.nonce}: passed" in line for line in bench.said):
            break
    assert bench.log(asked.nonce) == "hello from test\n", bench.said


class Waiting:
    """A runner of the bench that need not wait: its clock is turned by hand."""

    def __init__(self, bench: Bench) -> None:
        self.now = 0.0
        self._runner = Runner(bench.station(), say=bench.said.append, clock=lambda: self.now)

    def serve(self) -> int:
        """Serve what is there now; returns how many requests that were."""
        return self._runner.serve(once=True, idle_timeout_s=0)


@contextmanager
def raising(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> Iterator[None]:
    """Inside the block, calling the function of this name raises."""

    def fail(*_: object, **__: object) -> str:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(name, fail)
        yield


@pytest.mark.slow
def test_a_server_that_says_no_for_a_while_is_asked_again(bench: Bench) -> None:
    asked = bench.ask()
    hook = bench.house.remote / "hooks" / "pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho read-only for maintenance; exit 1\n")
    hook.chmod(0o755)
    runner = Waiting(bench)
    for _ in range(6):
        assert runner.serve() == 0
        runner.now += 100.0
    hook.unlink()
    assert runner.serve() == 1
    assert bench.log(asked.nonce) == "hello from test\n"


@pytest.mark.slow
def test_a_result_that_a_full_disk_kept_back_is_published_afterwards(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = bench.ask()
    runner = Waiting(bench)
    full = BusError("git hash-object failed: No space left on device")
    with raising(monkeypatch, "bridge.bus.publish._write_folder", full):
        for _ in range(5):
            runner.serve()
            runner.now += 100.0
    runner.serve()
    answer = bench.answer(asked.nonce)
    assert answer.result.attempt == 1
    assert answer.files["log.txt"] == b"hello from test\n"
    assert not list(bench.station().folder.glob("spool-*/*"))


def test_a_bug_while_serving_is_named_with_its_place_and_the_runner_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.ask()
    runner = Waiting(bench)
    with raising(monkeypatch, "bridge.runner.taking.examine", ZeroDivisionError("seven")):
        assert runner.serve() == 0
    [said] = [line for line in bench.said if first.nonce in line]
    assert "ZeroDivisionError: seven at " in said
    assert "test_hostile.py:" in said
    assert "please report it" in said
    runner.now += 10.0
    assert runner.serve() == 1
    assert bench.log(first.nonce) == "hello from test\n"


def half_removed(entry: Path) -> None:
    (entry / "entry.json").unlink()


def for_main(entry: Path) -> None:
    meta = json.loads((entry / "entry.json").read_text())
    (entry / "entry.json").write_text(json.dumps({**meta, "result_ref": "refs/heads/main"}))


def of_no_commit(entry: Path) -> None:
    meta = json.loads((entry / "entry.json").read_text())
    (entry / "entry.json").write_text(json.dumps({**meta, "request_commit": "12" * 20}))


def not_a_result(entry: Path) -> None:
    (entry / "result.json").write_text('{"nonce": 1e999}')


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("damage", [half_removed, for_main, of_no_commit, not_a_result])
def test_a_damaged_result_in_the_spool_is_set_aside(bench: Bench, damage: Callable[[Path], None]) -> None:
    bench.ask()
    (bench.house.remote / "hooks").mkdir(exist_ok=True)
    hook = bench.house.remote / "hooks" / "update"
    hook.write_text('#!/bin/sh\ncase "$1" in *claims*) exit 0;; *) exit 1;; esac\n')
    hook.chmod(0o755)
    bench.serve_once()
    [spool] = bench.station().folder.glob("spool-*")
    [entry] = spool.glob("[0-9]*")
    damage(entry)
    hook.unlink()
    main = bench.house.git("rev-parse", "main", cwd=bench.house.remote)
    assert served(bench) == "hello from test\n"
    assert bench.house.git("rev-parse", "main", cwd=bench.house.remote) == main
    assert not list(spool.glob("[0-9]*"))
    if damage is not of_no_commit:  # that one was published, as a result that fits no request
        assert list(spool.glob("unusable-*"))


DEEP = """
import os
os.chdir('..')
for _ in range(1000):  # a job ends at 400, or soon after
    os.mkdir('d' * 50)
    os.chdir('d' * 50)
"""


@pytest.mark.slow
def test_a_tree_too_deep_for_any_path_is_cleaned_up(bench: Bench) -> None:
    program(bench, "deep", DEEP)
    asked = bench.ask("deep")
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == ("failed", "resource_limit")
    assert list(bench.station().jobs.iterdir()) == []
    assert served(bench) == "hello from test\n"


def test_what_a_job_puts_beside_its_room_is_removed_too(bench: Bench) -> None:
    script = """
        import os
        room = os.path.dirname(os.getcwd())
        try:
            os.mkdir('../../planted')
            os.rename(room, os.path.join(os.path.dirname(room), 'moved'))
        except OSError:  # where the machine lets it write nowhere else
            pass
        print('tried')
    """
    program(bench, "plant", script)
    asked = bench.ask("plant")
    assert bench.serve_once() == 1
    assert bench.log(asked.nonce) == "tried\n"
    assert list(bench.station().jobs.iterdir()) == []


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    "trick",
    ["os.symlink('/etc/passwd', '../log')", "os.mkfifo('../log')", "os.mkdir('../log')", "pass"],
)
def test_the_log_is_what_was_printed_whatever_the_job_puts_in_its_place(bench: Bench, trick: str) -> None:
    program(bench, "trick", f"import os\nprint('printed', flush=True)\n{trick}")
    asked = bench.ask("trick")
    assert bench.serve_once() == 1
    assert bench.log(asked.nonce) == "printed\n"


@needs_namespaces
def test_a_job_reaches_nothing_of_any_runner_but_its_own_folders(bench: Bench) -> None:
    other = bench.station("other")
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
    program(bench, "look", script)
    asked = bench.ask("look")
    assert bench.serve_once() == 1
    assert other.key is not None
    log = bench.log(asked.nonce)
    assert "id_ed25519" not in log
    assert "look.toml" not in log
    assert log.count("refused 30") == 2
    assert log.endswith("own folder x\n")


@pytest.mark.slow
def test_a_mirror_whose_configuration_was_changed_is_made_again(bench: Bench, tmp_path: Path) -> None:
    served(bench)
    [mirror] = bench.station().folder.glob("mirror-*.git")
    canary = tmp_path / "canary"
    script = tmp_path / "evil"
    script.write_text(f"#!/bin/sh\ntouch {canary}\n")
    script.chmod(0o755)
    subprocess.run(
        ["git", "-C", str(mirror), "config", f"url.ext::{script} .insteadOf", str(bench.house.remote)],
        check=True,
    )
    subprocess.run(["git", "-C", str(mirror), "config", "protocol.ext.allow", "always"], check=True)
    assert served(bench) == "hello from test\n"
    assert not canary.exists()
