"""Where runners' cards stand on the bus: published by compare-and-swap, read in one fetch.

A card is a parentless commit with ``runner.json`` and, from a runner that signs, its signature. Cards are
hints: what cannot be read is left out and counted, and nothing is refused because of one. Two runners of one
name do not overwrite each other while both are alive: the later one stands under its name and id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from bridge import signing
from bridge.bus.aside import aside
from bridge.bus.git import Git, Update
from bridge.bus.objects import Entry
from bridge.bus.results import Standing
from bridge.errors import BusError, LeaseLost, PushRejected, SignatureError
from bridge.protocol import refs
from bridge.protocol.manifest import parse_time
from bridge.protocol.runner_info import (
    CARD_NAME,
    CARD_SIGNATURE_NAME,
    MAX_BYTES,
    RunnerCard,
    is_live,
    parse_card,
)

TIMEOUT_S = 15.0
MAX_CARDS = 200
MAX_FETCH_BYTES = 64 * 1024 * 1024
MAX_READ_BYTES = 16 * 1024 * 1024

_HERE = "refs/cards/"
_HERE_BRANCH = "refs/branch-cards/"
_SPECS = (f"+{refs.RUNNERS}*:{_HERE}*", f"+{refs.BRANCH_RUNNERS}*:{_HERE_BRANCH}*")
_CONTENTION_TRIES = 4
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_NOT_IN_REF = re.compile(r"\.(?=\.|$|lock$)")


@dataclass(frozen=True)
class Place:
    """Where a runner's own card stands: the ref, the commit it holds, and the name that gives the runner."""

    ref: str
    commit: str

    @property
    def name(self) -> str:
        """Under which name the runner is listed."""
        return self.ref.rpartition("/")[2]


@dataclass(frozen=True)
class Seen:
    """A card that could be read.

    Attributes:
        name: Under which name it is listed.
        ref: Where it stands.
        commit: The commit that ref holds.
        card: What it says.
        standing: What its signature is worth here.
        signer: The trusted name, or the fingerprint of another key; None: unsigned or unchecked.
    """

    name: str
    ref: str
    commit: str
    card: RunnerCard
    standing: Standing
    signer: str | None

    @property
    def trusted(self) -> bool:
        """Whether a key that counts here signed it."""
        return self.standing is Standing.TRUSTED


@dataclass(frozen=True)
class Catalogue:
    """The cards on a remote.

    Attributes:
        seen: What could be read, by name.
        left_out: How many refs hold something that is no card of this schema, or not one of that name.
        held: Every ref looked at and the commit it holds.
    """

    seen: tuple[Seen, ...]
    left_out: int
    held: Mapping[str, str]

    def live(self, now: datetime) -> list[Seen]:
        """Runners that are there, as far as their cards tell."""
        return [seen for seen in self.seen if is_live(seen.card, now)]


