"""A request as one runner knows it, and whether it may run here, now."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from bridge import interpreter, presets, signing
from bridge.bus.archive import SETTLED, open_archive
from bridge.bus.registry import read_registry
from bridge.bus.requests import RefValue, RequestCommit, has_result
from bridge.errors import (
    BrokenObject,
    BusError,
    ParameterError,
    PresetError,
    RequestRefused,
    SignatureError,
)
from bridge.git.cache import GitCache
from bridge.presets import Preset
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_NONCE_SKEW, Manifest, ParamValue, format_time, unmet
from bridge.protocol.result import Reason, RunStatus
from bridge.runner import machine, models
from bridge.runner.config import RunnerConfig
from bridge.runner.policy import BRANCHES, FILE_NAME, Key, OutsideHours, PolicyRefusal
from bridge.runner.store import Store
from bridge.signing import Signature
from bridge.signing.keyfiles import UNSIGNED

# Refusals about this machine alone: another runner that says it takes the preset gets so much time first.
OWN_REASONS = {
    Reason.UNKNOWN_PRESET,
    Reason.POLICY,
    Reason.OUTSIDE_HOURS,
    Reason.MACHINE_UNFIT,
    Reason.MODEL_MISSING,
}
PATIENCE = timedelta(minutes=5)
_LOOK_AGAIN = timedelta(seconds=30)
_REASONS = {
    PresetError: Reason.UNKNOWN_PRESET,
    ParameterError: Reason.BAD_PARAMETER,
    models.ModelMissing: Reason.MODEL_MISSING,
    OutsideHours: Reason.OUTSIDE_HOURS,
}
# Branches of the bus itself: requesters write them, so they vouch for nothing.
_BUS_BRANCHES = (refs.BRANCHES, refs.AGENT_BRANCHES, "refs/heads/mac-bridge-")


@dataclass(frozen=True)
class Admitted:
    """It may run: the job and its checked values with defaults."""

    preset: Preset
    params: Mapping[str, ParamValue]
    against: Mapping[str, ParamValue] | None = None  # of the other side of a paired run


class Refusal(RequestRefused):
    """It is answered with ``refused`` and this reason; `key` is the setting of the policy that refuses."""

    def __init__(
        self, reason: Reason, message: str, remedy: str | None = None, *, key: Key | None = None
    ) -> None:
        super().__init__(message, remedy)
        self.reason, self.key = reason, key
        # Known as far as they were checked: the refusal is published under the right name.
        self.preset: Preset | None = None
        self.params: Mapping[str, ParamValue] = {}


Decision = Admitted | Refusal


@dataclass(frozen=True)
class NotNow:
    """It is left alone until then; `refusal` is its answer where no request can wait."""

    reason: str
    until: datetime
    refusal: Refusal


@dataclass
class Request:
    """A request without a result, read once. Times are monotonic seconds."""

    nonce: str  # from the ref it was found under; whether the manifest agrees is in `refusal`
    commit: str
    ref: str | None = None  # the branch it was found on; None: in the inbox
    claim: RefValue | None = None  # as of the last look, like `cancel`
    cancel: RefValue | None = None
    # Its claim: when to read it next, what it said, whether it counts, and since when it holds this commit.
    read_claim_at: float = 0.0
    status: RunStatus | None = None
    claim_counts: bool = True
    silent_since: tuple[str, float] | None = None
    is_read: bool = False  # whether `data` to `refusal` are known
    data: RequestCommit | None = None  # None: it has not the shape of a request
    manifest: Manifest | None = None
    signer: Signature | None = None  # None: it is unsigned, or nothing can be verified here
    refusal: Refusal | None = None  # why it cannot be read, or its signature does not verify
    over_quota: bool = False  # its requester has too many waiting
    first_refused: datetime | None = None  # here, while another runner offered its preset

    @property
    def place(self) -> str:
        """The ref it was found under."""
        return self.ref or refs.INBOX + self.nonce

    @property
    def requester(self) -> str | None:
        """The principal that signed it, by this machine's list; None: unsigned or unknown."""
        return None if self.signer is None else self.signer.name

    @property
    def label(self) -> str:
        """How logs name it."""
        name = "unreadable" if self.manifest is None else self.manifest.preset
        who = "" if self.requester is None else f", for {self.requester}"
        return f"{self.nonce} ({name}{who})"


