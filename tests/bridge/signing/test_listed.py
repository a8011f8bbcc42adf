"""A list of keys says exactly what its owner wrote, agrees with ssh-keygen, and never more than that."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridge import signing
from bridge.errors import KeyListError, SignatureError
from bridge.proc import helper_environment, run_program
from bridge.signing.keyfiles import NAME_PATTERN, AllowedSigner, KeyList, parse_line, read_keys
from bridge.signing.trust import TrustLevel
from tests.bridge.signing.keyring import private, public

ANN = public("ann").line
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
SPACE = signing.REQUEST_NAMESPACE


def write(folder: Path, *lines: str) -> Path:
    path = folder / "allowed_signers"
    path.write_text("".join(line + "\n" for line in lines))
    return path


# What precedes the key → whether it counts for a request at NOW.
OPTIONS = {
    "nothing": ("", True),
    "namespace": (f'namespaces="{SPACE}"', True),
    "two-namespaces": (f'namespaces="{signing.CANCEL_NAMESPACE},{SPACE}"', True),
    "other-namespace": (f'namespaces="{signing.CANCEL_NAMESPACE}"', False),
    "pattern": ('namespaces="kakeya-mac-*"', True),
    "other-pattern": ('namespaces="git*,kakeya-mac-c*"', False),
    "upper-case-option": (f'NAMESPACES="{SPACE}"', True),
    "not-yet": ('valid-after="20260301120001Z"', False),
    "just-started": ('valid-after="20260301115959Z"', True),
    "last-second": ('valid-before="20260301120001Z"', True),
    "over": ('valid-before="20260301115959Z"', False),
    "day-started": ('valid-after="20260301Z"', True),
    "day-over": ('valid-before="20260301Z"', False),
    "minute": ('valid-before="202603011201Z"', True),
    "window": ('valid-after="20260201Z",valid-before="20260401Z"', True),
    "all": (f'namespaces="{SPACE}",valid-after="20260201Z",valid-before="20260401Z"', True),
}


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_line_means_what_ssh_keygen_takes_it_for(
    tmp_path: Path, options: tuple[str, bool], zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our reading and that of ``ssh-keygen -Y verify`` are the same, and the table's."""
    import time

    monkeypatch.setenv("TZ", zone)
    time.tzset()
    text, counts = options
    if zone != "UTC":  # the same moments, written in local time
        text = text.replace('20260301120001Z"', '20260301210001"').replace('115959Z"', '205959"')
        text = text.replace('Z"', '"') if "201Z" not in text else text
        text = text.replace("202603011201", "202603012101")
    path = write(tmp_path, f"ann {text} {ANN}".replace("  ", " "))
    signature = signing.sign(private("ann"), SPACE, b"data")
    try:
        found = signing.identify(b"data", signature, SPACE, path, now=NOW)
        assert (found.name == "ann") is counts, found
        (tmp_path / "sig").write_bytes(signature)
        stamp = NOW.astimezone().strftime("%Y%m%d%H%M%S")
        argv = ["ssh-keygen", "-Y", "verify", "-n", SPACE, "-I", "ann", "-s", str(tmp_path / "sig")]
        argv += ["-f", str(path), f"-Overify-time={stamp}"]
        done = run_program(argv, input=b"data", timeout_s=20, env=helper_environment())
        assert done.ok is counts, done
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"*@example.org {ANN}", "cannot be a signer's name"),
        (f"ann,bob {ANN}", "cannot be a signer's name"),
        (f'"ann" {ANN}', "cannot be a signer's name"),
        (f"unsigned {ANN}", "cannot be a signer's name"),
        (f"\u0430nn {ANN}", "cannot be a signer's name"),
        (f"ann CERT-AUTHORITY {ANN}", "is not understood"),
        (f'ann namespaces="a" namespaces="b" {ANN}', "is not understood"),
        (f"ann namespaces=a {ANN}", "is not understood"),
        ("ann", "is not understood"),
        (f'ann principals="a" {ANN}', "unknown or given twice"),
        (f'ann namespaces="a",namespaces="b" {ANN}', "unknown or given twice"),
        (f'ann namespaces="" {ANN}', "no list of namespaces"),
        (f'ann namespaces="a,!b" {ANN}', "no list of namespaces"),
        (f'ann valid-before="" {ANN}', "no time"),
        (f'ann valid-before="20260231" {ANN}', "no time"),
        (f'ann valid-before="2026-03-01" {ANN}', "no time"),
        ("ann ssh-ed25519", "not a public key"),
        (f"ann {ANN[:-12]}", "not a public key"),
        (f"ann\u202e {ANN}", "U\\+202E"),
        (f"ann\0 {ANN}", "U\\+0000"),
    ],
    ids=[
        *("pattern", "two-names", "quoted-name", "unsigned", "homoglyph", "authority", "two-words"),
        *("no-quotes", "name-alone", "unknown-option", "twice", "no-namespaces", "not-namespace"),
        *("empty-time", "no-such-day", "dashes", "kind-alone", "cut-off", "bidirectional", "nul"),
    ],
)
def test_a_line_that_is_not_understood_spoils_the_list_and_is_named(
    tmp_path: Path, line: str, words: str
) -> None:
    path = write(tmp_path, "# people", "", f"bob {public('bob').line}", line)
    with pytest.raises(KeyListError, match=words) as caught:
        read_keys(path)
    assert caught.value.message.startswith(f"{path}:4: ")
    with pytest.raises(KeyListError):
        signing.identify(b"x", signing.sign(private("bob"), SPACE, b"x"), SPACE, path)


