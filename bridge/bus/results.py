"""Results on the bus: found, read out of the object store, and believed only after every check.

`fetch` judges nothing; `believe` names the reason for which a result is not believed. Nonce, request commit
and workload are public, so only a signature tells who wrote a result.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bridge import signing
from bridge.bus.requests import RefValue, RequestCommit, RequestState, has_result
from bridge.errors import BusError, EvidenceError, MachineError, ManifestError, ResultError, SignatureError
from bridge.git.repo import FileChange, GitRepo, Scratch
from bridge.protocol import result as records
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH, Against, Manifest, ParamValue, parse
from bridge.protocol.sanitize import clean_line
from bridge.signing.trust import Signature, TrustLevel, weigh
from evidence_format.paired import NAME as PAIRED

# In the commit message of a result: the digest of its result.json.
TRAILER = "Result-SHA256"
MAX_RESULT_BYTES = 256 * 1024 * 1024
MAX_RESULT_FILES = 1005  # what a result can list, itself, its signature and its attestations
# In a result that no runner wrote: withdrawn by a client, or of a workflow's publish job.
NO_RUNNER_ID = "0" * 16
# How deep below a branch's tip its request is looked for.
MAX_WALK = 100

_TRAILER = re.compile(rf"^{TRAILER}: ([0-9a-f]{{64}})$", re.MULTILINE)

# What a signature says of who wrote a result.
_SAID = {
    TrustLevel.TRUSTED: "signed by {signer}",
    TrustLevel.REVOKED: "worthless: signed by {objection}; the thief could have written this",
    TrustLevel.UNTRUSTED_KEY: "signed by a key that is not trusted here: {objection}",
    TrustLevel.UNCHECKED: "signed, but not checked: ssh-keygen (openssh-client) is not installed",
    TrustLevel.UNSIGNED: "unsigned: anyone with push rights could have written this",
}


@dataclass(frozen=True)
class ExpectedRequest:
    """The request that a result must answer; `workload_sha`, `preset`, `params` None: not readable."""

    nonce: str
    commit: str
    workload_sha: str | None
    preset: str | None = None
    params: Mapping[str, ParamValue] | None = None
    requested_by: str | None = None  # as it says
    against: Against | None = None  # the other side of a paired run


@dataclass(frozen=True)
class FetchedResult:
    """What is where a result should be, unjudged."""

    nonce: str  # the request
    ref: str  # where it was found
    commit: str  # the commit that ref holds
    parents: tuple[str, ...]  # its parents; none where the branch had moved
    above: int | None  # commits on top of the request, `commit` included; None: the request is not below
    changes: tuple[FileChange, ...]  # every path in which it differs from its parent, or from nothing
    message: str  # the commit message
    files: Mapping[str, bytes]  # contents of the result's folder by path relative to it; empty from `locate`
    # The request as it is on the remote; None: no longer there, or not the one that is answered
    expected: ExpectedRequest | None
    # The request's branch is gone, and it does not wait: nothing is left to compare the result with
    alone: bool = False
    request: str | None = None  # the request commit, where it is known and here
    asked: RequestCommit | None = None  # the request as the archive has it

    @property
    def blobs(self) -> dict[str, str]:
        """Shas of the plain files of the result's folder, by path relative to it."""
        folder = f"{records.RESULT_ROOT}/{self.nonce}/"
        return {
            change.path.removeprefix(folder): change.sha
            for change in self.changes
            if change.path.startswith(folder) and change.mode in ("100644", "100755")
        }


