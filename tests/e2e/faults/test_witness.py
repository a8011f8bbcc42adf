"""The witness misses no run: not one that was killed, nor one whose room is gone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.faults import jobs
from tests.e2e.faults.machines import Machine
from tests.e2e.faults.witness import Witness
from tests.houses import House, wait_for

NONCE = "20260101t000000z000000000000"


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Folders only: no remote is needed here."""
    built = House(tmp_path, {"KAKEYA_CONFIG": str(tmp_path / "config")})
    jobs.install(built)
    return built


@pytest.fixture
def room(house: House) -> Path:
    return house.root / "state" / "runner" / "mac1" / "jobs" / NONCE


@pytest.fixture
def witness(house: House) -> Iterator[Witness]:
    with Witness(house, [Machine(house, "mac1", 1.0, states=[house.root / "state"])]) as built:
        yield built


def run(house: House, room: Path, seconds: float) -> subprocess.Popen[bytes]:
    """The job's program, in a room as a runner makes it."""
    (room / "home").mkdir(parents=True)
    argv = [sys.executable, "-I", str(house.root / "job.py"), "well", "word-1", f"{seconds}"]
    return subprocess.Popen(
        [*argv, "--request-nonce", NONCE], env={"HOME": str(room / "home")}, stdout=subprocess.DEVNULL
    )


def test_what_a_job_said_stays_when_its_room_is_gone_and_the_next_one_is_another(
    house: House, room: Path, witness: Witness
):
    for times in (1, 2, 3):
        assert run(house, room, 0.0).wait(20) == 0
        shutil.rmtree(room)
        wait_for(lambda times=times: jobs.read_ledger(house).ended[NONCE] == times, 5, "the end of the job")
    witness.leave()
    assert jobs.read_ledger(house) == jobs.Ledger({NONCE: 3}, {NONCE: 3}, [])


def test_a_job_that_was_killed_started_and_did_not_end(house: House, room: Path, witness: Witness):
    job = run(house, room, 20.0)
    wait_for(lambda: jobs.read_ledger(house).started[NONCE], 20, "the start of the job")
    job.kill()
    job.wait()
    shutil.rmtree(room)
    witness.leave()
    assert jobs.read_ledger(house) == jobs.Ledger({NONCE: 1}, {}, [])


def test_a_job_does_nothing_before_it_is_heard(house: House, room: Path):
    job = run(house, room, 0.0)
    wait_for((room / "home" / jobs.JOURNAL).exists, 20, "the journal")
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.5)
    with Witness(house, [Machine(house, "mac1", 1.0, states=[house.root / "state"])]):
        assert job.wait(20) == 0
    assert jobs.read_ledger(house) == jobs.Ledger({NONCE: 1}, {NONCE: 1}, [])
