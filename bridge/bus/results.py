"""A published result, fetched as objects and believed only after every check.

`fetch` collects what stands on the remote; files come out of the object store, nothing is ever checked out.
`believe` is pure but for the signature check: it names the exact reason for which a result is not believed.
Nonce, request commit and workload are public, so only a signature tells who wrote a result. A client that
trusts a runner's key believes nothing else; one that trusts none is told what it sees: `Believed.sentence`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bridge import signing
from bridge.bus.changes import Change
from bridge.bus.git import Git
from bridge.bus.handles import Held, RequestState
from bridge.bus.publish import TRAILER
from bridge.bus.untrusted import clean_line
from bridge.errors import BusError, MachineError, ManifestError, ResultError, SignatureError
from bridge.manifest import MAX_BYTES, REQUEST_PATH, parse
from bridge.result import RESULT_NAME, RESULT_ROOT, RESULT_SIGNATURE_NAME, Result, Status, parse_result

MAX_RESULT_BYTES = 256 * 1024 * 1024

_WALK = 32
_PLAIN_FILES = ("100644", "100755")
_TRAILER = re.compile(rf"^{TRAILER}: ([0-9a-f]{{64}})$", re.MULTILINE)


@dataclass(frozen=True)
class Asked:
    """The request that a result must answer; `workload_sha` and `preset` None: it could not be read."""

    nonce: str
    commit: str
    workload_sha: str | None
    preset: str | None = None


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


class Standing(StrEnum):
    """What a result's signature is worth on this machine. A closed set."""

    TRUSTED = "trusted"
    UNTRUSTED_KEY = "untrusted-key"
    UNSIGNED = "unsigned"
    UNCHECKED = "unchecked"


@dataclass(frozen=True)
class Believed:
    """A result that passed every check.

    Attributes:
        result: The parsed ``result.json``.
        files: The files it lists, by path.
        commit: The result commit.
        ref: Where it stands.
        signature: What its signature is worth here.
        signer: The trusted principal, or the fingerprint of an untrusted key.
    """

    result: Result
    files: Mapping[str, bytes]
    commit: str
    ref: str
    signature: Standing
    signer: str | None

    @property
    def sentence(self) -> str:
        """What a reader must know about who wrote this."""
        match self.signature:
            case Standing.TRUSTED:
                return f"signed by {self.signer}"
            case Standing.UNTRUSTED_KEY:
                return f"signed by a key that is not trusted here: {self.signer}"
            case Standing.UNCHECKED:
                return "signed, but not checked: ssh-keygen is not installed"
            case Standing.UNSIGNED:
                return "unsigned: anyone with push rights could have written this"


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
    places = [held for held in (state.branch, state.result) if held and held.commit != request_commit]
    if not places:
        return None
    with git.scratch() as scratch:
        needed = [held for held in (state.branch, state.result) if held and (held in places or not asked)]
        wanted = [held.ref for held in needed if not scratch.exists(held.commit)]
        if wanted:
            scratch.fetch(remote, wanted, timeout_s=timeout_s)
        places = [held for held in places if scratch.exists(held.commit)]  # one may have moved meanwhile
        found = [_read(scratch, state, held, asked, request_commit) for held in places]
    answers = [answer for answer in found if answer is not None]
    whole = [answer for answer in answers if answer.above == 1 and RESULT_NAME in answer.files]
    return next(iter(whole or answers), None)