@dataclass(frozen=True)
class Believed:
    """A result that passed every check."""

    result: records.Result  # the parsed ``result.json``
    files: Mapping[str, bytes]  # the files it lists, by path
    commit: str  # the result commit
    ref: str  # where it is
    signature: TrustLevel  # what its signature is worth here
    signer: str | None  # the trusted principal, or the fingerprint of an untrusted key
    # The request is gone, so nothing can be compared with it, and no trusted key signed it
    request_gone: bool = False
    # Why that key does not count, after "signed by"; None: it does, or there is none
    objection: str | None = None
    expected: ExpectedRequest | None = None  # the request it answers; None: nothing of it was there

    @property
    def sentence(self) -> str:
        """What a reader must know about who wrote this, and whether it can be compared with its request."""
        known = _SAID[self.signature].format(signer=self.signer, objection=self.objection)
        if self.request_gone:
            return f"its request is gone from the remote, so what it answers cannot be checked; {known}"
        return known


def fetch(
    git: GitRepo,
    remote: str,
    state: RequestState,
    *,
    expected: ExpectedRequest | None = None,
    depth: int | None = None,
    timeout_s: float | None = None,
) -> FetchedResult | None:
    """Fetch the result of a request, leaving nothing in the checkout; None: there is none yet.

    `expected` is the request as this client submitted it; None: as it is on the remote. A `ResultError`: the
    branch holds neither this request nor a result of it, or the result is too large.
    """
    request_commit = expected.commit if expected else state.inbox
    held = [value for value in (*state.branches, state.result) if value is not None]
    places = [value for value in held if value.commit != request_commit]
    if not places:
        return None
    wanted = [v.ref for v in held if (v in places or not expected) and not git.exists(v.commit)]
    is_own = isinstance(git, Scratch) or not wanted
    with contextlib.nullcontext(git) if is_own else git.scratch() as scratch:
        if wanted:
            scratch.fetch(remote, wanted, depth=depth, timeout_s=timeout_s)
        return read(scratch, state, places, expected)


def read(
    git: GitRepo, state: RequestState, places: list[RefValue], expected: ExpectedRequest | None
) -> FetchedResult | None:
    """The result of a request out of a repository that holds its refs' commits; see `fetch`."""
    request_commit = expected.commit if expected else state.inbox
    alone = state.branch is None and state.inbox is None
    found: list[tuple[tuple[bool, bool], FetchedResult]] = []
    faults: list[ResultError] = []
    for place in places:
        if not git.exists(place.commit):
            continue  # it moved meanwhile
        try:
            if (located := locate(git, state, place, request_commit)) is not None:
                asked, is_named = _read_request(git, located)
                whole = replace(with_files(git, located), alone=alone, expected=expected or asked)
                is_partial = (whole.above or 1) > 1 or records.RESULT_NAME not in whole.files
                found.append(((is_partial, not is_named), whole))
        except ResultError as fault:  # of one place; another may hold the result
            faults.append(fault)
    if faults and len(faults) == len(places):
        raise faults[0]
    # Another branch of the nonce hides nothing: a whole result first, and the place that the request names.
    return min(found, key=lambda each: each[0])[1] if found else None


def locate(
    git: GitRepo, state: RequestState, place: RefValue, request_commit: str | None
) -> FetchedResult | None:
    """What a ref, whose commits are in this repository, says in answer to a request; None: no result.

    Without a `request_commit` the request is looked for below. A `ResultError`: it is not there.
    """
    nonce, tip = state.nonce, git.commit(place.commit)
    request, above = _find_request(git, place.commit, nonce, request_commit)
    if above == 0:
        return None
    parent = tip.parents[0] if tip.parents and git.exists(tip.parents[0]) else None
    changes = tuple(git.changes(parent, place.commit))
    if not any(change.path.startswith(f"{records.RESULT_ROOT}/") for change in changes):
        if above is None and request_commit is None and tip.parents and state.result is None:
            held = f"{place.commit[:12]}, neither the request {nonce} nor a result of it"
            raise ResultError(f"the branch {place.ref} holds {held}")
        if above == 1 or above is None or not has_result(git, place.commit, nonce):
            return None  # a commit of the user's on top; the result goes elsewhere
    located = FetchedResult(
        nonce, place.ref, place.commit, tip.parents, above, changes, tip.message, {}, None, request=request
    )
    if request is None and not tip.parents:
        return replace(located, request=_answered_on_branch(git, state, located))
    return located


