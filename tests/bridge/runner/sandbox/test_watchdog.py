"""What a job takes is measured, and one that takes too much ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bridge import presets
from bridge.protocol.result import Reason
from bridge.runner.child import JobExit
from bridge.runner.job import of_exit
from bridge.runner.policy import JobLimits
from bridge.runner.sandbox import resource_limits
from bridge.runner.supervisor import Breach, Watchdog
from tests.bridge.runner.jobs import EITHER, UNSANDBOXED, Jobs, linux

MIB = 1 << 20


@pytest.fixture(params=EITHER)
def jobs(tmp_path: Path, request: pytest.FixtureRequest) -> Jobs:
    """Jobs in the sandbox, and without one."""
    return Jobs(tmp_path, request.param)


HOG = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        mine = bytearray(os.urandom(1)) * (60 << 20)
        time.sleep(60)
time.sleep(60)
"""
BREACHES = {
    "memory": (HOG, {"memory": 150 * MIB}),
    "scratch": (
        "import time; open('/dev/shm/big', 'wb').write(bytes(80 << 20)); time.sleep(60)",
        {"disk": 60 * MIB},
    ),
    "processes": (
        "import os, time\nfor _ in range(30):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)",
        {"processes": 20},
    ),
    "threads": (
        "import threading, time\nfor _ in range(30): threading.Thread(target=time.sleep, args=(60,)).start()",
        {"processes": 20},
    ),
    "disk": (
        "import time\nfor n in range(5): open(f'part{n}', 'wb').write(bytes(4 << 20))\ntime.sleep(60)",
        {"disk": 10 * MIB},
    ),
    "disk-without-a-name": (
        "import os, time\nfile = open('gone', 'wb'); os.unlink('gone'); file.write(bytes(20 << 20))\n"
        "file.flush(); time.sleep(60)",
        {"disk": 10 * MIB},
    ),
    "files": ("import time\nfor n in range(200): open(str(n), 'w')\ntime.sleep(60)", {"files": 100}),
    "files-of-a-short-job": ("for n in range(200): open(str(n), 'w')", {"files": 100}),
    "closed-folder": (
        "import os, time\nos.mkdir('in')\nfor n in range(200): open(f'in/{n}', 'w')\n"
        "os.chmod('in', 0); time.sleep(60)",
        {"files": 100},
    ),
    "depth": (
        "import os\nfor _ in range(600): os.mkdir('d'); os.chdir('d')",
        {"files": 10_000},
    ),
}


@linux
@pytest.mark.sampled(12, 1)
@pytest.mark.parametrize(("script", "allowed"), BREACHES.values(), ids=BREACHES)
def test_a_job_that_takes_too_much_ends_and_is_told_what(
    jobs: Jobs, script: str, allowed: dict[str, int]
) -> None:
    if "/dev/shm" in script and jobs.sandbox is UNSANDBOXED:
        pytest.skip("there /dev/shm is the machine's own")
    ended = jobs.run(script, allowed=allowed)
    assert ended.breach is not None, jobs.log.read_text()
    assert ended.breach.what in (*allowed, "depth")
    assert ended.breach.used > ended.breach.allowed
    assert ended.survivors == 0


@pytest.mark.slow
@linux
def test_memory_that_processes_share_counts_once(jobs: Jobs) -> None:
    script = """
        import os, time
        shared = bytearray(b"x") * (60 << 20)
        for _ in range(4):
            if os.fork() == 0:
                time.sleep(1.5)
                os._exit(0)
        time.sleep(1.5)
    """
    ended = jobs.run(script, allowed={"memory": 150 * MIB})
    assert ended.breach is None
    assert ended.exit_code == 0


def test_job_may_fill_half_of_the_disk_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [10_000]
    monkeypatch.setattr(Watchdog, "_left", lambda _: left[0])
    usual, full = (Watchdog({"left": least}, str(tmp_path)) for least in (100, 99_000))
    left[0] = 4_999
    assert (usual.look(), full.look()) == (None, Breach("left", 4_999, 5_000))
    left[0] = 99
    assert usual.look() == Breach("left", 99, 100)


def test_a_folder_is_measured_without_following_links(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "big").write_bytes(bytes(MIB))
    (folder / "deep" / "big").write_bytes(bytes(MIB))
    os.link(folder / "deep" / "big", folder / "again")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to(folder)

    def measured(**allowed: int) -> Breach | None:
        return Watchdog(allowed, str(folder)).look_at_folders()

    assert measured(files=6, disk=MIB + MIB // 2) is None
    assert measured(files=5) == Breach("files", 6, 5)
    assert measured(disk=MIB - 1) is not None


@pytest.mark.slow
def test_folders_are_measured_less_often_the_longer_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looked = [0.0], []

    def slow(*_: object) -> None:
        looked.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(Watchdog, "look_at_folders", slow)
    monkeypatch.setattr("bridge.runner.supervisor.time.monotonic", lambda: now[0])
    watchdog = Watchdog({"files": 1}, str(tmp_path))
    while now[0] < 100.0:
        assert watchdog.look() is None
        now[0] += 0.5
    assert looked == [1.0, 43.0, 85.0]


@linux
def test_process_limit_adds_to_those_of_the_user() -> None:
    limits = JobLimits(processes=10)
    assert resource_limits(limits)["NPROC"] > 10, "this very process is one of them"


@pytest.mark.parametrize(
    ("breach", "words"),
    [
        (Breach("memory", 6 << 30, 4 << 30), "more memory than it may (6 GiB, at most 4 GiB) and was killed"),
        (Breach("left", 1 << 29, 1 << 30), "left too little of the disk (0.5 GiB)"),
        (Breach("files", 11, 10), "more files than it may (11, at most 10)"),
    ],
)
def test_what_was_exceeded_is_said_with_its_figures(breach: Breach, words: str) -> None:
    verdict = of_exit(presets.load_all(None)["probe"], JobExit(-9, 1.0, False, False, False, 0, breach))
    assert verdict is not None
    assert (verdict.reason, words in verdict.message) == (Reason.RESOURCE_LIMIT, True)


def test_a_file_that_grew_too_big_has_its_own_words() -> None:
    verdict = of_exit(presets.load_all(None)["probe"], JobExit(-signal.SIGXFSZ, 1, False, False, False, 0))
    assert verdict is not None
    assert (verdict.reason, "bigger file" in verdict.message) == (Reason.RESOURCE_LIMIT, True)
