"""Submit a job: checked, written as a manifest, signed, and pushed. The client's first half.

`plan_request` decides everything and changes nothing (a dry run ends there); `submit_request` pushes what
it planned. What the machine allows is decided on the machine. Who takes a request, and what starts it:

    embedded            a runner's daemon fetches it
    actions, a push     starts the workflow file of the pushed commit
    actions, a dispatch starts the default branch's file; needs a token, and is the only way inside a
                        workflow, for what is pushed with its token starts nothing

Two workflow files may be there, the workload's and the default branch's. A push wants them to be the same, or
the workload to have none: then the request brings the default branch's, and no other, for servers want a
special permission of who pushes another, and the default branch's is the reviewed one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from bridge import presets, signing
from bridge.bus.requests import WORKFLOW_PATH, SubmitOptions, Submitted, submit, take_back
from bridge.bus.results import ExpectedRequest
from bridge.client.remotes import Remote, resolve_remote
from bridge.client.signing_key import choose
from bridge.errors import (
    ApiError,
    ApiFault,
    BusError,
    ManifestError,
    ParameterError,
    PushRejected,
    RevisionError,
)
from bridge.git.repo import GitRepo
from bridge.github.api import GitHub, Repository, Token, find_token, repository_of
from bridge.github.dispatch import Dispatch
from bridge.presets import Preset
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest, ParamValue, parse
from bridge.settings import Settings

_DIRTY_TIMEOUT_S = 2.0
_MAX_FILE = 256 * 1024
_PLAIN = SubmitOptions()
_WITHOUT_RUN = SubmitOptions(starts_run=False)
_EMBEDDED = "--transport embedded leaves the request to a runner's daemon"


@dataclass(frozen=True)
class Route:
    """How a request gets to a runner."""

    transport: Literal["embedded", "actions"]
    why: str  # of the choice, for people
    options: SubmitOptions = _PLAIN
    dispatch: Dispatch | None = None  # what starts its run; None: the push does, or no run is needed
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
    argv: tuple[str, ...]  # what the preset would run, the machine's own values left as placeholders
    remote: Remote
    route: Route
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Submission:
    """A request that was pushed."""

    manifest: Manifest
    commit: str  # the request commit
    ref: str  # its branch, where the result will appear
    remote: Remote
    signed_with: str | None  # the key and where it was found; None: it is unsigned
    run_id: int | None  # the workflow run that was started for it; None: none was, or it is not known
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
    expires: timedelta | None = None,
    timeout_s: int | None = None,
    transport: str | None = None,
    on: str | None = None,
) -> Plan:
    """Check a request and write its manifest; reads the checkout and does not change it.

    The network is asked only where the remote may have workflows: whether it does, and which file. `git` has
    the workload, which `ref` names by any revision; `expires` says how long the request may wait, `on` which
    machines may run it (``chip=M4*,memory>=64``; None: any). `settings` hold the other defaults.
    """
    chosen = presets.get(preset, settings.presets)
    values = presets.validate(chosen, params)
    workload = git.resolve(ref)
    _check_paths(git, chosen, values, workload)
    bus = resolve_remote(git, settings.remote)
    route = choose_route(transport or settings.transport, git, bus, workload)
    created = datetime.now(UTC).replace(microsecond=0)
    nonce = refs.new_nonce(created, os.urandom(6))
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
    """Sign and push a planned request, and start its workflow run where it needs one.

    Raises:
        SignatureError: The key that the user named cannot sign.
        PushRejected: The remote said no, with its words.
        RemoteUnreachable: The remote did not answer.
        ApiError: Its run could not be started, so the request was withdrawn.
        ApiFault: Whether its run was started is not known, so the request stays.
    """
    signer = choose(settings, git)
    signature = signer.sign(signing.REQUEST_NAMESPACE, plan.manifest.to_bytes())
    try:
        submitted = submit(git, plan.remote.address, plan.manifest, signature, options=plan.route.options)
    except PushRejected as error:
        error.remedy = _remedy(error.message, plan, error.remedy)
        raise
    run_id = None if plan.route.dispatch is None else _start_run(git, plan, submitted, plan.route.dispatch)
    warnings = [*plan.warnings, *signer.warnings]
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


def choose_route(
    asked: str, git: GitRepo, remote: Remote, workload: str, *, environ: Mapping[str, str] = os.environ
) -> Route:
    """How a request for a workload, which `git` has, gets to a runner; `asked` may be ``auto``.

    Raises:
        RevisionError: The workload has another workflow file than the default branch.
        ApiError: Inside a workflow: there is no token, or it does not do.
        RemoteUnreachable: The remote did not answer.
    """
    if asked == "embedded":
        return Route("embedded", "it was asked for")
    repository = repository_of(remote.address, environ)
    if repository is None and asked == "auto":
        return Route("embedded", "the remote is on no GitHub server that is known here")
    token = None if repository is None else find_token(environ)
    if environ.get("GITHUB_ACTIONS") == "true" and repository is not None:
        return _route_inside(asked, git, remote, repository, token)
    github = None if repository is None or token is None else GitHub(repository, token)
    return _route_outside(asked, _read_workflow(git, workload), default_file(git, remote), github, workload)


def default_file(git: GitRepo, remote: Remote) -> bytes | None:
    """The workflow file of the remote's default branch; None: it has none, or there is no such branch."""
    head = git.list_refs(remote.address, "HEAD").get("HEAD")
    if head is None:
        return None
    if git.exists(head):
        return _read_workflow(git, head)
    with git.scratch() as scratch:
        scratch.fetch(remote.address, ["HEAD"])
        return _read_workflow(scratch, head)


