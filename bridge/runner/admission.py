"""May this request run here, now? Every question that needs no job, in order, each with its reason.

What is learnt on the way (the preset, the values) is kept even when a later question refuses, so that the
refusal is published under the right name. Whether paths exist in the workload is asked when the workspace is
made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta

from bridge import interpreter, presets, signing
from bridge.bus.archive import SETTLED, open_archive
from bridge.bus.registry import read_registry
from bridge.bus.requests import has_result
from bridge.errors import (
    BusError,
    KeyListError,
    ParameterError,
    PolicyError,
    PresetError,
    SignatureError,
)
from bridge.git.cache import GitCache
from bridge.presets import Preset
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_NONCE_SKEW, Manifest, ParamValue, format_time
from bridge.protocol.result import Reason
from bridge.protocol.target import unmet
from bridge.runner import fairness, machine, models
from bridge.runner.config import RunnerConfig
from bridge.runner.policy import FILE_NAME, Key
from bridge.runner.request import Admitted, Decision, NotNow, Refusal, Refused, Request
from bridge.runner.store import Store
from bridge.runner.workload_branches import check_workload
from bridge.signing.keyfiles import UNSIGNED

# Refusals about this machine alone: another runner that says it takes the preset gets so much time first.
OWN_REASONS = frozenset((Reason.UNKNOWN_PRESET, Reason.POLICY, Reason.MACHINE_UNFIT, Reason.MODEL_MISSING))
PATIENCE = timedelta(minutes=5)
_LOOK_AGAIN = timedelta(seconds=30)
_SIGNATURE_RULE: Key = ("require_signature",)


@dataclass
class Admission:
    """The questions of one runner about the requests of one remote."""

    config: RunnerConfig
    cache: GitCache
    store: Store
    _: KW_ONLY
    now: Callable[[], datetime]

    def check(self, request: Request, found: Mapping[str, str]) -> Decision | NotNow:
        """Ask every question about a request; `found`: the remote's refs, as of the last look.

        Raises:
            RemoteUnreachable: The remote did not answer, and must be asked.
        """
        manifest, now = request.manifest, self.now()
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
                check_workload(self.config, self.cache, manifest.workload_sha)
                self._check_place(request, manifest.result_ref)
            except (PolicyError, Refusal) as error:
                decision = _refused(error, decision.preset, decision.params)
        policy = self.config.policy
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
        raise Refusal(
            Reason.POLICY,
            f"the branch {branch.removeprefix('refs/heads/')} does not hold this request, and this machine's"
            " policy goes by branches",
            key=("allow_refs",),
        )

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
        identity, audience = self.config.identity, self.config.audience
        offers = [
            seen.card.offer(preset)
            for seen in others
            if seen.card.audience == audience and seen.card.session != identity.session
        ]
        return any(offer is not None and offer.available for offer in offers)


def decide(
    request: Request, config: RunnerConfig, now: datetime, *, answered: bool = False, assumed: bool = False
) -> Decision:
    """Ask every question that needs neither the remote nor the store. Pure, given the machine's own files.

    Args:
        request: One whose manifest was read.
        config: The runner.
        now: The time of day (aware).
        answered: It has its result.
        assumed: The requester is assumed: whether a signature counts is not asked.
    """
    manifest = request.manifest
    assert manifest is not None  # noqa: S101 - see Args
    preset: Preset | None = None
    params: Mapping[str, ParamValue] = {}
    try:
        # Early: of what is refused later it is known who asked, and strangers learn nothing of it.
        if not assumed:
            _check_signature(request, config)
        preset, params = _choose(manifest, config)
        params = _check_policy(manifest, preset, config)
        check_machine(preset, config)
        config.policy.check_requester(preset, request.requester)
        config.policy.check_hours(now)
        _check_quota(request, config)
        _check_time(manifest, config, now, answered=answered)
    except (Refusal, PolicyError) as error:
        return _refused(error, preset, params)
    return Admitted(preset, params)


def _refused(
    error: Refusal | PolicyError, preset: Preset | None, params: Mapping[str, ParamValue]
) -> Refused:
    refusal = error if isinstance(error, Refusal) else Refusal.of(Reason.POLICY, error)
    return replace(refusal.decision(), preset=preset, params=params)


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
        refusal = Refusal.of(Reason.BAD_SIGNATURE, error)
        request.refusal = request.refusal or refusal.decision()
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
    raise Refusal(Reason.BAD_SIGNATURE, message, remedy, key=_SIGNATURE_RULE)


def _choose(manifest: Manifest, config: RunnerConfig) -> tuple[Preset, Mapping[str, ParamValue]]:
    try:
        preset = presets.find(manifest.preset, dict(config.presets))
    except PresetError as error:
        raise Refusal.of(Reason.UNKNOWN_PRESET, error) from None
    try:
        # As installed: tighter bounds of this machine's policy are asked with the policy.
        return preset, presets.validate(config.installed[preset.name], manifest.params)
    except ParameterError as error:
        raise Refusal.of(Reason.BAD_PARAMETER, error) from None


def _check_policy(manifest: Manifest, preset: Preset, config: RunnerConfig) -> Mapping[str, ParamValue]:
    """Whether the owner allows this preset, on this branch, with these values; its values with defaults."""
    config.policy.check(preset)
    config.policy.check_ref(manifest.result_ref)
    for name, value in manifest.params.items():
        try:
            presets.check_value(preset.name, name, preset.params[name], value)
        except ParameterError as error:
            message = f"{error.message}: this machine's policy allows less than the preset does"
            key = ("presets", preset.name, "params", name)
            raise Refusal(Reason.POLICY, message, error.remedy, key=key) from None
    if changed := interpreter.objection():
        raise Refusal(Reason.MACHINE_UNFIT, changed, interpreter.REMEDY)
    return presets.validate(preset, manifest.params)


def check_machine(preset: Preset, config: RunnerConfig) -> None:
    """Raise a `Refusal` for a preset that this machine cannot run, or whose models are not here.

    Models of a workload that brings its own are looked for when it is laid out.
    """
    if lacking := machine.unfit(preset, allow_unsandboxed=config.policy.allow_unsandboxed):
        raise Refusal(Reason.MACHINE_UNFIT, f"the preset {preset.name} cannot run here: {lacking}")
    if not preset.runs_repo_code:
        try:
            models.resolve(preset.models, config.model_places(workload=None))
        except models.ModelMissing as error:
            raise Refusal.of(Reason.MODEL_MISSING, error) from None


def _check_quota(request: Request, config: RunnerConfig) -> None:
    """Whether its requester may have it waiting; with a quota of 0 not even the first."""
    policy, name = config.policy, request.requester or UNSIGNED
    over_quota = request.over_quota
    if over_quota is None and policy.max_queued(request.requester) == 0:
        over_quota = fairness.over_quota(request.requester, 0)
    if over_quota is not None:
        raise Refusal(
            Reason.QUOTA,
            over_quota,
            "ask again when some have ended, or cancel some; the machine's owner can raise"
            f" max_queued_per_requester or a number under [quotas] in {FILE_NAME}",
            key=("quotas", name) if name in policy.quotas else ("max_queued_per_requester",),
        )


def _check_time(manifest: Manifest, config: RunnerConfig, now: datetime, *, answered: bool) -> None:
    if now >= manifest.expires_at:
        raise Refusal(Reason.EXPIRED, f"the request expired at {format_time(manifest.expires_at)}")
    if manifest.created_at - now > MAX_NONCE_SKEW:  # else it could outlive what is known of its result
        raise Refusal(
            Reason.BAD_MANIFEST,
            f"the request is dated {format_time(manifest.created_at)}, and it is {format_time(now)} here",
            "set the clock that is wrong, and ask again",
        )
    if manifest.audience != config.audience:
        raise Refusal(
            Reason.WRONG_AUDIENCE,
            f"the request is meant for {manifest.audience}, and this runner serves {config.audience}",
        )
    if answered:
        raise Refusal(Reason.REPLAYED, f"the request {manifest.nonce} was answered before")
