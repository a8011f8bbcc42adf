"""Find a request's result, and decide what this client makes of it.

What a runner passed is judged by the gate installed here, because nothing forces its writer to have done so.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from bridge import errors, presets, signing
from bridge.bus.archive import find_archived
from bridge.bus.requests import ALL_REFS, RefValue, RequestState, bound_manifest, find, read_request, state_of
from bridge.bus.results import (
    Believed,
    ExpectedRequest,
    FetchedResult,
    believe,
    evidence_report,
    fetch,
)
from bridge.client.binding import Agreement, compare
from bridge.client.remotes import Remote, open_cache
from bridge.client.signing_key import RequestSigner
from bridge.evidence.gate import Binding, Judgement, broken_promises
from bridge.evidence.gate import judge as run_gate
from bridge.git.repo import GitRepo
from bridge.presets import Preset
from bridge.proc import helper_environment, spawn
from bridge.protocol import refs
from bridge.protocol.manifest import RECORD, Manifest, parse_document, parse_time
from bridge.protocol.result import EXIT_CODES, Reason, Status, Text, Verdict, Violation
from bridge.settings import Settings
from bridge.signing.trust import TrustLevel
from evidence_format.model import Summary
from evidence_format.paired import Paired
from evidence_format.parse import Unreadable
from evidence_format.rules.claims import ClaimFigure
from evidence_format.verification import NAME as VERIFICATION
from evidence_format.verification import SIGNATURE_NAME, Verification, parse_verification

GATE_RECORD = "judgement.json"
_MAX_GATE_RECORD_BYTES = 16 * 1024**2
_MAX_VIOLATIONS = 1000
_REPLAY_TIMEOUT_S = 3600.0
# What the engine sees of our environment besides what helpers see: where models lie, and which BLAS.
_PASSED = re.compile(
    "KAKEYA_(BLAS|STATE|MODEL_.*)|HF_(HOME|HUB_CACHE)|(OMP|OPENBLAS)_NUM_THREADS|CI|GITHUB_ACTIONS",
)


class _GateEntry(BaseModel):
    model_config = RECORD

    file: Text
    accepted: bool
    kind: Text | None
    violations: tuple[Violation, ...]
    claims: tuple[ClaimFigure, ...]
    figures: Summary | None


class GateRecord(BaseModel):
    """What ``kakeya_mac gate --record`` wrote, as the preset ``gate`` publishes it."""

    model_config = RECORD

    files: tuple[_GateEntry, ...]


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
    verification: Verification | None = None  # what a runner that replayed another request's report found
    gate_record: GateRecord | None = None  # what a runner said that judged reports of the workload
    commit_measured: bool | None = None  # None: its preset is not installed here, so that is not known

    @property
    def evidence(self) -> list[dict[str, object]]:
        """Verdict, claims, broken rules and figures of each report: this client's, or the preset gate's."""
        judged = [
            {"file": path, "judged_by": "client", **judgement.to_document()}
            for path, judgement in self.judgements.items()
        ]
        said = () if self.gate_record is None else self.gate_record.files
        return judged + [
            {"judged_by": "runner", **entry.model_dump(mode="json", exclude_unset=True)} for entry in said
        ]

    @property
    def paired(self) -> Paired | None:
        """The record of a paired run that the gate accepted."""
        found = (each.paired for each in self.judgements.values() if each.accepted)
        return next((record for record in found if record is not None), None)

    @property
    def verified(self) -> bool:
        """Whether a key that is trusted here signed the result."""
        return self.believed.signature is TrustLevel.TRUSTED

    @property
    def exit_code(self) -> int:
        """What a command that shows this ends with."""
        if self.verdict.status is Status.PASSED and not (self.verified or self.allow_unsigned):
            return errors.EXIT_UNVERIFIED
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
        return 0 if self.record.confirmed else errors.EvidenceError.exit_code

    def as_json(self) -> dict[str, object]:
        """The record for a command's JSON line, and whether it is signed."""
        document = self.record.model_dump(mode="json", by_alias=True)
        return document | {"signed": self.signature is not None}

    def save(self, folder: Path) -> None:
        """Write the record, and its signature, next to the files of the result."""
        (folder / VERIFICATION).write_bytes(self.data)
        if self.signature is not None:
            (folder / SIGNATURE_NAME).write_bytes(self.signature)


