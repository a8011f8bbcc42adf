"""A wish to stop stands only while its request does, and counts only for whom the machine listens to."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.cancels import (
    CANCEL_NAME,
    MAX_BYTES,
    SIGNATURE_NAME,
    Cancel,
    Wished,
    draft,
    objection,
    parse,
    read_cancel,
    wish,
)
from bridge.bus.git import Git
from bridge.bus.handles import Held
from bridge.bus.requests import Submitted
from bridge.errors import ManifestError, PushRejected, SignatureError
from bridge.protocol import refs
from tests.worlds import World


def standing(submitted: Submitted) -> Held:
    return Held(submitted.ref, submitted.commit)


def make_key(folder: Path, name: str) -> Path:
    return signing.ensure_key(folder / "keys" / name, name)


def wished(world: World, submitted: Submitted, *, key: Path | None = None, git: Git | None = None) -> Wished:
    cancel = draft(submitted.nonce, submitted.commit, requested_by="me", reason="wrong model")
    signature = key and signing.sign(key, signing.CANCEL_NAMESPACE, cancel.to_bytes())
    return wish(git or world.git, world.remote, cancel, standing(submitted), signature=signature)


def cancel_refs(world: World) -> dict[str, str]:
    return {ref: sha for ref, sha in world.git.ls_remote(world.remote).items() if "cancel" in ref}


def stray(world: World, submitted: Submitted, files: dict[str, bytes]) -> str:
    """A commit of somebody's own where the wish belongs."""
    commit = world.commit(submitted.commit, files)
    world.point(refs.cancel_ref(submitted.nonce), commit)
    return commit


def why_not(world: World, submitted: Submitted, **changes: object) -> str | None:
    """What a machine that requires signatures says of the wish that stands."""
    git = Git(world.house.remote)
    [commit] = cancel_refs(world).values()
    values: dict[str, object] = {
        "nonce": submitted.nonce,
        "request_commit": submitted.commit,
        "require_signature": True,
        "requester": "me@example.org",
        "allowed_signers": world.root / "allowed",
        **changes,
    }
    return objection(git, commit, **values)  # type: ignore[arg-type]


def allow(world: World, **keys: Path) -> None:
    lines = [
        signing.allowed_line(signing.public_key(key), f"{name}@example.org", signing.CANCEL_NAMESPACE)
        for name, key in keys.items()
    ]
    (world.root / "allowed").write_text("".join(lines))


def test_a_wish_stands_beside_its_request_and_is_read_back(world: World) -> None:
    submitted = world.submit()
    assert wished(world, submitted) is Wished.ASKED
    [(ref, commit)] = cancel_refs(world).items()
    assert ref == refs.cancel_ref(submitted.nonce)
    found = read_cancel(Git(world.house.remote), commit)
    assert found is not None
    assert (found.nonce, found.request_commit) == (submitted.nonce, submitted.commit)
    assert found.sentence == "cancelled by me: wrong model"
    assert world.git.ls_remote(world.remote)[submitted.ref] == submitted.commit


def test_nothing_is_left_in_the_clone(world: World) -> None:
    submitted = world.submit()
    before = sorted(path for path in (world.house.clone / ".git").rglob("*") if path.is_file())
    wished(world, submitted)
    assert sorted(path for path in (world.house.clone / ".git").rglob("*") if path.is_file()) == before


def test_a_clone_that_never_saw_the_request_can_cancel_it(world: World, tmp_path: Path) -> None:
    other = tmp_path / "other"
    world.house.git("clone", "--quiet", world.remote, str(other), cwd=tmp_path)
    submitted = world.submit()
    git = Git(other)
    assert not git.exists(submitted.commit)
    assert wished(world, submitted, git=git) is Wished.ASKED
    assert cancel_refs(world)


def test_asking_twice_is_fine_and_changes_nothing(world: World) -> None:
    submitted = world.submit()
    wished(world, submitted)
    before = cancel_refs(world)
    assert wished(world, submitted) is Wished.ALREADY_ASKED
    assert cancel_refs(world) == before


def test_an_answered_request_is_not_left_with_a_stray_wish(world: World) -> None:
    submitted = world.submit()
    world.answer(submitted)
    assert wished(world, submitted) is Wished.TOO_LATE
    assert not cancel_refs(world)


