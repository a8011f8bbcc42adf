"""A report as the verifier reads it: the parts that are replayed, as frozen types.

The gate judges the whole report strictly; here unknown fields are passed over, so that a report with more in
it can still be replayed. Nothing of the report is believed: the values are what it claims.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import ConfigurationError
from engine.evaluation.report import LARGEST, SCHEMA

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Scalar = str | int | float | bool | None
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
REPLAYED = ("throughput", "quality", "recall", "kv")


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class ClaimedRound(_Read):
    """A verify forward of ``block`` tokens, of which ``accepted`` drafts were confirmed."""

    block: Annotated[int, Field(ge=1, le=1024)]
    accepted: Count


class ClaimedNeedle(_Read):
    """The fact a prompt hides, and whether it was found."""

    needle: str
    answer: str
    depth: float
    prompt_contains_answer_outside_needle: bool
    prompt_contains_needle: bool
    hit: bool


class ClaimedCache(_Read):
    """What the caches were and held after the run."""

    classes: dict[str, Count]
    resident_bytes: Count


class ClaimedKV(_Read):
    """What a policy holds, and how far it lies from native caches."""

    layers: tuple[Count, ...]
    values: Count
    bytes: Count
    key_distortion: float | None
    value_distortion: float | None


class ClaimedRow(_Read):
    """What one arm says it made of one prompt."""

    prompt_id: str
    prompt_sha256: Digest
    source_sha256: Digest
    instruction_sha256: Digest
    prompt_tokens: Count
    tokens: Annotated[tuple[Count, ...], Field(min_length=1)]
    tokens_sha256: Digest
    text: str
    answer_text: str | None = None
    finish_reason: str
    rounds: tuple[ClaimedRound, ...]
    cache: ClaimedCache
    kv: ClaimedKV | None = None
    kept_positions: Count | None = None
    restored_positions: Count | None = None
    needle: ClaimedNeedle | None = None

    @property
    def has_distortion(self) -> bool:
        """Whether it says how far its codes lie from native keys and values."""
        return self.kv is not None and self.kv.key_distortion is not None

    @property
    def verified(self) -> int:
        """Rounds that verified drafts."""
        return sum(each.block > 1 for each in self.rounds)


class ClaimedSystem(_Read):
    """What an arm ran."""

    loop: str
    kv: str


class ClaimedArm(_Read):
    """One system and its rows."""

    name: str
    control: str | None = None
    system: ClaimedSystem
    samples: tuple[ClaimedRow, ...]


class ClaimedLayer(_Read):
    """What one of a target's own caches keeps."""

    kind: str
    values: Count
    window: Count | None


class ClaimedModel(_Read):
    """A model by its weights."""

    id: str
    weights_sha256: Digest
    dtype: str
    quantization: str | None
    parameters: Count
    vocab_size: Count | None
    largest_block: Count | None
    cache_layers: tuple[ClaimedLayer, ...] | None


class ClaimedSource(_Read):
    """Which engine ran."""

    source_sha256: Digest


class ClaimedEnvironment(_Read):
    """Where it ran, as far as the replay needs it."""

    device: str
    git: ClaimedSource
    models: dict[str, ClaimedModel]


class ClaimedRequest(_Read):
    """The request that the report answers."""

    nonce: str


class ClaimedClaim(_Read):
    """One thing that the report wants to be believed for."""

    name: str
    arm: str | None = None


class Document(_Read):
    """The report itself."""

    schema_id: Literal["kakeya.evidence/1"] = Field(alias="schema")
    kind: str
    request: ClaimedRequest | None = None
    environment: ClaimedEnvironment
    claims: tuple[ClaimedClaim, ...]
    configuration: dict[str, Scalar]
    arms: tuple[ClaimedArm, ...]


@dataclass(frozen=True)
class Claimed:
    """A report file that was read.

    Attributes:
        document: its content.
        sha256: digest of the file's bytes.
    """

    document: Document
    sha256: str

    @property
    def rows(self) -> Iterator[tuple[ClaimedArm, ClaimedRow]]:
        """All rows, each with its arm, in the report's order."""
        return ((arm, row) for arm in self.document.arms for row in arm.samples)


def read_report(path: Path) -> Claimed:
    """Read a report that can be replayed.

    Raises:
        ConfigurationError: the file cannot be read, is no evidence report, or holds nothing to replay.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read the report {path}: {error.strerror or error}") from None
    if len(data) > LARGEST:
        raise ConfigurationError(f"{path} has more than {LARGEST} bytes, more than a report may have")
    try:
        document = Document.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigurationError(
            f"{path} is no report of {SCHEMA}: {where}: {first['msg']}; kakeya_mac gate says more"
        ) from None
    _refuse_unreplayable(path, document)
    return Claimed(document, hashlib.sha256(data).hexdigest())


def _refuse_unreplayable(path: Path, document: Document) -> None:
    """Raise ConfigurationError for a report of which no token can be computed again."""
    if document.kind not in REPLAYED:
        raise ConfigurationError(
            f"nothing to replay: {path} is a {document.kind} report, which has no rows of tokens; "
            f"verify replays {', '.join(REPLAYED)} (run a {document.kind} again instead)"
        )
    if not any(arm.samples for arm in document.arms):
        raise ConfigurationError(f"nothing to replay: {path} has no rows")
    configuration = document.configuration
    if configuration.get("temperature"):
        raise ConfigurationError(
            f"nothing to replay: the tokens of {path} were drawn at temperature "
            f"{configuration['temperature']}, and other draws are as right; verify replays greedy reports"
        )
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if configuration.get(name):
            raise ConfigurationError(
                f"nothing to replay: {path} was made with {name} {configuration[name]}, which changes the "
                "model's logits; verify replays plain greedy reports"
            )
