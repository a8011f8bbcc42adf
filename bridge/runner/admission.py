"""A request as one runner knows it, and whether it may run here, now.

Every question that needs no job is asked in order, each with its reason. What is learnt on the way (the
preset, the values) is kept even when a later question refuses, so that the refusal is published under the
right name. Whether paths exist in the workload is asked when the workspace is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from bridge import interpreter, presets, signing
from bridge.bus.archive import SETTLED, open_archive
from bridge.bus.registry import read_registry
from bridge.bus.requests import RefValue, RequestCommit, has_result
from bridge.errors import BusError, KeyListError, ParameterError, PresetError, RequestRefused, SignatureError
from bridge.git.cache import GitCache
from bridge.presets import Preset
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_NONCE_SKEW, Manifest, ParamValue, format_time, unmet
from bridge.protocol.result import Reason, RunStatus
from bridge.runner import machine, models
from bridge.runner.config import RunnerConfig
from bridge.runner.policy import BRANCHES, FILE_NAME, Key, PolicyRefusal
from bridge.runner.store import Store
from bridge.signing import Signer
from bridge.signing.keyfiles import UNSIGNED

# Refusals about this machine alone: another runner that says it takes the preset gets so much time first.
OWN_REASONS = frozenset((Reason.UNKNOWN_PRESET, Reason.POLICY, Reason.MACHINE_UNFIT, Reason.MODEL_MISSING))
PATIENCE = timedelta(minutes=5)
_LOOK_AGAIN = timedelta(seconds=30)
# Of more branches the histories are not fetched: a pattern that wide protects nothing.
_MAX_BRANCHES = 100
_HISTORY_S = 600.0
_PLAIN = re.compile(r"refs/heads/[A-Za-z0-9_][A-Za-z0-9_./+-]{0,240}")
# Branches of the bus itself: requesters write them, so they vouch for nothing.
_BUS_BRANCHES = (refs.BRANCHES, refs.AGENT_BRANCHES, "refs/heads/mac-bridge-")


@dataclass(frozen=True)
class Admitted:
    """It may run: the job and its checked values with defaults."""

    preset: Preset
    params: Mapping[str, ParamValue]


@dataclass(frozen=True)
class Refused:
    """It is answered with ``refused`` and this reason."""

    reason: Reason
    message: str
    remedy: str | None = None
    key: Key | None = None  # the setting of the policy that refuses
    # Known as far as they were checked.
    preset: Preset | None = None
    params: Mapping[str, ParamValue] = field(default_factory=dict)


Decision = Admitted | Refused


@dataclass(frozen=True)
class NotNow:
    """It is left alone until then; `decision` is what it would be otherwise."""

    reason: str
    until: datetime
    decision: Decision


class Refusal(RequestRefused):
    """The request is refused for a reason of the closed set."""

    def __init__(
        self, reason: Reason, message: str, remedy: str | None = None, *, key: Key | None = None
    ) -> None:
        super().__init__(message, remedy)
        self.reason = reason
        self.key = key

    @classmethod
    def of(cls, reason: Reason, error: RequestRefused | BusError) -> Refusal:
        """The same message under a reason of the closed set."""
        return cls(reason, error.message, error.remedy, key=getattr(error, "key", None))


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
    signer: Signer | None = None  # None: it is unsigned, or nothing can be verified here
    refusal: Refused | None = None  # why it cannot be read, or its signature does not verify
    over_quota: str | None = None  # why its requester has too many waiting
    first_refused: datetime | None = None  # here, while another runner offered its preset

    @property
    def place(self) -> str:
        """The ref it was found under."""
        return self.ref or refs.inbox_ref(self.nonce)

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
            return request.refusal or Refused(Reason.BAD_MANIFEST, "the manifest cannot be read")
        if manifest.on is not None and now < manifest.expires_at:
            lacking = unmet(manifest.on, self.config.facts(), self.config.identity.name)
            if lacking:
                reason = f"the request is for machines with {', '.join(map(str, lacking))}"
                return NotNow(reason, manifest.expires_at, Refused(Reason.MACHINE_UNFIT, reason))
        answered = self.store.is_answered(request.nonce) or self._is_archived(request.nonce, found, now)
        decision = decide(request, self.config, now, answered=answered)
        if isinstance(decision, Admitted):
            try:
                self._check_workload(manifest.workload_sha)
                self._check_place(request, manifest.result_ref)
            except RequestRefused as error:
                decision = _refused(error, decision.preset, decision.params)
        if isinstance(decision, Refused):
            if self._leave_to_another(request, manifest.preset, decision.reason, now):
                reason = f"another live runner offers {manifest.preset}; here: {decision.message}"
                return NotNow(reason, now + _LOOK_AGAIN, decision)
        elif not policy.is_open(now):
            reason = f"waits for the hours in which jobs may begin, {policy.hours_text}"
            return NotNow(reason, min(now + timedelta(minutes=1), manifest.expires_at), decision)
        return decision

    def _is_archived(self, nonce: str, found: Mapping[str, str], now: datetime) -> bool:
        if nonce > refs.nonce_time(now - SETTLED):
            return False  # nothing so young is archived
        archive = open_archive(self.cache, found)
        return archive is not None and archive.get(nonce) is not None

    def _check_workload(self, commit: str) -> None:
        """Refuse a commit that is no tip of a branch of ``allow_workloads``, nor in the history of one.

        Who may move these branches is for the server to protect: on one that protects nothing, this says
        nothing.
        """
        patterns, key = self.config.policy.allow_workloads, "allow_workloads"
        if patterns is None:
            return
        tips = {
            ref: tip
            for ref, tip in self.cache.list_remote(BRANCHES).items()
            if _PLAIN.fullmatch(ref)
            and not ref.startswith(_BUS_BRANCHES)
            and any(fnmatchcase(ref.removeprefix(BRANCHES), pattern) for pattern in patterns)
        }
        if commit in tips.values():
            return
        if len(tips) > _MAX_BRANCHES:
            message = f"the commit {commit[:12]} is no tip, and {len(tips)} branches match allow_workloads"
            raise PolicyRefusal(key, message, owner_can=f"name fewer than {_MAX_BRANCHES} in {key}")
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
            raise PolicyRefusal(key, message, remedy)

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


def _is_in_history(histories: GitCache, commit: str, tips: Iterable[str]) -> bool:
    histories.prepare()
    # Numbered here, so that no name is in the way of another.
    places = {ref: f"refs/trusted/{number}" for number, ref in enumerate(sorted(tips))}
    histories.fetch(histories.remote, places, timeout_s=_HISTORY_S)
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
    manifest = request.manifest
    assert manifest is not None  # noqa: S101 - it was read
    preset: Preset | None = None
    params: Mapping[str, ParamValue] = {}
    try:
        # Early: of what is refused later it is known who asked, and strangers learn nothing of it.
        if not assumed:
            _check_signature(request, config)
        preset = presets.find(manifest.preset, dict(config.presets))
        # As installed: tighter bounds of this machine's policy are asked with the policy.
        params = presets.validate(config.installed[preset.name], manifest.params)
        params = _check_policy(manifest, preset, config)
        check_machine(preset, config)
        config.policy.check_requester(preset, request.requester)
        config.policy.check_hours(now)
        _check_quota(request, config)
        _check_time(manifest, config, now, answered=answered)
    except RequestRefused as error:
        return _refused(error, preset, params)
    return Admitted(preset, params)


def _refused(error: RequestRefused, preset: Preset | None, params: Mapping[str, ParamValue]) -> Refused:
    reasons = {PresetError: Reason.UNKNOWN_PRESET, ParameterError: Reason.BAD_PARAMETER}
    reason = error.reason if isinstance(error, Refusal) else reasons.get(type(error), Reason.POLICY)
    return Refused(reason, error.message, error.remedy, getattr(error, "key", None), preset, params)


def find_signer(request: Request, config: RunnerConfig, now: datetime) -> None:
    """Find out who signed a request, by the machine's lists: sets its `signer`, or why it is refused.

    Without a signer it is unsigned, or nothing can be verified here.
    """
    data = request.data
    if data is None or data.signature is None or config.key is None:
        return
    try:
        request.signer = signing.identify(
            data.data,
            data.signature,
            signing.REQUEST_NAMESPACE,
            config.allowed_signers,
            revoked=config.revoked_keys,
            now=now,
        )
    except SignatureError as error:
        request.refusal = request.refusal or Refused(Reason.BAD_SIGNATURE, error.message, error.remedy)
    except KeyListError as error:
        message = f"this machine cannot tell whose signature it is: {error.message}"
        request.refusal = request.refusal or Refused(Reason.POLICY, message, error.remedy)


def _check_signature(request: Request, config: RunnerConfig) -> None:
    """A request without a signature that counts is refused where the policy requires one."""
    if request.requester is not None or not config.policy.require_signature:
        return
    takes = "this machine takes only requests of listed signers, and"
    if request.signer is not None:
        message = f"{takes} this one is signed by {request.signer.objection}"
        remedy = "its owner can add a key with: kakeya_mac runner signers add NAME --key 'ssh-ed25519 …'"
    elif request.data is not None and request.data.signature is not None:
        message = f"{takes} it cannot check a signature: ssh-keygen is not installed there"
        remedy = "its owner can install OpenSSH's client (openssh-client)"
    else:
        message = f"{takes} this one is unsigned"
        remedy = "see which key would sign, and what to give to the machine's owner: kakeya_mac key"
    raise Refusal(Reason.BAD_SIGNATURE, message, remedy, key=("require_signature",))


def _check_policy(manifest: Manifest, preset: Preset, config: RunnerConfig) -> Mapping[str, ParamValue]:
    """Whether the owner allows this preset, on this branch, with these values; its values with defaults."""
    config.policy.check(preset)
    config.policy.check_ref(manifest.result_ref)
    installed = config.installed[preset.name]
    for name, value in manifest.params.items():
        if preset.params[name] == installed.params[name]:
            continue
        try:
            presets.check_value(preset.name, name, preset.params[name], value)
        except ParameterError as error:
            message = f"{error.message}: this machine's policy allows less than the preset does"
            key = ("presets", preset.name, "params", name)
            raise Refusal(Reason.POLICY, message, error.remedy, key=key) from None
    if changed := interpreter.objection():
        raise Refusal(Reason.MACHINE_UNFIT, changed, interpreter.REMEDY)
    # Only a parameter that has to be given has no default.
    values = {name: manifest.params.get(name, each.default) for name, each in preset.params.items()}
    return {name: value for name, value in values.items() if value is not None}


def check_machine(preset: Preset, config: RunnerConfig) -> None:
    """Raise a `Refusal` for a preset that this machine cannot run, or whose models are not here.

    Models of a workload that brings its own are looked for when it is laid out.
    """
    if lacking := machine.unfit(preset, allow_unsandboxed=config.policy.allow_unsandboxed):
        raise Refusal(Reason.MACHINE_UNFIT, f"the preset {preset.name} cannot run here: {lacking}")
    if not preset.runs_repo_code:
        try:
            models.resolve(preset.models, config.model_places())
        except models.ModelMissing as error:
            raise Refusal.of(Reason.MODEL_MISSING, error) from None


def over_quota(requester: str | None, limit: int) -> str:
    """Why a request beyond a requester's quota is refused, in one sentence."""
    who = "unsigned requests together" if requester is None else f"the requester {requester}"
    return f"this machine lets {who} have at most {limit} waiting, and older ones fill that"


