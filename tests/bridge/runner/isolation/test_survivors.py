"""Nothing that a job started outlives it, whatever it does and whoever is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from bridge.errors import MachineError
from bridge.runner.child import Supervised
from bridge.runner.isolation import namespaces, processes
from tests.bridge.runner.jobs import Jobs, as_permitted, marked
from tests.houses import wait_for

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="layers of Linux")


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


SURVIVORS = {
    "session": "Popen(ARGV, start_new_session=True)",
    "double-fork": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(ARGV[0], ARGV)
    os._exit(0)
os.wait()
""",
    "orphans-of-orphans": """
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        Popen(ARGV, start_new_session=True)
        os._exit(0)
    os.wait()
""",
    "deaf": """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
Popen(ARGV, start_new_session=True)
""",
    "never-the-same-processes": """
HOP = "hop() { [ $1 -gt 0 ] && hop $(($1 - 1)) & }; hop 1000000"
for _ in range(12):
    Popen(["sh", "-c", HOP], start_new_session=True)
Popen(ARGV, start_new_session=True)
time.sleep(0.3)
""",
}


@linux
@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize("level", namespaces.LEVELS)
@pytest.mark.parametrize("way", SURVIVORS.values(), ids=SURVIVORS)
def test_nothing_it_started_outlives_it(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, level: str, way: str
) -> None:
    as_permitted(monkeypatch, level=level)
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    argv = [sys.executable, "-I", "-c", "import time; time.sleep(60)", mark]
    head = f"import os, signal, time\nfrom subprocess import Popen\nARGV = {argv!r}\n"
    ended = jobs.run(f"{head}{way}\nprint('started')")
    assert ended.exit_code == 0, jobs.log.read_text()
    assert ended.survivors == 0
    assert ended.seconds < 15, "nothing ended by itself"
    assert marked(mark) == []
    assert jobs.enforced.tree == ("process namespace" if level == "full" else "adopted")


@linux
@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("victim", ["guard", "keeper"])
@pytest.mark.parametrize("level", namespaces.LEVELS)
def test_whoever_of_the_supervisors_is_killed_the_job_ends_whole(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, level: str, victim: str
) -> None:
    as_permitted(monkeypatch, level=level)
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    argv = [sys.executable, "-I", "-c", "import time; time.sleep(60)", mark]
    script = f"from subprocess import Popen\nPopen({argv!r}, start_new_session=True).wait()"
    standby = jobs.standby(keep=[Path(sys.prefix)])

    def kill(_: object = None) -> bool:
        if not marked(mark):
            return False
        guard = standby._process.pid
        [keeper] = [each.pid for each in processes.from_proc() if each.parent == guard]
        os.kill({"guard": guard, "keeper": keeper}[victim], signal.SIGKILL)
        return False

    with Supervised(standby) as supervised, jobs.log.open("wb", 0) as log:
        with pytest.raises(MachineError, match="supervisor died"):
            supervised.run(jobs.order(script), log, on_line=jobs.lines.append, stop=kill)
        wait_for(lambda: not marked(mark), 10, "the end of what the job started")