def test_a_request_whose_branch_is_gone_is_cancelled_by_its_inbox_entry(world: World) -> None:
    submitted = world.submit()
    world.house.git("update-ref", "-d", submitted.ref, cwd=world.house.remote)
    assert wished(world, submitted) is Wished.TOO_LATE
    inbox = Held(refs.inbox_ref(submitted.nonce), submitted.commit)
    cancel = draft(submitted.nonce, submitted.commit)
    assert wish(world.git, world.remote, cancel, inbox) is Wished.ASKED


def test_where_only_branches_are_taken_the_wish_is_a_branch(world: World) -> None:
    world.take_branches_only()
    submitted = world.submit()
    assert wished(world, submitted) is Wished.ASKED
    assert list(cancel_refs(world)) == [refs.BRANCH_CANCELS + submitted.nonce]
    assert wished(world, submitted) is Wished.ALREADY_ASKED


def test_a_server_that_takes_nothing_says_so(world: World) -> None:
    submitted = world.submit()
    world.hook("update", 'echo "closed today"; exit 1')
    with pytest.raises(PushRejected, match="closed today"):
        wished(world, submitted)


def test_a_key_that_cannot_sign_is_said_before_anything_is_pushed(world: World) -> None:
    submitted = world.submit()
    with pytest.raises(SignatureError, match="does not exist"):
        wished(world, submitted, key=world.root / "none")
    assert not cancel_refs(world)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("squatted", ["garbage", "unsigned", "another key", "another request"])
def test_nobody_keeps_a_signer_from_cancelling_by_being_first(world: World, squatted: str) -> None:
    mine, theirs = make_key(world.root, "mine"), make_key(world.root, "theirs")
    submitted = world.submit()
    if squatted == "garbage":
        stray(world, submitted, {CANCEL_NAME: b"{"})
    elif squatted == "unsigned":
        wished(world, submitted)
    elif squatted == "another key":
        wished(world, submitted, key=theirs)
    else:
        other = draft(submitted.nonce, "0" * 40)
        stray(world, submitted, {CANCEL_NAME: other.to_bytes()})
    allow(world, me=mine)
    assert why_not(world, submitted) is not None
    assert wished(world, submitted, key=mine) is Wished.ASKED
    assert why_not(world, submitted) is None
    assert wished(world, submitted, key=mine) is Wished.ALREADY_ASKED


def test_without_required_signatures_anybody_may_cancel(world: World) -> None:
    submitted = world.submit()
    wished(world, submitted)
    assert why_not(world, submitted, require_signature=False, requester=None) is None


def test_with_required_signatures_only_the_requester_may(world: World) -> None:
    mine, theirs = make_key(world.root, "mine"), make_key(world.root, "theirs")
    allow(world, me=mine, them=theirs)
    submitted = world.submit()
    wished(world, submitted)
    assert "unsigned" in (why_not(world, submitted) or "")
    wished(world, submitted, key=theirs)
    assert "signed by them@example.org, who did not ask" in (why_not(world, submitted) or "")
    wished(world, submitted, key=mine)
    assert why_not(world, submitted) is None
    assert "who did not ask" in (why_not(world, submitted, requester=None) or "")
    (world.root / "allowed").write_text("")
    assert "is not listed here" in (why_not(world, submitted) or "")


def test_a_key_listed_for_requests_alone_does_not_cancel(world: World) -> None:
    mine = make_key(world.root, "mine")
    line = signing.allowed_line(signing.public_key(mine), "me@example.org", signing.REQUEST_NAMESPACE)
    (world.root / "allowed").write_text(line)
    submitted = world.submit()
    wished(world, submitted, key=mine)
    assert signing.CANCEL_NAMESPACE in (why_not(world, submitted) or "")


def test_a_wish_signed_with_a_revoked_key_stops_nothing(world: World) -> None:
    mine = make_key(world.root, "mine")
    allow(world, me=mine)
    submitted = world.submit()
    wished(world, submitted, key=mine)
    revoked = world.root / "revoked_keys"
    assert why_not(world, submitted, revoked_keys=revoked) is None
    revoked.write_bytes(signing.public_key(mine).read_bytes())
    assert "which was revoked" in (why_not(world, submitted, revoked_keys=revoked) or "")
    revoked.write_text("rubbish\n")
    assert "not a public key" in (why_not(world, submitted, revoked_keys=revoked) or "")