def look_up(
    git: GitRepo, remote: Remote, handle: str, state_dir: Path
) -> tuple[RequestState, FetchedResult | None]:
    """The request that a handle (a nonce, a branch name or a unique prefix) names, and its unjudged result.

    An archived request has no refs any more.
    """
    found, state, result = resolve(git, remote, handle, state_dir)
    fault = None
    if result is not None:
        return state, result
    try:
        result = fetch(git, remote.address, state)
    except errors.ResultError as error:
        fault = error
    is_open = state.inbox is not None or state.claim is not None
    if result is None and not is_open and refs.ARCHIVE in found:
        with contextlib.suppress(errors.UnknownHandle):
            result = find_archived(open_cache(state_dir, remote, git), state.nonce, found=found)
    if result is None and fault is not None:
        raise fault
    return state, result


def resolve(
    git: GitRepo, remote: Remote, handle: str, state_dir: Path
) -> tuple[Mapping[str, str], RequestState, FetchedResult | None]:
    """The remote's refs and the request that a handle names; its result, where only the archive has it."""
    found = git.list_refs(remote.address, *ALL_REFS)
    try:
        return found, state_of(found, find(found, handle), handle), None
    except errors.UnknownHandle:
        spelled = handle.strip()
        if refs.ARCHIVE not in found or not spelled or any(spelled in ref for ref in found):
            raise
    answer = find_archived(open_cache(state_dir, remote, git), handle, found=found)
    return found, state_of({}, answer.nonce), answer


def request_place(state: RequestState) -> RefValue | None:
    """The ref that holds a request as it was asked, as far as refs tell: its branch, or its inbox entry."""
    branch, inbox = state.branch, state.inbox
    if inbox is None or (branch is not None and branch.commit == inbox):
        return branch
    return RefValue(refs.INBOX + state.nonce, inbox)


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
        except (errors.ManifestError, errors.BusError):
            return None


def believe_answer(
    settings: Settings, answer: FetchedResult, *, expected: ExpectedRequest | None = None
) -> Believed:
    """Check a fetched result; differences from its request are left for `judge` to show."""
    trusted, allow = settings.trusted_runners, settings.allow_unsigned
    return believe(answer, trusted=trusted, expected=expected, allow_unsigned=allow, bound=False)


def judge_answer(
    settings: Settings,
    answer: FetchedResult,
    *,
    installed: Mapping[str, Preset],
    expected: ExpectedRequest | None = None,
) -> Judged:
    """Check a fetched result and judge it, with the presets that are installed here."""
    believed = believe_answer(settings, answer, expected=expected)
    return judge(believed, installed=installed, allow_unsigned=settings.allow_unsigned)


def judge(
    believed: Believed, *, installed: Mapping[str, Preset] | None = None, allow_unsigned: bool = False
) -> Judged:
    """Compare a believed result with its request, and judge every report by the gate installed here.

    `installed` are the presets by name (None: the bundled ones); with `allow_unsigned` a pass counts that no
    trusted key signed.
    """
    result, preset = believed.result, None
    if result.preset is not None:
        with contextlib.suppress(errors.PresetError):
            preset = presets.find(result.preset, presets.load_all() if installed is None else installed)
    binding = Binding(
        nonce=result.nonce,
        workload_sha=result.workload_sha,
        preset_digest=result.preset_digest,
        engine_source=result.engine_source,
        started_at=parse_time(result.started_at),
        finished_at=parse_time(result.finished_at),
    )
    listed = [file.path for file in result.files if file.role == "evidence"]
    judgements = {path: run_gate(believed.files[path], binding=binding) for path in listed}
    verification, faults = _read_verification(believed, preset)
    gate_record, more = _read_gate_record(believed, preset)
    faults += more
    passed = result.verdict.status is Status.PASSED
    reports = {path: each.report for path, each in judgements.items() if passed and each.report is not None}
    record = next((each.paired for each in judgements.values() if each.paired is not None), None)
    agreement = compare(
        believed.expected, result, reports, preset, verification if passed else None, paired=record
    )
    differences = [
        Violation(code="BINDING", message=str(each)[:4000], file=each.file) for each in agreement.differences
    ]
    broken = [*_violations(judgements, preset), *faults] if passed else []
    verdict = result.verdict
    if differences or broken:
        codes = ", ".join(dict.fromkeys(violation.code for violation in broken))
        message = f"this client's gate rejects what the runner passed: {codes}"
        if differences:
            message = f"the result does not match the request: {differences[0].message}"
        verdict = Verdict(
            status=Status.REJECTED,
            reason=Reason.BINDING if differences else Reason.EVIDENCE,
            message=message[:4000],
            violations=tuple([*differences, *broken][:_MAX_VIOLATIONS]),
        )
    measured = None if preset is None else preset.measures_commit
    return Judged(
        believed, judgements, verdict, agreement, allow_unsigned, verification, gate_record, measured
    )


