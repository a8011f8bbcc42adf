"""A machine's clock jumps by hours while it runs: leases and requests do not notice.

A clock that is set moves the time of day and leaves the monotonic clock and sleeping alone, and so does the
little library here, by a file that says how far off the time of day is. (libfaketime, told to leave the
monotonic clock alone, breaks sleeping until a moment, which is how Python sleeps.)
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from bridge.protocol.manifest import parse_time
from tests.e2e.faults import jobs
from tests.e2e.faults.machines import Machine
from tests.e2e.faults.scene import Scene

pytestmark = pytest.mark.e2e

LEASE_S = 4.0
TWO_HOURS_S = 7200


_LIBRARY = """\
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long wrong_by(void) {
  char text[32] = "";
  const char *name = getenv("CLOCK_FILE");
  int handle = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
  if (handle < 0) return 0;
  if (read(handle, text, sizeof text - 1) < 0) text[0] = 0;
  close(handle);
  return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += wrong_by();
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec exact;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *copy) {
  struct timespec exact;
  if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
  if (copy) *copy = exact.tv_sec;
  return exact.tv_sec;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, made by the machine's C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "no C compiler is installed, and this test needs one: apt-get install gcc libc6-dev"
    made = tmp_path_factory.mktemp("clock") / "clock.so"
    argv = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(made)]
    done = subprocess.run(argv, input=_LIBRARY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


class Clock:
    """The time of day of one machine."""

    def __init__(self, scene: Scene, name: str, library: Path) -> None:
        self._file = scene.repo.root / f"{name}-clock"
        self.set(0)
        self.env = {"LD_PRELOAD": str(library), "CLOCK_FILE": str(self._file)}

    def set(self, off_s: int) -> None:
        """Make the clock so many seconds wrong."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{off_s}\n")
        fresh.replace(self._file)


def clocked(scene: Scene, name: str, library: Path) -> tuple[Machine, Clock]:
    """A runner on a machine with a clock of its own."""
    clock = Clock(scene, name, library)
    machine = scene.machine(name, lease_s=LEASE_S, env=clock.env)
    machine.start()
    return machine, clock


@pytest.mark.parametrize(
    "off_s", [TWO_HOURS_S, pytest.param(-TWO_HOURS_S, marks=pytest.mark.exhaustive)], ids=["ahead", "back"]
)
def test_the_holders_clock_jumps_and_its_claim_stays_its_own(scene: Scene, library: Path, off_s: int):
    _, clock = clocked(scene, "mac1", library)
    nonce = scene.ask(2.5 * LEASE_S)
    scene.started(nonce)
    other = scene.machine("mac2", lease_s=LEASE_S)
    other.start()
    scene.says(other, "serving ")
    clock.set(off_s)
    scene.answered(nonce, 40)
    after = [scene.ask(0.3) for _ in range(4)]
    for later in after:
        scene.answered(later, 40)
    results = scene.close()
    result = results[nonce].result
    assert (result.attempt, result.runner.name, result.verdict.status) == (1, "mac1", "passed")
    finished = parse_time(result.finished_at).timestamp()
    assert abs(finished - time.time() - off_s) < 300, "the clock was not moved"
    assert result.commands[0].seconds == pytest.approx(2.5 * LEASE_S, abs=LEASE_S)
    assert all(results[later].result.attempt == 1 for later in after)


@pytest.mark.parametrize(
    "off_s", [pytest.param(TWO_HOURS_S, marks=pytest.mark.exhaustive), -TWO_HOURS_S], ids=["ahead", "back"]
)
def test_the_observers_clock_jumps_and_it_takes_nothing_over(scene: Scene, library: Path, off_s: int):
    holder = scene.machine("mac1", lease_s=LEASE_S)
    holder.start()
    nonce = scene.ask(2.5 * LEASE_S)
    scene.started(nonce)
    observer, clock = clocked(scene, "mac2", library)
    scene.says(observer, "serving ")
    time.sleep(1)
    clock.set(off_s)
    scene.answered(nonce, 40)
    result = scene.close()[nonce].result
    assert (result.attempt, result.runner.name, result.verdict.status) == (1, "mac1", "passed")


def test_clock_jump_does_not_prevent_taking_over_from_a_dead_runner(scene: Scene, library: Path):
    """Back by two hours: a lease judged by the time of day would now last two hours longer."""
    observer, clock = clocked(scene, "mac2", library)
    scene.says(observer, "serving ")
    observer.sleep()  # it is there in time on a busy machine, too, and takes nothing yet
    holder = scene.machine("mac1", lease_s=LEASE_S)
    holder.start()
    nonce = scene.ask(4.0)
    scene.started(nonce)
    observer.wake()
    time.sleep(1)
    holder.kill()
    assert not jobs.read_ledger(scene.repo).ended[nonce], "the job ended before its runner was killed"
    clock.set(-TWO_HOURS_S)
    scene.answered(nonce, 6 * LEASE_S)
    scene.machines.remove(holder)
    result = scene.close()[nonce].result
    assert (result.attempt, result.runner.name, result.verdict.status) == (2, "mac2", "passed")


def test_request_that_expires_after_the_clock_error_is_run(scene: Scene, library: Path):
    """Expiry is the one thing judged by the time of day: requests of these tests live six hours."""
    runner, clock = clocked(scene, "mac1", library)
    scene.says(runner, "serving ")
    for off_s in (TWO_HOURS_S, -TWO_HOURS_S, 0):
        clock.set(off_s)
        scene.answered(scene.ask(), 30)
    results = scene.close()
    assert {believed.result.verdict.status for believed in results.values()} == {"passed"}
