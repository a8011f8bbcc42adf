"""The door to child processes: closed, capped, and always back in time."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from bridge.errors import MachineError
from bridge.proc import helper_environment, run_program, spawn, write_atomic
from tests.fixtures.repo import wait_for

PYTHON = [sys.executable, "-I", "-c"]


def test_output_exit_code_and_input_come_through() -> None:
    script = (
        "import sys; data = sys.stdin.buffer.read(); sys.stdout.buffer.write(data[::-1]);"
        " print('oops', file=sys.stderr); sys.exit(3)"
    )
    done = run_program([*PYTHON, script], input=b"abc", timeout_s=20)
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"cba", b"oops\n")
    assert not done.ok
    assert not done.timed_out


@pytest.mark.slow
def test_a_timeout_is_a_value_and_leaves_no_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import os, time; os.fork();"
        f"print(os.getpid(), file=open({str(pid_file)!r}, 'a'), flush=True); time.sleep(60)"
    )
    done = run_program([*PYTHON, script], timeout_s=1.5)
    assert done.timed_out
    assert done.exit_code == -signal.SIGTERM
    pids = [int(line) for line in pid_file.read_text().split()]
    assert len(pids) == 2
    wait_for(lambda: not any(_alive(pid) for pid in pids), 5, "the end of both")


def test_a_flood_is_cut_but_read_to_its_end() -> None:
    done = run_program([*PYTHON, "print('x' * 5_000_000)"], timeout_s=20, limit_bytes=1000)
    assert done.exit_code == 0
    assert done.stdout == b"x" * 1000


@pytest.mark.sampled(4, 1)
@pytest.mark.timeout(30)
@pytest.mark.parametrize("start", ["", "setsid "], ids=["of its group", "of a session of its own"])
@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", ">&- 2>&-"])
def test_helper_that_keeps_a_stream_open_is_not_waited_for(start: str, closed: str) -> None:
    done = run_program(
        ["sh", "-c", f"{start}sleep 60 {closed} & echo said; echo asked >&2; exit 3"], timeout_s=25
    )
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"said\n", b"asked\n")
    assert not done.timed_out


def test_input_of_several_parts_waits_for_answers() -> None:
    script = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)"
    done = run_program([*PYTHON, script], input=[b"a\n", b"b\nc\n"], timeout_s=20)
    assert done.stdout == b"A\nB\nC\n"
    silent = run_program(["true"], input=[b"a\n", b"b\n"], timeout_s=20)
    assert silent.ok


def test_guard_ends_a_program_with_its_reason() -> None:
    assert run_program(["sleep", "60"], timeout_s=30, guard=lambda: "too much").stopped == "too much"
    done = run_program(["true"], timeout_s=30, guard=lambda: None)
    assert (done.ok, done.stopped) == (True, None)


def test_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old", mode=0o640)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"old", 0o640)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_allowlisted_environment_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_TEST_TOKEN", "swordfish")
    done = run_program([*PYTHON, "import os; print(sorted(os.environ))"], timeout_s=20)
    assert b"KAKEYA_TEST_TOKEN" not in done.stdout
    assert helper_environment({"A": "b"})["A"] == "b"
    assert helper_environment()["LC_ALL"] == "C"


def test_no_descriptor_of_ours_is_inherited(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as handle:
        os.set_inheritable(handle.fileno(), True)
        script = f"import os; os.fstat({handle.fileno()})"
        done = run_program([*PYTHON, script], timeout_s=20)
    assert done.exit_code == 1
    assert b"Bad file descriptor" in done.stderr


@pytest.mark.parametrize("argv", [["/nonexistent/program"], [], ["echo", "a\0b"]])
def test_what_cannot_start_is_one_clear_error(argv: list[str]) -> None:
    with pytest.raises(MachineError, match="cannot start"):
        run_program(argv, timeout_s=5)


def test_nothing_reaches_a_shell(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    done = run_program([*PYTHON, "import sys; print(sys.argv[1])", f"$(touch {canary})"], timeout_s=20)
    assert done.stdout.startswith(b"$(touch")
    assert not canary.exists()


def test_a_spawned_child_writes_where_it_is_told_and_can_be_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as handle:
        child = spawn(
            [*PYTHON, "import time; print('here', flush=True); time.sleep(60)"],
            env=helper_environment(),
            output=handle.fileno(),
        )
    assert child.wait(0.05) is None
    deadline = time.monotonic() + 20
    while log.read_bytes() != b"here\n":
        assert time.monotonic() < deadline, "the child never wrote its line"
        time.sleep(0.01)
    child.kill()
    assert child.wait(1) == -9


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" not in status.read_text()
