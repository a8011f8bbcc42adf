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
from tests.fixtures.bus import BusFixture, snapshot
from tests.fixtures.repo import allowed_line
from tests.objects import Objects

ASKED, AGAIN, LATE = CancelOutcome.ASKED, CancelOutcome.ALREADY_ASKED, CancelOutcome.TOO_LATE


def make_key(folder: Path, name: str) -> Path:
    return signing.ensure_key(folder / "keys" / name, name)


def cancel(
    bus: BusFixture, submitted: Submitted, *, key: Path | None = None, ref: str | None = None
) -> CancelOutcome:
    asked = new_cancel(submitted.nonce, submitted.commit, requested_by="me", reason="wrong model")
    signature = key and signing.sign(key, signing.CANCEL_NAMESPACE, asked.to_bytes())
    target = RefValue(ref or submitted.ref, submitted.commit)
    return request_cancel(bus.cache, asked, target, signature=signature)


def cancel_refs(bus: BusFixture) -> dict[str, str]:
    return bus.git.list_refs(bus.remote, refs.CANCELS, refs.BRANCH_CANCELS)


def put_foreign(bus: BusFixture, submitted: Submitted, files: dict[str, bytes | None]) -> str:
    """A commit that another wrote where the cancel request belongs."""
    commit = Objects(bus.repo.remote).commit_files(None, files)
    bus.point(refs.CANCELS + submitted.nonce, commit)
    return commit


def why_not(bus: BusFixture, submitted: Submitted, **changes: object) -> str:
    """What a machine that requires signatures says of the cancel request; empty: it is honoured."""
    [commit] = cancel_refs(bus).values()
    values: dict[str, object] = {
        "nonce": submitted.nonce,
        "request_commit": submitted.commit,
        "require_signature": True,
        "requester": "me@example.org",
        "allowed_signers": bus.root / "allowed",
        **changes,
    }
    return objection(GitRepo(bus.repo.remote), commit, **values) or ""  # type: ignore[arg-type]


def allow(bus: BusFixture, **keys: Path) -> None:
    lines = [
        allowed_line(signing.public_key(key), f"{name}@example.org", signing.CANCEL_NAMESPACE)
        for name, key in keys.items()
    ]
    (bus.root / "allowed").write_text("".join(lines))


def test_cancel_request_is_pushed_once_and_read_back(bus: BusFixture) -> None:
    submitted, before = bus.submit(), snapshot(bus.repo.clone)
    assert cancel(bus, submitted) is ASKED
    assert cancel(bus, submitted) is AGAIN
    [(ref, commit)] = cancel_refs(bus).items()
    assert ref == refs.CANCELS + submitted.nonce
    found = read_cancel(GitRepo(bus.repo.remote), commit)
    assert found is not None
    assert (found.nonce, found.request_commit) == (submitted.nonce, submitted.commit)
    assert found.sentence == "cancelled by me: wrong model"
    assert bus.git.list_refs(bus.remote, submitted.ref) == {submitted.ref: submitted.commit}
    assert snapshot(bus.repo.clone) == before
    assert why_not(bus, submitted, require_signature=False, requester=None) == ""


def test_answered_request_gets_no_cancel_request(bus: BusFixture) -> None:
    submitted = bus.submit()
    bus.answer(submitted)
    assert cancel(bus, submitted) is LATE
    assert not cancel_refs(bus)


def test_request_without_a_branch_is_cancelled_by_its_inbox_entry(bus: BusFixture) -> None:
    submitted = bus.submit()
    bus.repo.git("update-ref", "-d", submitted.ref, cwd=bus.repo.remote)
    assert cancel(bus, submitted) is LATE
    assert cancel(bus, submitted, ref=refs.INBOX + submitted.nonce) is ASKED


@pytest.mark.slow
def test_cancel_request_is_a_branch_where_only_branches_are_allowed(bus: BusFixture) -> None:
    bus.allow_only_branches()
    submitted, other = bus.submit(), bus.submit()
    assert cancel(bus, submitted) is ASKED
    assert list(cancel_refs(bus)) == [refs.BRANCH_CANCELS + submitted.nonce]
    assert cancel(bus, submitted) is AGAIN
    bus.hook("update", 'echo "closed today"; exit 1')
    with pytest.raises(PushRejected, match="closed today"):
        cancel(bus, other)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("first", ["garbage", "unsigned", "another key", "another request"])
