"""The report of a finished request, for a job that replays it: found on the bus, and where its models lie.

The requester names a handle; what is replayed is decided by the refs, the digests and the signature of that
request's result. Which folders hold the models is this machine's own answer to the presets it has installed;
the engine tells by their digests whether they are the right ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from bridge.bus.git import Git
from bridge.bus.results import believe
from bridge.client.lookup import look_up
from bridge.client.verified import report_of
from bridge.errors import EvidenceError, ResultError, UnknownHandle
from bridge.evidence.parse import parse
from bridge.presets.template import switches
from bridge.protocol.result import Reason, RunnerFacts
from bridge.runner import models
from bridge.runner.check import Refusal, places
from bridge.runner.station import Station

NAME = "report.json"


@dataclass(frozen=True)
class Report:
    """A report and where it comes from.

    Attributes:
        nonce: Of the request that it answers.
        preset: Of that request.
        runner: Who made it, as its result says.
        authenticity: What the result's signature is worth here.
        data: The report's bytes.
    """

    nonce: str
    preset: str | None
    runner: RunnerFacts
    authenticity: str
    data: bytes

    @property
    def sha256(self) -> str:
        """Digest of the report."""
        return hashlib.sha256(self.data).hexdigest()


def find(git: Git, station: Station, handle: str) -> Report:
    """The report of a finished request.

    Args:
        git: Any repository; nothing is left in it.
        station: The runner.
        handle: A nonce, a branch name or a unique prefix of either.

    Raises:
        Refusal: No request, or several, are called so; it has no result yet, or none that can be believed; or
            that holds no report of this request.
        RemoteUnreachable: The remote did not answer.
    """
    try:
        found = look_up(git, station.remote, handle, station.folder)
        if found.answer is None:
            raise _refused(f"the request {found.nonce} is not finished, so it has no report to verify")
        believed = believe(found.answer, trusted=station.allowed_signers.with_name("trusted_runners"))
        data = report_of(believed)
    except (UnknownHandle, ResultError, EvidenceError) as error:
        raise _refused(error.message) from None
    result = believed.result
    report, faults = parse(data)
    if report is None:
        raise _refused(f"the report of {found.nonce} cannot be read: {faults[0].message}")
    if report.request is None or report.request.nonce != found.nonce:
        raise _refused(f"the report in the result of {found.nonce} is not of that request")
    return Report(found.nonce, result.preset, result.runner, believed.sentence, data)


def folders(station: Station, name: str | None) -> list[Path]:
    """Where the models of an installed preset lie on this machine.

    None where it is not installed, or they are not here: then the shipped ones do, or the engine says what
    is missing.
    """
    preset = station.installed.get(name or "")
    if preset is None:
        return []
    wanted = {switch.model for switch in switches(preset)}
    try:
        found = models.resolve(preset.models, places(station, workload=None))
    except models.ModelMissing:
        return []
    return [model.folder for model_name, model in found.items() if model_name in wanted]


def _refused(message: str) -> Refusal:
    return Refusal(Reason.BAD_PARAMETER, f"parameter request: {message}", "see: kakeya_mac history")