def verify(believed: Believed, sample: int, signer: RequestSigner, *, output: int) -> Verified:
    """Replay the report of a believed result: `sample` rows; table and progress go to the file `output`."""
    report = evidence_report(believed)
    by_runner = f"or let a runner do it: kakeya_mac run --preset verify -p request={believed.result.nonce}"
    if importlib.util.find_spec("engine") is None or importlib.util.find_spec("mlx") is None:
        raise errors.MachineError(
            "the engine is not installed here, so the report cannot be replayed",
            f"in the checkout of kakeya-mac: make setup; {by_runner}",
        )
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
        path, record = Path(folder) / "report.json", Path(folder) / VERIFICATION
        path.write_bytes(report)
        argv = [sys.executable, "-I", "-m", "engine", "verify", str(path), f"--sample={sample}"]
        kept = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
        env = helper_environment(kept | {"LC_ALL": "C.UTF-8", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"})
        child = spawn([*argv, f"--record={record}"], env=env, output=output)
        try:
            code = child.wait(_REPLAY_TIMEOUT_S)
        finally:
            child.kill()
        if code not in (0, 1) or not record.is_file():
            ended = f"exit code {code}" if code is not None else f"no end within {_REPLAY_TIMEOUT_S:.0f} s"
            raise errors.MachineError(
                f"the report cannot be replayed here: kakeya_engine verify: {ended}",
                f"see above; {by_runner}",
            )
        data = record.read_bytes()
    try:
        found = parse_verification(data)
    except Unreadable as error:
        raise errors.EvidenceError(f"{VERIFICATION}: {error}") from None
    if found.report.sha256 != (digest := hashlib.sha256(report).hexdigest()):
        raise errors.EvidenceError(f"the record is for the report {found.report.sha256}, not for {digest}")
    return Verified(found, data, signer.sign(signing.VERIFICATION_NAMESPACE, data))


def _read_verification(
    believed: Believed, preset: Preset | None
) -> tuple[Verification | None, list[Violation]]:
    """The record of a result whose preset replays a report, and what is wrong with it."""
    if preset is None or all(parameter.format != "request" for parameter in preset.params.values()):
        return None, []
    data = believed.files.get(VERIFICATION)
    if data is None:
        message = f"the preset {preset.name} promises {VERIFICATION}, and the result does not hold it"
        return None, [Violation(code="NO_EVIDENCE", message=message)]
    try:
        record = parse_verification(data)
    except Unreadable as error:
        message = f"{VERIFICATION}: {error}"[:4000]
        return None, [Violation(code="SCHEMA", message=message, file=VERIFICATION)]
    message = f"the record refutes the report: {', '.join(record.refuted_rows[:5])}"
    refuted = Violation(code="CLAIM_NOT_MET", message=message, file=VERIFICATION)
    return record, [] if record.confirmed else [refuted]


def _read_gate_record(believed: Believed, preset: Preset | None) -> tuple[GateRecord | None, list[Violation]]:
    """The record of a job that judged reports, and what is wrong with it; runners before wrote none."""
    data = believed.files.get(GATE_RECORD)
    if data is None or preset is None or preset.name != "gate":
        return None, []
    try:
        kind = errors.ResultError
        limit = _MAX_GATE_RECORD_BYTES
        return parse_document(GateRecord, data, what=GATE_RECORD, limit=limit, error=kind, plain=False), []
    except errors.ResultError as error:
        return None, [Violation(code="SCHEMA", message=error.message[:4000], file=GATE_RECORD)]


def _violations(judgements: Mapping[str, Judgement], preset: Preset | None) -> list[Violation]:
    """Every rule that the reports of a passed result break, and what its preset promised and is not there."""
    promise = None if preset is None else preset.evidence
    broken = []
    for path, judgement in judgements.items():
        lacking = () if promise is None else broken_promises(promise, judgement)
        broken += [each.model_copy(update={"file": path}) for each in (*judgement.violations, *lacking)]
    if promise is not None and preset is not None and not judgements:
        message = f"the preset {preset.name} promises a {promise.kind} report, and the result holds none"
        broken.append(Violation(code="NO_EVIDENCE", message=message))
    return broken