def test_a_wish_counts_only_in_the_time_of_its_key(world: World) -> None:
    mine = make_key(world.root, "mine")
    line = f'me@example.org valid-before="20990101Z" {signing.public_key(mine).read_text()}'
    (world.root / "allowed").write_text(line)
    submitted = world.submit()
    wished(world, submitted, key=mine)
    assert why_not(world, submitted, now=datetime(2098, 12, 31, tzinfo=UTC)) is None
    assert "expired at" in (why_not(world, submitted, now=datetime(2099, 1, 1, tzinfo=UTC)) or "")


def test_a_signed_wish_does_not_pass_for_another_request(world: World) -> None:
    mine = make_key(world.root, "mine")
    allow(world, me=mine)
    first, second = world.submit(), world.submit()
    wished(world, first, key=mine)
    [commit] = cancel_refs(world).values()
    world.house.git("update-ref", "-d", refs.cancel_ref(first.nonce), cwd=world.house.remote)
    world.point(refs.cancel_ref(second.nonce), commit)
    for require in (True, False):
        assert "another request" in (why_not(world, second, require_signature=require) or "")
    changed = why_not(world, first, request_commit="1" * 40)
    assert "another request" in (changed or "")


def test_an_altered_wish_does_not_verify(world: World) -> None:
    mine = make_key(world.root, "mine")
    allow(world, me=mine)
    submitted = world.submit()
    cancel = draft(submitted.nonce, submitted.commit, reason="altered")
    signature = signing.sign(mine, signing.CANCEL_NAMESPACE, cancel.to_bytes() + b" ")
    stray(world, submitted, {CANCEL_NAME: cancel.to_bytes(), SIGNATURE_NAME: signature})
    assert "does not verify" in (why_not(world, submitted) or "")
    stray(world, submitted, {CANCEL_NAME: cancel.to_bytes(), SIGNATURE_NAME: b"x" * 20_000})
    assert "unsigned" in (why_not(world, submitted) or "")


def one() -> Cancel:
    nonce = refs.new_nonce(datetime.now(UTC), secrets.token_bytes(6))
    return draft(nonce, "a" * 40, requested_by="me", reason="because")


def test_a_wish_survives_its_bytes_exactly() -> None:
    cancel = one()
    assert parse(cancel.to_bytes()) == cancel
    assert parse(draft(cancel.nonce, "b" * 64).to_bytes()).reason is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"because"', b'"\\u001b[2J"', "not allowed in a text"),
        (b'"because"', b'"\\u202eevil"', "not allowed in a text"),
        (b'"because"', b'"' + b"x" * 501 + b'"', "at most 500"),
        (b'"because"', b"1", "string"),
        (b'"schema_version": 1', b'"schema_version": 2', "schema_version"),
        (b'"schema_version": 1', b'"schema_version": true', "schema_version"),
        (b'"me"', b'"me", "me2": 1', "me2"),
        (b'"me"', b'"me", "reason": "twice"', "twice"),
        (b'"' + b"a" * 40, b'"' + b"A" * 40, "request_commit"),
        (b"Z", b"", "time"),
        (b"{", b"[", "JSON"),
        (b"}", b"}" + b" " * MAX_BYTES, "at most"),
    ],
)
def test_a_wish_of_the_wrong_form_is_refused(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        parse(one().to_bytes().replace(old, new, 1))


def test_whatever_else_stands_there_is_no_wish(world: World) -> None:
    git = Git(world.house.remote)
    main = world.house.git("rev-parse", "HEAD")
    assert read_cancel(git, main) is None
    assert read_cancel(git, git.write_blob(b"x")) is None
    for data in (b"{", b"x" * (MAX_BYTES + 1)):
        assert read_cancel(git, world.commit(main, {CANCEL_NAME: data})) is None


def test_a_reason_is_brought_onto_one_line_and_not_cut() -> None:
    cancel = one()
    assert draft(cancel.nonce, "a" * 40, reason="one\ntwo\x1b[31m").reason == "one two"
    with pytest.raises(ManifestError, match="reason"):
        draft(cancel.nonce, "a" * 40, reason="x" * 501)
