"""The evidence report: rows, the summary derived from them, and the file. Claims are made elsewhere.

The format is ``kakeya.evidence/1``. Every figure of the summary is computed from the rows as they stand in
the file (times rounded to 1e-7 s), so that a reader who recomputes it gets the same number.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from engine.errors import EngineError
from engine.evaluation.arms import Outcome
from engine.evaluation.prompts import Prompt

SCHEMA = "kakeya.evidence/1"
LARGEST = 32 * 2**20


@dataclass(frozen=True)
class Request:
    """What binds a report to a job: all of it or nothing."""

    nonce: str
    workload_sha: str
    preset_digest: str
    engine_source: str


@dataclass
class Arm:
    """One system under measurement and its rows."""

    name: str
    role: str  # sut, baseline, oracle or control
    loop: str
    drafter: str | None = None
    block: str | None = None
    control: str | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The arm as it stands in the report."""
        system = {
            "loop": self.loop,
            "drafter": self.drafter,
            "block": self.block,
            "kv": "native",
            "restoration": None,
        }
        return {
            "name": self.name,
            "role": self.role,
            "control": self.control,
            "system": system,
            "timing_scope": "decode",
            "samples": self.samples,
        }


def sample(prompt: Prompt, tokens: Sequence[int], outcome: Outcome) -> dict[str, Any]:
    """A row: what one system made of one prompt. Needles are judged on the text of the row."""
    row: dict[str, Any] = {
        "prompt_id": prompt.id,
        "prompt_sha256": tokens_digest(tokens),
        "instruction_sha256": hashlib.sha256(prompt.instruction.encode()).hexdigest(),
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
    if prompt.needle is not None and prompt.text is not None:
        needle = prompt.needle
        present = needle.sentence in prompt.text
        elsewhere = prompt.text.replace(needle.sentence, "", 1)
        row["needle"] = {
            "needle": needle.sentence,
            "answer": needle.answer,
            "depth": needle.depth,
            "prompt_contains_answer_outside_needle": bool(needle.answer) and needle.answer in elsewhere,
            "prompt_contains_needle": present,
            "hit": bool(needle.answer) and needle.answer in outcome.text,
        }
    return row


def tokens_digest(tokens: Sequence[int]) -> str:
    """sha256 of the tokens as ASCII decimals joined by single spaces."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode("ascii")).hexdigest()


def summarise(arms: Sequence[Arm]) -> dict[str, Any]:
    """All derived figures, from the rows alone."""
    baselines = [arm for arm in arms if arm.role == "baseline"]
    systems = [arm for arm in arms if arm.role == "sut"]
    return {
        "arms": {arm.name: _arm_summary(arm.samples) for arm in arms},
        "comparisons": [_comparison(arm, baseline) for baseline in baselines[:1] for arm in systems],
    }


def _arm_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    decoded = [len(row["tokens"]) - 1 for row in rows]
    verified = [item for row in rows for item in row["rounds"] if item["block"] >= 2]
    needles = [row["needle"]["hit"] for row in rows if "needle" in row]
    return {
        "samples": len(rows),
        "generated_tokens": sum(decoded) + len(rows),
        "decoded_tokens": sum(decoded),
        "median_decoded_tokens": median(decoded) if decoded else 0,
        "decode_tokens_per_s": _ratio(sum(decoded), sum(row["decode_s"] for row in rows)),
        "end_to_end_tokens_per_s": _ratio(
            sum(decoded) + len(rows), sum(row["prefill_s"] + row["decode_s"] for row in rows)
        ),
        "verify_rounds": len(verified),
        "acceptance_length": _ratio(sum(item["accepted"] + 1 for item in verified), len(verified)),
        "recall": _ratio(sum(needles), len(needles)),
        "max_resident_bytes": max((row["cache"]["resident_bytes"] for row in rows), default=None),
    }


def _comparison(arm: Arm, baseline: Arm) -> dict[str, Any]:
    """The arm against the baseline over the prompts both ran."""
    plain = {row["prompt_id"]: row for row in baseline.samples}
    ours = [row for row in arm.samples if row["prompt_id"] in plain]
    theirs = [plain[row["prompt_id"]] for row in ours]
    ours_summary, theirs_summary = _arm_summary(ours), _arm_summary(theirs)
    pairs = list(zip(ours, theirs, strict=True))
    ratios = [
        (b["decode_s"] / (len(b["tokens"]) - 1)) / (a["decode_s"] / (len(a["tokens"]) - 1))
        for a, b in pairs
        if len(a["tokens"]) > 1 and len(b["tokens"]) > 1 and a["decode_s"] > 0
    ]
    return {
        "arm": arm.name,
        "baseline": baseline.name,
        "decode_ratio": _ratio(ours_summary["decode_tokens_per_s"], theirs_summary["decode_tokens_per_s"]),
        "median_decode_ratio": median(ratios) if ratios else None,
        "end_to_end_ratio": _ratio(
            ours_summary["end_to_end_tokens_per_s"], theirs_summary["end_to_end_tokens_per_s"]
        ),
        "identical_samples": sum(a["tokens"] == b["tokens"] for a, b in pairs),
        "compared_samples": len(pairs),
    }


def liveness(arms: Sequence[Arm]) -> dict[str, Any]:
    """What ran in the rows: forwards of our loop, and those of the drafter (one for every block)."""
    rounds = [item for arm in arms for row in arm.samples for item in row["rounds"]]
    drafted = sum(1 for item in rounds if item["block"] >= 2)
    return {"rounds": len(rounds), "drafter_forwards": drafted, "restored_positions": 0, "fallbacks": []}


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
        request: Request | None = None,
    ) -> "Report":
        """Put the parts together and derive the rest."""
        document: dict[str, Any] = {"schema": SCHEMA, "kind": kind}
        if request is not None:
            document["request"] = {
                "nonce": request.nonce,
                "workload_sha": request.workload_sha,
                "preset_digest": request.preset_digest,
                "engine_source": request.engine_source,
            }
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
            "summary": summarise(arms),
        }
        return cls(document)

    def write(self, path: Path) -> None:
        """Write the file whole or not at all.

        Raises:
            EngineError: it is larger than a report may be, or cannot be written.
        """
        data = json.dumps(self.document, allow_nan=False, ensure_ascii=False, indent=1).encode() + b"\n"
        if len(data) > LARGEST:
            raise EngineError(f"the report has {len(data)} bytes, more than {LARGEST}; use a smaller --limit")
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


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
