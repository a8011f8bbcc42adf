"""Submit a job: planned and checked (a dry run ends there), then signed and pushed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Literal

from bridge import presets, signing
from bridge.bus.requests import WORKFLOW_PATH, SubmitOptions, Submitted, submit, take_back
from bridge.bus.results import ExpectedRequest
from bridge.client.remotes import Remote, resolve_remote
from bridge.client.runners import published_preset, read_runners
from bridge.client.signing_key import choose
from bridge.errors import (
    ApiError,
    ApiFault,
    BusError,
    ParameterError,
    PresetError,
    PushRejected,
    RevisionError,
)
from bridge.git.repo import GitRepo
from bridge.github.api import GitHub, find_token, repository_of
from bridge.github.servers import server_of
from bridge.presets import Preset
from bridge.protocol import refs
from bridge.protocol.manifest import Against, Manifest, ParamValue, parse
from bridge.settings import Settings

_DIRTY_TIMEOUT_S = 2.0
_MAX_FILE = 256 * 1024
_EMBEDDED = "--transport embedded leaves the request to a runner's daemon"
_ARTIFACTS = "the workflow's artifact actions work on github.com and ghe.com alone"


@dataclass(frozen=True)
class Route:
    """How a request gets to a runner."""

    transport: Literal["embedded", "actions"]
    why: str  # of the choice, for people
    options: SubmitOptions = field(default_factory=SubmitOptions)
    # What starts its run; None: the push does, or no run is needed
    dispatch: Callable[[str, str], int | None] | None = None
    warnings: tuple[str, ...] = ()

    @property
    def start(self) -> str:
        """What makes a runner take it: ``daemon``, ``push`` or ``dispatch``."""
        if self.transport == "embedded":
            return "daemon"
        return "push" if self.dispatch is None else "dispatch"


@dataclass(frozen=True)
class Plan:
    """A request that was checked and not yet pushed."""

    manifest: Manifest
    # What the preset would run, the machine's own values left as placeholders; empty: only its runner knows
    argv: tuple[str, ...]
    remote: Remote
    route: Route


@dataclass(frozen=True)
class Submission:
    """A request that was pushed."""

    manifest: Manifest
    commit: str
    remote: Remote
    signed_with: str | None  # the key and where it was found; None: it is unsigned
    run_id: int | None  # the workflow run that was started for it; None: none was, or it is not known
    warnings: tuple[str, ...]

    @property
    def expected(self) -> ExpectedRequest:
        """What a result must answer to be believed."""
        asked = self.manifest
        what = (asked.workload_sha, asked.preset, asked.params, asked.requested_by, asked.against)
        return ExpectedRequest(asked.nonce, self.commit, *what)


def find_preset(settings: Settings, git: GitRepo, name: str) -> Preset:
    """The preset of that name or alias: installed here, else as a live runner publishes it."""
    try:
        return presets.get(name, settings.presets)
    except PresetError as error:
        unknown = error
    try:
        remote = resolve_remote(git, settings.remote)
        registry = read_runners(settings, git, remote)
    except BusError as error:
        unknown.message += f"; whether a runner offers it is not known: {error.message}"
        raise unknown from None
    if (offered := published_preset(registry, name, datetime.now(UTC))) is not None:
        return offered
    unknown.message += f" here, and no live runner on {remote.shown} offers it"
    unknown.remedy = f"{unknown.remedy}; what runners offer: kakeya_mac presets --remote"
    raise unknown


def plan_request(
    settings: Settings,
    git: GitRepo,
    *,
    preset: Preset,
    params: Mapping[str, object],
    ref: str = "HEAD",
    expires: timedelta | None = None,
    timeout_s: int | None = None,
    transport: str | None = None,
    on: str | None = None,
    against: str | None = None,
    against_params: Mapping[str, object] | None = None,
) -> Plan:
    """Check a request and write its manifest; reads the checkout and does not change it.

    `preset` is one of `find_preset`. `git` has the workload, which `ref` names by any revision; `expires`
    says how long the request may wait, `on` which machines may run it (None: any). `against`, a revision, or
    `against_params`, which replace some of `params`, ask for a paired run. `settings` hold other defaults.
    """
    values = presets.validate(preset, params)
    workload = git.resolve(ref)
    _check_paths(git, preset, values, workload)
    other = None
    if against is not None or against_params is not None:
        other = _other_side(git, preset, {**params, **(against_params or {})}, against or workload)
        _check_sides(preset, against, (workload, values), (other.workload_sha, other.params))
    bus = resolve_remote(git, settings.remote)
    route = choose_route(transport or settings.transport, git, bus, workload)
    created = datetime.now(UTC).replace(microsecond=0)
    nonce = refs.new_nonce(created, os.urandom(6))
    draft = Manifest.model_construct(
        nonce=nonce,
        preset=preset.name,
        params=values,
        workload_sha=workload,
        result_ref=refs.request_ref(preset.name, nonce, git.current_branch()),
        transport=route.transport,
        requested_by=settings.requested_by,
        created_at=created,
        expires_at=created + (expires or timedelta(seconds=settings.request_lifetime_s)),
        audience=bus.audience,
        timeout_s=timeout_s,
        on=on,
        against=other,
    )
    manifest = parse(draft.to_bytes())
    argv = tuple(presets.argv(preset, values, presets.show))
    return Plan(manifest, argv, bus, route)


def _other_side(git: GitRepo, preset: Preset, params: Mapping[str, object], ref: str) -> Against:
    commit = git.resolve(ref)
    values = presets.validate(preset, params)
    _check_paths(git, preset, values, commit)
    return Against(workload_sha=commit, params=values)


def _check_sides(
    preset: Preset, against: str | None, own: tuple[object, ...], other: tuple[object, ...]
) -> None:
    """Refuse a paired run that would compare nothing; a side is a commit and parameters."""
    if against is not None and not preset.measures_commit and (own == other or own[0] != other[0]):
        raise ParameterError(
            f"preset {preset.name} runs the installed engine and reads nothing of the commit:"
            f" --against {against} would compare nothing",
            "compare two sets of parameters with --against-params NAME=VALUE, or use a preset that runs code"
            " of the commit: kakeya_mac presets",
        )
    if against is None and own == other:
        raise ParameterError(
            "--against-params gives the values that the request has already", "name a value that differs"
        )


def submit_request(settings: Settings, plan: Plan, git: GitRepo) -> Submission:
    """Sign and push a planned request, and start its workflow run where it needs one.

    Raises:
        ApiError: Its run could not be started, so the request was removed.
        ApiFault: Whether its run was started is not known, so the request stays.
    """
    signer = choose(settings, git)
    signature = signer.sign(signing.REQUEST_NAMESPACE, plan.manifest.to_bytes())
    try:
        submitted = submit(git, plan.remote.address, plan.manifest, signature, options=plan.route.options)
    except PushRejected as error:
        error.remedy = _remedy(error, plan)
        raise
    run_id = None if plan.route.dispatch is None else _start_run(git, plan, submitted, plan.route.dispatch)
    warnings = [*plan.route.warnings, *signer.warnings]
    other = plan.manifest.against
    if other is not None and (other.workload_sha, other.params) == (
        plan.manifest.workload_sha,
        plan.manifest.params,
    ):
        warnings.append("both sides are the same commit with the same parameters: only noise can differ")
    if not submitted.in_inbox:
        warnings.append("the remote takes branches only: a runner finds this request a little later")
    signed_with = None if signer.key is None else f"{signer.key.shown} ({signer.key.source})"
    return Submission(plan.manifest, submitted.commit, plan.remote, signed_with, run_id, tuple(warnings))


def warn_of_changes(git: GitRepo) -> list[str]:
    """A sentence when tracked files have uncommitted changes, which do not travel with a request."""
    if not git.is_dirty(_DIRTY_TIMEOUT_S):
        return []
    return ["uncommitted changes stay behind: the request is the commit, not the work tree"]


def choose_route(
    asked: str, git: GitRepo, remote: Remote, workload: str, *, environ: Mapping[str, str] = os.environ
) -> Route:
    """How a request for a workload, which `git` has, gets to a runner; `asked` may be ``auto``.

    A runner's daemon fetches it (``embedded``), or a workflow run takes it, which can bring a result back on
    github.com and ghe.com alone. Elsewhere ``actions`` needs artifact actions of the site's own.
    """
    if asked == "embedded":
        return Route("embedded", "it was asked for")
    server = server_of(remote.address, environ)
    if not server.has_artifacts and asked == "auto":
        where = f"on {server.host}" if server.host else "a folder"
        return Route("embedded", f"{_ARTIFACTS}, and the remote is {where}")
    route = _workflow_route(asked, git, remote, workload, environ)
    if server.has_artifacts:
        return route
    said = f"{_ARTIFACTS}: without others in mac-bridge.yaml no result comes back (docs/actions.md)"
    return replace(route, warnings=(said, *route.warnings))


def _workflow_route(
    asked: str, git: GitRepo, remote: Remote, workload: str, environ: Mapping[str, str]
) -> Route:
    """Have a workflow run take the request, unless `auto` finds no workflow.

    A push starts the file of the pushed commit, so that one must be the default branch's, which is the
    reviewed one; a dispatch starts the default branch's and needs a token. Inside a workflow only a dispatch
    starts runs.
    """
    repository = repository_of(remote.address, environ)
    token = None if repository is None else find_token(environ)
    github = None if repository is None or token is None else GitHub(repository, token)
    inside = repository is not None and environ.get("GITHUB_ACTIONS") == "true"
    if inside and github is None:
        raise ApiError(
            "inside a workflow a request is started through the API, and there is no token for it",
            "give the step `env: KAKEYA_GITHUB_TOKEN: ${{ github.token }}` and the job `actions: write` and"
            f" `contents: write`; or {_EMBEDDED}",
        )
    default = default_file(git, remote)
    own = default if inside else git.read_file(workload, WORKFLOW_PATH, _MAX_FILE)
    if own is None and default is None and asked == "auto":
        return Route("embedded", f"neither the workload nor the default branch has {WORKFLOW_PATH}")
    differ = own != default and None not in (own, default)
    if github is not None and (inside or differ):
        reason = "this is a workflow, and what is pushed with its token starts no run"
        if differ:
            reason = f"the workload's {WORKFLOW_PATH} is not the default branch's, which a dispatch runs"
        dispatch = partial(github.dispatch, github.facts().default_branch)
        return Route("actions", reason, SubmitOptions(starts_run=False), dispatch)
    return _route_by_push(asked, own, default, workload)


def _route_by_push(asked: str, own: bytes | None, default: bytes | None, workload: str) -> Route:
    why = "it was asked for" if asked == "actions" else f"the repository has {WORKFLOW_PATH}"
    if own is None and default is None:
        raise RevisionError(
            f"neither the workload {workload[:12]} nor the remote's default branch has {WORKFLOW_PATH}",
            f"{_EMBEDDED}; on github.com commit that file to the default branch (docs/actions.md)",
        )
    if own is None:  # the request brings the file; servers want a special permission for any other
        return Route("actions", why, SubmitOptions(workflow=default))
    if default is None:
        said = f"only the workload has {WORKFLOW_PATH}, not the default branch: its runs are unreviewed"
        return Route("actions", why, warnings=(said,))
    if own == default:
        return Route("actions", why)
    raise RevisionError(
        f"the workload {workload[:12]} has another {WORKFLOW_PATH} than the remote's default branch: a push"
        " would run the workload's, which is not the reviewed one",
        "rebase the workload; or set KAKEYA_GITHUB_TOKEN, with which the default branch's file is started;"
        f" or {_EMBEDDED}",
    )


def default_file(git: GitRepo, remote: Remote) -> bytes | None:
    """The workflow file of the remote's default branch; None: it has none, or there is no such branch."""
    head = git.list_refs(remote.address, "HEAD").get("HEAD")
    if head is None:
        return None
    with git.scratch() as scratch:
        if not git.exists(head):
            scratch.fetch(remote.address, ["HEAD"])
        return scratch.read_file(head, WORKFLOW_PATH, _MAX_FILE)


