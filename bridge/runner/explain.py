"""What this machine would do with a request, without its commit: for the owner who writes a policy.

Every question is asked by the code of `bridge.runner.check` that a runner uses. What only the bus knows is
not asked: see `NOT_ASKED`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bridge import presets
from bridge.bus.mirror import Pending
from bridge.bus.requests import ReadRequest
from bridge.errors import ManifestError
from bridge.presets import Preset
from bridge.presets.template import show
from bridge.protocol.manifest import Manifest, ParamValue, parse
from bridge.protocol.result import Reason
from bridge.runner import models
from bridge.runner.check import Checked, judge, places
from bridge.runner.policy.hours import shown
from bridge.runner.station import Station, survey_station

NOT_ASKED = (
    "whether the requester has too much waiting",
    "whether the request was answered before",
    "whether its commit has the files that it names",
    "whether its commit is on a branch of allow_workloads",
    "whether it stands on the branch that it names, where allow_refs decides",
)
_NO_COMMIT = "0" * 40


@dataclass(frozen=True)
class Work:
    """What a job would get.

    Attributes:
        preset: Its name.
        requester: Who signed the request; None: nobody.
        waits_for: The hours that it waits for, in words; None: it may begin now.
        params: Values with defaults.
        argv: Its command line; ``${…}`` is what only a running job has.
        timeout_s: Seconds.
        limits: By name, in bytes or numbers; None: by the machine's memory.
        network: Whether it gets the machine's network.
        environment: Names of variables it gets beside the usual ones, of those that are set here.
    """

    preset: str
    requester: str | None
    waits_for: str | None
    params: dict[str, ParamValue]
    argv: tuple[str, ...]
    timeout_s: int
    limits: dict[str, int | None]
    network: bool
    environment: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """The answer to one manifest.

    Attributes:
        reason: Why it is refused; None: it is allowed.
        message: The refusal in words, as it would be published.
        remedy: What its owner or requester can do.
        line: The line of the policy that refuses, or the default; None: none of it does.
        work: What the job would get; None: it is refused.
    """

    reason: Reason | None
    message: str = ""
    remedy: str | None = None
    line: str | None = None
    work: Work | None = None

    def as_json(self) -> dict[str, Any]:
        """For a JSON line."""
        refused = {"reason": self.reason, "message": self.message, "remedy": self.remedy, "line": self.line}
        job = None if self.work is None else asdict(self.work)
        return {"allowed": self.reason is None, **refused, "job": job, "not_asked": list(NOT_ASKED)}


def explain(
    data: bytes,
    *,
    state_dir: Path,
    config_dir: Path,
    now: datetime,
    remote: str | None = None,
    signature: bytes | None = None,
    requester: str | None = None,
) -> Explanation:
    """What would become of a manifest here.

    Args:
        data: Its exact bytes.
        state_dir: Where this machine keeps runners' state.
        config_dir: Where the owner's files lie.
        now: The time to judge by (aware).
        remote: The remote that would be served; None: the one it is meant for.
        signature: Its detached signature; None: unsigned.
        requester: Who is to be taken for its signer, whatever `signature` says; None: who is.

    Raises:
        PolicyError, PresetError: The owner's files are wrong.
    """
    try:
        manifest = parse(data)
    except ManifestError as error:
        return Explanation(Reason.BAD_MANIFEST, error.message, error.remedy)
    station = survey_station(
        remote or manifest.audience,
        state_dir=state_dir,
        config_dir=config_dir,
        audience=manifest.audience if remote is None else None,
    )
    request = ReadRequest(_NO_COMMIT, manifest.workload_sha, data, signature)
    known = Checked(Pending(manifest.nonce, _NO_COMMIT, manifest.result_ref), request=request)
    checked = judge(known, station, now=now, answered=(), lineage=lambda _: None, requester=requester)
    if checked.refusal is not None:
        refusal = checked.refusal
        line = None if refusal.key is None else station.policy.decision(refusal.key)
        return Explanation(refusal.reason, refusal.message, refusal.remedy, line)
    assert checked.preset is not None  # noqa: S101 - a request that is not refused has one
    return Explanation(None, work=_work(checked, checked.preset, manifest, station, now))


def _work(checked: Checked, preset: Preset, manifest: Manifest, station: Station, now: datetime) -> Work:
    found = {} if preset.runs_repo_code else models.resolve(preset.models, places(station, workload=None))

    def resolve(kind: str, name: str) -> list[str]:
        if kind in ("engine", "bridge"):
            return [sys.executable, "-I", "-m", kind]
        if kind == "python":
            return [sys.executable]
        if kind == "model" and name in found:
            return [str(found[name].folder)]
        return show(kind, name)

    policy = station.policy
    return Work(
        preset=preset.name,
        requester=checked.requester,
        waits_for=None if policy.is_open(now) else shown(policy.hours or ()),
        params=dict(checked.params),
        argv=tuple(presets.argv(preset, checked.params, resolve)),
        timeout_s=policy.timeout_s(preset, manifest.timeout_s),
        limits=asdict(policy.limits),
        network=policy.opens_network(preset),
        environment=tuple(name for name in policy.environment if name in station.environment),
    )
