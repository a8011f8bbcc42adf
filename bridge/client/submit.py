"""Submit a job: checked, written as a manifest, signed, and pushed. The client's first half.

`plan_request` decides everything and changes nothing (a dry run ends there); `submit_request` pushes what
it planned. What the machine allows is decided on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from bridge import presets, signing
from bridge.bus.requests import WORKFLOW_PATH, Submitted, submit, take_back
from bridge.bus.results import ExpectedRequest
from bridge.client.remotes import Remote, resolve_remote
from bridge.client.signing_key import choose
from bridge.client.transport import Route, choose_route
from bridge.errors import ApiError, ApiFault, BusError, ManifestError, ParameterError, PushRejected
from bridge.git.repo import GitRepo
from bridge.github.dispatch import Dispatch
from bridge.presets import Preset
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest, ParamValue, parse
from bridge.settings import Settings

_DIRTY_TIMEOUT_S = 2.0


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
    """A request that was pushed.

    Attributes:
        manifest: What was asked.
        commit: The request commit.
        ref: Its branch, where the result will appear.
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
    def expected(self) -> ExpectedRequest:
        """What a result must answer to be believed."""
        asked = self.manifest
        return ExpectedRequest(asked.nonce, self.commit, asked.workload_sha, asked.preset, asked.params)


def plan_request(
    settings: Settings,
    git: GitRepo,
    *,
    preset: str,
    params: Mapping[str, object],
    ref: str = "HEAD",
    remote: str | None = None,
    expires: timedelta | None = None,
    timeout_s: int | None = None,
    transport: str | None = None,
    on: str | None = None,
    now: datetime | None = None,
    entropy: bytes | None = None,
) -> Plan:
    """Check a request and write its manifest. Reads the checkout and does not change it.

    The network is asked only where the remote may have workflows: whether it does, and which file.

    Args:
        settings: The client's settings.
        git: The checkout that has the workload commit, or a scratch of it.
        preset: Name or alias of the job.
        params: Its parameters; defaults are filled in.
        ref: The workload: any revision.
        remote: URL, folder or name of the bus; None: the setting, else the checkout's own remote.
        expires: How long the request may wait; None: the setting.
        timeout_s: Seconds the job may run; None: the preset's limit.
        transport: Who takes it: ``auto``, ``embedded`` or ``actions``; None: the setting.
        on: Which machines may run it, as ``chip=M4*,memory>=64``; None: any.
        now: The moment it is made; None: now.
        entropy: 6 random bytes for the nonce; None: the system's.

    Raises:
        PresetError: No such preset.
        ParameterError: A parameter is unknown, mistyped, out of range, or a path the workload does not have.
        RevisionError: `ref` is no commit here.
        ManifestError: A value does not fit a manifest.
        NoRemote: There is no remote to talk to.
        BusError: `git` is not a checkout; or see `bridge.client.transport.choose_route`.
    """
    chosen = presets.get(preset, settings.presets)
    values = presets.validate(chosen, params)
    workload = git.resolve(ref)
    _check_paths(git, chosen, values, workload)
    bus = resolve_remote(git, remote or settings.remote)
    route = choose_route(transport or settings.transport, git, bus, workload)
    created = (now or datetime.now(UTC)).astimezone(UTC).replace(microsecond=0)
    nonce = refs.new_nonce(created, entropy or os.urandom(6))
    lifetime = expires or timedelta(seconds=settings.request_lifetime_s)
    try:
        draft = Manifest.model_construct(
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
            on=on,
        )
    except OverflowError:
        raise ManifestError(f"manifest: expires_at: {lifetime} is too long") from None
    manifest = parse(draft.to_bytes())
    warnings = list(route.warnings)
    if timeout_s is not None and timeout_s > chosen.timeout_s:
        warnings.append(
            f"a machine may allow {chosen.name} no more than {chosen.timeout_s} s; {timeout_s} s were asked"
            " for"
        )
    argv = tuple(presets.argv(chosen, values, presets.show))
    return Plan(manifest, argv, bus, route, tuple(warnings))


def submit_request(settings: Settings, plan: Plan, git: GitRepo) -> Submission:
    """Sign and push a planned request.

    Args:
        settings: The client's settings.
        plan: From `plan_request`.
        git: The same as in `plan_request`.

    Raises:
        SignatureError: The key that the user named cannot sign.
        PushRejected: The remote said no, with its words.
        RemoteUnreachable: The remote did not answer.
        ApiError: Its run could not be started, so the request was taken back.
        ApiFault: Whether its run was started is not known, so the request stays.
    """
    warnings = list(plan.warnings)
    signer = choose(settings, git)
    signature = signer.sign(signing.REQUEST_NAMESPACE, plan.manifest.to_bytes())
    warnings += signer.warnings
    try:
        submitted = submit(git, plan.remote.address, plan.manifest, signature, options=plan.route.options)
    except PushRejected as error:
        error.remedy = _remedy(error.message, plan, error.remedy)
        raise
    run_id = None if plan.route.dispatch is None else _start_run(git, plan, submitted, plan.route.dispatch)
    if not submitted.in_inbox:
        warnings.append("the remote takes branches only: a runner finds this request a little later")
    return Submission(
        manifest=plan.manifest,
        commit=submitted.commit,
        ref=submitted.ref,
        remote=plan.remote,
        signed_with=None if signer.key is None else f"{signer.key.shown} ({signer.key.source})",
        run_id=run_id,
        warnings=tuple(warnings),
    )


def warn_of_changes(git: GitRepo) -> list[str]:
    """A sentence when tracked files have uncommitted changes, which do not travel with a request."""
    if not git.is_dirty(_DIRTY_TIMEOUT_S):
        return []
    return ["uncommitted changes stay behind: the request is the commit, not the work tree"]


def _remedy(said: str, plan: Plan, usual: str | None) -> str | None:
    if plan.route.options.workflow is not None and "workflow" in said.lower():
        return (
            f"this request brings {WORKFLOW_PATH}, which your credentials may not push: use ones with the"
            " scope `workflow`, or ask for a commit that has the file"
        )
    if plan.manifest.result_ref.startswith(refs.AGENT_BRANCHES):
        return usual
    own = (
        "an account that may push only into its own namespace needs a branch there, and the request follows:"
        " git switch -c AgentMemory/<name>-<suffix>"
    )
    return own if usual is None else f"{usual}; {own}"


def _start_run(git: GitRepo, plan: Plan, submitted: Submitted, dispatch: Dispatch) -> int | None:
    """Start the workflow run of a request; without one nothing answers it, so then it is taken back."""
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


def _check_paths(git: GitRepo, preset: Preset, values: Mapping[str, ParamValue], workload: str) -> None:
    for name, parameter in preset.params.items():
        value = values.get(name)
        if parameter.format != "repo-path" or not isinstance(value, str):
            continue
        if git.kind_and_size(f"{workload}:{value.rstrip('/')}")[0] == "missing":
            raise ParameterError(
                f"preset {preset.name}: parameter {name}: {workload[:12]} has no {value!r}",
                "commit it, or choose another commit with --ref",
            )
