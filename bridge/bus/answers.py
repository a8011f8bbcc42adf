"""What stands where a request's answer should: found, read out of the object store, unjudged.

`fetch` collects what stands on the remote; files come out of the object store, nothing is ever checked out.
Whether an answer is believed is `bridge.bus.results`; answers of retired requests are in
`bridge.bus.archived`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bridge.bus.changes import Change
from bridge.bus.git import Git
from bridge.bus.handles import Held, RequestState
from bridge.bus.requests import has_result
from bridge.errors import BusError, ManifestError, ResultError
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH, ParamValue, parse
from bridge.protocol.result import MAX_BYTES as MAX_RECORD_BYTES
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, Status, parse_result

MAX_RESULT_BYTES = 256 * 1024 * 1024
MAX_RESULT_FILES = 1002  # what a result can list, itself and its signature
# How deep below a branch's tip its request is looked for.
WALK = 32

_PLAIN_FILES = ("100644", "100755")


@dataclass(frozen=True)
class Asked:
    """The request that a result must answer; `workload_sha`, `preset`, `params` None: not readable."""

    nonce: str
    commit: str
    workload_sha: str | None
    preset: str | None = None
    params: Mapping[str, ParamValue] | None = None


@dataclass(frozen=True)
class FetchedResult:
    """What stands where a result should, unjudged.

    Attributes:
        nonce: The request.
        ref: Where it was found.
        commit: The commit that ref holds.
        parents: Its parents; none where the branch had moved.
        above: Commits between the request and `commit`, that one included; 1 on an untouched branch.
        changes: Every path in which it differs from its parent (from nothing, without one).
        message: The commit message.
        files: Contents of the result's folder by path relative to it.
        asked: The request as it stands on the remote; None: no longer there, or not the one that is answered.
        alone: The request's branch is gone, and it does not wait: nothing is left to hold the result against.
    """

    nonce: str
    ref: str
    commit: str
    parents: tuple[str, ...]
    above: int
    changes: tuple[Change, ...]
    message: str
    files: Mapping[str, bytes]
    asked: Asked | None
    alone: bool = False


@dataclass(frozen=True)
class Answer:
    """A place that holds an answer, its files not yet read.

    Attributes:
        nonce: The request.
        held: The ref and the commit it holds.
        parents: Parents of that commit.
        above: Commits between the request and the answer, that one included; None: the request is not below.
        changes: Every path in which it differs from its parent (from nothing, without one).
        blobs: Those of them that are files of the result's folder.
        message: The commit message.
        request: The request commit, where it is known and here.
    """

    nonce: str
    held: Held
    parents: tuple[str, ...]
    above: int | None
    changes: tuple[Change, ...]
    blobs: tuple[Change, ...]
    message: str
    request: str | None


def fetch(
    git: Git, remote: str, state: RequestState, *, asked: Asked | None = None, timeout_s: float | None = None
) -> FetchedResult | None:
    """Fetch what answers a request; None: nothing does yet.

    Args:
        git: Any checkout; nothing is left in it.
        remote: Address of the bus.
        state: From `resolve_handle`.
        asked: The request as this client submitted it; None: as it stands on the remote.
        timeout_s: Deadline of the fetch.

    Raises:
        ResultError: The branch holds neither this request nor an answer to it, or the result is too large.
        RemoteUnreachable: The remote did not answer.
    """
    request_commit = asked.commit if asked else state.inbox
    stands = [held for held in (*state.branches, state.result) if held is not None]
    places = [held for held in stands if held.commit != request_commit]
    if not places:
        return None
    wanted = [held.ref for held in stands if (held in places or not asked) and not git.exists(held.commit)]
    with git.scratch() if wanted else contextlib.nullcontext(git) as scratch:
        if wanted:
            scratch.fetch(remote, wanted, timeout_s=timeout_s)
        places = [held for held in places if scratch.exists(held.commit)]  # one may have moved meanwhile
        alone = state.branch is None and state.inbox is None
        found: list[tuple[bool, FetchedResult]] = []
        faults: list[ResultError] = []
        for held in places:
            try:
                if (answer := locate(scratch, state, held, request_commit)) is not None:
                    own = _names(scratch, answer)
                    found.append((own, _read(scratch, answer, asked, alone=alone)))
            except ResultError as fault:  # of one place; another may hold the answer
                faults.append(fault)
    if not found and faults and (not state.others or len(faults) == len(stands)):
        raise faults[0]
    # Whatever else stands in its light: a whole answer first, and one on the branch that its request names.
    found.sort(key=lambda each: (each[1].above != 1 or RESULT_NAME not in each[1].files, not each[0]))
    return found[0][1] if found else None


def _names(git: Git, answer: Answer) -> bool:
    """Whether an answer stands where its request said that it would, or on no branch at all."""
    if answer.request is None or not answer.parents:
        return True
    try:
        manifest = parse(git.read_blob(answer.request, REQUEST_PATH, MAX_BYTES) or b"")
    except (ManifestError, BusError):
        return False
    return manifest.result_ref == answer.held.ref


def locate(git: Git, state: RequestState, held: Held, request_commit: str | None) -> Answer | None:
    """What a ref that is in this repository says in answer to a request; None: no answer, or not here.

    Args:
        git: A repository with the commit, the request below it and that one's parent.
        state: Where the request stands.
        held: Its branch, or the ref of a result of its own.
        request_commit: The request, where it is known; None: it is looked for below the tip.

    Raises:
        ResultError: The branch holds neither this request nor an answer to it.
    """
    nonce, tip = state.nonce, git.commit(held.commit)
    request, above = _find_request(git, held.commit, nonce, request_commit)
    if above == 0:
        return None
    if tip.parents and git.exists(tip.parents[0]):
        changes = tuple(git.changes(tip.parents[0], tip.sha))
    else:
        changes = tuple(git.files(tip.sha))
    if not any(change.path.startswith(f"{RESULT_ROOT}/") for change in changes):
        if above is None and request_commit is None and tip.parents and state.result is None:
            raise ResultError(f"the branch {held.ref} no longer holds the request {nonce}")
        if above == 1 or above is None or not has_result(git, held.commit, nonce):
            return None  # somebody's own commit on top; the answer will go elsewhere
    folder = f"{RESULT_ROOT}/{nonce}/"
    blobs = tuple(
        change for change in changes if change.path.startswith(folder) and change.mode in _PLAIN_FILES
    )
    if request is None and not tip.parents:
        request = _answered_on_branch(git, state, blobs)
    return Answer(nonce, held, tip.parents, above, changes, blobs, tip.message, request)


def read_asked(git: Git, answer: Answer) -> Asked | None:
    """The request that an answer is for, as it stands beside it; None: it does not."""
    if answer.request is None:
        return None
    parents = git.commit(answer.request).parents
    workload = parents[0] if len(parents) == 1 else None
    try:
        manifest = parse(git.read_blob(answer.request, REQUEST_PATH, MAX_BYTES) or b"")
    except (ManifestError, BusError):
        return Asked(answer.nonce, answer.request, workload)
    return Asked(answer.nonce, answer.request, workload, manifest.preset, manifest.params)


def _read(git: Git, answer: Answer, asked: Asked | None, *, alone: bool) -> FetchedResult:
    if len(answer.blobs) > MAX_RESULT_FILES:
        raise ResultError(
            f"the commit {answer.held.commit[:12]} holds {len(answer.blobs)} files for {answer.nonce};"
            f" a result has at most {MAX_RESULT_FILES}"
        )
    contents = git.read_objects([change.sha for change in answer.blobs], MAX_RESULT_BYTES)
    folder = f"{RESULT_ROOT}/{answer.nonce}/"
    files = {blob.path.removeprefix(folder): data for blob, data in zip(answer.blobs, contents, strict=True)}
    return FetchedResult(
        nonce=answer.nonce,
        ref=answer.held.ref,
        commit=answer.held.commit,
        parents=answer.parents,
        above=1 if answer.above is None else answer.above,
        changes=answer.changes,
        message=answer.message,
        files=files,
        asked=asked or read_asked(git, answer),
        alone=alone,
    )


def _find_request(
    git: Git, tip: str, nonce: str, request_commit: str | None
) -> tuple[str | None, int | None]:
    """The request commit under a branch's tip and how many commits lie above it; None: it is not there."""
    for above, commit in enumerate(_walk(git, tip)):
        if commit == request_commit or (request_commit is None and _is_request(git, commit, nonce)):
            return commit, above
    known = request_commit if request_commit is not None and git.exists(request_commit) else None
    return known, None


