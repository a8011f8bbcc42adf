"""``kakeya_mac runner signers``: keys are listed, shown, changed, revoked and removed, as the files say."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge import signing
from bridge.cli.signers import signers
from tests.bridge.cli.calls import call
from tests.bridge.signing.keyring import private, public
from tests.fixtures.repo import Done

SPACE = signing.REQUEST_NAMESPACE


@dataclass
class SignersOwner:
    """Types commands and looks at the files."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def allowed(self) -> Path:
        return self.folder / "allowed_signers"

    @property
    def revoked(self) -> Path:
        return self.folder / "revoked_keys"

    def type(self, *args: str) -> Done:
        return call(signers, self.capsys, *args)

    def add(self, name: str, key: str, *more: str) -> Done:
        return self.type("add", name, "--key", public(key).line, *more)

    def states(self) -> dict[tuple[str, str], str]:
        """(name, fingerprint) → state."""
        rows = self.type("list", "--json").json["signers"]
        return {(row["name"], row["fingerprint"]): row["state"] for row in rows}

    def who(self, key: str, namespace: str = SPACE) -> str | None:
        """By which name the lists know a signature of a key, now."""
        signature = signing.sign(private(key), namespace, b"x")
        return signing.identify(b"x", signature, namespace, self.allowed).name


@pytest.fixture
def owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> SignersOwner:
    folder = tmp_path / "config"
    monkeypatch.setenv("KAKEYA_CONFIG", str(folder))
    return SignersOwner(folder, capsys)


def test_added_key_signs_requests_and_cancels_and_nothing_else(owner: SignersOwner) -> None:
    done = owner.add("ann", "ann")
    assert (done.code, done.out) == (0, f"listed: ann {public('ann').fingerprint} ({owner.allowed})\n")
    assert {owner.who("ann", each) for each in (SPACE, signing.CANCEL_NAMESPACE)} == {"ann"}
    assert owner.who("ann", signing.RESULT_NAMESPACE) is None
    assert owner.allowed.stat().st_mode & 0o777 == 0o600
    assert owner.folder.stat().st_mode & 0o777 == 0o700
    assert "already listed" in owner.add("ann", "ann").out
    assert owner.add("ann", "ann", "--json").json["added"] is False