def test_signed_cancel_request_replaces_one_that_does_less(bus: BusFixture, first: str) -> None:
    mine, theirs = make_key(bus.root, "mine"), make_key(bus.root, "theirs")
    submitted = bus.submit()
    if first == "garbage":
        put_foreign(bus, submitted, {CANCEL_NAME: b"{"})
    elif first == "another request":
        put_foreign(bus, submitted, {CANCEL_NAME: new_cancel(submitted.nonce, "0" * 40).to_bytes()})
    else:
        cancel(bus, submitted, key=theirs if first == "another key" else None)
    allow(bus, me=mine)
    assert why_not(bus, submitted)
    assert cancel(bus, submitted, key=mine) is ASKED
    assert why_not(bus, submitted) == ""


def test_with_required_signatures_only_the_requester_may_cancel(bus: BusFixture) -> None:
    mine, theirs = make_key(bus.root, "mine"), make_key(bus.root, "theirs")
    allow(bus, me=mine, them=theirs)
    submitted = bus.submit()
    cancel(bus, submitted)
    assert "unsigned" in why_not(bus, submitted)
    cancel(bus, submitted, key=theirs)
    assert "signed by them@example.org, who did not ask" in why_not(bus, submitted)
    cancel(bus, submitted, key=mine)
    assert why_not(bus, submitted) == ""
    assert "who did not ask" in why_not(bus, submitted, requester=None)
    assert "another request" in why_not(bus, submitted, request_commit="1" * 40)
    (bus.root / "allowed").write_text("")
    assert "is not listed here" in why_not(bus, submitted)
    line = allowed_line(signing.public_key(mine), "me@example.org", signing.REQUEST_NAMESPACE)
    (bus.root / "allowed").write_text(line)
    assert "which counts for kakeya-mac-request only" in why_not(bus, submitted)


def test_revoked_or_expired_key_cancels_nothing(bus: BusFixture) -> None:
    mine = make_key(bus.root, "mine")
    line = f'me@example.org valid-before="20990101Z" {signing.public_key(mine).read_text()}'
    (bus.root / "allowed").write_text(line)
    submitted, revoked = bus.submit(), bus.root / "revoked_keys"
    cancel(bus, submitted, key=mine)
    assert why_not(bus, submitted, now=datetime(2098, 12, 31, tzinfo=UTC)) == ""
    assert "expired at" in why_not(bus, submitted, now=datetime(2099, 1, 1, 0, 0, 1, tzinfo=UTC))
    revoked.write_bytes(signing.public_key(mine).read_bytes())
    assert "which was revoked" in why_not(bus, submitted)
    revoked.write_text("rubbish\n")
    assert "not a public key" in why_not(bus, submitted)


def test_signed_cancel_request_does_not_pass_for_another_request(bus: BusFixture) -> None:
    mine = make_key(bus.root, "mine")
    allow(bus, me=mine)
    first, second = bus.submit(), bus.submit()
    cancel(bus, first, key=mine)
    [commit] = cancel_refs(bus).values()
    bus.repo.git("update-ref", "-d", refs.CANCELS + first.nonce, cwd=bus.repo.remote)
    bus.point(refs.CANCELS + second.nonce, commit)
    for require in (True, False):
        assert "another request" in why_not(bus, second, require_signature=require)


def test_altered_cancel_request_does_not_verify(bus: BusFixture) -> None:
    mine = make_key(bus.root, "mine")
    allow(bus, me=mine)
    submitted = bus.submit()
    data = new_cancel(submitted.nonce, submitted.commit, reason="altered").to_bytes()
    signature = signing.sign(mine, signing.CANCEL_NAMESPACE, data + b" ")
    put_foreign(bus, submitted, {CANCEL_NAME: data, CANCEL_SIGNATURE_NAME: signature})
    assert "does not verify" in why_not(bus, submitted)
    put_foreign(bus, submitted, {CANCEL_NAME: data, CANCEL_SIGNATURE_NAME: b"x" * 20_000})
    assert "unsigned" in why_not(bus, submitted)


def test_other_objects_are_no_cancel_requests(bus: BusFixture) -> None:
    objects, git = Objects(bus.repo.remote), GitRepo(bus.repo.remote)
    others = [bus.repo.head(), objects.blob(b"x"), "1" * 40]
    others += [objects.commit_files(None, {CANCEL_NAME: data}) for data in (b"{", b"x" * 9000)]
    for commit in others:
        assert read_cancel(git, commit) is None