def _answered_on_branch(git: Git, state: RequestState, blobs: tuple[Change, ...]) -> str | None:
    """The request commit that a result elsewhere names, when the request's branch holds it.

    It must be the branch's request; where no commit of the branch has the shape of one, a refusal may answer
    any of them.
    """
    held, path = state.branch, f"{RESULT_ROOT}/{state.nonce}/{RESULT_NAME}"
    if held is None or not git.exists(held.commit):
        return None
    try:
        named = [blob.sha for blob in blobs if blob.path == path]
        answer = parse_result(b"".join(git.read_objects(named, MAX_RECORD_BYTES)))
    except (ResultError, BusError):
        return None  # whoever judges it says what is wrong with it
    request = answer.request_commit
    if request not in _walk(git, held.commit):
        return None
    shown, _ = _find_request(git, held.commit, state.nonce, None)
    refused = shown is None and answer.verdict.status is Status.REFUSED
    return request if shown == request or refused else None


def _walk(git: Git, tip: str) -> Iterator[str]:
    """A commit and its first parents, as far as a request may lie below a tip."""
    commit = tip
    for _ in range(WALK):
        yield commit
        parents = git.commit(commit).parents
        if not parents or not git.exists(parents[0]):
            return
        commit = parents[0]


def _is_request(git: Git, commit: str, nonce: str) -> bool:
    """Whether a commit brought a manifest that is this request's, or one that nobody can read."""
    parents = git.commit(commit).parents
    if len(parents) != 1 or not git.exists(parents[0]):
        return False
    changes = git.changes(parents[0], commit)
    if not any(change.path == REQUEST_PATH and change.status != "D" for change in changes):
        return False
    try:
        return parse(git.read_blob(commit, REQUEST_PATH, MAX_BYTES) or b"").nonce == nonce
    except (ManifestError, BusError):  # not a manifest, or too large to be one
        return True