@dataclass
class Admission:
    """The questions of one runner about the requests of one remote."""

    config: RunnerConfig
    cache: GitCache
    store: Store
    _: KW_ONLY
    now: Callable[[], datetime]

    def check(self, request: Request, found: Mapping[str, str]) -> Decision | NotNow:
        """Ask every question about a request; `found`: the remote's refs, as of the last look."""
        manifest, now, policy = request.manifest, self.now(), self.config.policy
        if request.refusal is not None or manifest is None:
            return request.refusal or Refusal(Reason.BAD_MANIFEST, "the manifest cannot be read")
        if manifest.on is not None and now < manifest.expires_at:
            lacking = unmet(manifest.on, self.config.facts(), self.config.identity.name)
            if lacking:
                reason = f"the request is for machines with {', '.join(map(str, lacking))}"
                return NotNow(reason, manifest.expires_at, Refusal(Reason.MACHINE_UNFIT, reason))
        answered = self.store.get(request.nonce).answered_at is not None
        if not answered and request.nonce <= refs.nonce_time(now - SETTLED):  # nothing younger is archived
            with contextlib.suppress(BrokenObject):  # anyone with push rights can break it
                archive = open_archive(self.cache, found)
                answered = archive is not None and archive.get(request.nonce) is not None
        decision = decide(request, self.config, now, answered=answered)
        if isinstance(decision, Admitted):
            try:
                for commit in manifest.commits:
                    self._check_workload(commit)
                self._check_place(request, manifest.result_ref)
            except RequestRefused as error:
                decision = _refusal(error, decision.preset, decision.params)
        if isinstance(decision, Refusal):
            if self._leave_to_another(request, manifest.preset, decision.reason, now):
                reason = f"another live runner offers {manifest.preset}; here: {decision.message}"
                return NotNow(reason, now + _LOOK_AGAIN, decision)
        elif (outside := policy.outside(now)) is not None:
            reason = f"waits for the hours in which jobs may begin, {policy.hours_text}"
            refusal = _refusal(outside, decision.preset, decision.params)
            return NotNow(reason, min(now + timedelta(minutes=1), manifest.expires_at), refusal)
        return decision

    def _check_workload(self, commit: str) -> None:
        """Refuse a commit that is no tip of a branch of ``allow_workloads``, nor in the history of one.

        Who may move these branches is for the server to protect.
        """
        patterns = self.config.policy.allow_workloads
        if patterns is None:
            return
        tips = {
            ref: tip
            for ref, tip in self.cache.list_remote(BRANCHES).items()
            if not ref.startswith(_BUS_BRANCHES)
            and any(fnmatchcase(ref.removeprefix(BRANCHES), pattern) for pattern in patterns)
        }
        if commit in tips.values():
            return
        # The runner's own repository is shallow, so histories are kept in another one.
        folder = self.cache.directory.with_name(f"histories-{self.config.tag}.git")
        histories = GitCache(folder, self.config.remote)
        try:
            trusted = bool(tips) and histories.recover(lambda: _is_in_history(histories, commit, tips))
        finally:
            histories.close()
        if not trusted:
            message = f"the commit {commit[:12]} is on no branch that this machine trusts"
            remedy = "ask for a commit that was merged into one of them: " + (", ".join(patterns) or "none")
            raise PolicyRefusal(("allow_workloads",), message, remedy)

    def _check_place(self, request: Request, branch: str) -> None:
        """Refuse what is not on its branch, where the policy goes by branches: anyone may push elsewhere."""
        if self.config.policy.allow_refs is None or request.ref is not None:
            return
        found = self.cache.list_remote(branch)
        tip = found.get(branch)
        if tip == request.commit or (tip is None and not self.config.policy.require_signature):
            return
        present = tip is not None and not self.cache.bring(found, [branch])
        if present and has_result(self.cache, found[branch], request.nonce):
            return
        what = f"the branch {branch.removeprefix(BRANCHES)} does not hold this request"
        why = "and this machine's policy goes by branches"
        raise Refusal(Reason.POLICY, f"{what}, {why}", key=("allow_refs",))

    def _leave_to_another(self, request: Request, preset: str, reason: Reason, now: datetime) -> bool:
        """Whether another live runner says that it takes what this machine alone would refuse."""
        if reason not in OWN_REASONS:
            return False
        request.first_refused = request.first_refused or now
        if now - request.first_refused >= PATIENCE:
            return False
        try:
            others = read_registry(self.cache).live(now)
        except BusError:
            return False
        return any(
            (offer := seen.info.offer(preset)) is not None and offer.available
            for seen in others
            if seen.info.audience == self.config.audience
            and seen.info.session != self.config.identity.session
        )


