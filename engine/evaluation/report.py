"""The evidence report ``kakeya.evidence/1``: rows, the figures derived from them, and the file.

Figures come from the rows as the file has them, rounded, so that a reader computes the same. Only the
drafter's forwards are counted where its network ran, so that drafts made without it are noticed.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

from engine.cache.stats import KVUse
from engine.errors import EngineError, wrap_errors
from engine.evaluation.prompts import Needle, Prompt
from engine.generate import Outcome
from evidence_format import model
from evidence_format.figures import summarise
from evidence_format.model import SCHEMA_ID, Arm, Report, ReportRequest, Sample
from evidence_format.parse import MAX_BYTES
from evidence_format.text import text_digest, tokens_digest

DIGITS = 7  # of a second after the point


def sample(
    prompt: Prompt,
    tokens: Sequence[int],
    outcome: Outcome,
    *,
    answer_text: str | None = None,
    distortion: tuple[float, float] | None = None,  # of keys and of values
) -> Sample:
    """A row: what one system made of one prompt, its needle searched in the answer (without reasoning)."""
    answer = outcome.text if answer_text is None else answer_text
    use, needle, text = outcome.kv, prompt.needle, prompt.text
    optional: dict[str, Any] = {
        "finish_reason": outcome.finish,
        "answer_text": answer if answer != outcome.text else None,
        "kept_positions": outcome.kept,
        "restored_positions": outcome.restored or None,
    }
    with wrap_errors(lambda reason: EngineError(f"no report can hold the row of {prompt.id}: {reason}")):
        if needle and text:
            optional["needle"] = needle_result(needle, text, answer, outcome.text)
        if use is not None:
            optional["kv"] = kv_record(use, *distortion or (None, None))
        return Sample(
            prompt_id=prompt.id,
            prompt_sha256=tokens_digest(tokens),
            source_sha256=prompt.source_sha256,
            instruction_sha256=text_digest(prompt.instruction),
            prompt_tokens=len(tokens),
            prefill_s=round(outcome.prefill_s, DIGITS),
            decode_s=round(outcome.decode_s, DIGITS),
            tokens=tuple(outcome.tokens),
            tokens_sha256=tokens_digest(outcome.tokens),
            text=outcome.text,
            path=outcome.path,
            rounds=tuple(
                model.VerifyRound(
                    block=item.block,
                    accepted=item.accepted,
                    draft_s=round(item.draft_s, DIGITS),
                    verify_s=round(item.verify_s, DIGITS),
                    **({"looked_up": True} if item.looked_up else {}),
                )
                for item in outcome.rounds
            ),
            cache=model.Cache(
                classes=outcome.cache_classes, resident_bytes=outcome.resident_bytes, measured=True
            ),
            **{name: value for name, value in optional.items() if value is not None},
        )


def needle_result(needle: Needle, prompt: str, answer: str, text: str) -> model.NeedleResult:
    """What a row says of its needle: where it was, and whether the answer has it."""
    wanted = needle.answer
    return model.NeedleResult(
        needle=needle.sentence,
        answer=wanted,
        depth=needle.depth,
        prompt_contains_answer_outside_needle=bool(wanted)
        and wanted in prompt.replace(needle.sentence, "", 1),
        prompt_contains_needle=needle.sentence in prompt,
        # the whole text must have it, too: the pieces around removed reasoning must not join to a hit
        hit=bool(wanted) and wanted in answer and wanted in text,
    )


def kv_record(use: KVUse, keys: float | None = None, values: float | None = None) -> model.KVRecord:
    """What a policy held, with the distortion of its keys and values where that was measured."""
    stored: dict[str, Any] = {"layers": use.layers, "values": use.values, "bytes": use.nbytes}
    return model.KVRecord(**stored, key_distortion=keys, value_distortion=values)


def build_report(
    kind: model.Kind,
    *,
    started: datetime,
    claims: Sequence[model.ReportClaim],
    environment: dict[str, Any],
    configuration: dict[str, Any],
    arms: Sequence[Arm] = (),
    drafter_forwards: int = 0,
    warm_up_forwards: int = 0,
    order: Sequence[tuple[str, str]] = (),
    rounding: model.Rounding | None = None,
    divergences: Sequence[model.Divergence] = (),
    restarts: Sequence[model.Restart] = (),
    parity: model.ParityComparison | None = None,
    perplexity: model.PerplexityComparison | None = None,
    request: ReportRequest | None = None,
) -> Report:
    """The report of finished arms, figures computed; EngineError where the format cannot hold it."""
    rows = [row for arm in arms for row in arm.samples]
    document: dict[str, Any] = {
        "schema": SCHEMA_ID,
        "kind": kind,
        **({} if request is None else {"request": request}),
        "started_at": stamp(started),
        "finished_at": stamp(now()),
        "claims": tuple(claims),
        "environment": environment,
        "configuration": configuration,
        "arms": tuple(arms),
        "order": tuple(order),
        "liveness": model.Liveness(
            rounds=sum(len(row.rounds) for row in rows),
            drafter_forwards=drafter_forwards,
            warm_up_forwards=warm_up_forwards,
            restored_positions=sum(row.restored_positions or 0 for row in rows),
            fallbacks=(),
        ),
        "rounding": rounding,
        "divergences": tuple(divergences),
        "restarts": tuple(restarts),
        **({} if parity is None else {"parity": parity}),
        **({} if perplexity is None else {"perplexity": perplexity}),
        "summary": summarise(
            arms,
            parity,
            perplexity,
            one_graph=configuration.get("single_graph") is True,
            cut=configuration.get("loops") == model.CUT_LOOPS,
        ),
    }
    with wrap_errors(lambda reason: EngineError(f"these results fit no report: {reason}")):
        return Report.model_validate(document)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write a report, or a record about one, whole or not at all."""
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
    """The present time, UTC."""
    return datetime.now(UTC)


def stamp(moment: datetime) -> str:
    """A time as reports write it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