@pytest.mark.parametrize("way", ["line", "file", "input"])
def test_a_key_is_given_as_a_line_a_file_or_on_standard_input(
    owner: SignersOwner, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = signing.public_key(private("ann"))
    given = {"line": file.read_text().strip(), "file": str(file), "input": "-"}[way]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert owner.type("add", "ann", "--key", given).code == 0
    assert owner.who("ann") == "ann"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("add", "*", "--key", "{ann}"), "cannot be a signer's name"),
        (("add", "unsigned", "--key", "{ann}"), "cannot be a signer's name"),
        (("add", "a,b", "--key", "{ann}"), "cannot be a signer's name"),
        (("add", "ann", "--key", "ssh-ed25519 AAAA"), "not a public key"),
        (("add", "ann", "--key", "/no/such/file"), "neither a public key nor a file"),
        (("add", "ann", "--key", "{private}"), "private key"),
        (("add", "ann", "--key", "{ann}", "--valid-until", "2001-01-01"), "is over"),
        (("add", "ann", "--key", "{ann}", "--valid-until", "soon"), "is no time"),
        (("add", "ann", "--key", "{ann}", "--valid-until", "9999-12-31"), "is no time"),
        (("add", "eve", "--key", "{bob}"), "this key belongs to bob"),
        (("remove", "ann"), "no key of 'ann'"),
        (("revoke", "ann"), "no key of 'ann'"),
        (("revoke", "bob", "--key", "SHA256:nothing"), "of 'bob'"),
    ],
    ids=[
        *("pattern", "unsigned", "two-names", "no-key", "no-file", "private", "over", "words", "beyond"),
        *("somebody-elses", "remove-nobody", "revoke-nobody", "no-such-key"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(
    owner: SignersOwner, args: tuple[str, ...], words: str
) -> None:
    owner.add("bob", "bob")
    before = owner.allowed.read_bytes()
    keys = {"ann": public("ann").line, "bob": public("bob").line, "private": str(private("ann"))}
    done = owner.type(*(arg.format(**keys) for arg in args))
    assert done.code == 2
    assert words in done.err
    assert owner.allowed.read_bytes() == before
    assert not owner.revoked.exists()


def test_a_key_counts_until_the_end_of_its_last_day(owner: SignersOwner) -> None:
    owner.add("ann", "ann", "--valid-until", (datetime.now() + timedelta(days=1)).strftime("%Y-%m-%d"))
    assert owner.states() == {("ann", public("ann").fingerprint): "counts"}
    signature = signing.sign(private("ann"), SPACE, b"x")

    def name(after: timedelta) -> str | None:
        now = datetime.now(UTC) + after
        return signing.identify(b"x", signature, SPACE, owner.allowed, now=now).name

    assert (name(timedelta(hours=23)), name(timedelta(hours=49))) == ("ann", None)


def test_a_key_is_changed_by_adding_the_new_one_and_revoking_the_old(owner: SignersOwner) -> None:
    owner.add("ann", "old")
    owner.add("ann", "new")
    assert (owner.who("old"), owner.who("new")) == ("ann", "ann")
    which = owner.type("revoke", "ann")
    assert which.code == 2
    assert public("old").fingerprint in which.err
    assert not owner.revoked.exists()
    done = owner.type("revoke", "ann", "--key", public("old").fingerprint, "--json")
    assert done.json["keys"] == [public("old").fingerprint]
    assert (owner.who("old"), owner.who("new")) == (None, "ann")
    assert set(owner.states().values()) == {"revoked", "counts"}
    assert "revoked" in owner.type("list").out
    again = owner.type("add", "ann", "--key", public("old").line)
    assert again.code == 2
    assert "was revoked" in again.err
    assert owner.type("revoke", "ann").code == 0, "one key is left, so it is clear which"
    assert owner.who("new") is None
    assert "was revoked before" in owner.type("revoke", "ann").err


def test_all_keys_of_a_name_are_revoked_at_once_and_no_others(owner: SignersOwner) -> None:
    for name, key in (("ann", "old"), ("ann", "new"), ("bob", "bob")):
        owner.add(name, key)
    assert owner.type("revoke", "ann", "--all").code == 0
    assert [owner.who(key) for key in ("old", "new", "bob")] == [None, None, "bob"]


def test_removing_takes_one_key_or_all_and_keeps_the_owners_comments(owner: SignersOwner) -> None:
    for name, key in (("ann", "old"), ("ann", "new"), ("bob", "bob")):
        owner.add(name, key)
    owner.allowed.write_text("# ours\n" + owner.allowed.read_text())
    owner.allowed.chmod(0o600)
    assert owner.type("remove", "ann", "--key", public("old").line).code == 0
    assert (owner.who("old"), owner.who("new")) == (None, "ann")
    assert owner.type("remove", "ann", "--json").json["keys"] == [public("new").fingerprint]
    assert owner.allowed.read_text().startswith("# ours\nbob ")


def test_a_list_by_hand_shows_what_each_line_is_good_for(owner: SignersOwner) -> None:
    assert "no key is listed yet" in owner.type("list").out
    owner.folder.mkdir(mode=0o700)
    lines = [
        f"any {public('ann').line} her laptop",
        f'git namespaces="git" {public("bob").line}',
        f'late valid-after="20990101" {public("old").line}',
        f'gone valid-before="20010101Z" {public("new").line}',
    ]
    owner.allowed.write_text("\n".join(lines) + "\n")
    assert list(owner.states().values()) == ["counts", "other-use", "not-yet", "expired"]
    shown = owner.type("list").out.splitlines()
    assert [line.split()[0] for line in shown] == ["any", "git", "late", "gone"]
    assert "her laptop" in shown[0]
    assert json.loads(owner.type("list", "--json").out)["signers"][0]["namespaces"] is None
