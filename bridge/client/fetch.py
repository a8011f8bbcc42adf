"""Find a request's result, and decide what this client makes of it.

`look_up` resolves a handle from any clone: among the remote's refs first, then in the archive. `judge` takes
a result that `bridge.bus.results.believe` accepted, compares it with its request (`bridge.client.compare`)
and runs the gate that is installed here over each report, because nothing forces the writer of an unsigned
result to have done so. What the runner itself did not pass stays as it is; what it passed and this client
does not is rejected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge import presets
from bridge.bus.archive import find_archived
from bridge.bus.requests import bound_manifest, read_request
from bridge.bus.results import Believed, FetchedResult, believe, fetch
from bridge.bus.state import ALL_REFS, RequestState, find, state_of
from bridge.client.compare import Agreement, compare
from bridge.client.remotes import Remote, open_cache
from bridge.errors import (
    EXIT_UNVERIFIED,
    BusError,
    EvidenceError,
    ManifestError,
    PresetError,
    ResultError,
    UnknownHandle,
)
from bridge.evidence.gate import Binding, Judgement
from bridge.evidence.gate import judge as run_gate
from bridge.evidence.required import broken_promises
from bridge.evidence.verification import NAME as VERIFICATION
from bridge.evidence.verification import Verification, parse_verification
from bridge.git.repo import GitRepo
from bridge.presets import Preset
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest, parse_time
from bridge.protocol.result import EXIT_CODES, Reason, Result, Status, Verdict, Violation
from bridge.settings import Settings
from bridge.signing.trust import TrustLevel

_MAX_VIOLATIONS = 1000


@dataclass(frozen=True)
class Lookup:
    """What a handle names.

    Attributes:
        nonce: The request.
        state: Its refs; of an archived request there are none.
        answer: Its result, unjudged; None: there is none yet.
    """

    nonce: str
    state: RequestState
    answer: FetchedResult | None


@dataclass(frozen=True)
class Judged:
    """A believed result and what this client makes of it.

    Attributes:
        believed: The result.
        judgements: What the gate installed here says of each report, by path.
        verdict: The runner's, or `rejected` where the result is of something else than was asked, or the
            runner passed what this gate does not.
        agreement: Where request, result and reports differ.
        allow_unsigned: Whether a pass counts that no trusted key signed.
        verification: What a runner that replayed another request's report found; None: it replayed none.
    """

    believed: Believed
    judgements: Mapping[str, Judgement]
    verdict: Verdict
    agreement: Agreement = field(default_factory=Agreement)
    allow_unsigned: bool = False
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


def look_up(git: GitRepo, remote: Remote, handle: str, state_dir: Path) -> Lookup:
    """The request that a handle names and its result, if it has one.

    Args:
        git: Any checkout; nothing is left in it.
        remote: The bus.
        handle: A nonce, a branch name or a unique prefix of either.
        state_dir: Where caches live, for the archive.

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


def read_open_request(git: GitRepo, remote: Remote, state: RequestState) -> Manifest | None:
    """What an unanswered request asks; None: its ref holds no request, or not it alone.

    Args:
        git: Any checkout; nothing is left in it.
        remote: The bus.
        state: Its refs.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    branch = state.branch
    commit = state.inbox or (None if branch is None else branch.commit)
    if commit is None:
        return None
    ref = branch.ref if branch is not None and branch.commit == commit else refs.inbox_ref(state.nonce)
    with git.scratch() as scratch:
        if not scratch.exists(commit):
            scratch.fetch(remote.address, [ref])
        try:
            return bound_manifest(read_request(scratch, commit), state.nonce)
        except (ManifestError, BusError):
            return None


def believe_answer(settings: Settings, answer: FetchedResult, *, allow_unsigned: bool = False) -> Believed:
    """Check a fetched result; differences from its request are left for `judge` to show.

    Raises:
        ResultError: See `bridge.bus.results.believe`.
    """
    allow = allow_unsigned or settings.allow_unsigned
    return believe(answer, trusted=settings.trusted_runners, allow_unsigned=allow, bound=False)


def judge(
    believed: Believed, *, installed: Mapping[str, Preset] | None = None, allow_unsigned: bool = False
) -> Judged:
    """Compare a believed result with its request, and judge every report of it.

    Args:
        believed: The result.
        installed: The presets that are installed here, by name; None: the bundled ones.
        allow_unsigned: Whether a pass counts that no trusted key signed.

    Raises:
        PresetError: A bundled preset is broken.
    """
    result = believed.result
    preset = _find_preset(result.preset, installed)
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
        verdict = _unbound(agreement, violations)
    elif violations:
        codes = ", ".join(dict.fromkeys(violation.code for violation in violations))
        message = f"this client's gate rejects what the runner passed: {codes}"
        verdict = _rejected(Reason.EVIDENCE, message, violations)
    return Judged(believed, judgements, verdict, agreement, allow_unsigned, verification)


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


def _find_preset(name: str | None, installed: Mapping[str, Preset] | None) -> Preset | None:
    """The preset of that name that is installed here; None: there is none."""
    known = dict(presets.load_all() if installed is None else installed)
    try:
        return None if name is None else presets.find(name, known)
    except PresetError:
        return None


def _unbound(agreement: Agreement, violations: list[Violation]) -> Verdict:
    """Of a result that answers something else than was asked, with both values of each difference."""
    told = [
        Violation(code="BINDING", message=str(each)[:4000], file=each.file) for each in agreement.differences
    ]
    message = f"the result does not match the request: {agreement.differences[0]}"
    return _rejected(Reason.BINDING, message, [*told, *violations])


def _rejected(reason: Reason, message: str, violations: list[Violation]) -> Verdict:
    return Verdict(
        status=Status.REJECTED,
        reason=reason,
        message=message[:4000],
        violations=tuple(violations[:_MAX_VIOLATIONS]),
    )
