"""Results on the bus: found, read out of the object store, and believed only after every check.

`fetch` collects what is on the remote and judges nothing. `believe` names the exact reason for which a result
is not believed. Nonce, request commit and workload are public, so only a signature tells who wrote a result:
a client that trusts a runner's key believes nothing else, one that trusts none is told so
(`Believed.sentence`). Live and archived results are read by the same code (`bridge.bus.archive`). Files come
out of the object store; nothing is ever checked out.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bridge import signing
from bridge.bus.requests import has_result
from bridge.bus.state import RefValue, RequestState
from bridge.errors import BusError, EvidenceError, MachineError, ManifestError, ResultError, SignatureError
from bridge.git.repo import FileChange, GitRepo
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH, Manifest, ParamValue, parse
from bridge.protocol.result import MAX_BYTES as MAX_RECORD_BYTES
from bridge.protocol.result import (
    RESULT_NAME,
    RESULT_ROOT,
    RESULT_SIGNATURE_NAME,
    Result,
    Status,
    parse_result,
)
from bridge.protocol.sanitize import clean_line
from bridge.signing.trust import Signature, Trust, TrustLevel, weigh

# In the commit message of a result: the digest of its result.json.
TRAILER = "Result-SHA256"
MAX_RESULT_BYTES = 256 * 1024 * 1024
MAX_RESULT_FILES = 1002  # what a result can list, itself and its signature
# How deep below a branch's tip its request is looked for.
MAX_WALK = 32

_PLAIN_FILES = ("100644", "100755")
_TRAILER = re.compile(rf"^{TRAILER}: ([0-9a-f]{{64}})$", re.MULTILINE)


@dataclass(frozen=True)
class ExpectedRequest:
    """The request that a result must answer; `workload_sha`, `preset`, `params` None: not readable."""

    nonce: str
    commit: str
    workload_sha: str | None
    preset: str | None = None
    params: Mapping[str, ParamValue] | None = None


@dataclass(frozen=True)
class FetchedResult:
    """What is where a result should be, unjudged."""

    nonce: str  # the request
    ref: str  # where it was found
    commit: str  # the commit that ref holds
    parents: tuple[str, ...]  # its parents; none where the branch had moved
    # Commits between the request and `commit`, that one included; 1 on an untouched branch; None: the request
    # is not below
    above: int | None
    # Every path in which it differs from its parent (from nothing, without one)
    changes: tuple[FileChange, ...]
    message: str  # the commit message
    files: Mapping[str, bytes]  # contents of the result's folder by path relative to it; empty from `locate`
    # The request as it is on the remote; None: no longer there, or not the one that is answered
    expected: ExpectedRequest | None
    # The request's branch is gone, and it does not wait: nothing is left to compare the result with
    alone: bool = False
    request: str | None = None  # the request commit, where it is known and here

    @property
    def blobs(self) -> dict[str, str]:
        """Shas of the plain files of the result's folder, by path relative to it."""
        folder = f"{RESULT_ROOT}/{self.nonce}/"
        return {
            change.path.removeprefix(folder): change.sha
            for change in self.changes
            if change.path.startswith(folder) and change.mode in _PLAIN_FILES
        }


@dataclass(frozen=True)
class Believed:
    """A result that passed every check."""

    result: Result  # the parsed ``result.json``
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
        known = _describe(Signature(self.signature, self.signer, self.objection))
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

    Args:
        git: Any checkout.
        remote: Address of the bus.
        state: The request's refs.
        expected: The request as this client submitted it; None: as it is on the remote.
        depth: Commits to fetch of each history; None: all that the checkout lacks.
        timeout_s: Deadline of the fetch.

    Raises:
        ResultError: The branch holds neither this request nor a result of it, or the result is too large.
    """
    request_commit = expected.commit if expected else state.inbox
    held = [value for value in (*state.branches, state.result) if value is not None]
    places = [value for value in held if value.commit != request_commit]
    if not places:
        return None
    wanted = [v.ref for v in held if (v in places or not expected) and not git.exists(v.commit)]
    with git.scratch() if wanted else contextlib.nullcontext(git) as scratch:
        if wanted:
            scratch.fetch(remote, wanted, depth=depth, timeout_s=timeout_s)
        return read(scratch, state, places, expected)


def read(
    git: GitRepo, state: RequestState, places: list[RefValue], expected: ExpectedRequest | None
) -> FetchedResult | None:
    """The result of a request out of a repository that holds its refs' commits; see `fetch`."""
    request_commit = expected.commit if expected else state.inbox
    alone = state.branch is None and state.inbox is None
    found: list[tuple[bool, FetchedResult]] = []
    faults: list[ResultError] = []
    for place in places:
        if not git.exists(place.commit):
            continue  # it moved meanwhile
        try:
            if (located := locate(git, state, place, request_commit)) is not None:
                whole = replace(with_files(git, located), alone=alone)
                whole = replace(whole, expected=expected or _read_expected(git, located))
                found.append((_is_named_place(git, located), whole))
        except ResultError as fault:  # of one place; another may hold the result
            faults.append(fault)
    if not found and faults and (not state.others or len(faults) == len(places)):
        raise faults[0]
    # Another branch of the nonce hides nothing: a whole result first, and the place that the request names.
    found.sort(key=lambda each: ((each[1].above or 1) > 1 or RESULT_NAME not in each[1].files, not each[0]))
    return found[0][1] if found else None