def read_record(git: GitRepo, located: FetchedResult) -> records.Result | None:
    """The ``result.json`` of a located result; None: there is none that can be read."""
    sha = located.blobs.get(records.RESULT_NAME)
    try:
        return None if sha is None else records.parse_result(git.read_objects([sha], records.MAX_BYTES)[0])
    except (ResultError, BusError):
        return None


def believe(
    fetched: FetchedResult,
    *,
    trusted: Path,
    expected: ExpectedRequest | None = None,
    allow_unsigned: bool = False,
    bound: bool = True,
) -> Believed:
    """Judge a fetched result; a `ResultError` names the reason for which it is not believed.

    One whose request is gone, as a deleted branch leaves it, is shown as such where no key is trusted, or
    with `allow_unsigned`; where something else is in the request's place, only a trusted key helps. `trusted`
    lists the runner keys that count, with ``revoked_keys`` next to it; `expected` is the request as this
    client knows it; `bound` also refuses a result of another preset or workload than was asked. An unsigned
    result of no runner, which claims nothing, needs no key.
    """
    expected = expected or fetched.expected
    for objection in _place_objections(fetched, expected):
        raise ResultError(objection)
    nonce, present = fetched.nonce, fetched.files
    result, files, signature = check_files(
        present, nonce=nonce, expected=expected, trusted=trusted, bound=bound
    )
    is_trusted = signature.trust is TrustLevel.TRUSTED
    needs_key = signature.trust is not TrustLevel.UNSIGNED or not _claims_nothing(result)
    if needs_key and not is_trusted and not allow_unsigned and pins_keys(trusted):
        said = _SAID[signature.trust].format(signer=signature.signer, objection=signature.objection)
        raise ResultError(
            f"the result is {said}; this client accepts no signature but those of the runners it trusts",
            "trust a runner with: kakeya_mac runners trust NAME --key 'KEY' (the runner prints that line);"
            " --allow-unsigned shows this result all the same",
        )
    unknown = expected is None and not is_trusted
    if needs_key and unknown and not fetched.alone:
        raise ResultError(
            f"what the result of {nonce} answers is not on the remote, and no trusted key signed it",
            "trust the runner's key with `kakeya_mac runners trust`",
        )
    return Believed(
        result=result,
        files=files,
        commit=fetched.commit,
        ref=fetched.ref,
        signature=signature.trust,
        signer=signature.signer,
        request_gone=unknown,
        objection=signature.objection,
        expected=expected,
    )


def evidence_report(believed: Believed) -> bytes:
    """The one evidence report among a result's files; an `EvidenceError`: there is none, or several."""
    result = believed.result
    reports = [file.path for file in result.files if file.role == "evidence" and file.path != PAIRED]
    if len(reports) != 1:
        what = f"the result of {result.nonce} ({result.preset}, {result.verdict.status})"
        raise EvidenceError(f"nothing to verify: {what} holds {len(reports)} evidence reports, not one")
    return believed.files[reports[0]]


def check_files(
    present: Mapping[str, bytes],
    *,
    nonce: str,
    expected: ExpectedRequest | None,
    trusted: Path,
    bound: bool = True,
) -> tuple[records.Result, dict[str, bytes], Signature]:
    """Compare a result's files, by path, with each other and the request; see `believe`."""
    data = present.get(records.RESULT_NAME)
    if data is None:
        raise ResultError(f"there is no {records.RESULT_NAME}")
    result, signed = records.parse_result(data), present.get(records.RESULT_SIGNATURE_NAME)
    for objection in (*_objections(result, nonce, expected, bound=bound), *file_objections(result, present)):
        raise ResultError(objection)
    try:
        signature = weigh(data, signed, signing.RESULT_NAMESPACE, trusted)
    except SignatureError as error:
        raise ResultError(f"{records.RESULT_SIGNATURE_NAME}: {clean_line(error.message)}") from None
    return result, {file.path: present[file.path] for file in result.files}, signature


