"""Where runners' registrations are on the bus: published by compare-and-swap, read in one fetch.

A registration is a hint: what cannot be read is left out and counted; no request is refused because of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from bridge import signing
from bridge.bus.requests import RefValue
from bridge.errors import BusError, LeaseLost, PushRejected, SignatureError
from bridge.git.cache import GitCache
from bridge.git.repo import RefUpdate
from bridge.protocol import refs, runner_info
from bridge.protocol.manifest import parse_time
from bridge.signing.trust import TrustLevel

TIMEOUT_S = 15.0
MAX_REGISTRATIONS = 200
# Prefixes of the refs that hold registrations.
PLACES = (refs.RUNNERS, refs.BRANCH_RUNNERS)

_CONTENTION_TRIES = 4
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_NOT_IN_REF = re.compile(r"\.(?=\.|$|lock$)")


@dataclass(frozen=True)
class Registration:
    """A registration that could be read."""

    name: str  # the name that the runner is listed under
    ref: str  # where it is
    commit: str  # the commit that ref holds
    info: runner_info.RunnerInfo  # what it says
    trust: TrustLevel  # what its signature is worth here
    signer: str | None  # the trusted name, or the fingerprint of another key; None: unsigned or unchecked

    @property
    def trusted(self) -> bool:
        """Whether a key that counts here signed it."""
        return self.trust is TrustLevel.TRUSTED


@dataclass(frozen=True)
class Registry:
    """The registrations on a remote."""

    seen: tuple[Registration, ...]  # what could be read, by name
    left_out: int  # how many refs hold something that is no registration, or not one of that name
    held: Mapping[str, str]  # every ref looked at and the commit it holds

    def live(self, now: datetime) -> list[Registration]:
        """Runners that are alive, as far as they say."""
        return [seen for seen in self.seen if runner_info.is_live(seen.info, now)]


def register(
    cache: GitCache,
    info: runner_info.RunnerInfo,
    signature: bytes | None,
    *,
    place: RefValue | None = None,
    now: datetime,
) -> RefValue:
    """Put a runner's registration on the bus, in place of its last one (`place`); returns where it is.

    It is listed under the runner's own name, or ``<name>-<id[:6]>`` while another runner of that name is
    alive.
    """
    data = info.to_bytes()
    if len(data) > runner_info.MAX_BYTES:
        raise BusError(
            f"the registration of {info.name} has {len(data)} bytes; at most {runner_info.MAX_BYTES} are read"
        )
    files = {runner_info.INFO_NAME: data, runner_info.INFO_SIGNATURE_NAME: signature}
    with cache.scratch() as scratch:
        commit = scratch.commit_files(None, files, f"kakeya-mac runner: {info.name} [skip ci]\n")

        def put(ref: str, expected: str) -> RefValue:
            for _ in range(_CONTENTION_TRIES):
                if scratch.swap(cache.remote, RefUpdate(ref, commit, expected)) is None:
                    return RefValue(ref, commit)
                found = read_registry(cache)
                other = next((seen for seen in found.seen if seen.ref == ref), None)
                if other is not None and other.info.id != info.id and runner_info.is_live(other.info, now):
                    ref = f"{ref.rpartition('/')[0]}/{ref_name(info)}-{info.id[:6]}"
                expected = found.held.get(ref, "")
            raise LeaseLost(f"{ref} changed hands too often", "the runner registers again later")

        if place is not None:
            return put(place.ref, place.commit)
        try:
            return put(refs.RUNNERS + ref_name(info), "")
        except PushRejected:
            return put(refs.BRANCH_RUNNERS + ref_name(info), "")


def read_registry(
    cache: GitCache,
    *,
    found: Mapping[str, str] | None = None,
    trusted: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Registry:
    """Every runner's registration on a remote.

    `found` are its refs, where they were listed just now; `trusted` names the keys that count, by
    fingerprint.
    """
    if found is None:
        found = cache.list_remote(*PLACES, timeout_s=timeout_s)
    held = {ref: commit for ref, commit in found.items() if ref.startswith(PLACES)}
    named = [ref for ref in sorted(held) if _NAME.fullmatch(_listed_name(ref))][:MAX_REGISTRATIONS]
    failures = cache.bring(held, named, depth=1)
    read = [_read(cache, ref, held[ref], trusted or {}) for ref in named if ref not in failures]
    readable = [registration for registration in read if registration is not None]
    return Registry(tuple(_latest(readable)), len(held) - len(readable), held)


def remove_old_registrations(cache: GitCache, *, older_than: timedelta, now: datetime) -> list[str]:
    """Delete the registrations of runners not seen for so long; returns their names. Unreadable ones stay."""
    gone = []
    for seen in read_registry(cache).seen:
        if runner_info.is_live(seen.info, now) or now - parse_time(seen.info.seen_at) <= older_than:
            continue
        try:
            cache.push(cache.remote, [RefUpdate(seen.ref, None, seen.commit)], timeout_s=TIMEOUT_S)
        except LeaseLost:  # it came back just now
            continue
        gone.append(seen.name)
    return gone


def ref_name(info: runner_info.RunnerInfo) -> str:
    """A runner's name as the last part of a ref; git takes no ``..`` and no ``.`` or ``.lock`` at the end."""
    return _NOT_IN_REF.sub("-", info.name)


def _read(cache: GitCache, ref: str, commit: str, trusted: Mapping[str, str]) -> Registration | None:
    """A registration; None when it is none, is not that runner's, or its signature does not verify."""
    name = _listed_name(ref)
    try:
        data = cache.read_file(commit, runner_info.INFO_NAME, runner_info.MAX_BYTES)
        signature = cache.read_file(commit, runner_info.INFO_SIGNATURE_NAME, signing.MAX_SIGNATURE_BYTES)
        if data is None:
            return None
        info = runner_info.parse_info(data)
        if name not in (ref_name(info), f"{ref_name(info)}-{info.id[:6]}"):
            return None
        trust, signer = _check_signature(info, data, signature, trusted)
    except (BusError, SignatureError):
        return None
    return Registration(name, ref, commit, info, trust, signer)


def _check_signature(
    info: runner_info.RunnerInfo, data: bytes, signature: bytes | None, trusted: Mapping[str, str]
) -> tuple[TrustLevel, str | None]:
    """What a registration's signature is worth; a `SignatureError` where it names another key."""
    if signature is None:
        if info.public_key is not None:
            raise SignatureError("the registration names a key and is not signed")
        return TrustLevel.UNSIGNED, None
    named = None if info.public_key is None else signing.fingerprint(info.public_key)
    if not signing.available():
        return TrustLevel.UNCHECKED, None
    signer = signing.signer_fingerprint(data, signature, signing.RUNNER_NAMESPACE)
    if named != signer:
        raise SignatureError("the registration names another key than the one that signed it")
    return (TrustLevel.TRUSTED, trusted[signer]) if signer in trusted else (TrustLevel.UNTRUSTED_KEY, signer)


def _latest(found: list[Registration]) -> list[Registration]:
    """The last registration of each runner, which may be listed under two names."""
    newest: dict[tuple[str, TrustLevel, str | None], Registration] = {}
    for seen in sorted(found, key=lambda seen: (seen.info.seen_at, seen.ref)):
        newest[seen.info.id, seen.trust, seen.signer] = seen
    return sorted(newest.values(), key=lambda seen: seen.name)


def _listed_name(ref: str) -> str:
    return ref.removeprefix(refs.RUNNERS).removeprefix(refs.BRANCH_RUNNERS)