@pytest.mark.parametrize("mode", [0o620, 0o602])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_list_that_others_may_write_says_nothing(tmp_path: Path, what: str, mode: int) -> None:
    path = write(tmp_path, f"ann {ANN}")
    target = path if what == "file" else tmp_path
    target.chmod(mode | (0o100 if what == "folder" else 0))
    try:
        with pytest.raises(KeyListError, match="can be written by others") as caught:
            read_keys(path)
    finally:
        target.chmod(0o700)
    assert caught.value.remedy == f"chmod go-w {target}"


def test_a_link_into_a_folder_that_others_may_write_says_nothing(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "real").write_text(f"ann {ANN}\n")
    shared.chmod(0o777)
    (tmp_path / "allowed_signers").symlink_to(shared / "real")
    with pytest.raises(KeyListError, match="shared can be written by others"):
        read_keys(tmp_path / "allowed_signers")


_WORDS = st.sampled_from(
    (
        *("ann", "*", "unsigned", "cert-authority", 'namespaces="a,b"', 'valid-before="20270101Z"'),
        *("namespaces", '"', ",", " ", "\t", "=", "ssh-ed25519", "ssh-rsa", ANN, ANN.split()[1], "#"),
        *("\r", "\0", "\u202e", "é"),
    )
)


@given(
    st.one_of(st.text(max_size=80), st.lists(_WORDS, max_size=9).map("".join), st.lists(_WORDS).map(" ".join))
)
@example(f"ann {ANN}")  # accepted lines are rare among those drawn
@example(f'  ann  Namespaces="a,b",valid-before="20270101Z"  {ANN}  a comment \r')
def test_any_line_is_an_entry_of_one_name_and_key_or_refused_in_words(line: str) -> None:
    try:
        found = parse_line(line)
    except SignatureError:
        return
    assert re.fullmatch(NAME_PATTERN, found.name)
    assert found.name != "unsigned"
    assert found.key.line == ANN
    assert found.text().endswith("\n")
    assert isinstance(found, AllowedSigner)
    assert parse_line(found.text()[:-1]) == found, "what is written is what was read"


def lists(folder: Path, *namespaces: str) -> KeyList:
    return KeyList(folder / "allowed_signers", namespaces or (SPACE,))


