"""Hostile requests pushed with plain git to a remote that a real runner serves: refused, nothing else."""

from __future__ import annotations

import pytest

from bridge.protocol import refs
from bridge.protocol.result import Reason, Status
from tests.adversary.attack import Forge, Request
from tests.adversary.families import REQUESTS
from tests.adversary.siege import besieged
from tests.houses import House
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
def test_each_is_answered_with_its_reason_and_the_runner_serves_on(house: House, part: slice):
    with besieged(house) as siege:
        forged = [siege.forge.make(name, attack) for name, attack in share(part).items() if attack.whole]
        siege.push(forged)
        with house.runner("--idle", "0.2", trusted=False):
            siege.wait([one.nonce for one in forged], 200 + 2 * len(forged))
            good = siege.bench.ask()
            siege.wait([good.nonce], 200)
        for one in forged:
            verdict = siege.result(one.nonce, one.branch).verdict
            expected = Status.PASSED if one.attack.expected is Reason.OK else Status.REFUSED
            assert (verdict.status, verdict.reason) == (expected, one.attack.expected), one.name
            assert expected is Status.PASSED or verdict.message, one.name
        assert siege.result(good.nonce, good.result_ref).verdict.status is Status.PASSED
        assert siege.file(good.nonce, good.result_ref, "log.txt") == "'test'"
        assert "a bug of kakeya-mac" not in siege.said()


@pytest.mark.slow
def test_requests_whose_objects_are_missing_keep_no_other_from_its_answer(house: House):
    with besieged(house) as siege:
        forge = Forge(Objects(house.remote), siege.forge.audience, siege.forge.canary)
        torn = [forge.make(name, attack) for name, attack in share(slice(None)).items() if not attack.whole]
        assert torn
        for one in torn:
            siege.bench.point(refs.INBOX + one.nonce, one.commit)
        good = siege.bench.ask()
        with house.runner("--idle", "0.2", trusted=False):
            siege.wait([good.nonce], 60)
        assert siege.result(good.nonce, good.result_ref).verdict.status is Status.PASSED
        assert "a bug of kakeya-mac" not in siege.said()
