"""List what waits, runs and ran on a bus, as it was published: nothing is judged. Texts come back cleaned."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TypeVar

from bridge.bus import results
from bridge.bus.archive import DEPTH, Archive, ResultSummary, open_archive, summarize
from bridge.bus.claims import MAX_LEASE_S
from bridge.bus.requests import ALL_REFS, RefValue, RequestState, has_result, names_of, state_of
from bridge.bus.results import FetchedResult, read_manifest
from bridge.client.fetch import request_place
from bridge.client.watch import keys_in, read_beat
from bridge.errors import BridgeError, BusError, FetchTooLarge, LeaseLost, ResultError
from bridge.git.cache import GitCache
from bridge.protocol import manifest, refs, result
from bridge.protocol.result import Phase, Progress, Reason, RunStatus, Status
from bridge.protocol.sanitize import clean_line
from bridge.signing.trust import Signature

# How many finished requests a filter looks through before it gives up.
MAX_EXAMINED = 5000

_BATCH = 50
# Claims whose signature is checked: anyone with push rights may have pushed thousands.
_MAX_CHECKED = 50
# Places of one request that are searched for its result, for the same reason.
_MAX_PLACES = 8
# Branches without an inbox entry that are read to find open requests, the newest first.
_MAX_WITHOUT_INBOX = 64
_Seen = TypeVar("_Seen")


@dataclass(frozen=True)
class Row:
    """One request in a list; None where something does not apply or is not known."""

    nonce: str
    preset: str | None  # from its branch or its result
    phase: Phase  # `done` when it has a result
    requested_at: str | None  # from the nonce
    ahead: int | None = None  # older requests that wait too, while it is queued
    expected_s: float | None = None  # seconds until it is likely to start, while it is queued
    runner: str | None = None  # which one runs it, or ran it
    attempt: int | None = None  # how often it has been claimed
    progress: Progress | None = None  # as its runner last said
    claim: Signature | None = None  # what the last heartbeat's is worth, where it was checked
    elapsed_s: float | None = None  # seconds it has been running, or took
    beat_age_s: float | None = None  # since the last heartbeat, by that machine's clock
    silent_s: float | None = None  # the same when that is longer than its lease
    cancelling: bool = False  # whether a cancel request exists
    status: Status | None = None  # as published
    reason: Reason | None = None
    requested_by: str | None = None  # as the request says
    started_at: str | None = None  # as published, or by the last heartbeat
    finished_at: str | None = None  # as published
    eta_s: float | None = None  # seconds until it is likely to end
    expired: bool = False  # whether nothing may claim it any more
    archived: bool = False
    place: RefValue | None = None  # the ref that holds the request, while it waits; not shown


def queue(cache: GitCache, *, now: datetime, trusted: Path | None = None) -> list[Row]:
    """What waits and what runs at `now` (aware), the oldest first; heartbeats are checked by `trusted`."""
    states = _states(cache.list_remote(*ALL_REFS))
    keys = keys_in(trusted)

    def read() -> list[Row]:
        open_states = [states[nonce] for nonce in sorted(_open_nonces(cache, states, now))]
        claims = {state.claim.ref: state.claim.commit for state in open_states if state.claim is not None}
        failures = cache.bring(claims, list(claims), depth=1)
        places = {state.nonce: place for state in open_states if (place := request_place(state)) is not None}
        asked = _read_requests(cache, dict(list(places.items())[:_MAX_CHECKED]))
        rows: list[Row] = []
        ahead = 0
        for state in open_states:
            status = signature = None
            if state.claim is not None and state.claim.ref not in failures:
                checked_by = keys if len(rows) - ahead < _MAX_CHECKED else None
                status, signature = read_beat(cache, state.claim, checked_by)
            rows.append(
                _open_row(state, status, signature, ahead=ahead, now=now, asked=asked.get(state.nonce))
            )
            ahead += state.claim is None
        return rows

    return cache.recover(read)


def for_workflows(cache: GitCache, rows: Sequence[Row]) -> set[str]:
    """Nonces of the waiting requests that a workflow takes, as their manifests say."""
    places = {row.nonce: row.place for row in rows[:_MAX_CHECKED] if row.place is not None}
    asked = cache.recover(lambda: _read_requests(cache, places))
    return {nonce for nonce, each in asked.items() if each.transport == "actions"}


def history(
    cache: GitCache, *, limit: int, preset: str | None = None, status: Status | None = None
) -> tuple[list[Row], bool]:
    """The newest finished requests, at most `limit`; False: older ones were not looked through to the end."""
    found = cache.list_remote(*ALL_REFS)

    def read() -> tuple[list[Row], bool]:
        rows: list[Row] = []
        for examined, row in enumerate(_finished(cache, found), 1):
            if preset in (None, row.preset) and status in (None, row.status):
                rows.append(row)
            if len(rows) >= limit or examined >= MAX_EXAMINED:
                return rows, len(rows) >= limit
        return rows, True

    return cache.recover(read)


def read_results(
    cache: GitCache,
    visit: Callable[[Row, FetchedResult | BridgeError], _Seen],
    *,
    limit: int,
    preset: str,
) -> list[_Seen]:
    """What `visit` makes of the newest finished requests of a preset, at most `limit`, one after another.

    It gets each result unjudged, of a request that passed as published; or why that cannot be read.
    """
    found = cache.list_remote(*ALL_REFS)

    def read() -> list[_Seen]:
        archive, states, seen = open_archive(cache, found), _states(found), list[_Seen]()
        newest = islice(_finished(cache, found), MAX_EXAMINED)
        rows = islice((row for row in newest if row.preset == preset), limit)
        while batch := list(islice(rows, _BATCH)):
            if archive is not None:
                archive.bring(row.nonce for row in batch if row.archived and row.status is Status.PASSED)
            seen += [visit(row, _read_result(cache, archive, states, row)) for row in batch]
        return seen

    return cache.recover(read)


def _read_result(
    cache: GitCache, archive: Archive | None, states: Mapping[str, RequestState], row: Row
) -> FetchedResult | BridgeError:
    if row.status is not Status.PASSED:
        ended = "its result cannot be read" if row.status is None else f"{row.status} ({row.reason})"
        return ResultError(ended)
    try:
        if row.archived:
            result = None if archive is None else archive.read(row.nonce)
        else:
            state = states[row.nonce]
            places = [place for place in (*state.branches, state.result) if place is not None]
            result = results.read(cache, state, places, None)
    except (ResultError, FetchTooLarge, LeaseLost) as error:
        return error
    return ResultError("its result cannot be read") if result is None else result


def heartbeat_age_s(status: RunStatus, now: datetime) -> float:
    """Seconds since a heartbeat was made, by its machine's clock and this reader's (`now`, aware)."""
    return (now - manifest.parse_time(status.updated_at)).total_seconds()


def silence_s(status: RunStatus, now: datetime) -> float | None:
    """Seconds since the last heartbeat when they are more than its lease; None: they are not."""
    age_s = heartbeat_age_s(status, now)
    return age_s if age_s > min(status.lease_s, MAX_LEASE_S) else None


def started_at(status: RunStatus) -> str:
    """When a job that runs was claimed, by its last heartbeat and that machine's clock."""
    try:
        elapsed = timedelta(seconds=status.elapsed_s)
        return manifest.format_time(manifest.parse_time(status.updated_at) - elapsed)
    except OverflowError:  # anyone could have written any number
        return status.updated_at