def locate(
    git: GitRepo, state: RequestState, place: RefValue, request_commit: str | None
) -> FetchedResult | None:
    """What a ref, whose commits are in this repository, says in answer to a request; None: no result.

    Args:
        git: A repository with the commit, the request below it and that one's parent.
        state: The request's refs.
        place: Its branch, or the ref of a result of its own.
        request_commit: The request, where it is known; None: it is looked for below the tip.

    Raises:
        ResultError: The branch holds neither this request nor a result of it.
    """
    nonce, tip = state.nonce, git.commit(place.commit)
    request, above = _find_request(git, place.commit, nonce, request_commit)
    if above == 0:
        return None
    parent = tip.parents[0] if tip.parents and git.exists(tip.parents[0]) else None
    changes = tuple(git.changes(parent, tip.sha))
    if not any(change.path.startswith(f"{RESULT_ROOT}/") for change in changes):
        if above is None and request_commit is None and tip.parents and state.result is None:
            raise ResultError(f"the branch {place.ref} no longer holds the request {nonce}")
        if above == 1 or above is None or not has_result(git, place.commit, nonce):
            return None  # a commit of the user's on top; the result goes elsewhere
    located = FetchedResult(
        nonce, place.ref, place.commit, tip.parents, above, changes, tip.message, {}, None, request=request
    )
    if request is None and not tip.parents:
        return replace(located, request=_answered_on_branch(git, state, located))
    return located