def pins_keys(trusted: Path) -> bool:
    """Whether an allowed-signers file lists any key. A line that cannot be parsed counts as one."""
    try:
        lines = trusted.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise MachineError(f"cannot read the trusted keys in {trusted}: {error.strerror}") from None
    return any(line.strip() and not line.lstrip().startswith(b"#") for line in lines)


def _claims_nothing(result: records.Result) -> bool:
    """Whether no runner wrote a result, and it did not pass; a push could as well delete the request."""
    is_of_no_runner = result.runner.id == NO_RUNNER_ID and not result.commands and not result.files
    return is_of_no_runner and result.verdict.status is not records.Status.PASSED


def read_manifest(git: GitRepo, commit: str) -> Manifest | None:
    """What a commit's tree says was asked; None: nothing that can be read. Nothing is checked."""
    try:
        return parse(git.try_read_file(commit, REQUEST_PATH, MAX_BYTES) or b"")
    except ManifestError:
        return None


def _read_request(git: GitRepo, located: FetchedResult) -> tuple[ExpectedRequest | None, bool]:
    """The request that a result answers; and whether that named the result's place, or it is on no branch."""
    if located.request is None:
        return None, True
    parents, manifest = git.commit(located.request).parents, read_manifest(git, located.request)
    expected = ExpectedRequest(located.nonce, located.request, parents[0] if len(parents) in (1, 2) else None)
    if manifest is None:
        return expected, not located.parents
    expected = replace(
        expected,
        preset=manifest.preset,
        params=manifest.params,
        requested_by=manifest.requested_by,
        against=manifest.against,
    )
    return expected, not located.parents or manifest.result_ref == located.ref


def with_files(git: GitRepo, located: FetchedResult) -> FetchedResult:
    """A located result with the contents of its files."""
    blobs = located.blobs
    if len(blobs) > MAX_RESULT_FILES:
        what = f"the commit {located.commit[:12]} holds {len(blobs)} files for {located.nonce}"
        raise ResultError(f"{what}; a result has at most {MAX_RESULT_FILES}")
    contents = git.read_objects(list(blobs.values()), MAX_RESULT_BYTES)
    return replace(located, files=dict(zip(blobs, contents, strict=True)))


def _find_request(
    git: GitRepo, tip: str, nonce: str, request_commit: str | None
) -> tuple[str | None, int | None]:
    """The request commit below a branch's tip and how many commits are above it; None: it is not there."""
    for above, commit in enumerate(first_parents(git, tip)):
        if commit == request_commit or (request_commit is None and _is_request(git, commit, nonce)):
            return commit, above
    return request_commit if request_commit and git.exists(request_commit) else None, None


def _answered_on_branch(git: GitRepo, state: RequestState, located: FetchedResult) -> str | None:
    """The request commit that a result elsewhere names, when the request's branch holds it.

    Where no commit of the branch has the shape of a request, a refusal may answer any of them.
    """
    branch = state.branch
    if branch is None or not git.exists(branch.commit):
        return None
    result = read_record(git, located)
    if result is None or result.request_commit not in first_parents(git, branch.commit):
        return None  # `believe` says what is wrong with it
    shown, _ = _find_request(git, branch.commit, state.nonce, None)
    refused = shown is None and result.verdict.status is records.Status.REFUSED
    return result.request_commit if shown == result.request_commit or refused else None


def first_parents(git: GitRepo, tip: str) -> Iterator[str]:
    """A commit and its first parents, as far as they are here and at most `MAX_WALK`."""
    commit = tip
    for _ in range(MAX_WALK):
        if git.kind_and_size(commit)[0] != "commit":
            return
        yield commit
        parents = git.commit(commit).parents
        if not parents:
            return
        commit = parents[0]


