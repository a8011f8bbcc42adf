"""Which requests are finished and old enough to be archived, and whether their answers can be.

A request is only ever retired when its answer is exactly what a runner publishes: one commit that adds plain
files to the result's folder and nothing else. Whatever is unfinished stays; whatever is odd stays too and is
named, because deleting a ref is the one thing here that could lose somebody's work. Nothing is written here;
moving into the archive is `bridge.bus.archive`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from bridge.bus.answers import MAX_RESULT_BYTES, Answer, locate, read_asked
from bridge.bus.archive_record import MAX_MESSAGE, Archived, ArchivedRequest, Summary, summary_of
from bridge.bus.cache import MOST_FILES, Cache
from bridge.bus.claims import read_status
from bridge.bus.handles import Held, RequestState
from bridge.bus.requests import FOLDER, MAX_SIGNATURE_BYTES
from bridge.errors import BusError, ResultError
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH, SIGNATURE_PATH, parse_time
from bridge.protocol.result import MAX_BYTES as MAX_RECORD_BYTES
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, STATUS_NAME, parse_result
from bridge.protocol.sanitize import quoted

# A result this young stays: somebody may be about to fetch it.
SETTLED = timedelta(hours=1)
# A claim on a request that has its result, and whose heartbeat is this old, was forgotten.
STALE_CLAIM = timedelta(days=1)
# Commits that are fetched of each branch: the answer, the request, the workload.
DEPTH = 3

_SEEN = "refs/seen/"
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_LONGEST_PATH = 200
_SUBMODULE = "160000"
_REQUEST_NAMES = {
    REQUEST_PATH.removeprefix(f"{FOLDER}/"): MAX_BYTES,
    SIGNATURE_PATH.removeprefix(f"{FOLDER}/"): MAX_SIGNATURE_BYTES,
}


@dataclass
class Standing:
    """Every ref of one request, by what it is for."""

    nonce: str
    inbox: bool = False
    presets: list[str] = field(default_factory=list)
    branches: list[Held] = field(default_factory=list)
    results: list[Held] = field(default_factory=list)
    claims: list[Held] = field(default_factory=list)
    cancels: list[Held] = field(default_factory=list)

    @property
    def may_be_finished(self) -> bool:
        """Whether its refs do not say already that it waits."""
        return not self.inbox and bool(self.branches or self.results)


@dataclass(frozen=True)
class Left:
    """A finished request that stays where it is, and why."""

    nonce: str
    ref: str
    reason: str


@dataclass(frozen=True)
class Retired:
    """A finished request, ready to be archived.

    Attributes:
        record: What ``archived.json`` will say.
        files: Blobs of the result's folder, by path.
        request: Blobs of ``request.json`` and its signature, by name.
        ended: Refs to delete with it.
        forgotten: Those of them that mean nothing since the result is there: claims, wishes to stop.
        left: What of it must stay although the result is archived.
    """

    record: Archived
    files: Mapping[str, str]
    request: Mapping[str, str]
    ended: tuple[Held, ...]
    forgotten: tuple[Held, ...]
    left: Left | None


@dataclass(frozen=True)
class Unfinished:
    """A request that still waits or runs, or whose result is too fresh to be moved; `forgotten`: refs that
    may go all the same.
    """

    nonce: str
    forgotten: tuple[Held, ...] = ()


def standings(found: Mapping[str, str]) -> dict[str, Standing]:
    """A remote's refs by nonce; names that are not the bridge's are left out."""
    by_nonce: dict[str, Standing] = {}
    kinds = {
        refs.RESULTS: "results",
        refs.BRANCH_RESULTS: "results",
        refs.CLAIMS: "claims",
        refs.BRANCH_CLAIMS: "claims",
        refs.CANCELS: "cancels",
        refs.BRANCH_CANCELS: "cancels",
    }
    for ref, commit in found.items():
        named = refs.parse_request_ref(ref)
        if named is not None:
            standing = by_nonce.setdefault(named.nonce, Standing(named.nonce))
            standing.branches.append(Held(ref, commit))
            standing.presets.append(named.preset)
        elif nonce := refs.nonce_of(ref, refs.INBOX):
            by_nonce.setdefault(nonce, Standing(nonce)).inbox = True
        else:
            for prefix, kind in kinds.items():
                if nonce := refs.nonce_of(ref, prefix):
                    getattr(by_nonce.setdefault(nonce, Standing(nonce)), kind).append(Held(ref, commit))
    return by_nonce


def due(
    by_nonce: Mapping[str, Standing], *, now: datetime, older_than: timedelta, keep: int | None
) -> list[str]:
    """Nonces that retention no longer covers, the oldest first: too old, or beyond the newest `keep`.

    Told by the time in the nonce; one of the future is not touched. Requests that wait without an inbox entry
    (where a server takes branches only) count among the kept ones.
    """
    future, cutoff = refs.nonce_time(now + timedelta(days=1)), refs.nonce_time(now - older_than)
    settled = refs.nonce_time(now - SETTLED)
    candidates = sorted(
        (nonce for nonce, standing in by_nonce.items() if standing.may_be_finished and nonce < future),
        reverse=True,
    )
    beyond = set() if keep is None else set(candidates[keep:])
    return sorted(nonce for nonce in candidates if nonce < cutoff or (nonce in beyond and nonce < settled))


def look(cache: Cache, asked: list[Standing]) -> dict[str, str]:
    """Fetch what stands on the refs of some requests, with all that judging and archiving them needs.

    Returns:
        What each ref holds now.

    Raises:
        RemoteUnreachable: The remote did not answer.
        TooMuch: It sends too much.
    """
    places = [held for one in asked for held in (*one.branches, *one.results)]
    wanted = [held.ref for held in (*places, *(held for one in asked for held in one.claims))]
    seen = cache.refresh({ref: f"{i:05}-" for i, ref in enumerate(wanted)}, prefix=_SEEN, depth=DEPTH)
    folders, blobs = [], []
    for one in asked:
        for held in (*one.branches, *one.results):
            if held.ref not in seen:
                continue
            rows = {row.name: row for row in cache.entries(f"{held.commit}:{FOLDER}") or []}
            blobs += [rows[name].sha for name in _REQUEST_NAMES if name in rows and rows[name].kind == "blob"]
            if "results" in rows and rows["results"].kind == "tree":
                inner = {row.name: row for row in cache.entries(rows["results"].sha) or []}
                found = inner.get(one.nonce)
                folders += [found.sha] if found is not None and found.kind == "tree" else []
    for listed in cache.list_folders(folders):
        blobs += [file.sha for file in listed or [] if file.mode != _SUBMODULE]
    cache.bring([*blobs, *_status_blobs(cache, [held for one in asked for held in one.claims])])
    return seen


def examine(
    cache: Cache, standing: Standing, seen: Mapping[str, str], *, now: datetime
) -> Retired | Unfinished | Left:
    """Judge one request that `look` has fetched.

    Args:
        cache: Where its objects are.
        standing: Its refs as they were listed.
        seen: What the refs hold now; one that moved makes the request unfinished.
        now: The time of day, aware.
    """
    nonce, places = standing.nonce, (*standing.branches, *standing.results)
    if any(seen.get(held.ref) != held.commit for held in (*places, *standing.claims)):
        return Unfinished(nonce)
    first = places[0].ref
    if len(standing.branches) > 1 or len({held.commit for held in standing.results}) > 1:
        return Left(nonce, first, "several branches or several results carry its name")
    state = RequestState(
        nonce=nonce,
        preset=next(iter(standing.presets), None),
        branch=next(iter(standing.branches), None),
        inbox=None,
        claim=None,
        cancel=None,
        result=next(iter(standing.results), None),
        ahead=0,
    )
    try:
        answers = [locate(cache.git, state, held, None) for held in places]
    except (ResultError, BusError) as error:
        return Left(nonce, first, error.message)
    answered = {answer.held.commit: answer for answer in answers if answer is not None}
    if not answered:
        return Unfinished(nonce)
    if len(answered) > 1:
        return Left(nonce, first, "it has a result on its branch and another one beside it")
    [answer] = answered.values()
    if any(not _is_forgotten(cache, claim, now) for claim in standing.claims):
        return Unfinished(nonce)
    forgotten = (*standing.claims, *standing.cancels)
    reason = _odd(cache, answer)
    if reason is not None:
        return Left(nonce, answer.held.ref, reason)
    summary = _summary(cache, answer)
    if summary is not None and now - SETTLED < parse_time(summary.finished_at) < now + SETTLED:
        return Unfinished(nonce, forgotten)
    return _retired(cache, state, standing, answer, summary)


def _retired(
    cache: Cache, state: RequestState, standing: Standing, answer: Answer, summary: Summary | None
) -> Retired:
    asked, branch = read_asked(cache.git, answer), state.branch
    forgotten = (*standing.claims, *standing.cancels)
    ended, left = [*standing.results, *forgotten], None
    if branch is not None:
        if branch.commit in (answer.held.commit, answer.request):
            ended.append(branch)
        else:
            left = Left(state.nonce, branch.ref, "the branch holds somebody's own commits: delete it by hand")
    folder = f"{RESULT_ROOT}/{state.nonce}/"
    record = Archived(
        nonce=state.nonce,
        preset=state.preset,
        ref=answer.held.ref,
        result_commit=answer.held.commit,
        parents=answer.parents,
        message=answer.message,
        request=asked
        and ArchivedRequest(commit=asked.commit, workload_sha=asked.workload_sha, preset=asked.preset),
        summary=summary,
    )
    return Retired(
        record=record,
        files={blob.path.removeprefix(folder): blob.sha for blob in answer.blobs},
        request={} if answer.request is None else _request_files(cache, answer.request),
        ended=tuple(ended),
        forgotten=forgotten,
        left=left,
    )


def _odd(cache: Cache, answer: Answer) -> str | None:
    """Why an answer is not exactly what a runner publishes; None: it is."""
    folder = f"{RESULT_ROOT}/{answer.nonce}/"
    if answer.parents and answer.above is None:
        return "its request does not lie below the result"
    if answer.parents and (answer.above != 1 or answer.parents != (answer.request,)):
        return "more than one commit lies on the request: somebody pushed on top of it"
    if len(answer.changes) > MOST_FILES:
        return f"its result has {len(answer.changes)} files, but at most {MOST_FILES} are archived"
    for change in answer.changes:
        path = change.path.removeprefix(folder)
        if path == change.path:
            return f"the commit of its result changes {quoted(change.path)}, outside {folder}"
        plain = change.status == "A" and change.mode == "100644"
        if not plain or len(path) > _LONGEST_PATH or _PATH.fullmatch(path) is None:
            return f"its result holds {quoted(path)}, which is no new plain file of a plain name"
    if not any(blob.path == folder + RESULT_NAME for blob in answer.blobs):
        return f"its result holds no {RESULT_NAME}"
    if len(answer.message) > MAX_MESSAGE:
        return f"the message of its result is longer than {MAX_MESSAGE} characters"
    size = 0
    for blob in answer.blobs:
        kind, bytes_ = cache.git.kind_and_size(blob.sha)
        size += bytes_
        if kind != "blob":
            return f"the remote does not give the contents of {quoted(blob.path.removeprefix(folder))}"
    if size > MAX_RESULT_BYTES:
        return f"its result has {size} bytes, but at most {MAX_RESULT_BYTES} are archived"
    return None


def _summary(cache: Cache, answer: Answer) -> Summary | None:
    path = f"{RESULT_ROOT}/{answer.nonce}/{RESULT_NAME}"
    named = [blob.sha for blob in answer.blobs if blob.path == path]
    try:
        return summary_of(parse_result(cache.git.read_objects(named, MAX_RECORD_BYTES)[0]))
    except (ResultError, BusError):  # archived as it is: it is as little believed there
        return None


def _request_files(cache: Cache, request: str) -> dict[str, str]:
    kept = {}
    for row in cache.entries(f"{request}:{FOLDER}") or []:
        if row.name in _REQUEST_NAMES and row.mode == "100644":
            kind, size = cache.git.kind_and_size(row.sha)
            if kind == "blob" and size <= _REQUEST_NAMES[row.name]:
                kept[row.name] = row.sha
    return kept


def _is_forgotten(cache: Cache, claim: Held, now: datetime) -> bool:
    status = read_status(cache.git, claim.commit)
    return status is not None and parse_time(status.updated_at) < now - STALE_CLAIM


def _status_blobs(cache: Cache, claims: list[Held]) -> list[str]:
    rows = [row for held in claims for row in cache.entries(f"{held.commit}^{{tree}}") or []]
    return [row.sha for row in rows if row.name == STATUS_NAME and row.kind == "blob"]


def orphans(
    cache: Cache, by_nonce: Mapping[str, Standing], *, now: datetime, older_than: timedelta
) -> list[Held]:
    """Wishes to stop, and forgotten claims, of requests of which nothing else is left.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    cutoff = refs.nonce_time(now - older_than)
    alone = [
        one
        for nonce, one in sorted(by_nonce.items())
        if nonce < cutoff and not (one.inbox or one.branches or one.results)
    ]
    claims = [held for one in alone for held in one.claims]
    names = {held.ref: f"{i:05}-" for i, held in enumerate(claims)}
    seen = cache.refresh(names, prefix="refs/orphans/", depth=1) if claims else {}
    cache.bring(_status_blobs(cache, claims))
    forgotten = {
        held
        for held in claims
        if seen.get(held.ref) == held.commit and _is_forgotten(cache, held, now.astimezone(UTC))
    }
    return [
        held
        for one in alone
        if all(claim in forgotten for claim in one.claims)
        for held in (*one.cancels, *one.claims)
    ]
