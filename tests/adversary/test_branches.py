"""A ref that is no request's is none to us, and its name reaches nothing that would obey it."""

from __future__ import annotations

import pytest

from bridge.protocol import refs
from bridge.protocol.result import Reason, Status
from tests.adversary.attack import Request
from tests.adversary.attacked import attacked_runner
from tests.adversary.branches import NAMES, PUSHED
from tests.fixtures.repo import RepoFixture


@pytest.mark.parametrize("name", [pytest.param(name, id=key) for key, name in NAMES.items()])
def test_a_name_that_is_no_requests_is_none(name: str):
    assert refs.parse_request_ref(name) is None
    for prefix in (refs.INBOX, refs.CLAIMS, refs.CANCELS, refs.RESULTS):
        assert refs.nonce_of(name, prefix) is None
        assert refs.nonce_of(prefix + name, prefix) is None


@pytest.mark.slow
@pytest.mark.timeout(300)  # the wait below ends first
def test_hostile_branch_names_are_ignored_by_a_running_runner(repo: RepoFixture):
    with attacked_runner(repo) as attacked:
        request = attacked.builder.make("echo", Request(Reason.OK))
        names = [name for name in PUSHED.values() if not name.endswith("/x")]  # one name is a folder of it
        attacked.repo.git("push", "-q", str(repo.remote), *(f"{request.commit}:{name}" for name in names))
        for name in names[:10]:
            odd = refs.INBOX + name.rpartition("/")[2]
            attacked.repo.git("push", "-q", str(repo.remote), f"{request.commit}:{odd}")
        before = repo.remote_refs()
        good = attacked.runner.ask()
        with repo.runner("--idle", "0.2", trusted=False):
            attacked.wait([good.nonce], 200)
        assert attacked.result(good.nonce, good.result_ref).verdict.status is Status.PASSED
        assert before <= repo.remote_refs()
        assert all(repo.git("rev-parse", name, cwd=repo.remote) == request.commit for name in names)
        assert "a bug of kakeya-mac" not in attacked.said()