def _remedy(error: PushRejected, plan: Plan) -> str | None:
    if plan.route.options.workflow is not None and "workflow" in error.message.lower():
        return (
            f"this request brings {WORKFLOW_PATH}, which your credentials may not push: use ones with the"
            " scope `workflow`, or ask for a commit that has the file"
        )
    if plan.manifest.result_ref.startswith(refs.AGENT_BRANCHES):
        return error.remedy
    own = (
        "an account that may push only into its own namespace needs a branch there, and the request follows:"
        " git switch -c AgentMemory/<name>-<suffix>"
    )
    return "; ".join(filter(None, (error.remedy, own)))


def _start_run(
    git: GitRepo, plan: Plan, submitted: Submitted, dispatch: Callable[[str, str], int | None]
) -> int | None:
    """Start the workflow run of a request; without one nothing answers it, so then it is withdrawn."""
    try:
        return dispatch(submitted.ref, submitted.commit)
    except ApiFault as error:
        error.message += f"; it may have started a run, so the request stays at {submitted.ref}"
        error.remedy = (
            f"follow it: kakeya_mac wait {submitted.nonce}; or stop it: kakeya_mac cancel {submitted.nonce}"
        )
        raise
    except ApiError as error:
        try:
            take_back(git, plan.remote.address, submitted)
            error.message += "; the request was removed"
        except BusError as kept:
            error.message += f"; and the request stays at {submitted.ref}: {kept.message}"
        raise


def _check_paths(git: GitRepo, preset: Preset, values: Mapping[str, ParamValue], workload: str) -> None:
    for name, value in values.items():
        if preset.params[name].format != "repo-path" or not isinstance(value, str):
            continue
        if git.kind_and_size(f"{workload}:{value.rstrip('/')}")[0] == "missing":
            raise ParameterError(
                f"preset {preset.name}: parameter {name}: {workload[:12]} has no {value!r}",
                "commit it, or choose another commit with --ref",
            )
