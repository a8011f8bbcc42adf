"""What a job takes is measured, and one that takes too much ends."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from bridge import presets
from bridge.protocol.result import Reason
from bridge.runner.child import Ended
from bridge.runner.isolation import processes
from bridge.runner.isolation.enforced import Enforced
from bridge.runner.isolation.processes import Process
from bridge.runner.isolation.room import resource_limits
from bridge.runner.isolation.watchdog import Breach, Used, Watchdog, measure
from bridge.runner.limits import Limits
from bridge.runner.verdict import of_ending
from tests.bridge.runner.jobs import Jobs, as_permitted

MIB = 1 << 20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def measured(folder: Path, most_files: int = 1000) -> Used:
    handle = os.open(folder, os.O_RDONLY)
    try:
        return measure(handle, most_files=most_files)
    finally:
        os.close(handle)


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
    "scratch-is-memory": (
        "import time; open('/dev/shm/big', 'wb').write(bytes(80 << 20)); time.sleep(60)",
        {"memory": 60 * MIB},
    ),
    "shared-and-let-go": (
        "import mmap, os, time\nheld = mmap.mmap(-1, 160 << 20)\nfor part in range(4):\n"
        "    if os.fork() == 0:\n        held[part * 40 << 20 : (part + 1) * 40 << 20] = bytes(40 << 20)\n"
        "        os._exit(0)\n    os.wait()\ntime.sleep(60)",
        {"memory": 130 * MIB},
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
@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize(("script", "allowed"), BREACHES.values(), ids=BREACHES)
def test_a_job_that_takes_too_much_ends_and_is_told_what(
    jobs: Jobs, script: str, allowed: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "/dev/shm" in script:
        as_permitted(monkeypatch, level="full")
    ended = jobs.run(script, allowed=allowed)
    assert ended.breach is not None, jobs.log.read_text()
    assert ended.breach.what in (*allowed, "depth")
    assert ended.breach.used > ended.breach.allowed
    assert ended.seconds < 30
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


@pytest.mark.slow
@linux
def test_memory_that_is_a_file_and_mapped_counts_once(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    as_permitted(monkeypatch, level="full")
    script = """
        import mmap, time
        with open("/dev/shm/x", "w+b") as file:
            file.truncate(80 << 20)
            shared = mmap.mmap(file.fileno(), 0)
        shared[:] = bytes(b"x") * (80 << 20)
        time.sleep(1)
    """
    # With the string that fills it, 160 MiB for a moment.
    assert jobs.run(script, allowed={"memory": 200 * MIB}).breach is None


def test_a_job_ends_before_the_disk_is_full_and_may_fill_half_of_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [10_000]
    monkeypatch.setattr(Watchdog, "_left", lambda _: left[0])
    usual, full = (Watchdog({"left": least}, str(tmp_path), scratch=lambda: 0) for least in (100, 99_000))
    left[0] = 4_999
    assert (usual.look(), full.look()) == (None, Breach("left", 4_999, 5_000))
    left[0] = 99
    assert usual.look() == Breach("left", 99, 100)


@pytest.mark.slow
@linux
def test_a_job_within_its_limits_is_left_alone(jobs: Jobs) -> None:
    allowed = {"memory": 500 * MIB, "disk": 50 * MIB, "files": 100, "processes": 50}
    ended = jobs.run("import time; open('x', 'wb').write(bytes(1000)); time.sleep(1.4)", allowed=allowed)
    assert (ended.exit_code, ended.breach) == (0, None)


def test_a_folder_is_measured_without_following_links(tmp_path: Path) -> None:
    room = tmp_path / "room"
    (room / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "big").write_bytes(bytes(MIB))
    (room / "deep" / "big").write_bytes(bytes(MIB))
    os.link(room / "deep" / "big", room / "again")
    (room / "link").symlink_to(tmp_path / "outside")
    (room / "loop").symlink_to(room)
    used = measured(room)
    assert used.files == 6
    assert MIB <= used.bytes < 1.5 * MIB
    assert not used.too_deep


def test_counting_ends_soon_after_the_limit(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / str(number)).touch()
    assert measured(tmp_path, most_files=10).files == 11


def test_folders_are_measured_less_often_the_longer_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looked = [0.0], []

    def slow(_: int, *, most_files: int) -> Used:
        looked.append(now[0])
        now[0] += 2.0
        return Used(0, 0, False)

    monkeypatch.setattr("bridge.runner.isolation.watchdog.measure", slow)
    watchdog = Watchdog({"files": 1}, str(tmp_path), scratch=lambda: 0, clock=lambda: now[0])
    while now[0] < 100.0:
        assert watchdog.look() is None
        now[0] += 0.5
    assert looked == [1.0, 43.0, 85.0]


def test_a_process_whose_name_looks_like_its_figures_is_read_right() -> None:
    figures = b" ".join([b"S", b"7", *(b"0" for _ in range(15)), b"3", b"0", b"9", b"0", b"11"])
    each = processes.parse_stat(42, b"42 (a) R 1 (b) " + figures + b"\n")
    assert each == Process(42, parent=7, threads=3, resident=11 * os.sysconf("SC_PAGE_SIZE"), started=9)


def test_descendants_are_found_from_near_to_far_and_a_circle_ends() -> None:
    rows = {5: 1, 6: 5, 7: 6, 8: 2, 9: 9, 10: 5}
    running = [Process(pid, parent, 1, 0) for pid, parent in rows.items()]
    assert [each.pid for each in processes.below(1, running)] == [5, 6, 10, 7]
    assert processes.below(9, running) == [Process(9, 9, 1, 0)]


@linux
def test_the_kernel_limits_processes_beside_those_that_the_user_has_already() -> None:
    limits = Limits(processes=10)
    own = resource_limits(limits, Enforced(tree="process namespace"))["NPROC"]
    shared = resource_limits(limits, Enforced(tree="adopted"))["NPROC"]
    assert own == 10
    assert shared > 10, "this very process is one of them"


WORDS = {
    "memory": (
        Breach("memory", 6 << 30, 4 << 30),
        "memory than it may (6 GiB, at most 4) and was killed",
    ),
    "disk": (Breach("disk", 3 << 29, 1 << 30), "more of the disk than they may (1.5 GiB, at most 1)"),
    "left": (Breach("left", 1 << 29, 1 << 30), "the disk was about to be full (0.5 GiB left)"),
    "files": (Breach("files", 11, 10), "more files than it may (11, at most 10)"),
    "processes": (Breach("processes", 11, 10), "more processes and threads than it may (11, at most 10)"),
    "depth": (Breach("depth", 11, 10), "nested its folders deeper than they may be (11, at most 10)"),
}


@pytest.mark.parametrize(("breach", "words"), WORDS.values(), ids=WORDS)
def test_each_limit_has_its_own_words(breach: Breach, words: str) -> None:
    ended = Ended(-9, 1.0, False, False, False, 0, breach)
    verdict = of_ending(presets.load_all(None)["probe"], ended)
    assert verdict is not None
    assert verdict.reason is Reason.RESOURCE_LIMIT
    assert words in verdict.message


def test_a_file_that_grew_too_big_has_its_own_words() -> None:
    verdict = of_ending(presets.load_all(None)["probe"], Ended(-signal.SIGXFSZ, 1, False, False, False, 0))
    assert verdict is not None
    assert (verdict.reason, "bigger file" in verdict.message) == (Reason.RESOURCE_LIMIT, True)