def has_expired(asked: manifest.Manifest | None, claimed: bool, now: datetime) -> bool:
    """Whether a request waited until no runner may claim it any more; what runs has not."""
    return asked is not None and not claimed and now >= asked.expires_at


def _states(found: Mapping[str, str]) -> dict[str, RequestState]:
    """The state of every request on a remote, by nonce."""
    by_nonce: dict[str, dict[str, str]] = {}
    for ref, commit in found.items():
        if (nonce := names_of(ref)[0]) is not None:
            by_nonce.setdefault(nonce, {})[ref] = commit
    return {nonce: state_of(own, nonce) for nonce, own in by_nonce.items()}


def _open_nonces(cache: GitCache, states: Mapping[str, RequestState], now: datetime) -> set[str]:
    """Requests that wait or run. Where the refs alone do not tell, their branches are read."""
    oldest = refs.nonce_time(now - manifest.MAX_LIFETIME - manifest.MAX_NONCE_SKEW)
    open_nonces, unclear = set(), list[tuple[str, RefValue]]()
    for nonce, state in sorted(states.items(), reverse=True):
        branch, is_active = state.branch, state.inbox is not None or state.claim is not None
        if state.result is not None:
            continue
        if is_active and (branch is None or branch.commit == state.inbox):
            open_nonces.add(nonce)
        elif branch is not None and (is_active or (nonce > oldest and len(unclear) < _MAX_WITHOUT_INBOX)):
            unclear.append((nonce, branch))
    tips = {branch.ref: branch.commit for _, branch in unclear}
    failures = cache.bring(tips, list(tips), depth=DEPTH)
    return open_nonces | {
        nonce
        for nonce, branch in unclear
        if branch.ref not in failures and _is_request(cache, branch.commit, nonce)
    }


