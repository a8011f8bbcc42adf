"""Hostile requests pushed with plain git to a remote that a real runner serves: refused, nothing else."""

from __future__ import annotations

import pytest

from bridge.protocol import refs
from bridge.protocol.result import Reason, Status
from tests.adversary.attack import CommitBuilder, Request
from tests.adversary.attacked import attacked_runner
from tests.adversary.families import REQUESTS
from tests.fixtures.repo import RepoFixture
from tests.objects import Objects


def share(part: slice) -> dict[str, Request]:
    """These attacks of each family."""
    return {
        f"{family}-{name}": attack
        for family, members in REQUESTS.items()
        for name, attack in list(members.attacks.items())[part]
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the waits below end first, also on a machine that does much else
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(slice(2), id="two-of-each"),
        pytest.param(slice(None), id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_each_is_answered_with_its_reason_and_the_runner_serves_on(repo: RepoFixture, part: slice):
    with attacked_runner(repo) as attacked:
        hostile = [
            attacked.builder.make(name, attack) for name, attack in share(part).items() if attack.whole
        ]
        attacked.push(hostile)
        with repo.runner("--idle", "0.2", trusted=False):
            attacked.wait([one.nonce for one in hostile], 200 + 2 * len(hostile))
            good = attacked.runner.ask()
            attacked.wait([good.nonce], 200)
        for one in hostile:
            verdict = attacked.result(one.nonce, one.branch).verdict
            expected = Status.PASSED if one.attack.expected is Reason.OK else Status.REFUSED
            assert (verdict.status, verdict.reason) == (expected, one.attack.expected), one.name
            assert expected is Status.PASSED or verdict.message, one.name
        assert attacked.result(good.nonce, good.result_ref).verdict.status is Status.PASSED
        assert attacked.file(good.nonce, good.result_ref, "log.txt") == "'test'"
        assert "a bug of kakeya-mac" not in attacked.said()


@pytest.mark.slow
def test_requests_with_missing_objects_do_not_block_others(repo: RepoFixture):
    with attacked_runner(repo) as attacked:
        builder = CommitBuilder(Objects(repo.remote), attacked.builder.audience, attacked.builder.canary)
        torn = [builder.make(name, attack) for name, attack in share(slice(None)).items() if not attack.whole]
        assert torn
        for one in torn:
            attacked.runner.point(refs.INBOX + one.nonce, one.commit)
        good = attacked.runner.ask()
        with repo.runner("--idle", "0.2", trusted=False):
            attacked.wait([good.nonce], 60)
        assert attacked.result(good.nonce, good.result_ref).verdict.status is Status.PASSED
        assert "a bug of kakeya-mac" not in attacked.said()
