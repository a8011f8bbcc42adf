"""Exactly one result, in one place, whatever happens to the branch or the network."""

from __future__ import annotations

import pytest

from bridge.bus.publish import AlreadyAnswered, ResultFiles, publish
from bridge.bus.requests import Submitted
from bridge.errors import LeaseLost, PushRejected, ResultError
from bridge.protocol import refs
from bridge.signing.trust import TrustLevel
from tests.bridge.bus.reading import read
from tests.fixtures.bus import FILES, BusFixture


def test_result_is_one_commit_that_clears_inbox_and_claim(bus: BusFixture):
    submitted = bus.submit()
    published = bus.answer(submitted, held=bus.claim(submitted))
    assert published.ref == submitted.ref
    believed = read(bus, submitted, known=False)
    assert dict(believed.files) == FILES
    assert believed.signature is TrustLevel.UNSIGNED
    assert "anyone with push rights" in believed.sentence
    assert not [ref for ref in bus.repo.remote_refs() if ref.startswith("refs/mac-bridge/")]


def test_second_result_is_refused(bus: BusFixture):
    submitted = bus.submit()
    first = bus.answer(submitted)
    other = {"report.json": b"other"}
    second = bus.result(bus.expected(submitted), other)
    with pytest.raises(LeaseLost):
        bus.answer(submitted, result=second, files=other)
    assert read(bus, submitted).commit == first.commit


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("where", ["on its branch", "on a ref of its own"])
def test_same_result_pushed_again_is_the_one_that_is_there(bus: BusFixture, where: str):
    """A runner that died between the push and recording it pushes again."""
    submitted = bus.submit()
    if where == "on a ref of its own":
        bus.point(submitted.ref, bus.commit(submitted.commit, {"README.md": b"mine now"}))
    result = bus.result(bus.expected(submitted))
    first = bus.answer(submitted, result=result)
    bus.point(refs.INBOX + submitted.nonce, submitted.commit)  # as if deleting it had failed
    assert bus.answer(submitted, result=result) == first
    assert refs.INBOX + submitted.nonce not in bus.repo.remote_refs()
    with pytest.raises(AlreadyAnswered):
        bus.answer(submitted, result=result, signature=b"another")


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("commits", [1, 4])
def test_result_below_other_commits_is_still_the_result(bus: BusFixture, commits: int):
    submitted = bus.submit()
    result = bus.result(bus.expected(submitted))
    tip = bus.answer(submitted, result=result).commit
    for number in range(commits):
        tip = bus.commit(tip, {"README.md": f"number {number}\n".encode()})
    bus.point(submitted.ref, tip)
    with pytest.raises(LeaseLost, match="already has a result"):
        bus.answer(submitted, result=result)
    assert refs.RESULTS + submitted.nonce not in bus.repo.remote_refs()


def files(bus: BusFixture, submitted: Submitted, **changes: object) -> ResultFiles:
    values: dict[str, object] = {
        "nonce": submitted.nonce,
        "request_commit": submitted.commit,
        "result_ref": submitted.ref,
        "result": bus.result(bus.expected(submitted)),
        "signature": None,
        "files": FILES,
    }
    return ResultFiles(**{**values, **changes})  # type: ignore[arg-type]


def test_result_goes_to_no_branch_but_the_requests_own(bus: BusFixture):
    submitted = bus.submit()
    bus.bring(submitted)
    for ref in ("refs/heads/main", bus.submit().ref):
        with pytest.raises(ResultError, match="not a branch of the request"):
            publish(bus.cache, bus.remote, files(bus, submitted, result_ref=ref), claim=None)


def test_untouched_request_is_answered_in_one_push(bus: BusFixture, monkeypatch: pytest.MonkeyPatch):
    submitted = bus.submit()
    bus.bring(submitted)
    held = bus.claim(submitted)
    monkeypatch.setattr(bus.cache, "list_refs", None)
    published = publish(bus.cache, bus.remote, files(bus, submitted), claim=held, untouched=True)
    assert bus.repo.remote_refs() == {"refs/heads/main", submitted.ref}
    assert read(bus, submitted).commit == published.commit


def test_untouched_request_that_changed_is_looked_at(bus: BusFixture):
    submitted = bus.submit()
    held = bus.claim(submitted)
    bus.point(submitted.ref, bus.commit(submitted.commit, {"README.md": b"mine now"}))
    published = publish(bus.cache, bus.remote, files(bus, submitted), claim=held, untouched=True)
    assert published.ref == refs.RESULTS + submitted.nonce


def test_result_is_published_from_a_cache_that_lost_the_request(bus: BusFixture):
    """As after a rebuild while the job ran."""
    submitted = bus.submit()
    bus.bring(submitted)
    bus.cache.rebuild()
    published = publish(bus.cache, bus.remote, files(bus, submitted), claim=None)
    assert published.ref == submitted.ref
    assert read(bus, submitted).commit == published.commit


@pytest.mark.slow
def test_push_that_fails_changes_nothing_and_can_be_repeated(bus: BusFixture):
    submitted = bus.submit()
    held = bus.claim(submitted)
    before = bus.repo.git("show-ref", cwd=bus.repo.remote)
    bus.hook("pre-receive", "echo no; exit 1")
    with pytest.raises(PushRejected, match="no"):
        bus.answer(submitted, held=held)
    assert bus.repo.git("show-ref", cwd=bus.repo.remote) == before
    (bus.repo.remote / "hooks" / "pre-receive").unlink()
    assert bus.answer(submitted, held=held).ref == submitted.ref
    assert read(bus, submitted).signature is TrustLevel.UNSIGNED


def test_network_that_fails_for_a_while_is_waited_out(bus: BusFixture):
    submitted = bus.submit()
    bus.bring(submitted)
    answer = files(bus, submitted)
    away = bus.repo.remote.with_name("away.git")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            away.rename(bus.repo.remote)

    bus.repo.remote.rename(away)
    published = publish(bus.cache, bus.remote, answer, claim=None, sleep=pause)
    assert pauses == [0.2, 0.4]
    assert read(bus, submitted).commit == published.commit


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_result_of_a_moved_branch_gets_a_ref_of_its_own(bus: BusFixture, how: str):
    submitted = bus.submit()
    if how == "moved":
        bus.point(submitted.ref, bus.commit(submitted.commit, {"README.md": b"mine now"}))
    else:
        bus.repo.git("update-ref", "-d", submitted.ref, cwd=bus.repo.remote)
    published = bus.answer(submitted)
    assert published.ref == refs.RESULTS + submitted.nonce
    assert read(bus, submitted).commit == published.commit
