"""Find a request's result, and decide what this client makes of it.

`look_up` resolves a handle from any clone: among the remote's refs first, then in the archive. `judge` takes
a result that `bridge.bus.results.believe` accepted, compares it with its request (`bridge.client.compare`)
and runs the gate that is installed here over each report, because nothing forces the writer of an unsigned
result to have done so. What the runner itself did not pass stays as it is; what it passed and this client
does not is rejected. `verify` replays a report by the engine that is installed next to this client, another
program (``python -m engine verify``), with rows that are drawn here after the result was signed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge import presets, signing
from bridge.bus.archive import find_archived
from bridge.bus.requests import ALL_REFS, RefValue, RequestState, bound_manifest, find, read_request, state_of
from bridge.bus.results import Believed, FetchedResult, believe, evidence_report, fetch
from bridge.client.compare import Agreement, compare
from bridge.client.remotes import Remote, open_cache
from bridge.client.signing_key import RequestSigner
from bridge.errors import (
    EXIT_UNVERIFIED,
    BusError,
    EvidenceError,
    MachineError,
    ManifestError,
    PresetError,
    ResultError,
    UnknownHandle,
)
from bridge.evidence.gate import Binding, Judgement
from bridge.evidence.gate import judge as run_gate
from bridge.evidence.required import broken_promises
from bridge.evidence.verification import NAME as VERIFICATION
from bridge.evidence.verification import SIGNATURE_NAME, Verification, parse_verification
from bridge.git.repo import GitRepo
from bridge.presets import Preset
from bridge.proc import helper_environment, spawn
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest, parse_time
from bridge.protocol.result import EXIT_CODES, Reason, Result, Status, Verdict, Violation
from bridge.settings import Settings
from bridge.signing.trust import TrustLevel

_MAX_VIOLATIONS = 1000
_REPLAY_TIMEOUT_S = 3600.0
_CONFIRMED, _REFUTED = 0, 1  # exit codes of `kakeya_engine verify`
# What the engine sees of our environment besides what helpers see: where models lie, and which BLAS.
_PASSED = (
    "KAKEYA_BLAS",
    "KAKEYA_STATE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)


@dataclass(frozen=True)
class Lookup:
    """What a handle names."""

    nonce: str
    state: RequestState  # its refs; of an archived request there are none
    answer: FetchedResult | None  # its result, unjudged; None: there is none yet


@dataclass(frozen=True)
class Judged:
    """A believed result and what this client makes of it."""

    believed: Believed
    judgements: Mapping[str, Judgement]  # what the gate installed here says of each report, by path
    # The runner's, or `rejected` where the result is of something else than was asked, or the runner passed
    # what this gate does not
    verdict: Verdict
    agreement: Agreement = field(default_factory=Agreement)  # where request, result and reports differ
    allow_unsigned: bool = False  # whether a pass counts that no trusted key signed
    # What a runner that replayed another request's report found; None: it replayed none
    verification: Verification | None = None

    @property
    def verified(self) -> bool:
        """Whether a key that is trusted here signed the result."""
        return self.believed.signature is TrustLevel.TRUSTED

    @property
    def exit_code(self) -> int:
        """What a command that shows this ends with."""
        if self.verdict.status is Status.PASSED and not (self.verified or self.allow_unsigned):
            return EXIT_UNVERIFIED
        return EXIT_CODES[self.verdict.status]


@dataclass(frozen=True)
class Verified:
    """What a replay on this machine found."""

    record: Verification
    data: bytes  # its bytes
    signature: bytes | None  # of these, by this client's key; None: there is none

    @property
    def exit_code(self) -> int:
        """What a command that verifies ends with."""
        return 0 if self.record.confirmed else EvidenceError.exit_code

    def as_json(self) -> dict[str, object]:
        """The record for a command's JSON line, and whether it is signed."""
        document = self.record.model_dump(mode="json", by_alias=True)
        return document | {"signed": self.signature is not None}

    def save(self, folder: Path) -> None:
        """Write the record, and its signature, next to the files of the result."""
        (folder / VERIFICATION).write_bytes(self.data)
        if self.signature is not None:
            (folder / SIGNATURE_NAME).write_bytes(self.signature)


