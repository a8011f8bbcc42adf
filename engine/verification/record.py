"""The verification record, ``kakeya.verification/1``: which report was replayed, how, and what was found.

The schema is docs/schema/verification.json; whoever reads records checks against it. Nothing here decides.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "kakeya.verification/1"
CONFIRMED, REFUTED = "confirmed", "refuted"


@dataclass(frozen=True)
class Finding:
    """Something that the report says and the replay does not.

    Attributes:
        where: the row as ``arm/prompt_id``, a model's role, or ``report``.
        check: models, prompts, rows, text, tokens, rounds or memory.
        message: what was claimed and what was found.
    """

    where: str
    check: str
    message: str


@dataclass(frozen=True)
class TokensChecked:
    """A row's tokens against the target's logits.

    Attributes:
        checked: how many tokens.
        forward: ``one`` over prompt and tokens, or ``rounds`` under the row's own policy.
        largest_gap: by which the best logit lay above a claimed token's, at worst; 0: all are the best.
        at: the position of that token.
        allowed: the largest gap that rounding explains.
    """

    checked: int
    forward: str
    largest_gap: float
    at: int
    allowed: float


@dataclass(frozen=True)
class RoundsReplayed:
    """A row's rounds, drafted again.

    Attributes:
        replayed: rounds of two tokens or more.
        differing: how many of them confirmed another number of drafts, or had fewer drafts to confirm.
        claimed_accepted, accepted: drafts confirmed in all of them, as claimed and as found.
        reason: why they were not replayed; None: they were.
    """

    replayed: int = 0
    differing: int = 0
    claimed_accepted: int = 0
    accepted: int = 0
    reason: str | None = None


@dataclass(frozen=True)
class RowVerified:
    """A row that the models were run for.

    Attributes:
        arm, prompt_id: the row.
        drawn: by the draw; false: there was time to look at beside those.
        tokens, rounds: what was found; tokens None where they cannot be run.
    """

    arm: str
    prompt_id: str
    drawn: bool
    tokens: TokensChecked | None
    rounds: RoundsReplayed


@dataclass(frozen=True)
class Draw:
    """How rows were drawn: after the report was there, by a number that its author could not know.

    Attributes:
        seed: repeats the draw.
        source: ``os``: from the system's random numbers; ``given``.
        sample: rows asked for.
        rows: rows of the report.
    """

    seed: int
    source: str
    sample: int
    rows: int


@dataclass(frozen=True)
class Subject:
    """The report that was replayed.

    Attributes:
        sha256: of its bytes.
        kind: its kind.
        nonce: of the request it answers; None: it answers none.
        source_sha256: of the engine that wrote it.
    """

    sha256: str
    kind: str
    nonce: str | None
    source_sha256: str


@dataclass(frozen=True)
class Tolerances:
    """What may differ, see `engine.verification.verify`."""

    rounds: float
    rounding: float
    resident: float
    distortion: float
    accepted: float


@dataclass
class Record:
    """The whole record; ``request`` binds it to the request that a runner answers with it."""

    started_at: str
    report: Subject
    draw: Draw
    tolerances: Tolerances
    environment: dict[str, Any]
    request: dict[str, str] | None = None
    rows: list[RowVerified] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finished_at: str = ""

    @property
    def verdict(self) -> str:
        """``refuted`` where anything was found."""
        return REFUTED if self.findings else CONFIRMED

    def document(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {"schema": SCHEMA, "verdict": self.verdict} | asdict(self)