def test_what_is_added_is_read_back_and_only_its_owner_reads_the_file(tmp_path: Path) -> None:
    keys = lists(tmp_path / "config")
    until = NOW + timedelta(days=7)
    assert keys.add("ann", public("ann"), valid_before=until, now=NOW)
    assert not keys.add("ann", public("ann"), valid_before=until, now=NOW)
    assert keys.add("bob", public("bob"), valid_before=None, now=NOW)
    ann, bob = read_keys(keys.allowed)
    assert (ann.name, ann.valid_before, ann.line, ann.key.comment) == ("ann", until, 1, "ann")
    assert (bob.name, bob.valid_before, bob.line) == ("bob", None, 2)
    assert keys.allowed.stat().st_mode & 0o777 == 0o600
    assert keys.allowed.parent.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in keys.allowed.parent.iterdir()] == ["allowed_signers"]


def test_a_name_may_have_two_keys_and_a_key_only_one_name(tmp_path: Path) -> None:
    keys = lists(tmp_path)
    keys.add("ann", public("ann"), valid_before=None, now=NOW)
    keys.add("ann", public("bob"), valid_before=None, now=NOW)
    with pytest.raises(SignatureError, match="this key belongs to ann"):
        keys.add("bob", public("bob"), valid_before=None, now=NOW)
    assert [line.name for line in read_keys(keys.allowed)] == ["ann", "ann"]


@pytest.mark.parametrize("name", ["", "unsigned", "-n", "a b", "a,b", "*", "a\n", "é", "x" * 129])
def test_ambiguous_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SignatureError, match="cannot be a signer's name"):
        lists(tmp_path).add(name, public("ann"), valid_before=None, now=NOW)
    assert not (tmp_path / "allowed_signers").exists()


def test_removing_keeps_comments_and_other_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "# people", f"ann {ANN}", "", f"bob {public('bob').line} laptop")
    lists(tmp_path).remove("ann")
    assert path.read_text() == f"# people\n\nbob {public('bob').line} laptop\n"
    with pytest.raises(SignatureError, match="has no key of 'ann'"):
        lists(tmp_path).remove("ann")


def test_of_many_additions_at_once_none_is_lost(tmp_path: Path) -> None:
    names = [f"name{number}" for number in range(8)]
    added = {"valid_before": None, "now": NOW}
    threads = [
        threading.Thread(target=lists(tmp_path, name).add, args=("ann", public("ann")), kwargs=added)
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {line.namespaces for line in read_keys(tmp_path / "allowed_signers")} == {(n,) for n in names}


@pytest.mark.parametrize(
    ("options", "revoked", "words"),
    [
        ('valid-before="20260301115959Z"', False, "of ann, which expired at 2026-03-01 11:59:59 UTC"),
        ('valid-after="20260301120001Z"', False, "of ann, which counts only from 2026-03-01 12:00:01 UTC on"),
        ('namespaces="git"', False, "of ann, which counts for git only"),
        ("", True, "of ann, which was revoked"),
    ],
    ids=["expired", "not-yet", "other-use", "revoked"],
)
def test_a_key_that_does_not_count_is_named_with_the_reason(
    tmp_path: Path, options: str, revoked: bool, words: str
) -> None:
    path, gone = write(tmp_path, f"ann {options} {ANN}".replace("  ", " ")), tmp_path / "revoked_keys"
    if revoked:
        gone.write_text(f"# stolen\n{ANN}\n")
    signature = signing.sign(private("ann"), SPACE, b"data")
    found = signing.identify(b"data", signature, SPACE, path, now=NOW)
    assert (found.name, found.trust is TrustLevel.REVOKED) == (None, revoked)
    assert found.objection == f"the key {public('ann').fingerprint} {words}"


def test_one_of_two_lines_of_a_key_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path, f'ann valid-before="20200101Z" {ANN}', f'ann namespaces="git" {ANN}', f"ann {ANN}")
    signature = signing.sign(private("ann"), SPACE, b"data")
    assert signing.identify(b"data", signature, SPACE, path, now=NOW).name == "ann"
