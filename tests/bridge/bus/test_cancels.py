"""A cancel request exists only while its request does, and counts only from whom the machine listens to."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.cancels import CancelOutcome, objection, read_cancel, request_cancel
from bridge.bus.requests import RefValue, Submitted
from bridge.errors import PushRejected
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.manifest import CANCEL_NAME, CANCEL_SIGNATURE_NAME, new_cancel
from tests.houses import allowed_line
from tests.objects import Objects
from tests.worlds import World, snapshot

ASKED, AGAIN, LATE = CancelOutcome.ASKED, CancelOutcome.ALREADY_ASKED, CancelOutcome.TOO_LATE


def make_key(folder: Path, name: str) -> Path:
    return signing.ensure_key(folder / "keys" / name, name)


def cancel(
    world: World, submitted: Submitted, *, key: Path | None = None, ref: str | None = None
) -> CancelOutcome:
    asked = new_cancel(submitted.nonce, submitted.commit, requested_by="me", reason="wrong model")
    signature = key and signing.sign(key, signing.CANCEL_NAMESPACE, asked.to_bytes())
    target = RefValue(ref or submitted.ref, submitted.commit)
    return request_cancel(world.cache, asked, target, signature=signature)


def cancel_refs(world: World) -> dict[str, str]:
    return world.git.list_refs(world.remote, refs.CANCELS, refs.BRANCH_CANCELS)


def stray(world: World, submitted: Submitted, files: dict[str, bytes | None]) -> str:
    """A commit that another wrote where the cancel request belongs."""
    commit = Objects(world.house.remote).commit_files(None, files)
    world.point(refs.CANCELS + submitted.nonce, commit)
    return commit


def why_not(world: World, submitted: Submitted, **changes: object) -> str:
    """What a machine that requires signatures says of the cancel request; empty: it is honoured."""
    [commit] = cancel_refs(world).values()
    values: dict[str, object] = {
        "nonce": submitted.nonce,
        "request_commit": submitted.commit,
        "require_signature": True,
        "requester": "me@example.org",
        "allowed_signers": world.root / "allowed",
        **changes,
    }
    return objection(GitRepo(world.house.remote), commit, **values) or ""  # type: ignore[arg-type]


def allow(world: World, **keys: Path) -> None:
    lines = [
        allowed_line(signing.public_key(key), f"{name}@example.org", signing.CANCEL_NAMESPACE)
        for name, key in keys.items()
    ]
    (world.root / "allowed").write_text("".join(lines))


def test_cancel_request_is_pushed_once_and_read_back(world: World) -> None:
    submitted, before = world.submit(), snapshot(world.house.clone)
    assert cancel(world, submitted) is ASKED
    assert cancel(world, submitted) is AGAIN
    [(ref, commit)] = cancel_refs(world).items()
    assert ref == refs.CANCELS + submitted.nonce
    found = read_cancel(GitRepo(world.house.remote), commit)
    assert found is not None
    assert (found.nonce, found.request_commit) == (submitted.nonce, submitted.commit)
    assert found.sentence == "cancelled by me: wrong model"
    assert world.git.list_refs(world.remote, submitted.ref) == {submitted.ref: submitted.commit}
    assert snapshot(world.house.clone) == before
    assert why_not(world, submitted, require_signature=False, requester=None) == ""


def test_answered_request_gets_no_cancel_request(world: World) -> None:
    submitted = world.submit()
    world.answer(submitted)
    assert cancel(world, submitted) is LATE
    assert not cancel_refs(world)


def test_request_without_a_branch_is_cancelled_by_its_inbox_entry(world: World) -> None:
    submitted = world.submit()
    world.house.git("update-ref", "-d", submitted.ref, cwd=world.house.remote)
    assert cancel(world, submitted) is LATE
    assert cancel(world, submitted, ref=refs.INBOX + submitted.nonce) is ASKED


@pytest.mark.slow
def test_where_only_branches_are_taken_the_cancel_request_is_one(world: World) -> None:
    world.take_branches_only()
    submitted, other = world.submit(), world.submit()
    assert cancel(world, submitted) is ASKED
    assert list(cancel_refs(world)) == [refs.BRANCH_CANCELS + submitted.nonce]
    assert cancel(world, submitted) is AGAIN
    world.hook("update", 'echo "closed today"; exit 1')
    with pytest.raises(PushRejected, match="closed today"):
        cancel(world, other)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("first", ["garbage", "unsigned", "another key", "another request"])
def test_signed_cancel_request_replaces_one_that_does_less(world: World, first: str) -> None:
    mine, theirs = make_key(world.root, "mine"), make_key(world.root, "theirs")
    submitted = world.submit()
    if first == "garbage":
        stray(world, submitted, {CANCEL_NAME: b"{"})
    elif first == "another request":
        stray(world, submitted, {CANCEL_NAME: new_cancel(submitted.nonce, "0" * 40).to_bytes()})
    else:
        cancel(world, submitted, key=theirs if first == "another key" else None)
    allow(world, me=mine)
    assert why_not(world, submitted)
    assert cancel(world, submitted, key=mine) is ASKED
    assert why_not(world, submitted) == ""


def test_with_required_signatures_only_the_requester_may_cancel(world: World) -> None:
    mine, theirs = make_key(world.root, "mine"), make_key(world.root, "theirs")
    allow(world, me=mine, them=theirs)
    submitted = world.submit()
    cancel(world, submitted)
    assert "unsigned" in why_not(world, submitted)
    cancel(world, submitted, key=theirs)
    assert "signed by them@example.org, who did not ask" in why_not(world, submitted)
    cancel(world, submitted, key=mine)
    assert why_not(world, submitted) == ""
    assert "who did not ask" in why_not(world, submitted, requester=None)
    assert "another request" in why_not(world, submitted, request_commit="1" * 40)
    (world.root / "allowed").write_text("")
    assert "is not listed here" in why_not(world, submitted)
    line = allowed_line(signing.public_key(mine), "me@example.org", signing.REQUEST_NAMESPACE)
    (world.root / "allowed").write_text(line)
    assert "which counts for kakeya-mac-request only" in why_not(world, submitted)


def test_revoked_or_expired_key_cancels_nothing(world: World) -> None:
    mine = make_key(world.root, "mine")
    line = f'me@example.org valid-before="20990101Z" {signing.public_key(mine).read_text()}'
    (world.root / "allowed").write_text(line)
    submitted, revoked = world.submit(), world.root / "revoked_keys"
    cancel(world, submitted, key=mine)
    assert why_not(world, submitted, now=datetime(2098, 12, 31, tzinfo=UTC)) == ""
    assert "expired at" in why_not(world, submitted, now=datetime(2099, 1, 1, 0, 0, 1, tzinfo=UTC))
    revoked.write_bytes(signing.public_key(mine).read_bytes())
    assert "which was revoked" in why_not(world, submitted)
    revoked.write_text("rubbish\n")
    assert "not a public key" in why_not(world, submitted)


def test_signed_cancel_request_does_not_pass_for_another_request(world: World) -> None:
    mine = make_key(world.root, "mine")
    allow(world, me=mine)
    first, second = world.submit(), world.submit()
    cancel(world, first, key=mine)
    [commit] = cancel_refs(world).values()
    world.house.git("update-ref", "-d", refs.CANCELS + first.nonce, cwd=world.house.remote)
    world.point(refs.CANCELS + second.nonce, commit)
    for require in (True, False):
        assert "another request" in why_not(world, second, require_signature=require)


def test_altered_cancel_request_does_not_verify(world: World) -> None:
    mine = make_key(world.root, "mine")
    allow(world, me=mine)
    submitted = world.submit()
    data = new_cancel(submitted.nonce, submitted.commit, reason="altered").to_bytes()
    signature = signing.sign(mine, signing.CANCEL_NAMESPACE, data + b" ")
    stray(world, submitted, {CANCEL_NAME: data, CANCEL_SIGNATURE_NAME: signature})
    assert "does not verify" in why_not(world, submitted)
    stray(world, submitted, {CANCEL_NAME: data, CANCEL_SIGNATURE_NAME: b"x" * 20_000})
    assert "unsigned" in why_not(world, submitted)


def test_other_objects_are_no_cancel_requests(world: World) -> None:
    objects, git = Objects(world.house.remote), GitRepo(world.house.remote)
    others = [world.house.head(), objects.blob(b"x"), "1" * 40]
    others += [objects.commit_files(None, {CANCEL_NAME: data}) for data in (b"{", b"x" * 9000)]
    for commit in others:
        assert read_cancel(git, commit) is None
