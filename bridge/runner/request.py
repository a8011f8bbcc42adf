"""A request as one runner knows it, and what may be decided about it. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from bridge.bus.requests import RequestCommit
from bridge.bus.state import RefValue
from bridge.errors import BusError, RequestRefused
from bridge.presets import Preset
from bridge.protocol.manifest import Manifest, ParamValue
from bridge.protocol.result import Reason, RunStatus
from bridge.runner.policy import Key
from bridge.signing import Signer


@dataclass(frozen=True)
class Admitted:
    """It may run: the job and its checked values with defaults."""

    preset: Preset
    params: Mapping[str, ParamValue]


@dataclass(frozen=True)
class Refused:
    """It is answered with ``refused`` and this reason.

    `key` is the setting of the policy that refuses, if one does; `preset` and `params` are known as far as
    they were checked.
    """

    reason: Reason
    message: str
    remedy: str | None = None
    key: Key | None = None
    preset: Preset | None = None
    params: Mapping[str, ParamValue] = field(default_factory=dict)


@dataclass(frozen=True)
class NotNow:
    """It is left alone until then; `decision` is what it would be otherwise."""

    reason: str
    until: datetime
    decision: Admitted | Refused


Decision = Admitted | Refused


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

    def decision(self) -> Refused:
        """The same as a value."""
        return Refused(self.reason, self.message, self.remedy, self.key)


@dataclass
class Request:
    """A request without a result, read once.

    Attributes:
        nonce: From the ref it was found under; whether the manifest agrees is in `refusal`.
        ref: The branch it was found on; None: in the inbox.
        claim: The claim on it, as of the last look.
        claimed_since: When it was first seen claimed (monotonic seconds).
        silent_since: The commit its claim holds, and when that was first seen.
        claim_read: Whether its claim was read since then.
        status: What the claim said; None: not read yet, or unreadable.
        cancel: The cancel request, as of the last look.
        is_read: Whether `data` to `refusal` are known.
        data: The commit as read; None: it has not the shape of a request.
        signer: Who made its signature; None: it is unsigned, or nothing can be verified here.
        refusal: Why it cannot be read, or its signature does not verify.
        over_quota: Why its requester has too many waiting; None: it has not.
        first_refused: When this machine first refused it while another runner offered its preset.
        counted: When its claim's signature was last verified (monotonic seconds), and whether it counts.
        is_answered: It has its result on its branch, although the server kept it in the inbox.
    """

    nonce: str
    commit: str
    ref: str | None = None
    claim: RefValue | None = None
    claimed_since: float | None = None
    silent_since: tuple[str, float] | None = None
    claim_read: bool = False
    status: RunStatus | None = None
    cancel: RefValue | None = None
    is_read: bool = False
    data: RequestCommit | None = None
    manifest: Manifest | None = None
    signer: Signer | None = None
    refusal: Refused | None = None
    over_quota: str | None = None
    first_refused: datetime | None = None
    counted: tuple[float, bool] | None = None
    is_answered: bool = False

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
