"""The evidence report ``kakeya.evidence/1``: rows, the figures derived from them, and the file.

Figures come from the rows as the file has them, rounded, so that a reader computes the same. Only the
drafter's forwards are counted where its network ran, so that drafts made without it are noticed.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from statistics import median
from typing import Any

from engine.errors import EngineError
from engine.evaluation.prompts import Needle, Prompt
from engine.generate import Outcome
from evidence_format.model import SCHEMA_ID, ReportRequest, quotient
from evidence_format.parse import MAX_BYTES
from evidence_format.text import degeneration, text_digest, tokens_digest

FIRST_BLOCKS = 8
DIGITS = 7  # of a second after the point

Row = dict[str, Any]


@dataclass
class Arm:
    name: str
    role: str  # sut, baseline, oracle or control
    loop: str
    drafter: str | None = None
    block: str | None = None
    control: str | None = None
    kv: str = "native"  # canonical policy
    restoration: str | None = None  # source of restored keys and values
    samples: list[Row] = field(default_factory=list)
    drafter_forwards: int = 0  # behind the samples, for `liveness`; the rows do not hold them

    def add(self, rows: Sequence[Row], drafter_forwards: int) -> None:
        self.samples.extend(rows)
        self.drafter_forwards += drafter_forwards

    def document(self) -> dict[str, Any]:
        system = ("loop", "drafter", "block", "kv", "restoration")
        return {
            **{key: getattr(self, key) for key in ("name", "role", "control")},
            "system": {key: getattr(self, key) for key in system},
            "timing_scope": "decode",
            "samples": self.samples,
        }


@dataclass(frozen=True)
class Distortion:
    """Relative squared error against native caches; see `evidence_format.model.KVUse`."""

    keys: float
    values: float


def sample(
    prompt: Prompt,
    tokens: Sequence[int],
    outcome: Outcome,
    *,
    answer_text: str | None = None,
    distortion: Distortion | None = None,
) -> Row:
    """A row: what one system made of one prompt, its needle searched in the answer (without reasoning)."""
    row: Row = {
        "prompt_id": prompt.id,
        "prompt_sha256": tokens_digest(tokens),
        "source_sha256": prompt.source_sha256,
        "instruction_sha256": text_digest(prompt.instruction),
        "prompt_tokens": len(tokens),
        "prefill_s": round(outcome.prefill_s, DIGITS),
        "decode_s": round(outcome.decode_s, DIGITS),
        "tokens": outcome.tokens,
        "tokens_sha256": tokens_digest(outcome.tokens),
        "text": outcome.text,
        "finish_reason": outcome.finish,
        "path": outcome.path,
        "rounds": [
            {name: round(value, DIGITS) for name, value in vars(item).items()} for item in outcome.rounds
        ],
        "cache": {
            "classes": outcome.cache_classes,
            "resident_bytes": outcome.resident_bytes,
            "measured": True,
        },
    }
    answer = outcome.text if answer_text is None else answer_text
    kv, needle, text = outcome.kv, prompt.needle, prompt.text
    use = kv and {
        "layers": list(kv.layers),
        "values": kv.values,
        "bytes": kv.nbytes,
        "key_distortion": distortion and distortion.keys,
        "value_distortion": distortion and distortion.values,
    }
    optional = {
        "answer_text": answer if answer != outcome.text else None,
        "kv": use,
        "kept_positions": outcome.kept,
        "restored_positions": outcome.restored or None,
        "needle": needle_fields(needle, text, answer, outcome.text) if needle and text else None,
    }
    return row | {name: value for name, value in optional.items() if value is not None}


def needle_fields(needle: Needle, prompt: str, answer: str, text: str) -> dict[str, Any]:
    wanted = needle.answer
    return {
        "needle": needle.sentence,
        "answer": wanted,
        "depth": needle.depth,
        "prompt_contains_answer_outside_needle": bool(wanted)
        and wanted in prompt.replace(needle.sentence, "", 1),
        "prompt_contains_needle": needle.sentence in prompt,
        # the whole text must have it, too: the pieces around removed reasoning must not join to a hit
        "hit": bool(wanted) and wanted in answer and wanted in text,
    }


@dataclass(frozen=True)
class Report:
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
        document: dict[str, Any] = {
            "schema": SCHEMA_ID,
            "kind": kind,
            **({"request": request.model_dump()} if request is not None else {}),
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
        write_document(path, self.document)


def write_document(path: Path, document: dict[str, Any]) -> None:
    data = json.dumps(document, allow_nan=False, ensure_ascii=False, indent=1).encode() + b"\n"
    if len(data) > MAX_BYTES:
        raise EngineError(f"the report has {len(data)} bytes, more than {MAX_BYTES}; use a smaller --limit")
    part = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        part.chmod(0o644)
        os.replace(part, path)
    except OSError as error:
        raise EngineError(f"the report cannot be written to {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def now() -> datetime:
    return datetime.now(UTC)


def stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def summarise(arms: Sequence[Arm], *, one_graph: bool = False) -> dict[str, Any]:
    """All derived figures; systems under test are compared with the baseline, or else with the oracle."""
    figures = {arm.name: _arm_summary(arm.samples) for arm in arms}
    for arm in arms if one_graph else ():
        figures[arm.name]["block_s"] = _block_times(arm.samples)
    references = [arm for role in ("baseline", "oracle") for arm in arms if arm.role == role]
    systems = [arm for arm in arms if arm.role == "sut"]
    return {
        "arms": figures,
        "comparisons": [_comparison(arm, other) for other in references[:1] for arm in systems],
    }


def _block_times(rows: Sequence[Row]) -> dict[str, Any] | None:
    seconds = [item["draft_s"] + item["verify_s"] for row in rows for item in row["rounds"]]
    if not seconds:
        return None
    return {"first": seconds[:FIRST_BLOCKS], "max": max(seconds), "mean": sum(seconds) / len(seconds)}


def _arm_summary(rows: Sequence[Row]) -> dict[str, Any]:
    decoded = [len(row["tokens"]) - 1 for row in rows]
    verified = [item for row in rows for item in row["rounds"] if item["block"] >= 2]
    needles = [row["needle"]["hit"] for row in rows if "needle" in row]
    coded = [row["kv"] for row in rows if "kv" in row]
    generated, decode_s = sum(decoded) + len(rows), sum(row["decode_s"] for row in rows)
    whole_s = sum(row["prefill_s"] + row["decode_s"] for row in rows)
    return {
        "samples": len(rows),
        "generated_tokens": generated,
        "decoded_tokens": sum(decoded),
        "median_decoded_tokens": median(decoded) if decoded else 0,
        "decode_tokens_per_s": quotient(sum(decoded), decode_s),
        "end_to_end_tokens_per_s": quotient(generated, whole_s),
        "verify_rounds": len(verified),
        "acceptance_length": quotient(sum(item["accepted"] + 1 for item in verified), len(verified)),
        "recall": quotient(sum(needles), len(needles)),
        "max_resident_bytes": max((row["cache"]["resident_bytes"] for row in rows), default=None),
        "stored_bits_per_value": quotient(
            8 * sum(kv["bytes"] for kv in coded), sum(kv["values"] for kv in coded)
        ),
        "key_distortion": _mean([kv["key_distortion"] for kv in coded]),
        "value_distortion": _mean([kv["value_distortion"] for kv in coded]),
        "runaway_samples": sum(degeneration(row["tokens"]) is not None for row in rows),
    }


def _mean(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return quotient(sum(known), len(known))


def _comparison(arm: Arm, baseline: Arm) -> dict[str, Any]:
    plain = {row["prompt_id"]: row for row in baseline.samples}
    pairs = [(row, plain[row["prompt_id"]]) for row in arm.samples if row["prompt_id"] in plain]
    ours, theirs = (_arm_summary(rows) for rows in ([a for a, _ in pairs], [b for _, b in pairs]))
    ratios = [
        (b["decode_s"] / (len(b["tokens"]) - 1)) / (a["decode_s"] / (len(a["tokens"]) - 1))
        for a, b in pairs
        if len(a["tokens"]) > 1 and len(b["tokens"]) > 1 and a["decode_s"] > 0
    ]
    return {
        "arm": arm.name,
        "baseline": baseline.name,
        "decode_ratio": quotient(ours["decode_tokens_per_s"], theirs["decode_tokens_per_s"]),
        "median_decode_ratio": median(ratios) if ratios else None,
        "end_to_end_ratio": quotient(ours["end_to_end_tokens_per_s"], theirs["end_to_end_tokens_per_s"]),
        "identical_samples": sum(a["tokens"] == b["tokens"] for a, b in pairs),
        "compared_samples": len(pairs),
    }


def parity_summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = sum(item["rows"] for item in rounds)
    paths = [item["path_equal"] for item in rounds if item["path_equal"] is not None]
    return {
        "cases": len({item["case"] for item in rounds}),
        "rounds": len(rounds),
        "rows": rows,
        **{name: _largest([item[name] for item in rounds]) for name in ("hidden_max_abs", "logits_max_abs")},
        "argmax_agreement": quotient(sum(item["argmax_agreement"] * item["rows"] for item in rounds), rows),
        "paths_equal": sum(paths),
        "paths_compared": len(paths),
    }


def _largest(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return max(known, default=None) if len(known) == len(figures) else None


def liveness(arms: Sequence[Arm]) -> dict[str, Any]:
    rows = [row for arm in arms for row in arm.samples]
    return {
        "rounds": sum(len(row["rounds"]) for row in rows),
        "drafter_forwards": sum(arm.drafter_forwards for arm in arms),
        "restored_positions": sum(row.get("restored_positions", 0) for row in rows),
        "fallbacks": [],
    }
