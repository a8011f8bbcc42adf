"""A supervised job: one a machine, closed in, always ended in time, and nothing of it left behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from bridge.errors import MachineError
from bridge.runner.child import MachineBusy, Supervisor
from bridge.runner.sandbox import Sandbox
from tests.bridge.runner.jobs import EITHER, UNSANDBOXED, Jobs, marked
from tests.fixtures.repo import wait_for


@pytest.fixture(params=EITHER)
def jobs(tmp_path: Path, request: pytest.FixtureRequest) -> Jobs:
    """Jobs in the sandbox, and without one."""
    sandbox: Sandbox = request.param
    return Jobs(tmp_path, sandbox)


def test_exit_code_output_and_lines_come_back(jobs: Jobs) -> None:
    ended = jobs.run(
        "import sys; print('one'); print('two', file=sys.stderr); print('last', end=''); sys.exit(7)"
    )
    assert ended.exit_code == 7
    assert (ended.timed_out, ended.stopped, ended.flooded, ended.survivors) == (False, False, False, 0)
    assert sorted(jobs.lines) == ["last", "one", "two"]
    assert len(jobs.log.read_bytes()) == len("one\ntwo\nlast")


def test_a_program_that_does_not_exist_is_an_exit_code(jobs: Jobs) -> None:
    assert jobs.run("", argv=("/nonexistent/program",)).exit_code in (1, 127)  # 1 is bubblewrap's
    assert "/nonexistent/program" in jobs.log.read_text()


def test_the_child_has_no_input_no_descriptor_and_only_its_environment(jobs: Jobs) -> None:
    script = """
        import json, os, sys
        print(json.dumps({
            "stdin": sys.stdin.read(),
            "fds": [fd for fd in range(3, 200) if os.path.exists(f"/dev/fd/{fd}") and os.get_inheritable(fd)],
            "env": sorted(set(os.environ) - {"LC_CTYPE", "PWD"}),
            "cwd": os.getcwd(),
            "apart": os.getsid(0) != int(sys.argv[1]),
        }))
    """
    jobs.run(script, argv=(sys.executable, "-I", "-c", textwrap.dedent(script), str(os.getsid(0))))
    seen = json.loads(jobs.log.read_text())
    assert seen == {"stdin": "", "fds": [], "env": ["HOME", "PATH"], "cwd": str(jobs.folder), "apart": True}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="lists descriptors")
def test_child_inherits_no_pipe_of_its_supervisor_at_any_file_limit(jobs: Jobs) -> None:
    ours = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    jobs.run("import os; print(*os.listdir('/proc/self/fd'))", limits={"NOFILE": 9})
    for descriptor in ours:
        os.close(descriptor)
    assert jobs.lines == ["0 1 2 3"], "the last one is the listing's own"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="opens the other end of a pipe")
def test_process_that_outlives_its_job_and_prints_does_not_block(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.runner.child._REST_S", 0.5)
    supervisor = Supervisor(jobs.lock)
    other_end = os.open(f"/proc/self/fd/{supervisor._output}", os.O_WRONLY | os.O_NONBLOCK)
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.01):
            os.write(other_end, b"still here\n")

    survivor = threading.Thread(target=go_on)
    with supervisor, jobs.log.open("wb", 0) as log:
        survivor.start()
        until = time.monotonic() + 20
        ended = supervisor.run(
            jobs.command("pass"),
            log,
            on_line=lambda _: over.set() if time.monotonic() > until else None,
            stop=lambda: False,
        )
        kept_waiting = over.is_set()
        over.set()
        survivor.join()
    os.close(other_end)
    assert not kept_waiting
    assert ended.exit_code == 0


@pytest.mark.sampled(2, 1)
def test_only_one_job_runs_at_a_time_and_the_lock_is_free_afterwards(jobs: Jobs) -> None:
    with Supervisor(jobs.lock), pytest.raises(MachineBusy, match="another job runs"):
        Supervisor(jobs.lock)
    with Supervisor(jobs.lock):
        pass


@pytest.mark.slow
def test_no_descriptor_left_is_one_clear_error_and_frees_the_lock(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe", refused)
        with pytest.raises(MachineError, match="Too many open files"):
            Supervisor(jobs.lock)
    with Supervisor(jobs.lock) as supervisor:
        supervisor.await_start()


@pytest.mark.slow
def test_a_timeout_ends_a_job_that_ignores_being_asked(jobs: Jobs) -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(60)"
    ended = jobs.run(script, timeout_s=1, grace_s=0.5)
    assert ended.timed_out
    assert ended.exit_code == -signal.SIGKILL


def test_a_stopped_job_may_tidy_up_first(jobs: Jobs) -> None:
    script = """
        import os, signal, time
        # The handler may interrupt print itself, which cannot be entered twice: write and leave below it.
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'tidy\\n') and os._exit(5))
        print('up', flush=True)
        time.sleep(60)
    """
    ended = jobs.run(script, stop=lambda: "up" in jobs.lines, grace_s=10)
    assert ended.stopped
    assert ended.exit_code == 5
    assert jobs.lines == ["up", "tidy"]


def test_a_flood_of_output_is_cut_and_ends_the_job(jobs: Jobs) -> None:
    ended = jobs.run("while True: print('x' * 1000)", max_output=100_000)
    assert ended.flooded
    assert not ended.stopped
    assert jobs.log.stat().st_size == 100_000


def test_output_that_just_fits_is_not_too_much(jobs: Jobs) -> None:
    ended = jobs.run("print('x' * 999)", max_output=1000)
    assert (ended.exit_code, ended.flooded) == (0, False)


def test_one_endless_line_costs_no_memory(jobs: Jobs) -> None:
    ended = jobs.run("import sys; [sys.stdout.write('y' * 1000) for _ in range(3000)]")
    assert ended.exit_code == 0
    assert jobs.lines == ["y" * 4096]


def test_limits_are_in_force(jobs: Jobs) -> None:
    script = """
        import resource
        print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
        open("big", "wb").write(b"x" * 9999)
    """
    ended = jobs.run(script, limits={"NOFILE": 77, "FSIZE": 1000, "CORE": 0})
    assert jobs.lines[0] == "(77, 77)"
    assert ended.exit_code != 0
    assert (jobs.folder / "big").stat().st_size == 1000


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("victim", ["runner", "supervisor"])
def test_killed_runner_or_supervisor_leaves_no_process_and_no_lock(jobs: Jobs, victim: str) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    job = (
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'],"
        " start_new_session=True);"
        "time.sleep(60)"
    )
    runner = f"""
        import sys
        from pathlib import Path
        from bridge.runner.child import Supervisor
        from tests.bridge.runner.jobs import EITHER, Jobs, SANDBOX, UNSANDBOXED
        jobs = Jobs(Path({str(jobs.root)!r}), {"UNSANDBOXED" if jobs.sandbox is UNSANDBOXED else "SANDBOX"})
        with Supervisor(jobs.lock) as supervisor:
            print(supervisor.pid, flush=True)
            command = jobs.command({job!r}, timeout_s=60)
            supervisor.run(command, jobs.log.open("wb"), on_line=print, stop=lambda: False)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(runner)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    supervisor = int(process.stdout.readline())
    wait_for(lambda: bool(marked(mark)), what="the job's child")
    with pytest.raises(MachineBusy):
        Supervisor(jobs.lock)
    os.kill(process.pid if victim == "runner" else supervisor, signal.SIGKILL)
    wait_for(lambda: not marked(mark), seconds=10, what="the end of the job's tree")

    def free() -> bool:
        try:
            Supervisor(jobs.lock).close()
        except MachineBusy:
            return False
        return True

    wait_for(free, seconds=10, what="a free lock")
    process.wait(20)
    process.stdout.close()
