"""A fetched result, believed only after every check.

`believe` is pure but for the signature check: it names the exact reason for which a result is not believed.
Nonce, request commit and workload are public, so only a signature tells who wrote a result. A client that
trusts a runner's key believes nothing else; one that trusts none is told what it sees: `Believed.sentence`.
Results come from `fetch` (`bridge.bus.answers`) or out of the archive (`bridge.bus.archived`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge import signing
from bridge.bus.answers import MAX_RESULT_BYTES, Asked, FetchedResult, fetch
from bridge.bus.publish import TRAILER
from bridge.bus.standing import Signature, Standing, Trust, weigh
from bridge.errors import MachineError, ResultError, SignatureError
from bridge.protocol.result import (
    RESULT_NAME,
    RESULT_ROOT,
    RESULT_SIGNATURE_NAME,
    Result,
    Status,
    parse_result,
)
from bridge.protocol.sanitize import clean_line

__all__ = [
    "MAX_RESULT_BYTES",
    "Asked",
    "Believed",
    "FetchedResult",
    "Standing",
    "believe",
    "check_files",
    "fetch",
    "pins_keys",
]

_TRAILER = re.compile(rf"^{TRAILER}: ([0-9a-f]{{64}})$", re.MULTILINE)


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
        objection: Why that key does not count, after "signed by"; None: it does, or none signed.
        request_gone: Nothing of the request was there to hold it against, and no trusted key signed it.
        asked: The request it answers; None: nothing of it was there.
    """

    result: Result
    files: Mapping[str, bytes]
    commit: str
    ref: str
    signature: Standing
    signer: str | None
    request_gone: bool = False
    objection: str | None = None
    asked: Asked | None = None

    @property
    def sentence(self) -> str:
        """What a reader must know about who wrote this, and whether it can be held against its request."""
        known = _known_of(Signature(self.signature, self.signer, self.objection))
        if self.request_gone:
            return f"its request is gone from the remote: nobody can tell that this answers it; {known}"
        return known


def _known_of(signature: Signature) -> str:
    """What a signature says of who wrote a result."""
    match signature.standing:
        case Standing.TRUSTED:
            return f"signed by {signature.signer}"
        case Standing.REVOKED:
            return f"worthless: signed by {signature.objection}; whoever stole it could have written this"
        case Standing.UNTRUSTED_KEY:
            return f"signed by a key that is not trusted here: {signature.signer}"
        case Standing.UNCHECKED:
            return "signed, but not checked: ssh-keygen is not installed"
        case Standing.UNSIGNED:
            return "unsigned: anyone with push rights could have written this"


def believe(
    fetched: FetchedResult,
    *,
    trusted: Path,
    asked: Asked | None = None,
    allow_unsigned: bool = False,
    bound: bool = True,
) -> Believed:
    """Judge a fetched result.

    One whose request is gone, as a deleted branch leaves it, is shown as such where no key is trusted, or on
    request; where something else stands in the request's place, only a trusted key helps.

    Args:
        fetched: From `fetch`.
        trusted: Allowed-signers file of the runner keys that count here, with ``revoked_keys`` beside it;
            neither need exist.
        asked: The request as this client knows it; None: as `fetch` found it on the remote.
        allow_unsigned: Also believe what none of the trusted keys signed. A signature that does not verify
            is refused all the same.
        bound: Also refuse one of another preset or workload than was asked; False: the caller has
            `bridge.client.judged.judge` tell all such differences as a verdict.

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
    result, files, signature = check_files(
        fetched.files, nonce=fetched.nonce, asked=asked, trusted=trusted, bound=bound
    )
    is_trusted = signature.standing is Standing.TRUSTED
    if not is_trusted and not allow_unsigned and pins_keys(trusted):
        raise _not_trusted(signature)
    unknown = asked is None and not is_trusted
    if unknown and not fetched.alone:
        raise ResultError(
            f"the request {fetched.nonce} is no longer on the remote and no trusted key signed the answer",
            "trust the runner's key with `kakeya_mac runners trust`",
        )
    return Believed(
        result=result,
        files=files,
        commit=fetched.commit,
        ref=fetched.ref,
        signature=signature.standing,
        signer=signature.signer,
        request_gone=unknown,
        objection=signature.objection,
        asked=asked,
    )


def check_files(
    present: Mapping[str, bytes], *, nonce: str, asked: Asked | None, trusted: Path, bound: bool = True
) -> tuple[Result, dict[str, bytes], Signature]:
    """Hold the files of a result against each other and against the request, wherever they were found.

    Args:
        present: Contents by path relative to ``result.json``, that file and its signature among them.
        nonce: The request.
        asked: The same as it was found; None: it is gone.
        trusted: As in `believe`.
        bound: As in `believe`.

    Returns:
        The result, the files it lists by path, and what its signature is worth.

    Raises:
        ResultError: They are not a result of this request, one was altered, or the signature does not verify.
        KeyListError: `trusted` could have been written by others, or is not understood.
    """
    data = present.get(RESULT_NAME)
    if data is None:
        raise ResultError(f"there is no {RESULT_NAME}")
    result = parse_result(data)
    _check_identity(result, nonce, asked)
    if bound and asked is not None:
        _check_bound(result, asked)
    files = _check_files(result, present)
    return result, files, _check_signature(data, present.get(RESULT_SIGNATURE_NAME), trusted)


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
    if result.verdict.status in (Status.PASSED, Status.REJECTED) and result.preset is None:
        raise ResultError("the result names no preset, so nothing can have run for it")


def _check_bound(result: Result, asked: Asked) -> None:
    if asked.preset is not None and result.preset not in (asked.preset, None):
        raise ResultError(f"the result is of the preset {result.preset}, not {asked.preset}: it was copied")
    ran = result.verdict.status in (Status.PASSED, Status.REJECTED)
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


def _check_signature(data: bytes, signature: bytes | None, trusted: Path) -> Signature:
    try:
        return weigh(data, signature, signing.RESULT_NAMESPACE, Trust.by(trusted))
    except SignatureError as error:
        raise ResultError(f"{RESULT_SIGNATURE_NAME}: {clean_line(error.message)}") from None


def _not_trusted(signature: Signature) -> ResultError:
    """Why a client that trusts runner keys does not believe this result, and what may be done about it."""
    trust = "kakeya_mac runners trust NAME --key 'KEY' (the runner prints that line when it starts)"
    match signature.standing:
        case Standing.REVOKED:
            found = f"the result is signed by {signature.objection}: whoever stole it could have written this"
            remedy = f"ask again; a runner with a new key is trusted with: {trust}"
        case Standing.UNTRUSTED_KEY:
            found = f"the result is signed by {signature.objection}"
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
