"""May this request run here? Every question that needs no job, in order, each with its reason.

The request is read from git objects; nothing of it is executed or written. What is learnt on the way (the
manifest, the preset) is kept even when a later question refuses, so that the refusal can be published under
the right name. Whether paths and models exist is asked when the workspace is made.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from bridge import presets, signing
from bridge.bus.git import Git
from bridge.bus.mirror import Pending
from bridge.bus.requests import ReadRequest, bound_manifest, read_request
from bridge.errors import (
    BusError,
    KeyListError,
    ManifestError,
    ParameterError,
    PolicyError,
    PresetError,
    RequestRefused,
    SignatureError,
)
from bridge.presets import Preset
from bridge.protocol.manifest import MAX_NONCE_SKEW, Manifest, ParamValue, format_time
from bridge.protocol.result import Reason
from bridge.runner import facts, models, steady, turns
from bridge.runner.policy import FILE_NAME, UNSIGNED
from bridge.runner.policy.lines import Key
from bridge.runner.station import Station
from bridge.signing import Signer

_REQUIRED: Key = ("require_signature",)


class Refusal(RequestRefused):
    """The request is answered with `refused` and this reason."""

    def __init__(
        self, reason: Reason, message: str, remedy: str | None = None, *, key: Key | None = None
    ) -> None:
        super().__init__(message, remedy)
        self.reason = reason
        # The decision of the policy that refuses; None: none of it does.
        self.key = key

    @classmethod
    def of(cls, reason: Reason, error: RequestRefused | BusError) -> Refusal:
        """The same message under a reason of the closed set."""
        return cls(reason, error.message, error.remedy, key=getattr(error, "key", None))


@dataclass(frozen=True)
class Checked:
    """A request and what is known of it.

    Attributes:
        pending: Where it was found.
        request: The commit as read; None: it has not the shape of a request.
        manifest: What is asked; None: not readable.
        preset: The job; None: unknown.
        params: Checked values with defaults.
        requester: Who signed it, by the machine's list; None: unsigned or unknown.
        refusal: Why it is refused; None: it may run.
    """

    pending: Pending
    request: ReadRequest | None = None
    manifest: Manifest | None = None
    preset: Preset | None = None
    params: Mapping[str, ParamValue] = field(default_factory=dict)
    requester: str | None = None
    refusal: Refusal | None = None


def examine(
    git: Git,
    pending: Pending,
    station: Station,
    *,
    now: datetime,
    answered: Container[str],
    lineage: Callable[[str], None] | None = None,
    over_quota: str | None = None,
) -> Checked:
    """Ask every question about a request until one refuses.

    Args:
        git: A repository that holds the request commit and its parent.
        pending: The request.
        station: The runner.
        now: The time by which expiry is judged (aware).
        answered: Requests that have had their answer, here or on another known machine.
        lineage: Refuses a workload commit of no branch that the owner trusts; may ask the remote. None: the
            owner who wants that known gets every commit refused.
        over_quota: Why its requester has too much waiting, from `bridge.runner.turns`; None: it has not.
    """
    try:
        request = _read(git, pending)
    except Refusal as refusal:
        return Checked(pending, refusal=refusal)
    known = Checked(pending, request=request)
    return judge(known, station, now=now, answered=answered, lineage=lineage, over_quota=over_quota)


def judge(
    known: Checked,
    station: Station,
    *,
    now: datetime,
    answered: Container[str],
    lineage: Callable[[str], None] | None = None,
    over_quota: str | None = None,
    requester: str | None = None,
) -> Checked:
    """Ask every question about a request that has the right shape until one refuses.

    Args:
        known: With its `request`.
        station: The runner.
        now: As in `examine`.
        answered: As in `examine`.
        lineage: As in `examine`.
        over_quota: As in `examine`.
        requester: Who is taken for its signer, whoever that is; None: who signed it.
    """

    def manifest() -> Checked:
        return replace(known, manifest=_parse(known))

    questions: tuple[Callable[[], Checked], ...] = (
        manifest,
        # Early: of whatever is refused after this it is known who asked, and strangers learn nothing of it.
        lambda: _signed(known, station, now, requester),
        lambda: _choose(known, station),
        lambda: _allow(known, station),
        lambda: _equipped(known, station),
        lambda: _admitted(known, station),
        lambda: _within_hours(known, station, now),
        lambda: _within_quota(known, station, over_quota),
        lambda: _timely(known, station, now, answered),
        lambda: _rooted(known, station, lineage),
    )
    for question in questions:
        try:
            known = question()
        except Refusal as refusal:
            return replace(known, refusal=refusal)
    return known


def _rooted(known: Checked, station: Station, lineage: Callable[[str], None] | None) -> Checked:
    """Whether the commit is on a branch that the owner trusts; asked last, for it may ask the remote."""
    assert known.manifest is not None  # noqa: S101 - asked before
    if lineage is None:
        if station.policy.allow_workloads is not None:
            message = "the branches that this machine's policy trusts cannot be looked at"
            raise Refusal(Reason.POLICY, message, key=("allow_workloads",))
        return known
    try:
        lineage(known.manifest.workload_sha)
    except PolicyError as error:
        raise Refusal.of(Reason.POLICY, error) from None
    return known


def _read(git: Git, pending: Pending) -> ReadRequest:
    try:
        return read_request(git, pending.commit)
    except (ManifestError, BusError) as error:
        raise Refusal.of(Reason.BAD_COMMIT, error) from None


def _parse(known: Checked) -> Manifest:
    assert known.request is not None  # noqa: S101 - asked before
    try:
        return bound_manifest(known.request, known.pending.nonce)
    except ManifestError as error:
        raise Refusal.of(Reason.BAD_MANIFEST, error) from None


def _choose(known: Checked, station: Station) -> Checked:
    assert known.manifest is not None  # noqa: S101 - asked before
    try:
        preset = presets.find(known.manifest.preset, dict(station.presets))
    except PresetError as error:
        raise Refusal.of(Reason.UNKNOWN_PRESET, error) from None
    try:
        # As installed: what this machine's policy says of it besides is asked with the policy.
        params = presets.validate(station.installed[preset.name], known.manifest.params)
    except ParameterError as error:
        raise Refusal.of(Reason.BAD_PARAMETER, error) from None
    return replace(known, preset=preset, params=params)


def _allow(known: Checked, station: Station) -> Checked:
    """Whether the owner allows this preset, on this branch, with these values; and the machine can run it."""
    preset, manifest = known.preset, known.manifest
    assert preset is not None  # noqa: S101 - asked before
    assert manifest is not None  # noqa: S101 - asked before
    try:
        station.policy.check(preset)
        station.policy.check_ref(manifest.result_ref)
    except PolicyError as error:
        raise Refusal.of(Reason.POLICY, error) from None
    for name, value in manifest.params.items():
        try:
            presets.check_value(preset.name, preset.params[name], value)
        except ParameterError as error:
            message = f"{error.message}: this machine's policy allows less than the preset does"
            key = ("presets", preset.name, "params", name)
            raise Refusal(Reason.POLICY, message, error.remedy, key=key) from None
    if lacking := facts.unfit(preset):
        raise Refusal(Reason.MACHINE_UNFIT, f"the preset {preset.name} cannot run here: {lacking}")
    if changed := steady.objection():
        raise Refusal(Reason.MACHINE_UNFIT, changed, steady.REMEDY)
    return replace(known, params=presets.validate(preset, manifest.params))


def _equipped(known: Checked, station: Station) -> Checked:
    """Whether the preset's models are here; those of the workload are looked for when it is laid out."""
    preset = known.preset
    assert preset is not None  # noqa: S101 - asked before
    if not preset.runs_repo_code:
        try:
            models.resolve(preset.models, places(station, workload=None))
        except models.ModelMissing as error:
            raise Refusal.of(Reason.MODEL_MISSING, error) from None
    return known