def publish_card(
    git: Git,
    remote: str,
    card: RunnerCard,
    signature: bytes | None,
    *,
    held: Place | None = None,
    now: datetime | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Place:
    """Put a runner's card on the bus, in place of its last one.

    Args:
        git: Any repository; nothing is left in it.
        remote: Address of the bus.
        card: What to publish.
        signature: Of the card's bytes, in the namespace of runner cards.
        held: What the last call returned; None: the first card of this process.
        now: By which another runner's card of the same name is judged alive (aware); None: now.
        timeout_s: Deadline of each exchange with the remote.

    Returns:
        Where it stands. Its name is the runner's own, or ``<name>-<id[:6]>`` while another live runner has
        that.

    Raises:
        PushRejected: The remote takes cards neither as its own refs nor as branches.
        LeaseLost: The ref changed hands again and again.
        RemoteUnreachable: It did not answer.
    """

    def put(ref: str, expected: str = "") -> Place:
        return _put(git, remote, card, signature, ref=ref, expected=expected, now=now, timeout_s=timeout_s)

    if held is not None:
        return put(held.ref, held.commit)
    try:
        return put(refs.RUNNERS + ref_name(card))
    except PushRejected:
        return put(refs.BRANCH_RUNNERS + ref_name(card))


def read_cards(
    git: Git,
    remote: str,
    *,
    trusted: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Catalogue:
    """Every runner's card on a remote, by one fetch into a repository of its own.

    Args:
        git: Any checkout; nothing is left in it.
        remote: Address of the bus.
        trusted: Names of the runner keys that count here, by fingerprint.
        timeout_s: Deadline of the fetch.

    Raises:
        RemoteUnreachable: The remote did not answer.
        BusError: It sends more than this reads.
    """
    with aside(git) as here:
        here.fetch(remote, _SPECS, depth=1, timeout_s=timeout_s, limit_bytes=MAX_FETCH_BYTES)
        held = {refs.RUNNERS + ref.removeprefix(_HERE): sha for ref, sha in here.refs(_HERE).items()}
        held |= {
            refs.BRANCH_RUNNERS + ref.removeprefix(_HERE_BRANCH): sha
            for ref, sha in here.refs(_HERE_BRANCH).items()
        }
        contents = _contents(here, list(held.values()))
    cards = [_read(ref, sha, *contents.get(sha, (None, None)), trusted or {}) for ref, sha in held.items()]
    seen = _latest([card for card in cards if card is not None])
    return Catalogue(tuple(sorted(seen, key=lambda s: s.name)), cards.count(None), held)


def read_card(git: Git, ref: str, commit: str, trusted: Mapping[str, str]) -> Seen | None:
    """A card that a trusted key signed, from a commit that is in this repository; None: it is none such.

    A signature is checked only where the card names a trusted key: anybody can push cards by the thousand.

    Args:
        git: The repository.
        ref: Where the card stands.
        commit: What that ref holds.
        trusted: Names of the runner keys that count here, by fingerprint.
    """
    try:
        data = git.read_blob(commit, CARD_NAME, MAX_BYTES)
        signature = git.read_blob(commit, CARD_SIGNATURE_NAME, signing.MAX_SIGNATURE_BYTES)
        key = None if data is None else parse_card(data).public_key
        if key is None or signing.fingerprint(key) not in trusted:
            return None
    except (BusError, SignatureError):
        return None
    seen = _read(ref, commit, data, signature, trusted)
    return seen if seen is not None and seen.trusted else None


def forget_cards(git: Git, remote: str, *, older_than: timedelta, now: datetime) -> list[str]:
    """Delete the cards of runners not seen for so long; returns their names. Unreadable ones stay.

    Raises:
        PushRejected: The remote said no.
        RemoteUnreachable: It did not answer.
    """
    old = [
        seen
        for seen in read_cards(git, remote).seen
        if not is_live(seen.card, now) and now - parse_time(seen.card.seen_at) > older_than
    ]
    gone = []
    for seen in old:
        try:
            git.push(remote, [Update(seen.ref, None, seen.commit)], timeout_s=TIMEOUT_S)
        except LeaseLost:  # it came back just now
            continue
        gone.append(seen.name)
    return gone


def ref_name(card: RunnerCard) -> str:
    """A runner's name as the last part of a ref; git takes no ``..`` and no ``.`` or ``.lock`` at the end."""
    return _NOT_IN_REF.sub("-", card.name)


def _put(
    git: Git,
    remote: str,
    card: RunnerCard,
    signature: bytes | None,
    *,
    ref: str,
    expected: str,
    now: datetime | None,
    timeout_s: float,
) -> Place:
    """Push until the ref holds the card, over an own or dead one; beside a live one of another runner."""
    with git.scratch() as scratch:
        commit = _write(scratch, card, signature)
        for _ in range(_CONTENTION_TRIES):
            try:
                scratch.push(remote, [Update(ref, commit, expected)], timeout_s=timeout_s)
            except LeaseLost:
                found = read_cards(git, remote, timeout_s=timeout_s)
            else:
                return Place(ref, commit)
            other = next((seen for seen in found.seen if seen.ref == ref), None)
            own = _own_ref(ref, card)
            alive = other is not None and is_live(other.card, now or datetime.now(UTC))
            if other is not None and other.card.id != card.id and alive and ref != own:
                ref = own
            expected = found.held.get(ref, "")
    raise LeaseLost(f"the card {ref} changed hands {_CONTENTION_TRIES} times", "it is published again later")


def _own_ref(ref: str, card: RunnerCard) -> str:
    """The ref that no other runner of this name uses."""
    return f"{ref.rpartition('/')[0]}/{ref_name(card)}-{card.id[:6]}"


def _write(git: Git, card: RunnerCard, signature: bytes | None) -> str:
    files = {CARD_NAME: card.to_bytes()}
    if signature is not None:
        files[CARD_SIGNATURE_NAME] = signature
    if len(files[CARD_NAME]) > MAX_BYTES:
        size = len(files[CARD_NAME])
        raise BusError(f"the card of {card.name} has {size} bytes; at most {MAX_BYTES} are read")
    tree = git.write_tree(
        [Entry("100644", "blob", git.write_blob(data), name) for name, data in files.items()]
    )
    return git.commit_tree(tree, [], f"kakeya-mac runner: {card.name} [skip ci]\n")


def _contents(git: Git, commits: list[str]) -> dict[str, tuple[bytes | None, bytes | None]]:
    """Card and signature in each commit; None for what is absent, too large, or more than is read at all."""
    names = [(commit, name) for commit in dict.fromkeys(commits) for name in (CARD_NAME, CARD_SIGNATURE_NAME)]
    asked = "".join(f"{commit}:{name}\n" for commit, name in names).encode()
    answers = git.run("cat-file", "--batch-check", input=asked).decode("utf-8", "replace").splitlines()
    wanted: dict[tuple[str, str], str] = {}
    total = 0
    for (commit, name), answer in zip(names, answers, strict=True):
        sha, _, rest = answer.partition(" ")
        kind, _, size = rest.partition(" ")
        most = MAX_BYTES if name == CARD_NAME else signing.MAX_SIGNATURE_BYTES
        if len(wanted) < 2 * MAX_CARDS and kind == "blob" and int(size) <= min(most, MAX_READ_BYTES - total):
            wanted[commit, name] = sha
            total += int(size)
    data = git.read_objects(list(wanted.values()), MAX_READ_BYTES)
    found = dict(zip(wanted, data, strict=True))
    return {
        commit: (found.get((commit, CARD_NAME)), found.get((commit, CARD_SIGNATURE_NAME)))
        for commit in commits
    }


def _read(
    ref: str, commit: str, data: bytes | None, signature: bytes | None, trusted: Mapping[str, str]
) -> Seen | None:
    """A card as it stands; None when it is none, is not that runner's, or its signature does not hold."""
    name = ref.removeprefix(refs.RUNNERS).removeprefix(refs.BRANCH_RUNNERS)
    if data is None or _NAME.fullmatch(name) is None:
        return None
    try:
        card = parse_card(data)
        if name not in (ref_name(card), f"{ref_name(card)}-{card.id[:6]}"):
            return None
        standing, signer = _standing(card, data, signature, trusted)
    except (BusError, SignatureError):
        return None
    return Seen(name, ref, commit, card, standing, signer)


def _standing(
    card: RunnerCard, data: bytes, signature: bytes | None, trusted: Mapping[str, str]
) -> tuple[Standing, str | None]:
    """What a card's signature is worth.

    Raises:
        SignatureError: It does not hold, or the card names a key that did not sign it.
    """
    if signature is None:
        if card.public_key is not None:
            raise SignatureError("the card names a key and is not signed")
        return Standing.UNSIGNED, None
    named = None if card.public_key is None else signing.fingerprint(card.public_key)
    if not signing.available():
        return Standing.UNCHECKED, None
    signer = signing.signer_fingerprint(data, signature, signing.RUNNER_NAMESPACE)
    if named != signer:
        raise SignatureError("the card names another key than the one that signed it")
    return (Standing.TRUSTED, trusted[signer]) if signer in trusted else (Standing.UNTRUSTED_KEY, signer)


def _latest(cards: list[Seen]) -> list[Seen]:
    """The last card of each runner (it may have stood under two names), no two of one name."""
    newest: dict[tuple[str, Standing, str | None], Seen] = {}
    for seen in sorted(cards, key=lambda seen: (seen.card.seen_at, seen.ref)):
        newest[seen.card.id, seen.standing, seen.signer] = seen
    named: dict[str, Seen] = {}
    for seen in sorted(newest.values(), key=lambda seen: seen.ref, reverse=True):  # own refs before branches
        name = seen.name if seen.name not in named else f"{seen.name}-{seen.card.id[:6]}"
        named[name] = replace(seen, name=name)
    return list(named.values())
