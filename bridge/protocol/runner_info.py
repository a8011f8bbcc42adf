"""What a runner says of itself in ``runner.json``: a hint, for anyone with push rights can write one."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from bridge.errors import BusError
from bridge.protocol import manifest
from bridge.protocol.sanitize import one_line

INFO_NAME = "runner.json"
INFO_SIGNATURE_NAME = "runner.json.sig"
MAX_BYTES = 512 * 1024
MAX_PRESETS = 256
MAX_ANSWERED = 2048
# A registration counts for so many of its intervals, and clocks may differ by so much.
MISSED_INTERVALS = 3
SKEW = timedelta(seconds=60)
FURTHEST_AHEAD = timedelta(days=1)

Bound = Annotated[int | float, Field(ge=-1e300, le=1e300)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Text = Annotated[str, Field(max_length=1000)]
Word = Annotated[str, Field(max_length=200)]


class State(StrEnum):
    """What a runner does. A closed set."""

    IDLE = "idle"
    BUSY = "busy"
    STOPPED = "stopped"


class _Record(BaseModel):
    model_config = manifest.STRICT_RECORD


class Work(_Record):
    """The running job."""

    nonce: manifest.Nonce
    preset: manifest.PresetName
    elapsed_s: Seconds


class RunnerLoad(_Record):
    """Requests that wait, requests answered since the start, and the machine's load average."""

    pending: Count = 0
    done: Count = 0
    load_1m: Seconds | None = None


class Property(_Record):
    """One parameter as a JSON Schema property; without a default it must be given."""

    type: Literal["string", "integer", "number", "boolean"]
    description: Text = ""
    default: manifest.ParamValue | None = None
    enum: Annotated[tuple[manifest.ParamValue, ...], Field(max_length=256)] | None = None
    minimum: Bound | None = None
    maximum: Bound | None = None
    pattern: Text | None = None
    maxLength: Annotated[int, Field(ge=1, le=4096)] | None = None  # noqa: N815 - as JSON Schema writes it
    format: Literal["repo-path", "request"] | None = None
    prefix: Word | None = None
    suffix: Word | None = None


class Offer(_Record):
    """One installed preset: what it is, whether it can run on that machine now, and if not, why."""

    name: manifest.PresetName
    aliases: Annotated[tuple[manifest.PresetName, ...], Field(max_length=32)] = ()
    summary: Text = ""
    digest: manifest.Digest
    engine: Literal["installed", "workload"]
    evidence: Word | None = None
    timeout_s: Annotated[int, Field(ge=1, le=10**9)]
    parameters: Annotated[dict[manifest.ParamName, Property], Field(max_length=64)] = {}
    available: bool
    why: Annotated[Text, Field(description="reads on after the runner's name")] | None = None
    typical_s: Annotated[Seconds, Field(description="median of its recent runs there")] | None = None


class Limits(_Record):
    """What that machine's policy says of every request."""

    max_timeout_s: Annotated[int, Field(ge=1, le=10**9)]
    require_signature: bool
    quotas: Annotated[dict[Word, Count], Field(max_length=32)] = {}


class RunnerInfo(_Record):
    """Who a runner is, what it does, and what it offers."""

    schema_version: manifest.SchemaVersion = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    session: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", description="the runner process")]
    version: Annotated[str, Field(max_length=64)]
    audience: Annotated[str, Field(max_length=1000, description="the remote it serves")]
    public_key: (
        Annotated[str, Field(max_length=4096, pattern=r"^[a-z0-9@.-]{1,64} [A-Za-z0-9+/]{32,}={0,3}$")] | None
    ) = None
    started_at: manifest.Moment
    seen_at: manifest.Moment
    interval_s: Annotated[float, Field(ge=1, le=3600, description="how often the registration is renewed")]
    state: State
    job: Work | None = None
    load: RunnerLoad = RunnerLoad()
    presets: Annotated[tuple[Offer, ...], Field(max_length=MAX_PRESETS)] = ()
    models: Annotated[
        dict[Word, Text], Field(max_length=256, description="a folder, a stand-in, or missing")
    ] = {}
    machine: Annotated[dict[Word, Text | int | float | bool | None], Field(max_length=64)] = {}
    tools: Annotated[dict[Word, Word], Field(max_length=64)] = {}
    limits: Limits
    answered: Annotated[
        tuple[manifest.Nonce, ...],
        Field(max_length=MAX_ANSWERED, description="of earlier versions; not read"),
    ] = ()

    def to_bytes(self) -> bytes:
        """The exact bytes that are committed and signed. Texts are brought onto one line without controls."""
        document = manifest.with_texts(self.model_dump(mode="json", exclude_none=True), one_line)
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()

    def offer(self, preset: str) -> Offer | None:
        """What it offers under a preset's name or alias; None: nothing."""
        return next((offer for offer in self.presets if preset in (offer.name, *offer.aliases)), None)


def parse_info(data: bytes) -> RunnerInfo:
    """Read a ``runner.json`` from the bus; a `BusError` says what is wrong with it."""
    return manifest.parse_document(RunnerInfo, data, what=INFO_NAME, limit=MAX_BYTES, error=BusError)


def is_live(info: RunnerInfo, now: datetime) -> bool:
    """Whether a runner is there, as far as its registration tells; clocks may differ by `SKEW`."""
    if info.state is State.STOPPED:
        return False
    age = now - manifest.parse_time(info.seen_at)
    return -FURTHEST_AHEAD <= age <= timedelta(seconds=MISSED_INTERVALS * info.interval_s) + SKEW