def places(station: Station, *, workload: Path | None) -> models.Places:
    """Where a runner's machine may hold models.

    Args:
        station: The runner.
        workload: The workspace, for presets that run the workload's code.
    """
    return models.Places(
        configured=station.policy.models,
        environment=station.environment,
        home=station.home,
        metal=bool(station.machine["metal"]),
        workload=workload,
    )


def requester_of(request: ReadRequest, station: Station, now: datetime) -> Signer | None:
    """Who signed a request, by the machine's lists; None: it is unsigned, or nothing can be verified here.

    Raises:
        Refusal: The signature is broken, or a list of keys on this machine is.
    """
    if request.signature is None or station.key is None:
        return None
    try:
        return signing.identify(
            request.data,
            request.signature,
            signing.REQUEST_NAMESPACE,
            station.allowed_signers,
            revoked=station.revoked_keys,
            now=now,
        )
    except SignatureError as error:
        raise Refusal.of(Reason.BAD_SIGNATURE, error) from None
    except KeyListError as error:
        raise Refusal(
            Reason.POLICY,
            f"this machine cannot tell whose signature it is: {error.message}",
            error.remedy,
        ) from None


def _signed(known: Checked, station: Station, now: datetime, assumed: str | None) -> Checked:
    """A broken signature is refused always; one that does not count, or none, where the policy says so."""
    if assumed is not None:
        return replace(known, requester=assumed)
    assert known.request is not None  # noqa: S101 - asked before
    signer = requester_of(known.request, station, now)
    requester = None if signer is None else signer.name
    if requester is not None or not station.policy.require_signature:
        return replace(known, requester=requester)
    takes = "this machine takes only requests of listed signers, and"
    if signer is not None:
        raise Refusal(
            Reason.BAD_SIGNATURE,
            f"{takes} this one is signed by {signer.objection}",
            "its owner can add a key with: kakeya_mac runner signers add NAME --key 'ssh-ed25519 …'",
            key=_REQUIRED,
        )
    if known.request.signature is not None:
        raise Refusal(
            Reason.BAD_SIGNATURE,
            f"{takes} it cannot check a signature: ssh-keygen is not installed there",
            "its owner can install OpenSSH's client (openssh-client)",
            key=_REQUIRED,
        )
    raise Refusal(
        Reason.BAD_SIGNATURE,
        f"{takes} this one is unsigned",
        "see which key would sign, and what to give to the machine's owner: kakeya_mac key",
        key=_REQUIRED,
    )