def _is_request(git: GitRepo, commit: str, nonce: str) -> bool:
    """Whether a commit brought a manifest that is this request's, or one that cannot be read."""
    parents = git.commit(commit).parents
    if len(parents) not in (1, 2) or not git.exists(parents[0]):
        return False
    changes = git.changes(parents[0], commit)
    if not any(change.path == REQUEST_PATH and change.status != "D" for change in changes):
        return False
    manifest = read_manifest(git, commit)
    return manifest is None or manifest.nonce == nonce


def _place_objections(fetched: FetchedResult, expected: ExpectedRequest | None) -> Iterator[str]:
    """Why a commit is not the request's only successor, which adds one folder and nothing else."""
    where = f"{fetched.commit[:12]} on {fetched.ref}"
    if fetched.above is not None and fetched.above > 1:
        yield f"{fetched.above} commits are on top of the request at {fetched.ref}, a result is exactly one"
    if fetched.parents and expected is not None and fetched.parents != (expected.commit,):
        names = ", ".join(parent[:12] for parent in fetched.parents)
        yield f"the parent of {where} is {names}, not the request {expected.commit[:12]}"
    if len(fetched.parents) > 1:
        yield f"the commit {where} is a merge, a result is not"
    folder = f"{records.RESULT_ROOT}/{fetched.nonce}/"
    for change in fetched.changes:
        if not change.path.startswith(folder):
            yield f"the commit {where} changes {change.path!r}, outside {folder}"
        if change.status != "A" or change.mode != "100644":
            yield f"the commit {where} has {change.path!r} as something else than a new plain file"
    if (data := fetched.files.get(records.RESULT_NAME)) is None:
        yield f"the commit {fetched.commit[:12]} holds no {records.RESULT_NAME} for {fetched.nonce}"
    elif _TRAILER.findall(fetched.message) != [hashlib.sha256(data).hexdigest()]:
        yield f"{records.RESULT_NAME} is not the one that the commit message names ({TRAILER})"


def _objections(
    result: records.Result, nonce: str, expected: ExpectedRequest | None, *, bound: bool
) -> Iterator[str]:
    if result.nonce != nonce:
        yield f"the result answers the request {result.nonce}, not {nonce}: it was copied here"
    if expected is None:
        return
    if result.request_commit != expected.commit:
        answered, asked = result.request_commit[:12], expected.commit[:12]
        yield f"the result answers the request commit {answered}, not {asked}"
    ran = result.verdict.status in (records.Status.PASSED, records.Status.REJECTED)
    if ran and result.preset is None:
        yield "the result names no preset, so nothing can have run for it"
    if bound and expected.preset is not None and result.preset not in (expected.preset, None):
        yield f"the result is of the preset {result.preset}, not {expected.preset}: it was copied"
    # A request that cannot be read names no workload, and nothing was run for it.
    names_workload = ran or result.workload_sha is not None
    if bound and names_workload and expected.workload_sha not in (None, result.workload_sha):
        ran_on, asked = (result.workload_sha or "none")[:12], str(expected.workload_sha)[:12]
        yield f"the result is of workload {ran_on}, not {asked}"


def file_objections(result: records.Result, present: Mapping[str, bytes]) -> Iterator[str]:
    """Why files, by path, are not those that a result lists."""
    listed = {file.path for file in result.files}
    if len(listed) != len(result.files):
        yield f"{records.RESULT_NAME} lists a file twice"
    own = {records.RESULT_NAME, records.RESULT_SIGNATURE_NAME, *records.ATTESTATION_NAMES}
    for path in present.keys() - listed - own:
        yield f"the file {path!r} is not one that {records.RESULT_NAME} lists"
    for file in result.files:
        data = present.get(file.path)
        if data is None:
            yield f"the file {file.path} is listed in {records.RESULT_NAME} but missing"
        elif len(data) != file.bytes or hashlib.sha256(data).hexdigest() != file.sha256:
            yield f"EVIDENCE_DIGEST: the file {file.path} was altered: {records.RESULT_NAME} lists another"