def _check_quota(request: Request, config: RunnerConfig) -> None:
    """Whether its requester may have it waiting; with a quota of 0 not even the first."""
    policy, name = config.policy, request.requester or UNSIGNED
    message = request.over_quota
    if message is None and policy.max_queued(request.requester) == 0:
        message = over_quota(request.requester, 0)
    if message is not None:
        raised = "the machine's owner can raise max_queued_per_requester or a number under [quotas]"
        remedy = f"ask again when some have ended, or cancel some; {raised} in {FILE_NAME}"
        key = ("quotas", name) if name in policy.quotas else ("max_queued_per_requester",)
        raise Refusal(Reason.QUOTA, message, remedy, key=key)


def _check_time(manifest: Manifest, config: RunnerConfig, now: datetime, *, answered: bool) -> None:
    if now >= manifest.expires_at:
        raise Refusal(Reason.EXPIRED, f"the request expired at {format_time(manifest.expires_at)}")
    if manifest.created_at - now > MAX_NONCE_SKEW:  # else it could outlive what is known of its result
        message = (
            f"the request is dated {format_time(manifest.created_at)}, and it is {format_time(now)} here"
        )
        raise Refusal(Reason.BAD_MANIFEST, message, "set the clock that is wrong, and ask again")
    if manifest.audience != config.audience:
        message = f"the request is meant for {manifest.audience}, and this runner serves {config.audience}"
        raise Refusal(Reason.WRONG_AUDIENCE, message)
    if answered:
        raise Refusal(Reason.REPLAYED, f"the request {manifest.nonce} was answered before")