def look_up(git: GitRepo, remote: Remote, handle: str, state_dir: Path) -> Lookup:
    """The request that a handle (a nonce, a branch name or a unique prefix) names and its result, if any.

    Raises:
        UnknownHandle: It names no request, or several.
        ResultError: What is where the result belongs cannot be one.
        RemoteUnreachable: The remote did not answer.
    """
    found = git.list_refs(remote.address, *ALL_REFS)

    def archived(name: str) -> FetchedResult:
        return find_archived(open_cache(state_dir, remote, git), name, found=found)

    try:
        nonce = find(found, handle)
    except UnknownHandle:
        spelled = handle.strip()
        if refs.ARCHIVE not in found or not spelled or any(spelled in ref for ref in found):
            raise
        result = archived(handle)
        return Lookup(result.nonce, state_of({}, result.nonce), result)
    state = state_of(found, nonce, handle)
    may_be_archived = refs.ARCHIVE in found and state.inbox is None and state.claim is None
    try:
        answer = fetch(git, remote.address, state)
    except ResultError:
        if not may_be_archived or state.result is not None:
            raise
        with contextlib.suppress(UnknownHandle):
            return Lookup(nonce, state, archived(nonce))
        raise
    if answer is None and may_be_archived:
        with contextlib.suppress(UnknownHandle):
            answer = archived(nonce)
    return Lookup(nonce, state, answer)


def request_place(state: RequestState) -> RefValue | None:
    """The ref that holds a request as it was asked, as far as refs tell: its branch, or its inbox entry."""
    branch, inbox = state.branch, state.inbox
    if inbox is None or (branch is not None and branch.commit == inbox):
        return branch
    return RefValue(refs.inbox_ref(state.nonce), inbox)


def read_open_request(git: GitRepo, remote: Remote, state: RequestState) -> Manifest | None:
    """What an unanswered request asks; None: its ref holds no request, or not it alone."""
    place = request_place(state)
    if place is None:
        return None
    with git.scratch() as scratch:
        if not scratch.exists(place.commit):
            scratch.fetch(remote.address, [place.ref])
        try:
            return bound_manifest(read_request(scratch, place.commit), state.nonce)
        except (ManifestError, BusError):
            return None


def believe_answer(settings: Settings, answer: FetchedResult, *, allow_unsigned: bool = False) -> Believed:
    """Check a fetched result; differences from its request are left for `judge` to show."""
    allow = allow_unsigned or settings.allow_unsigned
    return believe(answer, trusted=settings.trusted_runners, allow_unsigned=allow, bound=False)


def judge(
    believed: Believed, *, installed: Mapping[str, Preset] | None = None, allow_unsigned: bool = False
) -> Judged:
    """Compare a believed result with its request, and judge every report by the gate installed here.

    `installed` are the presets by name (None: the bundled ones); with `allow_unsigned` a pass counts that no
    trusted key signed.
    """
    result = believed.result
    preset = None
    if result.preset is not None:
        with contextlib.suppress(PresetError):
            preset = presets.find(result.preset, presets.load_all() if installed is None else installed)
    binding = Binding(
        nonce=result.nonce,
        workload_sha=result.workload_sha,
        preset_digest=result.preset_digest,
        engine_source=result.engine_source,
        started_at=parse_time(result.started_at),
        finished_at=parse_time(result.finished_at),
    )
    judgements = {
        file.path: run_gate(believed.files[file.path], binding=binding)
        for file in result.files
        if file.role == "evidence"
    }
    passed = result.verdict.status is Status.PASSED
    reports = {path: each.report for path, each in judgements.items() if each.report is not None}
    verification, faults = _read_verification(believed, preset)
    replayed = verification if passed else None
    agreement = compare(believed.expected, result, reports if passed else {}, preset, replayed)
    violations = [*_violations(result, judgements, preset), *faults] if passed else []
    verdict = result.verdict
    if agreement.differences:
        told = [
            Violation(code="BINDING", message=str(each)[:4000], file=each.file)
            for each in agreement.differences
        ]
        message = f"the result does not match the request: {agreement.differences[0]}"
        verdict = _rejected(Reason.BINDING, message, [*told, *violations])
    elif violations:
        codes = ", ".join(dict.fromkeys(violation.code for violation in violations))
        message = f"this client's gate rejects what the runner passed: {codes}"
        verdict = _rejected(Reason.EVIDENCE, message, violations)
    return Judged(believed, judgements, verdict, agreement, allow_unsigned, verification)