def _is_request(cache: GitCache, commit: str, nonce: str) -> bool:
    """Whether a branch ends in its request, rather than in a result or in something else."""
    if has_result(cache, commit, nonce):
        return False
    asked = read_manifest(cache, commit)
    return asked is not None and asked.nonce == nonce


def _read_requests(cache: GitCache, places: Mapping[str, RefValue]) -> dict[str, manifest.Manifest]:
    """What requests ask by the refs that hold them, by nonce, as far as that can be read."""
    tips = {place.ref: place.commit for place in places.values()}
    failures = cache.bring(tips, list(tips), depth=DEPTH)
    asked = {
        nonce: read_manifest(cache, place.commit)
        for nonce, place in places.items()
        if place.ref not in failures
    }
    return {nonce: each for nonce, each in asked.items() if each is not None}


def _open_row(
    state: RequestState,
    status: RunStatus | None,
    signature: Signature | None,
    *,
    ahead: int,
    now: datetime,
    asked: manifest.Manifest | None,
) -> Row:
    row = Row(
        nonce=state.nonce,
        preset=state.preset,
        phase=Phase.QUEUED if state.claim is None else Phase.CLAIMED,
        requested_at=requested_at(state.nonce),
        ahead=ahead if state.claim is None else None,
        claim=signature,
        cancelling=state.cancel is not None,
        requested_by=None if asked is None else clean_line(asked.requested_by),
        expired=has_expired(asked, state.claim is not None, now),
        place=request_place(state),
    )
    if status is None:
        return row
    return replace(
        row,
        phase=status.phase,
        runner=status.runner,
        attempt=status.attempt,
        progress=status.progress,
        elapsed_s=status.elapsed_s,
        started_at=started_at(status),
        beat_age_s=heartbeat_age_s(status, now),
        silent_s=silence_s(status, now),
    )


def _finished(cache: GitCache, found: Mapping[str, str]) -> Iterator[Row]:
    """Every finished request, the newest first; one that is on its branch and in the archive comes once."""
    archive = open_archive(cache, found)
    entries = iter(()) if archive is None else archive.newest()
    archived = (
        _finished_row(entry.nonce, entry.preset, entry.summary, entry.requested_by, archived=True)
        for entry in entries
    )
    published = _published(cache, _states(found))
    last = None
    for row in heapq.merge(published, archived, key=lambda row: row.nonce, reverse=True):
        if row.nonce != last:
            yield row
        last = row.nonce


def _published(cache: GitCache, states: Mapping[str, RequestState]) -> Iterator[Row]:
    """Finished requests that still have refs, the newest first."""
    finished = [state for state in states.values() if state.result is not None or state.inbox is None]
    finished.sort(key=lambda state: state.nonce, reverse=True)
    for start in range(0, len(finished), _BATCH):
        batch = [
            (state, [place for place in (state.result, *state.branches) if place][:_MAX_PLACES])
            for state in finished[start : start + _BATCH]
        ]
        wanted = {place.ref: place.commit for _, places in batch for place in places}
        failures = cache.bring(wanted, list(wanted), depth=DEPTH)  # as deep as `prune` needs them
        for state, places in batch:
            for place in places:
                if place.ref not in failures and has_result(cache, place.commit, state.nonce):
                    named = refs.parse_request_ref(place.ref)
                    preset = state.preset if named is None else named.preset
                    summary = _read_summary(cache, place.commit, state.nonce)
                    asked = read_manifest(cache, place.commit)
                    by = None if asked is None else asked.requested_by
                    yield _finished_row(state.nonce, preset, summary, by, archived=False)
                    break


def _finished_row(
    nonce: str, preset: str | None, summary: ResultSummary | None, by: str | None, *, archived: bool
) -> Row:
    by = None if by is None else clean_line(by)
    if summary is None:
        return Row(nonce, preset, Phase.DONE, requested_at(nonce), requested_by=by, archived=archived)
    took = manifest.parse_time(summary.finished_at) - manifest.parse_time(summary.started_at)
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
        requested_by=by,
        started_at=summary.started_at,
        finished_at=summary.finished_at,
        expired=summary.reason is Reason.EXPIRED,
        archived=archived,
    )


def _read_summary(cache: GitCache, commit: str, nonce: str) -> ResultSummary | None:
    try:
        data = cache.read_file(commit, f"{result.RESULT_ROOT}/{nonce}/{result.RESULT_NAME}", result.MAX_BYTES)
        return summarize(result.parse_result(data or b""))
    except (ResultError, BusError):  # `result` says what is wrong with it
        return None


def requested_at(nonce: str) -> str | None:
    """The moment that a nonce names; None: there is no such moment."""
    try:
        return manifest.format_time(refs.nonce_moment(nonce))
    except ValueError:
        return None
