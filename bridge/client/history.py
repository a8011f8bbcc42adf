"""What waits, runs and ran on a bus: lists read from its refs, heartbeats, results and archive.

A list shows what was published and judges nothing: a status here is the runner's word, or that of whoever can
push. `bridge.bus.results.believe` is for one result. Texts come back cleaned for a terminal.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

from bridge.bus.archive_record import Summary, summary_of
from bridge.bus.archived import archive_in
from bridge.bus.cache import Cache, open_cache, sound
from bridge.bus.claimed import read_claim, read_status
from bridge.bus.git import Git
from bridge.bus.handles import Held
from bridge.bus.leases import MAX_LEASE_S
from bridge.bus.requests import FOLDER
from bridge.bus.results import pins_keys
from bridge.bus.retire import Standing, standings
from bridge.bus.standing import Signature, Trust
from bridge.errors import BusError, ResultError
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW, REQUEST_PATH, format_time, parse_time
from bridge.protocol.result import (
    MAX_BYTES,
    RESULT_NAME,
    RESULT_ROOT,
    STATUS_NAME,
    STATUS_SIGNATURE_NAME,
    Phase,
    Progress,
    Reason,
    RunStatus,
    Status,
    parse_result,
)
from bridge.protocol.sanitize import clean_line

# How many finished requests a filter may look through before it gives up.
MOST_LOOKED_AT = 5000

_AT_ONCE = 50
# Claims of which the signature is checked: anybody may have pushed thousands.
_MOST_CHECKED = 50
# Places of one request that are looked at for its result: anybody may push more branches of its nonce.
_MOST_PLACES = 8
# Branches without an inbox entry that are looked at for open requests, the newest first.
_MOST_WITHOUT_INBOX = 64


@dataclass(frozen=True)
class Row:
    """One request in a list.

    Attributes:
        nonce: Its name.
        preset: From its branch or its result; None: neither is known.
        phase: Where it is; `done` when it has a result.
        requested_at: From the nonce; None: that names no moment.
        ahead: Older requests that wait too; None unless it is queued.
        expected_s: Seconds until it is likely to start; None: not queued, or not known.
        runner: Who runs it, or ran it.
        attempt: How often it has been claimed.
        progress: As its runner last said.
        claim: What the signature of its runner's last sign is worth; None: not claimed, or not checked.
        elapsed_s: Seconds it has been running, or took.
        beat_age_s: Seconds since its runner's last sign, by that machine's clock; None: it is not running.
        silent_s: The same when that is longer than its lease; None: it is not.
        cancelling: Somebody asked for it to be stopped.
        status: How it ended, as published; None: not finished, or its result cannot be read.
        reason: Why.
        finished_at: When it ended, as published.
        archived: Its result is in the archive.
    """

    nonce: str
    preset: str | None
    phase: Phase
    requested_at: str | None
    ahead: int | None = None
    expected_s: float | None = None
    runner: str | None = None
    attempt: int | None = None
    progress: Progress | None = None
    claim: Signature | None = None
    elapsed_s: float | None = None
    beat_age_s: float | None = None
    silent_s: float | None = None
    cancelling: bool = False
    status: Status | None = None
    reason: Reason | None = None
    finished_at: str | None = None
    archived: bool = False


@dataclass(frozen=True)
class History:
    """The newest finished requests; `complete`: whether older ones were looked through as far as they go."""

    rows: tuple[Row, ...]
    complete: bool


def queue(
    folder: Path | None, remote: str, *, origin: Git, now: datetime, trusted: Path | None = None
) -> list[Row]:
    """What waits and what runs, the oldest first.

    Args:
        folder: Where caches live (the state folder); None: a temporary one.
        remote: Address of the bus.
        origin: A checkout whose own network settings count; nothing is left in it.
        now: The time of day, aware.
        trusted: The runner keys that count here, for heartbeats; None: those are not checked.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    found = origin.ls_remote(remote)
    by_nonce = standings(found)
    with open_cache(folder, remote, found, origin=origin) as cache:
        return sound(cache, lambda: _queue(cache, by_nonce, now, trusted))