def verify(believed: Believed, sample: int, signer: RequestSigner, *, output: int) -> Verified:
    """Replay the report of a believed result: `sample` rows; table and progress go to the file `output`.

    Raises:
        EvidenceError: The result holds no report, or the engine's record is none of it.
        MachineError: The engine is not installed here, or cannot replay the report.
    """
    report = evidence_report(believed)
    by_runner = f"or let a runner do it: kakeya_mac run --preset verify -p request={believed.result.nonce}"
    if importlib.util.find_spec("engine") is None or importlib.util.find_spec("mlx") is None:
        raise MachineError(
            "the engine is not installed here, so the report cannot be replayed",
            f"pip install 'kakeya-mac[engine]'; {by_runner}",
        )
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
        path, record = Path(folder) / "report.json", Path(folder) / VERIFICATION
        path.write_bytes(report)
        argv = [sys.executable, "-I", "-m", "engine", "verify", str(path), f"--sample={sample}"]
        kept = {name for name in os.environ if name in _PASSED or name.startswith("KAKEYA_MODEL_")}
        own = {"LC_ALL": "C.UTF-8", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
        env = helper_environment({name: os.environ[name] for name in kept} | own)
        child = spawn([*argv, f"--record={record}"], env=env, output=output)
        try:
            code = child.wait(_REPLAY_TIMEOUT_S)
        finally:
            child.kill()
        if code not in (_CONFIRMED, _REFUTED) or not record.is_file():
            ended = f"exit code {code}" if code is not None else f"no end within {_REPLAY_TIMEOUT_S:.0f} s"
            raise MachineError(
                f"the report cannot be replayed here: kakeya_engine verify: {ended}",
                f"see above; {by_runner}",
            )
        data = record.read_bytes()
    found = parse_verification(data)
    if found.report.sha256 != (digest := hashlib.sha256(report).hexdigest()):
        raise EvidenceError(f"the record is for the report {found.report.sha256}, not for {digest}")
    return Verified(found, data, signer.sign(signing.VERIFICATION_NAMESPACE, data))


def _read_verification(
    believed: Believed, preset: Preset | None
) -> tuple[Verification | None, list[Violation]]:
    """The record of a result whose preset replays a report, and what is wrong with it."""
    result, data = believed.result, believed.files.get(VERIFICATION)
    if preset is None or not preset.replays:
        return None, []
    if data is None:
        message = f"the preset {result.preset} promises {VERIFICATION}, and the result does not hold it"
        return None, [Violation(code="NO_EVIDENCE", message=message)]
    try:
        record = parse_verification(data)
    except EvidenceError as error:
        return None, [Violation(code="SCHEMA", message=error.message, file=VERIFICATION)]
    if record.confirmed:
        return record, []
    message = f"the record refutes the report: {', '.join(record.refuted_rows[:5])}"
    return record, [Violation(code="CLAIM_NOT_MET", message=message, file=VERIFICATION)]


def _violations(
    result: Result, judgements: Mapping[str, Judgement], preset: Preset | None
) -> list[Violation]:
    """Every rule that the reports of a passed result break, and what its preset promised and is not there."""
    broken = [
        violation.model_copy(update={"file": path})
        for path, judgement in judgements.items()
        for violation in judgement.violations
    ]
    promise = None if preset is None else preset.evidence
    if promise is None:
        return broken
    if not judgements:
        message = f"the preset {result.preset} promises a {promise.kind} report, and the result holds none"
        broken.append(Violation(code="NO_EVIDENCE", message=message))
    for path, judgement in judgements.items():
        lacking = broken_promises(promise, judgement)
        broken += [violation.model_copy(update={"file": path}) for violation in lacking]
    return broken


def _rejected(reason: Reason, message: str, violations: list[Violation]) -> Verdict:
    return Verdict(
        status=Status.REJECTED,
        reason=reason,
        message=message[:4000],
        violations=tuple(violations[:_MAX_VIOLATIONS]),
    )