def believe(
    fetched: FetchedResult, *, trusted: Path, asked: Asked | None = None, allow_unsigned: bool = False
) -> Believed:
    """Judge a fetched result.

    Args:
        fetched: From `fetch`.
        trusted: Allowed-signers file of the runner keys that count here; it need not exist.
        asked: The request as this client knows it; None: as `fetch` found it on the remote.
        allow_unsigned: Also believe what none of the trusted keys signed. A signature that does not verify
            is refused all the same.

    Raises:
        ResultError: It does not answer this request, was altered, its signature does not verify, or keys are
            trusted here and none of them signed it.
        MachineError: `trusted` is there and cannot be read.
    """
    asked = asked or fetched.asked
    _check_place(fetched, asked)
    data = fetched.files.get(RESULT_NAME)
    if data is None:
        raise ResultError(f"the commit {fetched.commit[:12]} holds no {RESULT_NAME} for {fetched.nonce}")
    digest = _TRAILER.findall(fetched.message)
    if digest != [hashlib.sha256(data).hexdigest()]:
        raise ResultError(f"{RESULT_NAME} is not the one that the commit message names ({TRAILER})")
    result = parse_result(data)
    _check_identity(result, fetched.nonce, asked)
    files = _check_files(result, fetched.files)
    signature, signer = _check_signature(data, fetched.files.get(RESULT_SIGNATURE_NAME), trusted)
    if signature is not Standing.TRUSTED and not allow_unsigned and pins_keys(trusted):
        raise _not_trusted(signature, signer)
    if asked is None and signature is not Standing.TRUSTED:
        raise ResultError(
            f"the request {fetched.nonce} is no longer on the remote and no trusted key signed the answer",
            "trust the runner's key with `kakeya_mac runners trust`",
        )
    return Believed(result, files, fetched.commit, fetched.ref, signature, signer)


def pins_keys(trusted: Path) -> bool:
    """Whether an allowed-signers file lists any key. A line that nobody can read counts: it was meant as one.

    Raises:
        MachineError: It is there and cannot be read.
    """
    try:
        lines = trusted.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise MachineError(f"cannot read the trusted keys in {trusted}: {error.strerror}") from None
    return any(line.strip() and not line.lstrip().startswith(b"#") for line in lines)