def history(
    folder: Path | None,
    remote: str,
    *,
    origin: Git,
    limit: int,
    preset: str | None = None,
    status: Status | None = None,
) -> History:
    """The newest finished requests, on their branches and in the archive, the newest first.

    Args:
        folder: Where caches live (the state folder); None: a temporary one.
        remote: Address of the bus.
        origin: A checkout whose own network settings count; nothing is left in it.
        limit: So many at most.
        preset: Only of this preset.
        status: Only those that ended so.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    found = origin.ls_remote(remote)
    by_nonce = standings(found)

    def wanted(row: Row) -> bool:
        return (preset is None or row.preset == preset) and (status is None or row.status is status)

    def read(cache: Cache) -> History:
        looked = 0
        rows: list[Row] = []
        for row in islice(_finished(cache, found, by_nonce), MOST_LOOKED_AT):
            looked += 1
            rows += [row] if wanted(row) else []
            if len(rows) >= limit:
                break
        return History(tuple(rows), complete=len(rows) >= limit or looked < MOST_LOOKED_AT)

    with open_cache(folder, remote, found, origin=origin) as cache:
        return sound(cache, lambda: read(cache))


def _queue(cache: Cache, by_nonce: Mapping[str, Standing], now: datetime, trusted: Path | None) -> list[Row]:
    unclear = _unclear(by_nonce, now)
    answered = _with_result(cache, unclear)
    beats = _heartbeats(cache, [held for one in by_nonce.values() for held in one.claims])
    rows: list[Row] = []
    waiting = checked = 0
    trust = Trust.by(trusted) if trusted is not None and pins_keys(trusted) else None
    for nonce, one in sorted(by_nonce.items()):
        open_ = one.inbox or one.claims or nonce in unclear
        if one.results or not open_ or (nonce in unclear and answered.get(nonce, True)):
            continue
        claimed, held = bool(one.claims), next((held for held in one.claims if held.ref in beats), None)
        row = _open_row(one, claimed, None if held is None else beats[held.ref], waiting, now)
        if trust is not None and held is not None and checked < _MOST_CHECKED:
            checked += 1
            found = read_claim(cache.git, held.commit, nonce, trust)
            row = replace(row, claim=None if found is None else found.signature)
        rows.append(row)
        waiting += not claimed
    return rows


def _open_row(one: Standing, claimed: bool, beat: RunStatus | None, ahead: int, now: datetime) -> Row:
    phase = Phase.QUEUED if not claimed else Phase.CLAIMED if beat is None else beat.phase
    return Row(
        nonce=one.nonce,
        preset=next(iter(one.presets), None),
        phase=phase,
        requested_at=requested_at(one.nonce),
        ahead=None if claimed else ahead,
        runner=None if beat is None else beat.runner,
        attempt=None if beat is None else beat.attempt,
        progress=None if beat is None else beat.progress,
        elapsed_s=None if beat is None else beat.elapsed_s,
        beat_age_s=None if beat is None else beat_age_s(beat, now),
        silent_s=None if beat is None else silent_s(beat, now),
        cancelling=bool(one.cancels),
    )


def _unclear(by_nonce: Mapping[str, Standing], now: datetime) -> dict[str, Held]:
    """Branches of which the refs alone do not say whether they wait for a result."""
    oldest = refs.nonce_time(now - MAX_LIFETIME - MAX_NONCE_SKEW)
    unclear = {
        nonce: one.branches[0]
        for nonce, one in by_nonce.items()
        if one.branches and not one.results and nonce > oldest
    }
    pressing = {n: held for n, held in unclear.items() if by_nonce[n].inbox or by_nonce[n].claims}
    others = sorted(unclear.keys() - pressing.keys(), reverse=True)[:_MOST_WITHOUT_INBOX]
    return {**pressing, **{nonce: unclear[nonce] for nonce in others}}


def _with_result(cache: Cache, tips: Mapping[str, Held]) -> dict[str, bool]:
    """Whether branches end in a result (or in something that is no request), by nonce; gone ones are left
    out.
    """
    present = _have(cache, tips, "refs/waiting/")
    answered = {}
    for nonce, commit in present.items():
        rows = _folder(cache, f"{commit}:{FOLDER}")
        is_request = REQUEST_PATH.removeprefix(f"{FOLDER}/") in rows
        answered[nonce] = not is_request or _result_blob(cache, commit, nonce) is not None
    return answered


def _have(cache: Cache, tips: Mapping[str, Held], prefix: str) -> dict[str, str]:
    """Have these commits and their trees in the cache; returns those that the remote still gives."""
    missing = {held.ref: f"{nonce}-" for nonce, held in tips.items() if not cache.git.exists(held.commit)}
    if missing:
        cache.refresh(missing, prefix=prefix, depth=1)
    return {nonce: held.commit for nonce, held in tips.items() if cache.git.exists(held.commit)}


def _heartbeats(cache: Cache, claims: Sequence[Held]) -> dict[str, RunStatus]:
    """What the claims say now, by ref; those that nobody can read are left out."""
    if not claims:
        return {}
    names = {held.ref: f"{index:05}-" for index, held in enumerate(claims)}
    held = cache.refresh(names, prefix="refs/claimed/", depth=1)
    folders = [_folder(cache, f"{commit}^{{tree}}") for commit in held.values()]
    blobs = [folder.get(name) for folder in folders for name in (STATUS_NAME, STATUS_SIGNATURE_NAME)]
    cache.bring([sha for sha in blobs if sha is not None])
    read = {ref: read_status(cache.git, commit) for ref, commit in held.items()}
    return {ref: status for ref, status in read.items() if status is not None}


def _finished(cache: Cache, found: Mapping[str, str], by_nonce: Mapping[str, Standing]) -> Iterator[Row]:
    """Every finished request, the newest first; one that is on its branch and in the archive comes once."""
    archive = archive_in(cache, found)
    archived = (
        iter(())
        if archive is None
        else (
            _finished_row(record.nonce, record.preset, record.summary, archived=True)
            for record in archive.newest()
        )
    )
    last = None
    for row in heapq.merge(_published(cache, by_nonce), archived, key=lambda row: row.nonce, reverse=True):
        if row.nonce != last:
            yield row
        last = row.nonce


def _published(cache: Cache, by_nonce: Mapping[str, Standing]) -> Iterator[Row]:
    """Finished requests that still have refs, the newest first."""
    nonces = sorted((n for n, one in by_nonce.items() if one.results or one.may_be_finished), reverse=True)
    for start in range(0, len(nonces), _AT_ONCE):
        chunk = [by_nonce[nonce] for nonce in nonces[start : start + _AT_ONCE]]
        tips = {
            f"{one.nonce}.{number}": held
            for one in chunk
            for number, held in enumerate((*one.results, *one.branches)[:_MOST_PLACES])
        }
        found = {
            key: blob
            for key, commit in _have(cache, tips, "refs/finished/").items()
            if (blob := _result_blob(cache, commit, key.partition(".")[0])) is not None
        }
        cache.bring(list(found.values()))
        for one in chunk:
            held = next((key for key in found if key.startswith(one.nonce)), None)
            if held is not None:
                named = refs.parse_request_ref(tips[held].ref)
                preset = next(iter(one.presets), None) if named is None else named.preset
                yield _finished_row(one.nonce, preset, _summary(cache, found[held]), archived=False)


def _finished_row(nonce: str, preset: str | None, summary: Summary | None, *, archived: bool) -> Row:
    if summary is None:
        return Row(nonce, preset, Phase.DONE, requested_at(nonce), archived=archived)
    took = parse_time(summary.finished_at) - parse_time(summary.started_at)
    return Row(
        nonce=nonce,
        preset=preset or summary.preset,
        phase=Phase.DONE,
        requested_at=requested_at(nonce),
        runner=clean_line(summary.runner),
        attempt=summary.attempt,
        elapsed_s=max(took, timedelta(0)).total_seconds(),
        status=summary.status,
        reason=summary.reason,
        finished_at=summary.finished_at,
        archived=archived,
    )


def beat_age_s(beat: RunStatus, now: datetime) -> float:
    """Seconds since a heartbeat was made, by its machine's clock and this reader's (`now`, aware)."""
    return (now - parse_time(beat.updated_at)).total_seconds()


def silent_s(beat: RunStatus, now: datetime) -> float | None:
    """Seconds without a sign from a runner when they are more than its lease; None: they are not."""
    age_s = beat_age_s(beat, now)
    return age_s if age_s > min(beat.lease_s, MAX_LEASE_S) else None


def requested_at(nonce: str) -> str | None:
    """The moment that a nonce names; None: there is no such moment."""
    try:
        moment = datetime.strptime(nonce[:16], "%Y%m%dt%H%M%Sz").replace(tzinfo=UTC)
    except ValueError:
        return None
    return format_time(moment)


def _summary(cache: Cache, blob: str) -> Summary | None:
    try:
        return summary_of(parse_result(cache.git.read_objects([blob], MAX_BYTES)[0]))
    except (ResultError, BusError):  # somebody else's; `result` says what is wrong with it
        return None


def _result_blob(cache: Cache, commit: str, nonce: str) -> str | None:
    results = _folder(cache, f"{commit}:{RESULT_ROOT}")
    if nonce not in results:
        return None
    cache.bring([results[nonce]])
    return _folder(cache, results[nonce]).get(RESULT_NAME)


def _folder(cache: Cache, tree: str) -> dict[str, str]:
    return {entry.name: entry.sha for entry in cache.entries(tree) or []}