def read_record(git: GitRepo, located: FetchedResult) -> Result | None:
    """The ``result.json`` of a located result; None: there is none that can be read."""
    sha = located.blobs.get(RESULT_NAME)
    try:
        return None if sha is None else parse_result(git.read_objects([sha], MAX_RECORD_BYTES)[0])
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
    """Judge a fetched result.

    One whose request is gone, as a deleted branch leaves it, is shown as such where no key is trusted, or
    with `allow_unsigned`; where something else is in the request's place, only a trusted key helps.

    Args:
        fetched: From `fetch`.
        trusted: Allowed-signers file of the runner keys that count here, with ``revoked_keys`` next to it;
            neither need exist.
        expected: The request as this client knows it; None: as `fetch` found it on the remote.
        allow_unsigned: Also believe what none of the trusted keys signed. A signature that does not verify
            is refused all the same.
        bound: Also refuse one of another preset or workload than was asked; False: the caller shows such
            differences as a verdict.

    Raises:
        ResultError: It does not answer this request, was altered, its signature does not verify, or keys are
            trusted here and none of them signed it.
    """
    expected = expected or fetched.expected
    _check_place(fetched, expected)
    data = fetched.files.get(RESULT_NAME)
    if data is None:
        raise ResultError(f"the commit {fetched.commit[:12]} holds no {RESULT_NAME} for {fetched.nonce}")
    digest = _TRAILER.findall(fetched.message)
    if digest != [hashlib.sha256(data).hexdigest()]:
        raise ResultError(f"{RESULT_NAME} is not the one that the commit message names ({TRAILER})")
    result, files, signature = check_files(
        fetched.files, nonce=fetched.nonce, expected=expected, trusted=trusted, bound=bound
    )
    is_trusted = signature.trust is TrustLevel.TRUSTED
    if not is_trusted and not allow_unsigned and pins_keys(trusted):
        raise _not_trusted(signature)
    unknown = expected is None and not is_trusted
    if unknown and not fetched.alone:
        raise ResultError(
            f"the request {fetched.nonce} is no longer on the remote and no trusted key signed the result",
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
    reports = [file.path for file in result.files if file.role == "evidence"]
    if len(reports) != 1:
        raise EvidenceError(
            f"there is nothing to verify: the result of {result.nonce} ({result.preset},"
            f" {result.verdict.status}) holds {len(reports)} evidence reports, not one"
        )
    return believed.files[reports[0]]


def check_files(
    present: Mapping[str, bytes],
    *,
    nonce: str,
    expected: ExpectedRequest | None,
    trusted: Path,
    bound: bool = True,
) -> tuple[Result, dict[str, bytes], Signature]:
    """Compare the files of a result with each other and with the request, wherever they were found.

    Args:
        present: Contents by path relative to ``result.json``, that file and its signature among them.
        nonce: The request.
        expected: The same as it was found; None: it is gone.
        trusted: As in `believe`.
        bound: As in `believe`.

    Returns:
        The result, the files it lists by path, and what its signature is worth.
    """
    data = present.get(RESULT_NAME)
    if data is None:
        raise ResultError(f"there is no {RESULT_NAME}")
    result = parse_result(data)
    _check_identity(result, nonce, expected)
    if bound and expected is not None:
        _check_bound(result, expected)
    files = _check_digests(result, present)
    try:
        signature = weigh(
            data, present.get(RESULT_SIGNATURE_NAME), signing.RESULT_NAMESPACE, Trust.by(trusted)
        )
    except SignatureError as error:
        raise ResultError(f"{RESULT_SIGNATURE_NAME}: {clean_line(error.message)}") from None
    return result, files, signature


def pins_keys(trusted: Path) -> bool:
    """Whether an allowed-signers file lists any key. A line that cannot be parsed counts as one."""
    try:
        lines = trusted.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise MachineError(f"cannot read the trusted keys in {trusted}: {error.strerror}") from None
    return any(line.strip() and not line.lstrip().startswith(b"#") for line in lines)


def _requested(git: GitRepo, commit: str) -> Manifest | None:
    try:
        return parse(git.try_read_file(commit, REQUEST_PATH, MAX_BYTES) or b"")
    except ManifestError:
        return None


def _read_expected(git: GitRepo, located: FetchedResult) -> ExpectedRequest | None:
    if located.request is None:
        return None
    parents, manifest = git.commit(located.request).parents, _requested(git, located.request)
    workload = parents[0] if len(parents) == 1 else None
    if manifest is None:
        return ExpectedRequest(located.nonce, located.request, workload)
    return ExpectedRequest(located.nonce, located.request, workload, manifest.preset, manifest.params)


def _is_named_place(git: GitRepo, located: FetchedResult) -> bool:
    """Whether a result is where its request said that it would be, or on no branch at all."""
    if located.request is None or not located.parents:
        return True
    manifest = _requested(git, located.request)
    return manifest is not None and manifest.result_ref == located.ref


def with_files(git: GitRepo, located: FetchedResult) -> FetchedResult:
    """A located result with the contents of its files."""
    blobs = located.blobs
    if len(blobs) > MAX_RESULT_FILES:
        raise ResultError(
            f"the commit {located.commit[:12]} holds {len(blobs)} files for {located.nonce};"
            f" a result has at most {MAX_RESULT_FILES}"
        )
    contents = git.read_objects(list(blobs.values()), MAX_RESULT_BYTES)
    return replace(located, files=dict(zip(blobs, contents, strict=True)))


def _find_request(
    git: GitRepo, tip: str, nonce: str, request_commit: str | None
) -> tuple[str | None, int | None]:
    """The request commit below a branch's tip and how many commits are above it; None: it is not there."""
    for above, commit in enumerate(first_parents(git, tip)):
        if commit == request_commit or (request_commit is None and _is_request(git, commit, nonce)):
            return commit, above
    known = request_commit if request_commit is not None and git.exists(request_commit) else None
    return known, None


def _answered_on_branch(git: GitRepo, state: RequestState, located: FetchedResult) -> str | None:
    """The request commit that a result elsewhere names, when the request's branch holds it.

    It must be the branch's request; where no commit of the branch has the shape of one, a refusal may answer
    any of them.
    """
    branch = state.branch
    if branch is None or not git.exists(branch.commit):
        return None
    result = read_record(git, located)
    if result is None or result.request_commit not in first_parents(git, branch.commit):
        return None  # `believe` says what is wrong with it
    shown, _ = _find_request(git, branch.commit, state.nonce, None)
    refused = shown is None and result.verdict.status is Status.REFUSED
    return result.request_commit if shown == result.request_commit or refused else None


def first_parents(git: GitRepo, tip: str, limit: int = MAX_WALK) -> Iterator[str]:
    """A commit and its first parents, as far as they are here and at most so many."""
    commit = tip
    for _ in range(limit):
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
    if len(parents) != 1 or not git.exists(parents[0]):
        return False
    changes = git.changes(parents[0], commit)
    if not any(change.path == REQUEST_PATH and change.status != "D" for change in changes):
        return False
    manifest = _requested(git, commit)
    return manifest is None or manifest.nonce == nonce


def _describe(signature: Signature) -> str:
    """What a signature says of who wrote a result."""
    match signature.trust:
        case TrustLevel.TRUSTED:
            return f"signed by {signature.signer}"
        case TrustLevel.REVOKED:
            return f"worthless: signed by {signature.objection}; the thief could have written this"
        case TrustLevel.UNTRUSTED_KEY:
            return f"signed by a key that is not trusted here: {signature.signer}"
        case TrustLevel.UNCHECKED:
            return "signed, but not checked: ssh-keygen is not installed"
        case TrustLevel.UNSIGNED:
            return "unsigned: anyone with push rights could have written this"


def _check_place(fetched: FetchedResult, expected: ExpectedRequest | None) -> None:
    """The commit is the request's only successor and adds one folder, nothing else."""
    where = f"{fetched.commit[:12]} on {fetched.ref}"
    if fetched.above is not None and fetched.above > 1:
        raise ResultError(
            f"{fetched.above} commits are on top of the request at {fetched.ref}, a result is exactly one: "
            "another commit was pushed there"
        )
    if fetched.parents and expected is not None and fetched.parents != (expected.commit,):
        names = ", ".join(parent[:12] for parent in fetched.parents)
        raise ResultError(f"the parent of {where} is {names}, not the request {expected.commit[:12]}")
    if len(fetched.parents) > 1:
        raise ResultError(f"the commit {where} is a merge, a result is not")
    folder = f"{RESULT_ROOT}/{fetched.nonce}/"
    for change in fetched.changes:
        if not change.path.startswith(folder):
            raise ResultError(f"the commit {where} changes {change.path!r}, outside {folder}")
        if change.status != "A" or change.mode != "100644":
            raise ResultError(
                f"the commit {where} has {change.path!r} as something else than a new plain file"
            )


def _check_identity(result: Result, nonce: str, expected: ExpectedRequest | None) -> None:
    if result.nonce != nonce:
        raise ResultError(f"the result answers the request {result.nonce}, not {nonce}: it was copied here")
    if expected is None:
        return
    if result.request_commit != expected.commit:
        answered, asked = result.request_commit[:12], expected.commit[:12]
        raise ResultError(f"the result answers the request commit {answered}, not {asked}")
    if result.verdict.status in (Status.PASSED, Status.REJECTED) and result.preset is None:
        raise ResultError("the result names no preset, so nothing can have run for it")


def _check_bound(result: Result, expected: ExpectedRequest) -> None:
    if expected.preset is not None and result.preset not in (expected.preset, None):
        raise ResultError(
            f"the result is of the preset {result.preset}, not {expected.preset}: it was copied"
        )
    ran = result.verdict.status in (Status.PASSED, Status.REJECTED)
    if result.workload_sha is None and not ran:
        return  # a request that cannot be read names no workload, and nothing was run for it
    if expected.workload_sha is not None and result.workload_sha != expected.workload_sha:
        ran_on, asked = (result.workload_sha or "none")[:12], expected.workload_sha[:12]
        raise ResultError(f"the result is of workload {ran_on}, not {asked}")


def _check_digests(result: Result, present: Mapping[str, bytes]) -> dict[str, bytes]:
    listed = {file.path: file for file in result.files}
    if len(listed) != len(result.files):
        raise ResultError(f"{RESULT_NAME} lists a file twice")
    for path in present:
        if path not in listed and path not in (RESULT_NAME, RESULT_SIGNATURE_NAME):
            raise ResultError(f"the file {path!r} is not one that {RESULT_NAME} lists")
    for path, file in listed.items():
        data = present.get(path)
        if data is None:
            raise ResultError(f"the file {path} is listed in {RESULT_NAME} but missing")
        if len(data) != file.bytes or hashlib.sha256(data).hexdigest() != file.sha256:
            raise ResultError(
                f"EVIDENCE_DIGEST: the file {path} is not the one that {RESULT_NAME} lists: it was altered"
            )
    return {path: present[path] for path in listed}


def _not_trusted(signature: Signature) -> ResultError:
    """Why a client that trusts runner keys does not believe this result, and what may be done about it."""
    trust = "kakeya_mac runners trust NAME --key 'KEY' (the runner prints that line when it starts)"
    match signature.trust:
        case TrustLevel.REVOKED:
            found = f"the result is signed by {signature.objection}: the thief could have written this"
            remedy = f"ask again; a runner with a new key is trusted with: {trust}"
        case TrustLevel.UNTRUSTED_KEY:
            found = f"the result is signed by {signature.objection}"
            remedy = f"if that is your runner's key: {trust}"
        case TrustLevel.UNCHECKED:
            found = "the result is signed, but ssh-keygen is not installed to check by whom"
            remedy = "install OpenSSH's client (openssh-client)"
        case _:
            found = "the result carries no signature: anyone with push rights could have written it"
            remedy = f"a runner that signs is trusted with: {trust}"
    return ResultError(
        f"{found}; this client believes only results of the runners it trusts",
        f"{remedy}; --allow-unsigned shows this result all the same",
    )
