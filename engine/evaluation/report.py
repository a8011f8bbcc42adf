"""The evidence report: rows, what is derived from them, and the file. Claims are made elsewhere.

The format is ``kakeya.evidence/1``. Times are rounded to 1e-7 s in the rows, and everything derived is
derived from what the rows say then.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.evaluation.arms import Outcome
from engine.evaluation.prompts import Needle, Prompt
from engine.evaluation.summary import liveness, parity_summary, summarise
from evidence_format.model import SCHEMA_ID, ReportRequest
from evidence_format.parse import MAX_BYTES
from evidence_format.text import text_digest, tokens_digest


@dataclass
class Arm:
    """One system under measurement and its rows."""

    name: str
    role: str  # sut, baseline, oracle or control
    loop: str
    drafter: str | None = None
    block: str | None = None
    control: str | None = None
    kv: str = "native"  # canonical policy
    restoration: str | None = None  # source of restored keys and values
    samples: list[dict[str, Any]] = field(default_factory=list)
    drafter_forwards: int = 0  # behind the samples, for `liveness`; the rows do not hold them

    def take(self, rows: Sequence[dict[str, Any]], drafter_forwards: int) -> None:
        """Some more rows, and the forwards of the drafter's network behind them."""
        self.samples.extend(rows)
        self.drafter_forwards += drafter_forwards

    def clear(self) -> None:
        """Forget all rows."""
        self.samples.clear()
        self.drafter_forwards = 0

    def document(self) -> dict[str, Any]:
        """The arm as it stands in the report."""
        system = {
            "loop": self.loop,
            "drafter": self.drafter,
            "block": self.block,
            "kv": self.kv,
            "restoration": self.restoration,
        }
        return {
            "name": self.name,
            "role": self.role,
            "control": self.control,
            "system": system,
            "timing_scope": "decode",
            "samples": self.samples,
        }


@dataclass(frozen=True)
class Distortion:
    """Relative squared error of the keys and values that the next query sees after the prompt.

    Against native caches on the same prompt; evicted positions count as lost.
    """

    keys: float
    values: float


def sample(
    prompt: Prompt,
    tokens: Sequence[int],
    outcome: Outcome,
    *,
    answer_text: str | None = None,
    distortion: Distortion | None = None,
) -> dict[str, Any]:
    """A row: what one system made of one prompt.

    Args:
        prompt: the prompt; a needle of it is sought in what the row calls the answer.
        tokens: its tokens.
        outcome: what came of it.
        answer_text: the text without its reasoning, where reasoning was stripped.
        distortion: of the keys and values, where the policy keeps some otherwise than natively.
    """
    row: dict[str, Any] = {
        "prompt_id": prompt.id,
        "prompt_sha256": tokens_digest(tokens),
        "source_sha256": prompt.source_sha256,
        "instruction_sha256": text_digest(prompt.instruction),
        "prompt_tokens": len(tokens),
        "prefill_s": _seconds(outcome.prefill_s),
        "decode_s": _seconds(outcome.decode_s),
        "tokens": outcome.tokens,
        "tokens_sha256": tokens_digest(outcome.tokens),
        "text": outcome.text,
        "finish_reason": outcome.finish,
        "path": outcome.path,
        "rounds": [
            {
                "block": item.block,
                "accepted": item.accepted,
                "draft_s": _seconds(item.draft_s),
                "verify_s": _seconds(item.verify_s),
            }
            for item in outcome.rounds
        ],
        "cache": {
            "classes": outcome.cache_classes,
            "resident_bytes": outcome.resident_bytes,
            "measured": True,
        },
    }
    answer = outcome.text if answer_text is None else answer_text
    if answer != outcome.text:
        row["answer_text"] = answer
    if outcome.kv is not None:
        row["kv"] = {
            "layers": list(outcome.kv.layers),
            "values": outcome.kv.values,
            "bytes": outcome.kv.nbytes,
            "key_distortion": distortion.keys if distortion else None,
            "value_distortion": distortion.values if distortion else None,
        }
    if outcome.kept is not None:
        row["kept_positions"] = outcome.kept
    if outcome.restored:
        row["restored_positions"] = outcome.restored
    if prompt.needle is not None and prompt.text is not None:
        row["needle"] = needle_fields(prompt.needle, prompt.text, answer, outcome.text)
    return row


def needle_fields(needle: Needle, prompt: str, answer: str, text: str) -> dict[str, Any]:
    """What a prompt hides, and whether it stands in the answer.

    It must stand in the whole text, too: what reasoning was taken out between may not join to a hit.
    """
    elsewhere = prompt.replace(needle.sentence, "", 1)
    return {
        "needle": needle.sentence,
        "answer": needle.answer,
        "depth": needle.depth,
        "prompt_contains_answer_outside_needle": bool(needle.answer) and needle.answer in elsewhere,
        "prompt_contains_needle": needle.sentence in prompt,
        "hit": bool(needle.answer) and needle.answer in answer and needle.answer in text,
    }


@dataclass(frozen=True)
class Report:
    """A finished report; `write` puts it into a file."""

    document: dict[str, Any]

    @classmethod
    def build(
        cls,
        kind: str,
        *,
        started: datetime,
        claims: list[dict[str, Any]],
        environment: dict[str, Any],
        configuration: dict[str, Any],
        arms: Sequence[Arm] = (),
        order: Sequence[tuple[str, str]] = (),
        rounding: dict[str, float | int] | None = None,
        divergences: Sequence[dict[str, Any]] = (),
        restarts: Sequence[dict[str, Any]] = (),
        parity: dict[str, Any] | None = None,
        request: ReportRequest | None = None,
    ) -> "Report":
        """Put the parts together and derive the rest."""
        document: dict[str, Any] = {"schema": SCHEMA_ID, "kind": kind}
        if request is not None:
            document["request"] = request.model_dump()
        document |= {
            "started_at": stamp(started),
            "finished_at": stamp(now()),
            "claims": claims,
            "environment": environment,
            "configuration": configuration,
            "arms": [arm.document() for arm in arms],
            "order": [list(pair) for pair in order],
            "liveness": liveness(arms),
            "rounding": rounding,
            "divergences": list(divergences),
            "restarts": list(restarts),
            "summary": summarise(arms, one_graph=configuration.get("single_graph") is True),
        }
        if parity is not None:
            document["parity"] = parity
            document["summary"]["parity"] = parity_summary(parity["rounds"])
        return cls(document)

    def write(self, path: Path) -> None:
        """Write the file whole or not at all.

        Raises:
            EngineError: it is larger than a report may be, or cannot be written.
        """
        write_document(path, self.document)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write a report, or a record about one, whole or not at all.

    Raises:
        EngineError: it is larger than a report may be, or cannot be written.
    """
    data = json.dumps(document, allow_nan=False, ensure_ascii=False, indent=1).encode() + b"\n"
    if len(data) > MAX_BYTES:
        raise EngineError(f"the report has {len(data)} bytes, more than {MAX_BYTES}; use a smaller --limit")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as part:
            try:
                part.write(data)
                part.flush()
                os.fsync(part.fileno())
                os.chmod(part.name, 0o644)
                os.replace(part.name, path)
            except BaseException:
                os.unlink(part.name)
                raise
    except OSError as error:
        raise EngineError(f"the report cannot be written to {path}: {error.strerror}") from error


def now() -> datetime:
    """The present time, UTC."""
    return datetime.now(UTC)


def stamp(moment: datetime) -> str:
    """A time as reports write it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _seconds(value: float) -> float:
    return round(value, 7)