def _read(
    git: Git, state: RequestState, held: Held, asked: Asked | None, request_commit: str | None
) -> FetchedResult | None:
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
        if above == 1 or above is None or not _has_result(git, held.commit, nonce):
            return None  # somebody's own commit on top; the answer will go elsewhere
    folder = f"{RESULT_ROOT}/{nonce}/"
    blobs = [change for change in changes if change.path.startswith(folder) and change.mode in _PLAIN_FILES]
    contents = git.read_objects([change.sha for change in blobs], MAX_RESULT_BYTES)
    files = {change.path.removeprefix(folder): data for change, data in zip(blobs, contents, strict=True)}
    if asked is None and request is None and not tip.parents:
        request = _answered_on_branch(git, state, files.get(RESULT_NAME, b""))
    return FetchedResult(
        nonce=nonce,
        ref=held.ref,
        commit=held.commit,
        parents=tip.parents,
        above=1 if above is None else above,
        changes=changes,
        message=tip.message,
        files=files,
        asked=asked or (_read_asked(git, nonce, request) if request else None),
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


def _answered_on_branch(git: Git, state: RequestState, data: bytes) -> str | None:
    """The request commit that a result elsewhere names, when the request's branch holds it.

    It must be the branch's request; where no commit of the branch has the shape of one, a refusal may answer
    any of them.
    """
    held = state.branch
    if held is None or not git.exists(held.commit):
        return None
    try:
        answer = parse_result(data)
    except ResultError:
        return None  # `believe` says what is wrong with it
    named = answer.request_commit
    if named not in _walk(git, held.commit):
        return None
    shown, _ = _find_request(git, held.commit, state.nonce, None)
    refused = shown is None and answer.verdict.status is Status.REFUSED
    return named if shown == named or refused else None


def _walk(git: Git, tip: str) -> Iterator[str]:
    """A commit and its first parents, as far as a request may lie below a tip."""
    commit = tip
    for _ in range(_WALK):
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


def _read_asked(git: Git, nonce: str, commit: str) -> Asked:
    parents = git.commit(commit).parents
    try:
        preset = parse(git.read_blob(commit, REQUEST_PATH, MAX_BYTES) or b"").preset
    except (ManifestError, BusError):
        preset = None
    return Asked(nonce, commit, parents[0] if len(parents) == 1 else None, preset)


def _has_result(git: Git, commit: str, nonce: str) -> bool:
    return git.kind_and_size(f"{commit}:{RESULT_ROOT}/{nonce}/{RESULT_NAME}")[0] == "blob"


def _check_place(fetched: FetchedResult, asked: Asked | None) -> None:
    """The commit is the request's only successor and adds one folder, nothing else."""
    where = f"{fetched.commit[:12]} on {fetched.ref}"
    if fetched.above > 1:
        raise ResultError(
            f"{fetched.above} commits lie on the request at {fetched.ref}, a result is exactly one: "
            "somebody pushed on top of it"
        )
    if fetched.parents and asked is not None and fetched.parents != (asked.commit,):
        names = ", ".join(parent[:12] for parent in fetched.parents)
        raise ResultError(f"the commit {where} stands on {names}, not on the request {asked.commit[:12]}")
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


def _check_identity(result: Result, nonce: str, asked: Asked | None) -> None:
    if result.nonce != nonce:
        raise ResultError(f"the result answers the request {result.nonce}, not {nonce}: it was copied here")
    if asked is None:
        return
    if result.request_commit != asked.commit:
        raise ResultError(
            f"the result answers the request commit {result.request_commit[:12]}, not {asked.commit[:12]}"
        )
    if asked.preset is not None and result.preset not in (asked.preset, None):
        raise ResultError(f"the result is of the preset {result.preset}, not {asked.preset}: it was copied")
    ran = result.verdict.status in (Status.PASSED, Status.REJECTED)
    if ran and result.preset is None:
        raise ResultError("the result names no preset, so nothing can have run for it")
    if result.workload_sha is None and not ran:
        return  # a request that cannot be read names no workload, and nothing was run for it
    if asked.workload_sha is not None and result.workload_sha != asked.workload_sha:
        raise ResultError(
            f"the result is of workload {(result.workload_sha or 'none')[:12]}, not {asked.workload_sha[:12]}"
        )


def _check_files(result: Result, present: Mapping[str, bytes]) -> dict[str, bytes]:
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


def _check_signature(data: bytes, signature: bytes | None, trusted: Path) -> tuple[Standing, str | None]:
    if signature is None:
        return Standing.UNSIGNED, None
    if not signing.available():
        return Standing.UNCHECKED, None
    try:
        fingerprint = signing.signer_fingerprint(data, signature, signing.RESULT_NAMESPACE)
        principal = signing.verify(data, signature, signing.RESULT_NAMESPACE, trusted)
    except SignatureError as error:
        raise ResultError(f"{RESULT_SIGNATURE_NAME}: {clean_line(error.message)}") from None
    if principal is None:
        return Standing.UNTRUSTED_KEY, fingerprint
    return Standing.TRUSTED, principal


def _not_trusted(signature: Standing, signer: str | None) -> ResultError:
    """Why a client that trusts runner keys does not believe this result, and what may be done about it."""
    trust = "kakeya_mac runners trust NAME --key 'KEY' (the runner prints that line when it starts)"
    match signature:
        case Standing.UNTRUSTED_KEY:
            found = f"the result is signed by an unknown key, {signer}"
            remedy = f"if that is your runner's key: {trust}"
        case Standing.UNCHECKED:
            found = "the result is signed, but ssh-keygen is not installed, so nobody can tell by whom"
            remedy = "install OpenSSH's client (openssh-client)"
        case _:
            found = "the result carries no signature: anyone with push rights could have written it"
            remedy = f"a runner that signs is trusted with: {trust}"
    return ResultError(
        f"{found}; this client believes only results of the runners it trusts",
        f"{remedy}; --allow-unsigned shows this result all the same",
    )