def _is_in_history(histories: GitCache, commit: str, tips: Mapping[str, str]) -> bool:
    histories.prepare()
    # Numbered here, so that no name is in the way of another.
    places = {ref: f"refs/trusted/{number}" for number, ref in enumerate(sorted(tips))}
    histories.fetch(histories.remote, places)
    if not histories.exists(commit):
        return False
    holding = histories.run("for-each-ref", f"--contains={commit}", "--format=%(refname)", "refs/trusted/")
    return not set(places.values()).isdisjoint(holding.decode("ascii").split())


def decide(
    request: Request, config: RunnerConfig, now: datetime, *, answered: bool = False, assumed: bool = False
) -> Decision:
    """Ask every question about a request that was read, but those that need the remote or the store.

    Pure, given the owner's files. `answered`: it has its result. `assumed`: its requester is assumed, so
    whether a signature counts is not asked.
    """
    manifest, policy = request.manifest, config.policy
    assert manifest is not None  # noqa: S101 - it was read
    preset: Preset | None = None
    params: Mapping[str, ParamValue] = {}
    try:
        # Early: of what is refused later it is known who asked, and strangers learn nothing of it.
        if not assumed:
            _check_signature(request, config)
        preset = presets.find(manifest.preset, config.presets)
        params = _check_params(preset, manifest.params, config)
        other = None
        if manifest.against is not None:
            other = _check_params(preset, manifest.against.params, config)
            if manifest.against.workload_sha != manifest.workload_sha and not preset.measures_commit:
                raise Refusal(
                    Reason.BAD_PARAMETER,
                    f"preset {preset.name} reads nothing of the commit: two commits would compare nothing",
                    "compare two sets of parameters: --against-params NAME=VALUE",
                )
        policy.check(preset)
        policy.check_ref(manifest.result_ref)
        if changed := interpreter.objection():
            raise Refusal(Reason.MACHINE_UNFIT, changed, interpreter.REMEDY)
        for values in (params, *([other] if other is not None else [])):
            check_machine(preset, config, values)
        policy.check_requester(preset, request.requester)
        policy.check_hours(now)
        _check_quota(request, config)
        _check_time(manifest, config, now, answered=answered)
    except RequestRefused as error:
        return _refusal(error, preset, params)
    return Admitted(preset, params, other)


def _refusal(error: RequestRefused, preset: Preset | None, params: Mapping[str, ParamValue]) -> Refusal:
    reason = _REASONS.get(type(error), Reason.POLICY)
    key = getattr(error, "key", None)
    refusal = error if isinstance(error, Refusal) else Refusal(reason, error.message, error.remedy, key=key)
    refusal.preset, refusal.params = preset, params
    return refusal


def find_signer(request: Request, config: RunnerConfig, now: datetime) -> None:
    """Find out who signed a request, by the machine's lists: sets its `signer`, or why it is refused."""
    data = request.data
    if data is None or data.signature is None or config.key is None:
        return
    space, signers = signing.REQUEST_NAMESPACE, config.allowed_signers
    try:
        request.signer = signing.identify(data.data, data.signature, space, signers, now=now)
    except SignatureError as error:
        request.refusal = request.refusal or Refusal(Reason.BAD_SIGNATURE, error.message, error.remedy)


