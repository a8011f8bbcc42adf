"""A job asked for: checked, written as a manifest, signed, and pushed. The client's first half.

`plan_request` decides everything and touches nothing (a dry run ends there); `submit_request` pushes what
it planned. What the machine allows is decided on the machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bridge import presets, signing
from bridge.bus.carriage import WORKFLOW_PATH
from bridge.bus.git import Git
from bridge.bus.requests import Submitted, submit, take_back
from bridge.bus.results import Asked
from bridge.client.keys import Pen, choose
from bridge.client.remotes import Remote, resolve_remote
from bridge.client.transport import Dispatch, Route, choose_route
from bridge.errors import ApiError, ApiFault, BusError, ManifestError, ParameterError, PushRejected
from bridge.presets import Preset
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest, ParamValue, parse
from bridge.settings import Settings

# How long the question whether the work tree is clean may take, and may still take once the push is done.
_DIRTY_LIMIT_S = 5.0
_STAYS_BEHIND = "uncommitted changes stay behind: the request is the commit, not the work tree"
_DIRTY_GRACE_S = 0.1
_ENTROPY_BYTES = 6


@dataclass(frozen=True)
class Plan:
    """A request that was checked and not yet pushed.

    Attributes:
        manifest: What will be asked.
        argv: What the preset would run, with the machine's own values left as placeholders.
        remote: Where it will go.
        route: How it gets to a runner from there.
        warnings: One sentence each, for people.
    """

    manifest: Manifest
    argv: tuple[str, ...]
    remote: Remote
    route: Route
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Submission:
    """A request that is on its way.

    Attributes:
        manifest: What was asked.
        commit: The request commit.
        ref: The branch it stands on, where the result will appear.
        remote: Where it went.
        signed_with: The key that signed it, and where that was found; None: it is unsigned.
        run_id: The workflow run that was started for it; None: none was, or it is not known.
        warnings: One sentence each, for people.
    """

    manifest: Manifest
    commit: str
    ref: str
    remote: Remote
    signed_with: str | None
    run_id: int | None
    warnings: tuple[str, ...]

    @property
    def signed(self) -> bool:
        """Whether the request carries a signature."""
        return self.signed_with is not None

    @property
    def nonce(self) -> str:
        """The durable handle."""
        return self.manifest.nonce

    @property
    def asked(self) -> Asked:
        """What a result must answer to be believed."""
        asked = self.manifest
        return Asked(asked.nonce, self.commit, asked.workload_sha, asked.preset, asked.params)


def plan_request(
    settings: Settings,
    *,
    repository: Path | Git,
    preset: str,
    params: Mapping[str, object],
    ref: str = "HEAD",
    remote: str | None = None,
    expires: timedelta | None = None,
    timeout_s: int | None = None,
    transport: str | None = None,
    now: datetime | None = None,
    entropy: bytes | None = None,
) -> Plan:
    """Check a request and write its manifest. Reads the checkout and does not touch it.

    The network is asked only where the remote may have workflows: whether it does, and which file.

    Args:
        settings: The client's settings.
        repository: The checkout that has the workload commit; a `Git` where that commit is not the checkout's
            own but lies in a scratch store beside it.
        preset: Name or alias of the job.
        params: Its parameters; defaults are filled in.
        ref: The workload: any revision.
        remote: URL, folder or name of the bus; None: the setting, else the checkout's own remote.
        expires: How long the request may wait; None: the setting.
        timeout_s: Seconds the job may run; None: the preset's limit.
        transport: Who shall take it: ``auto``, ``embedded`` or ``actions``; None: the setting.
        now: The moment it is made; None: now.
        entropy: 6 random bytes for the nonce; None: the system's.

    Raises:
        PresetError: No such preset.
        ParameterError: A parameter is unknown, mistyped, out of range, or a path the workload does not have.
        RevisionError: `ref` is no commit here.
        ManifestError: A value does not fit a manifest.
        NoRemote: There is no remote to talk to.
        BusError: `repository` is not a checkout; or see `bridge.client.transport.choose_route`.
    """
    chosen = presets.get(preset, settings.presets)
    values = presets.validate(chosen, params)
    git = _git(repository)
    workload = git.resolve(ref)
    _check_paths(git, chosen, values, workload)
    bus = resolve_remote(git, remote or settings.remote)
    route = choose_route(transport or settings.transport, git, bus, workload)
    created = (now or datetime.now(UTC)).astimezone(UTC).replace(microsecond=0)
    nonce = refs.new_nonce(created, entropy or os.urandom(_ENTROPY_BYTES))
    lifetime = expires or timedelta(seconds=settings.request_lifetime_s)
    try:
        drafted = Manifest.model_construct(
            nonce=nonce,
            preset=chosen.name,
            params=values,
            workload_sha=workload,
            result_ref=refs.request_ref(chosen.name, nonce, git.current_branch()),
            transport=route.transport,
            requested_by=settings.requested_by,
            created_at=created,
            expires_at=created + lifetime,
            audience=bus.audience,
            timeout_s=timeout_s,
        )
        manifest = parse(drafted.to_bytes())
    except OverflowError:
        raise ManifestError(f"manifest: expires_at: {lifetime} is too long") from None
    warnings = list(route.warnings)
    if timeout_s is not None and timeout_s > chosen.timeout_s:
        warnings.append(_shorter(chosen, timeout_s))
    argv = tuple(presets.argv(chosen, values, presets.show))
    return Plan(manifest, argv, bus, route, tuple(warnings))


def submit_request(
    settings: Settings, plan: Plan, *, repository: Path | Git, check_tree: bool = True
) -> Submission:
    """Sign and push a planned request.

    Args:
        settings: The client's settings.
        plan: From `plan_request`.
        repository: The same as in `plan_request`.
        check_tree: Warn when tracked files have uncommitted changes, which do not travel. Right when the
            workload is HEAD. Runs beside the push and is given up shortly after it.

    Raises:
        SignatureError: The key that the user named cannot sign.
        PushRejected: The remote said no, with its words.
        RemoteUnreachable: The remote did not answer.
        ApiError: Its run could not be started, so the request was taken back.
        ApiFault: Whether its run was started is not known, so the request stays.
    """
    git = _git(repository)
    question = _DirtyQuestion(git) if check_tree else None
    warnings = list(plan.warnings)
    pen = Pen(choose(settings, git))
    signature = pen.sign(signing.REQUEST_NAMESPACE, plan.manifest.to_bytes())
    warnings += pen.warnings
    submitted = _pushed(git, plan, signature)
    run_id = None if plan.route.dispatch is None else _started(git, plan, submitted, plan.route.dispatch)
    if not submitted.in_inbox:
        warnings.append("the remote takes branches only: a runner finds this request a little later")
    if question is not None and (said := question.answer()) is not None:
        warnings.append(said)
    return Submission(
        manifest=plan.manifest,
        commit=submitted.commit,
        ref=submitted.ref,
        remote=plan.remote,
        signed_with=None if pen.key is None else f"{pen.key.shown} ({pen.key.source})",
        run_id=run_id,
        warnings=tuple(warnings),
    )


def left_behind(repository: Path) -> str | None:
    """A sentence when tracked files have uncommitted changes, which do not travel with a request."""
    return _STAYS_BEHIND if Git(repository).is_dirty(_DIRTY_LIMIT_S) else None


def _pushed(git: Git, plan: Plan, signature: bytes | None) -> Submitted:
    """The request on the remote; a refusal says what usually helps."""
    try:
        return submit(git, plan.remote.address, plan.manifest, signature, carriage=plan.route.carriage)
    except PushRejected as error:
        error.remedy = _remedy(error.message, plan, error.remedy)
        raise


def _remedy(said: str, plan: Plan, usual: str | None) -> str | None:
    if plan.route.carriage.workflow is not None and "workflow" in said.lower():
        return (
            f"this request brings {WORKFLOW_PATH}, which your credentials may not push: use ones with the"
            " scope `workflow`, or ask for a commit that has the file"
        )
    if not plan.manifest.result_ref.startswith(refs.AGENT_BRANCHES):
        own = (
            "an account that may push into its own namespace only stands on a branch of it, and the request"
            " follows: git switch -c AgentMemory/<name>-<suffix>"
        )
        return own if usual is None else f"{usual}; {own}"
    return usual


def _started(git: Git, plan: Plan, submitted: Submitted, dispatch: Dispatch) -> int | None:
    """Start the run of a request; without one nobody would ever answer it, so then it is taken back."""
    try:
        return dispatch.start(submitted.ref, submitted.commit)
    except ApiFault as error:
        error.message += f"; it may have started a run, so the request stays at {submitted.ref}"
        error.remedy = (
            f"follow it: kakeya_mac wait {submitted.nonce}; or stop it: kakeya_mac cancel {submitted.nonce}"
        )
        raise
    except ApiError as error:
        try:
            take_back(git, plan.remote.address, submitted)
        except BusError as kept:
            error.message += f"; and the request stays at {submitted.ref}: {kept.message}"
        else:
            error.message += "; the request was taken back"
        raise


def _git(repository: Path | Git) -> Git:
    return repository if isinstance(repository, Git) else Git(repository)


class _DirtyQuestion:
    """Asks git, beside the push, whether uncommitted changes stay behind."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._dirty: bool | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def answer(self) -> str | None:
        self._thread.join(_DIRTY_GRACE_S)
        return _STAYS_BEHIND if self._dirty else None

    def _ask(self) -> None:
        self._dirty = self._git.is_dirty(_DIRTY_LIMIT_S)


def _check_paths(git: Git, preset: Preset, values: Mapping[str, ParamValue], workload: str) -> None:
    for name, parameter in preset.params.items():
        value = values.get(name)
        if parameter.format != "repo-path" or not isinstance(value, str):
            continue
        if git.kind_and_size(f"{workload}:{value.rstrip('/')}")[0] == "missing":
            raise ParameterError(
                f"preset {preset.name}: parameter {name}: {workload[:12]} has no {value!r}",
                "commit it, or choose another commit with --ref",
            )


def _shorter(preset: Preset, timeout_s: int) -> str:
    return (
        f"a machine may allow {preset.name} no more than {preset.timeout_s} s; {timeout_s} s were asked for"
    )
