"""A ref that is no request's is none to us, and its name reaches nothing that would obey it."""

from __future__ import annotations

import pytest

from bridge.protocol import refs
from bridge.protocol.result import Reason, Status
from tests.adversary.attack import Request
from tests.adversary.branches import NAMES, PUSHED
from tests.adversary.siege import besieged
from tests.houses import House


@pytest.mark.parametrize("name", [pytest.param(name, id=key) for key, name in NAMES.items()])
def test_a_name_that_is_no_requests_is_none(name: str):
    assert refs.parse_request_ref(name) is None
    for prefix in (refs.INBOX, refs.CLAIMS, refs.CANCELS, refs.RESULTS):
        assert refs.nonce_of(name, prefix) is None
        assert refs.nonce_of(prefix + name, prefix) is None


@pytest.mark.slow
@pytest.mark.timeout(300)  # the wait below ends first
def test_branches_of_such_names_are_left_alone_and_the_runner_serves_on(house: House):
    with besieged(house) as siege:
        request = siege.forge.make("echo", Request(Reason.OK))
        names = [name for name in PUSHED.values() if not name.endswith("/x")]  # one name is a folder of it
        siege.house.git("push", "-q", str(house.remote), *(f"{request.commit}:{name}" for name in names))
        for name in names[:10]:
            odd = refs.INBOX + name.rpartition("/")[2]
            siege.house.git("push", "-q", str(house.remote), f"{request.commit}:{odd}")
        before = house.remote_refs()
        good = siege.bench.ask()
        with house.runner("--idle", "0.2", trusted=False):
            siege.wait([good.nonce], 200)
        assert siege.result(good.nonce, good.result_ref).verdict.status is Status.PASSED
        assert before <= house.remote_refs()
        assert all(house.git("rev-parse", name, cwd=house.remote) == request.commit for name in names)
        assert "a bug of kakeya-mac" not in siege.said()