def _route_inside(
    asked: str, git: GitRepo, remote: Remote, repository: Repository, token: Token | None
) -> Route:
    """In a workflow: by dispatch."""
    if token is None:
        raise ApiError(
            "inside a workflow a request is started through the API, and there is no token for it",
            "give the step `env: KAKEYA_GITHUB_TOKEN: ${{ github.token }}` and the job `actions: write` and"
            f" `contents: write`; or {_EMBEDDED}",
        )
    github = GitHub(repository, token)
    ref = github.facts().default_branch
    if asked == "auto" and default_file(git, remote) is None:
        return Route("embedded", f"{repository.slug} has no {WORKFLOW_PATH} on its branch {ref}")
    why = "this is a workflow, and what is pushed with its token starts no run"
    return Route("actions", why, _WITHOUT_RUN, Dispatch(github, ref))


def _route_outside(
    asked: str, own: bytes | None, default: bytes | None, github: GitHub | None, workload: str
) -> Route:
    """On anybody's machine: by a push, where the workload's file and the default branch's allow it."""
    if own is None and default is None:
        if asked == "auto":
            return Route("embedded", f"neither the workload nor the default branch has {WORKFLOW_PATH}")
        raise RevisionError(
            f"neither the workload {workload[:12]} nor the remote's default branch has {WORKFLOW_PATH}",
            f"commit that file to the default branch (docs/actions.md), or {_EMBEDDED}",
        )
    why = "it was asked for" if asked == "actions" else f"the repository has {WORKFLOW_PATH}"
    if own is None:
        return Route("actions", why, SubmitOptions(workflow=default))
    if default is None:
        said = f"only the workload has {WORKFLOW_PATH}, not the default branch: its runs are unreviewed"
        return Route("actions", why, warnings=(said,))
    if own == default:
        return Route("actions", why)
    if github is not None:
        why = f"the workload's {WORKFLOW_PATH} is not the default branch's, which a dispatch runs"
        return Route("actions", why, _WITHOUT_RUN, Dispatch(github, github.facts().default_branch))
    raise RevisionError(
        f"the workload {workload[:12]} has another {WORKFLOW_PATH} than the remote's default branch: a push"
        " would run the workload's, which is not the reviewed one",
        "rebase the workload; or set KAKEYA_GITHUB_TOKEN, with which the default branch's file is started;"
        f" or {_EMBEDDED}",
    )


def _read_workflow(git: GitRepo, commit: str) -> bytes | None:
    return git.read_file(commit, WORKFLOW_PATH, _MAX_FILE)


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
    """Start the workflow run of a request; without one nothing answers it, so then it is withdrawn."""
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
            error.message += "; the request was withdrawn"
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
