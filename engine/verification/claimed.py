"""A report as the verifier reads it. Nothing of it is believed: the values are what it claims."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigurationError
from evidence_format.model import SCHEMA_ID, Arm, Report, Sample
from evidence_format.parse import MAX_BYTES, Unreadable, parse

REPLAYED = ("throughput", "quality", "recall", "kv")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Claimed:
    """A report file that was read: its content, and the digest of its bytes."""

    document: Report
    sha256: str

    @property
    def rows(self) -> Iterator[tuple[Arm, Sample]]:
        """All rows, each with its arm, in the report's order."""
        return ((arm, row) for arm in self.document.arms for row in arm.samples)


def read_report(path: Path) -> Claimed:
    """Read a report that can be replayed.

    Raises:
        ConfigurationError: the file cannot be read, is no evidence report, or holds nothing to replay.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        document = parse(data)
    except OSError as error:
        raise ConfigurationError(f"cannot read the report {path}: {error.strerror or error}") from None
    except Unreadable as error:
        message = f"{path} is no report of {SCHEMA_ID}: {error}; kakeya_mac gate says more"
        raise ConfigurationError(message) from None
    if problem := _unreplayable(document):
        raise ConfigurationError(f"nothing to replay: {path} {problem}")
    return Claimed(document, hashlib.sha256(data).hexdigest())


def _unreplayable(document: Report) -> str | None:
    """Why no token of a report can be computed again; None where it can."""
    kind, configuration = document.kind, document.configuration
    if kind not in REPLAYED:
        return (
            f"is a {kind} report, which has no rows of tokens; verify replays {', '.join(REPLAYED)}"
            f" (run a {kind} again instead)"
        )
    tokens = [row.tokens for arm in document.arms for row in arm.samples]
    if not tokens or not all(tokens):
        return "has no rows, or rows without a token"
    if drawn := configuration.get("temperature"):
        return (
            f"was drawn at temperature {drawn}, and other draws are as right; verify replays greedy reports"
        )
    for name in PENALTIES:
        if configuration.get(name):
            return (
                f"was made with {name} {configuration[name]}, which changes the model's logits; verify"
                " replays plain greedy reports"
            )
    return None