def _admitted(known: Checked, station: Station) -> Checked:
    """Whether the owner lets this requester ask, and for this preset."""
    assert known.preset is not None  # noqa: S101 - asked before
    try:
        station.policy.check_requester(known.preset, known.requester)
    except PolicyError as error:
        raise Refusal.of(Reason.POLICY, error) from None
    return known


def _within_hours(known: Checked, station: Station, now: datetime) -> Checked:
    """Whether it comes at an hour at which the owner wants nothing refused."""
    try:
        station.policy.check_hours(now)
    except PolicyError as error:
        raise Refusal.of(Reason.POLICY, error) from None
    return known


def _within_quota(known: Checked, station: Station, over_quota: str | None) -> Checked:
    """Whether its requester may have it waiting; of whom nothing is taken, not even the first."""
    policy, name = station.policy, known.requester or UNSIGNED
    if over_quota is None and policy.max_queued(known.requester) == 0:
        over_quota = turns.over_quota(known.requester, 0)
    if over_quota is not None:
        raise Refusal(
            Reason.QUOTA,
            over_quota,
            "ask again when some have ended, or cancel some; the machine's owner can raise"
            f" max_queued_per_requester or a number under [quotas] in {FILE_NAME}",
            key=("quotas", name) if name in policy.quotas else ("max_queued_per_requester",),
        )
    return known


def _timely(known: Checked, station: Station, now: datetime, answered: Container[str]) -> Checked:
    manifest = known.manifest
    assert manifest is not None  # noqa: S101 - asked before
    if now >= manifest.expires_at:
        raise Refusal(Reason.EXPIRED, f"the request expired at {format_time(manifest.expires_at)}")
    if manifest.created_at - now > MAX_NONCE_SKEW:  # else it could outlive every memory of its answer
        raise Refusal(
            Reason.BAD_MANIFEST,
            f"the request is dated {format_time(manifest.created_at)}, and it is {format_time(now)} here",
            "set the clock that is wrong, and ask again",
        )
    if manifest.audience != station.audience:
        raise Refusal(
            Reason.WRONG_AUDIENCE,
            f"the request is meant for {manifest.audience}, and this runner serves {station.audience}",
        )
    if manifest.nonce in answered:
        raise Refusal(Reason.REPLAYED, f"the request {manifest.nonce} was answered before")
    return known
