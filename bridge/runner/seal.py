"""From what is known of a job to its result: exact bytes, signed where that is possible, ready to be sent."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from bridge import __version__
from bridge.errors import described
from bridge.protocol.manifest import format_time
from bridge.protocol.result import Command, File, Result, RunnerFacts, Verdict
from bridge.runner import facts
from bridge.runner.check import Checked
from bridge.runner.isolation.enforced import Enforced
from bridge.runner.models import Found
from bridge.runner.spool import Entry
from bridge.runner.station import Station

LOG_NAME = "log.txt"
# How long a result waits for room on the disk before it is put together without what the job brought.
_ROOM_S, _POLL_S = 30.0, 0.5


@dataclass
class Record:
    """What its result says of a job, gathered while the job goes on.

    Attributes:
        attempt: Which attempt of the request this is, from 1.
        started: When it began (aware).
        enforced: What the supervisor enforces; None: nothing was to run.
        seconds: How long each phase took, by its name.
        commands: What ran.
        files: What is published beside the result: bytes and role by path.
        models: The preset's models on this machine, by name.
        inputs: Digests of what the job runs, as facts.
        survivors: Processes of the job that would not die.
        kept_awake: Whether the machine was kept awake; None: it does not fall asleep.
    """

    attempt: int
    started: datetime
    enforced: Enforced | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    models: Mapping[str, Found] = field(default_factory=dict)
    inputs: Mapping[str, facts.Fact] = field(default_factory=dict)
    survivors: int = 0
    kept_awake: bool | None = None


def seal(
    station: Station,
    checked: Checked,
    record: Record,
    verdict: Verdict,
    *,
    finished: datetime,
    say: Callable[[str], None],
    bare: bool = False,
) -> Entry:
    """The result with everything it names.

    Args:
        station: The runner; its key signs.
        checked: The request, and what is known of it.
        record: What came of it.
        verdict: How it ended.
        finished: When it ended (aware).
        say: Takes one line for the owner.
        bare: Leave out what came from the request or the job, except who asked for what commit.

    Raises:
        OSError: There is no room to sign it.
        ValueError: A result cannot say this.
    """
    manifest, preset = checked.manifest, checked.preset
    params = dict(checked.params) or (manifest.params if manifest else {})
    if bare:
        params, record = {}, replace(record, commands=[], files={})
    result = Result(
        nonce=checked.pending.nonce,
        request_commit=checked.pending.commit,
        workload_sha=manifest.workload_sha if manifest else None,
        preset=manifest.preset if manifest else None,
        preset_digest=preset.digest if preset else None,
        params=params,
        engine_source=preset.engine if preset else None,
        runner=_runner(station, record),
        attempt=record.attempt,
        started_at=format_time(record.started),
        finished_at=format_time(finished),
        phase_seconds=record.seconds,
        commands=tuple(record.commands),
        files=tuple(_described(path, data, role) for path, (data, role) in sorted(record.files.items())),
        verdict=verdict,
        tools=dict(station.tools),
    ).to_bytes()
    return Entry(
        nonce=checked.pending.nonce,
        request_commit=checked.pending.commit,
        result_ref=manifest.result_ref if manifest else checked.pending.ref,
        result=result,
        signature=station.sign(result, say),
        files={path: data for path, (data, _) in record.files.items()},
        until=format_time(manifest.expires_at) if manifest and checked.requester is not None else None,
    )


def with_room(make: Callable[[], Entry], say: Callable[[str], None]) -> Entry:
    """What `make` makes; a disk that is full for a moment must not cost what the job brought.

    Args:
        make: Seals a result; called again after an `OSError`.
        say: Takes one line for the owner, once, when there is a wait.

    Raises:
        OSError: There was no room for half a minute.
    """
    deadline, said = time.monotonic() + _ROOM_S, False
    while True:
        try:
            return make()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise
            if not said:
                say(f"its result waits for room: {described(error)}")
            said = True
            time.sleep(_POLL_S)


def _runner(station: Station, record: Record) -> RunnerFacts:
    machine = {
        **station.machine,
        **facts.isolation(record.enforced, record.survivors),
        **facts.of_models(record.models),
        **record.inputs,
        **({} if record.kept_awake is None else {"kept_awake": record.kept_awake}),
    }
    return RunnerFacts(
        name=station.identity.name, id=station.identity.id, version=__version__, machine=machine
    )


def _described(path: str, data: bytes, role: str) -> File:
    return File(path=path, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), role=role)
