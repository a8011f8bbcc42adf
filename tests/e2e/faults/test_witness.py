"""The witness misses no run: not one that was killed, nor one whose folder is gone."""

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
from tests.fixtures.repo import RepoFixture, wait_for

NONCE = "20260101t000000z000000000000"


@pytest.fixture
def repo(tmp_path: Path) -> RepoFixture:
    """Folders only: no remote is needed here."""
    built = RepoFixture(tmp_path, {"KAKEYA_CONFIG": str(tmp_path / "config")})
    jobs.install(built)
    return built


@pytest.fixture
def job_dir(repo: RepoFixture) -> Path:
    return repo.root / "state" / "runner" / "mac1" / "jobs" / NONCE


@pytest.fixture
def witness(repo: RepoFixture) -> Iterator[Witness]:
    with Witness(repo, [Machine(repo, "mac1", 1.0, states=[repo.root / "state"])]) as built:
        yield built


def run(repo: RepoFixture, job_dir: Path, seconds: float) -> subprocess.Popen[bytes]:
    """The job's program, in a folder as a runner makes it."""
    (job_dir / "home").mkdir(parents=True)
    argv = [sys.executable, "-I", str(repo.root / "job.py"), "well", "word-1", f"{seconds}"]
    return subprocess.Popen(
        [*argv, "--request-nonce", NONCE], env={"HOME": str(job_dir / "home")}, stdout=subprocess.DEVNULL
    )


def test_journal_survives_its_folder_and_the_next_job_has_its_own(
    repo: RepoFixture, job_dir: Path, witness: Witness
):
    for times in (1, 2, 3):
        assert run(repo, job_dir, 0.0).wait(20) == 0
        shutil.rmtree(job_dir)
        wait_for(lambda times=times: jobs.read_ledger(repo).ended[NONCE] == times, 5, "the end of the job")
    witness.leave()
    assert jobs.read_ledger(repo) == jobs.Ledger({NONCE: 3}, {NONCE: 3}, [])


def test_a_job_that_was_killed_started_and_did_not_end(repo: RepoFixture, job_dir: Path, witness: Witness):
    job = run(repo, job_dir, 20.0)
    wait_for(lambda: jobs.read_ledger(repo).started[NONCE], 20, "the start of the job")
    job.kill()
    job.wait()
    shutil.rmtree(job_dir)
    witness.leave()
    assert jobs.read_ledger(repo) == jobs.Ledger({NONCE: 1}, {}, [])


def test_a_job_does_nothing_before_it_is_heard(repo: RepoFixture, job_dir: Path):
    job = run(repo, job_dir, 0.0)
    wait_for((job_dir / "home" / jobs.JOURNAL).exists, 20, "the journal")
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.5)
    with Witness(repo, [Machine(repo, "mac1", 1.0, states=[repo.root / "state"])]):
        assert job.wait(20) == 0
    assert jobs.read_ledger(repo) == jobs.Ledger({NONCE: 1}, {NONCE: 1}, [])
