"""Exactly one result, in one place, whatever happens to the branch or the network."""

from __future__ import annotations

import pytest

from bridge.bus.publish import AlreadyAnswered, ResultFiles, publish
from bridge.bus.requests import Submitted
from bridge.errors import LeaseLost, PushRejected, ResultError
from bridge.protocol import refs
from bridge.signing.trust import TrustLevel
from tests.bridge.bus.reading import read
from tests.worlds import FILES, World


def test_result_is_one_commit_that_clears_inbox_and_claim(world: World):
    submitted = world.submit()
    published = world.answer(submitted, held=world.claim(submitted))
    assert published.ref == submitted.ref
    believed = read(world, submitted, known=False)
    assert dict(believed.files) == FILES
    assert believed.signature is TrustLevel.UNSIGNED
    assert "anyone with push rights" in believed.sentence
    assert not [ref for ref in world.house.remote_refs() if ref.startswith("refs/mac-bridge/")]


def test_second_result_is_refused(world: World):
    submitted = world.submit()
    first = world.answer(submitted)
    other = {"report.json": b"other"}
    second = world.result(world.expected(submitted), other)
    with pytest.raises(LeaseLost):
        world.answer(submitted, result=second, files=other)
    assert read(world, submitted).commit == first.commit


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("where", ["on its branch", "on a ref of its own"])
def test_same_result_pushed_again_is_the_one_that_is_there(world: World, where: str):
    """A runner that died between the push and taking note of it pushes again."""
    submitted = world.submit()
    if where == "on a ref of its own":
        world.point(submitted.ref, world.commit(submitted.commit, {"README.md": b"mine now"}))
    result = world.result(world.expected(submitted))
    first = world.answer(submitted, result=result)
    world.point(refs.INBOX + submitted.nonce, submitted.commit)  # as if deleting it had failed
    assert world.answer(submitted, result=result) == first
    assert refs.INBOX + submitted.nonce not in world.house.remote_refs()
    with pytest.raises(AlreadyAnswered):
        world.answer(submitted, result=result, signature=b"another")


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("commits", [1, 4])
def test_result_below_other_commits_is_still_the_result(world: World, commits: int):
    submitted = world.submit()
    result = world.result(world.expected(submitted))
    tip = world.answer(submitted, result=result).commit
    for number in range(commits):
        tip = world.commit(tip, {"README.md": f"number {number}\n".encode()})
    world.point(submitted.ref, tip)
    with pytest.raises(LeaseLost, match="already has a result"):
        world.answer(submitted, result=result)
    assert refs.RESULTS + submitted.nonce not in world.house.remote_refs()


def files(world: World, submitted: Submitted, **changes: object) -> ResultFiles:
    values: dict[str, object] = {
        "nonce": submitted.nonce,
        "request_commit": submitted.commit,
        "result_ref": submitted.ref,
        "result": world.result(world.expected(submitted)),
        "signature": None,
        "files": FILES,
    }
    return ResultFiles(**{**values, **changes})  # type: ignore[arg-type]


def test_result_goes_to_no_branch_but_the_requests_own(world: World):
    submitted = world.submit()
    world.bring(submitted)
    for ref in ("refs/heads/main", world.submit().ref):
        with pytest.raises(ResultError, match="not a branch of the request"):
            publish(world.cache, world.remote, files(world, submitted, result_ref=ref), claim=None)


def test_untouched_request_is_answered_in_one_push(world: World, monkeypatch: pytest.MonkeyPatch):
    submitted = world.submit()
    world.bring(submitted)
    held = world.claim(submitted)
    monkeypatch.setattr(world.cache, "list_refs", None)
    published = publish(world.cache, world.remote, files(world, submitted), claim=held, untouched=True)
    assert world.house.remote_refs() == {"refs/heads/main", submitted.ref}
    assert read(world, submitted).commit == published.commit


def test_untouched_request_that_changed_is_looked_at(world: World):
    submitted = world.submit()
    held = world.claim(submitted)
    world.point(submitted.ref, world.commit(submitted.commit, {"README.md": b"mine now"}))
    published = publish(world.cache, world.remote, files(world, submitted), claim=held, untouched=True)
    assert published.ref == refs.RESULTS + submitted.nonce


def test_result_is_published_from_a_cache_that_lost_the_request(world: World):
    """As after a rebuild while the job ran."""
    submitted = world.submit()
    world.bring(submitted)
    world.cache.rebuild()
    published = publish(world.cache, world.remote, files(world, submitted), claim=None)
    assert published.ref == submitted.ref
    assert read(world, submitted).commit == published.commit


@pytest.mark.slow
def test_push_that_fails_changes_nothing_and_can_be_repeated(world: World):
    submitted = world.submit()
    held = world.claim(submitted)
    before = world.house.git("show-ref", cwd=world.house.remote)
    world.hook("pre-receive", "echo no; exit 1")
    with pytest.raises(PushRejected, match="no"):
        world.answer(submitted, held=held)
    assert world.house.git("show-ref", cwd=world.house.remote) == before
    (world.house.remote / "hooks" / "pre-receive").unlink()
    assert world.answer(submitted, held=held).ref == submitted.ref
    assert read(world, submitted).signature is TrustLevel.UNSIGNED


def test_network_that_fails_for_a_while_is_waited_out(world: World):
    submitted = world.submit()
    world.bring(submitted)
    answer = files(world, submitted)
    away = world.house.remote.with_name("away.git")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            away.rename(world.house.remote)

    world.house.remote.rename(away)
    published = publish(world.cache, world.remote, answer, claim=None, sleep=pause)
    assert pauses == [0.2, 0.4]
    assert read(world, submitted).commit == published.commit


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_result_of_a_moved_branch_gets_a_ref_of_its_own(world: World, how: str):
    submitted = world.submit()
    if how == "moved":
        world.point(submitted.ref, world.commit(submitted.commit, {"README.md": b"mine now"}))
    else:
        world.house.git("update-ref", "-d", submitted.ref, cwd=world.house.remote)
    published = world.answer(submitted)
    assert published.ref == refs.RESULTS + submitted.nonce
    assert read(world, submitted).commit == published.commit
