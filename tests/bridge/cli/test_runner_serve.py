"""`kakeya_mac runner serve`: leases, heartbeats and the number of jobs, as an owner sets them."""

from __future__ import annotations

import json

import pytest

from bridge.protocol import refs
from tests.fixtures.repo import RepoFixture, wait_for
from tests.fixtures.runner import RunnerFixture

ONCE = ("runner", "serve", "--name", "mac", "--once", "--idle-timeout", "0.1")


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--lease", "9", "--beat", "3.5"), "--beat 3.5 is too slow for a lease of 9 s"),
        (("--beat", "41"), "give at most --beat 40"),
        (("--lease", "1"), "not in the range"),
        (("--lease", "901"), "not in the range"),
        (("--beat", "0.1"), "not in the range"),
        (("--jobs", "0"), "not in the range"),
    ],
)
def test_a_lease_that_its_heartbeats_cannot_hold_is_refused(
    repo: RepoFixture, options: tuple[str, ...], said: str
):
    done = repo.kakeya(*ONCE, *options)
    assert done.code == 2
    assert said in done.err


@pytest.mark.slow
def test_more_jobs_than_one_are_asked_for_in_vain_and_told_so(repo: RepoFixture):
    done = repo.kakeya(*ONCE, "--jobs", "3")
    assert done.code == 4, done.err
    assert f"--jobs 3: runners with their state in {repo.env['KAKEYA_STATE']} run one job" in done.out


@pytest.mark.slow
def test_it_says_which_presets_its_policy_allows_and_which_not(repo: RepoFixture):
    line = repo.kakeya(*ONCE).out.splitlines()[0]
    allowed, _, refused = line.partition("; presets: ")[2].partition("; not allowed: ")
    assert "probe" in allowed.split(", ")
    assert "tests" in refused.split(", ")
    assert not set(allowed.split(", ")) & set(refused.split(", "))


@pytest.mark.slow
def test_claims_carry_the_lease_and_are_renewed_as_often_as_it_needs(repo: RepoFixture):
    runner = RunnerFixture(repo)
    runner.install({"sleep": "import time; time.sleep(60)"})
    manifest = runner.ask("sleep")
    ref = refs.CLAIMS + manifest.nonce

    def held() -> str:
        return repo.git("for-each-ref", "--format=%(objectname)", ref, cwd=repo.remote)

    with repo.runner("--lease", "2.4", "--idle", "0.1") as process:
        wait_for(held, 20, "a claim")
        for _ in range(3):
            before = held()
            wait_for(lambda before=before: held() != before, 2.4, "a heartbeat within the lease")
        status = json.loads(repo.git("show", f"{held()}:status.json", cwd=repo.remote))
        assert status["lease_s"] == 2.4
        process.terminate()
        wait_for(lambda: "once more" in repo.runner_log(), 10, "the first answer to SIGTERM")
        process.terminate()
        assert process.wait(20) == 0