def _check_signature(request: Request, config: RunnerConfig) -> None:
    """A request without a signature that counts is refused where the policy requires one."""
    if request.requester is not None or not config.policy.require_signature:
        return
    if request.signer is not None:
        why = f"this one is signed by {request.signer.objection}"
    elif request.data is not None and request.data.signature is not None:
        why = "it cannot check a signature: ssh-keygen is not installed there"
    else:
        why = "this one is unsigned"
    message = f"this machine takes only requests of listed signers, and {why}"
    remedy = "see which key would sign, and what to give to the machine's owner: kakeya_mac key"
    raise Refusal(Reason.BAD_SIGNATURE, message, remedy, key=("require_signature",))


def _check_params(
    preset: Preset, params: Mapping[str, ParamValue], config: RunnerConfig
) -> Mapping[str, ParamValue]:
    """The values of a request, with defaults, within the bounds of this machine's policy."""
    try:
        return presets.validate(preset, params)
    except ParameterError as error:
        # Within the preset's own bounds; else the request itself is wrong.
        presets.validate(config.rulebook.installed[preset.name], params)
        message = f"{error.message}: this machine's policy allows less than the preset does"
        name = next(name for name, value in params.items() if preset.params[name].fault(value))
        is_model = preset.params[name].format == "model"
        key = ("models",) if is_model else ("presets", preset.name, "params", name)
        adding = "the Mac's owner offers another with: kakeya_mac runner models add NAME FOLDER"
        raise Refusal(Reason.POLICY, message, adding if is_model else error.remedy, key=key) from None


def check_machine(preset: Preset, config: RunnerConfig, params: Mapping[str, ParamValue]) -> None:
    """Raise a `RequestRefused` for a preset that this machine cannot run, or whose models are not here.

    Of `params` only the chosen model counts.
    """
    if lacking := machine.unfit(preset, allow_unsandboxed=config.policy.allow_unsandboxed):
        raise Refusal(Reason.MACHINE_UNFIT, f"the preset {preset.name} cannot run here: {lacking}")
    if not preset.runs_repo_code:  # whose models may be the workload's, which is laid out later
        models.resolve(presets.model_needs(preset, params), config.model_places())


def _check_quota(request: Request, config: RunnerConfig) -> None:
    """Whether its requester may have it waiting; with a quota of 0 not even the first."""
    policy, name = config.policy, request.requester or UNSIGNED
    limit = policy.max_queued(request.requester)
    if request.over_quota or limit == 0:
        who = "unsigned requests together" if request.requester is None else f"the requester {name}"
        message = f"this machine lets {who} have at most {limit} waiting, and older ones fill that"
        raised = "the machine's owner can raise max_queued_per_requester or a number under [quotas]"
        remedy = f"ask again when some have ended, or cancel some; {raised} in {FILE_NAME}"
        key = ("quotas", name) if name in policy.quotas else ("max_queued_per_requester",)
        raise Refusal(Reason.QUOTA, message, remedy, key=key)


def _check_time(manifest: Manifest, config: RunnerConfig, now: datetime, *, answered: bool) -> None:
    if now >= manifest.expires_at:
        raise Refusal(Reason.EXPIRED, f"the request expired at {format_time(manifest.expires_at)}")
    if manifest.created_at - now > MAX_NONCE_SKEW:  # else it could outlive what is known of its result
        dated, here = format_time(manifest.created_at), format_time(now)
        message = f"the request is dated {dated}, and it is {here} here"
        raise Refusal(Reason.BAD_MANIFEST, message, "set the clock that is wrong, and ask again")
    if manifest.audience != config.audience:
        message = f"the request is meant for {manifest.audience}, and this runner serves {config.audience}"
        raise Refusal(Reason.WRONG_AUDIENCE, message)
    if answered:
        raise Refusal(Reason.REPLAYED, f"the request {manifest.nonce} was answered before")
