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
from statistics import median
from typing import Any

from engine.errors import EngineError, wrap_errors
from engine.evaluation.prompts import Needle, Prompt
from engine.generate import Outcome
from evidence_format import model
from evidence_format.model import SCHEMA_ID, Arm, Report, ReportRequest, Sample, quotient
from evidence_format.parse import MAX_BYTES
from evidence_format.text import degeneration, text_digest, tokens_digest

FIRST_BLOCKS = 8
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
            stored: dict[str, Any] = {"layers": use.layers, "values": use.values, "bytes": use.nbytes}
            keys, values = distortion or (None, None)
            optional["kv"] = model.KVRecord(**stored, key_distortion=keys, value_distortion=values)
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
                model.VerifyRound(**{name: round(value, DIGITS) for name, value in vars(item).items()})
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


def build_report(
    kind: model.Kind,
    *,
    started: datetime,
    claims: Sequence[model.ReportClaim],
    environment: dict[str, Any],
    configuration: dict[str, Any],
    arms: Sequence[Arm] = (),
    drafter_forwards: int = 0,
    order: Sequence[tuple[str, str]] = (),
    rounding: model.Rounding | None = None,
    divergences: Sequence[model.Divergence] = (),
    restarts: Sequence[model.Restart] = (),
    parity: model.ParityComparison | None = None,
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
            restored_positions=sum(row.restored_positions or 0 for row in rows),
            fallbacks=(),
        ),
        "rounding": rounding,
        "divergences": tuple(divergences),
        "restarts": tuple(restarts),
        **({} if parity is None else {"parity": parity}),
        "summary": summarise(arms, parity, one_graph=configuration.get("single_graph") is True),
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


def summarise(
    arms: Sequence[Arm], parity: model.ParityComparison | None = None, *, one_graph: bool = False
) -> model.Summary:
    """All derived figures; systems under test are compared with the baseline, or else with the oracle."""
    references = [arm for role in ("baseline", "oracle") for arm in arms if arm.role == role]
    systems = [arm for arm in arms if arm.role == "sut"]
    return model.Summary(
        arms={arm.name: _arm_summary(arm.samples, one_graph) for arm in arms},
        comparisons=tuple(_comparison(arm, other) for other in references[:1] for arm in systems),
        **({} if parity is None else {"parity": _parity_summary(parity.rounds)}),
    )


def _block_times(rows: Sequence[Sample]) -> model.BlockTimes | None:
    seconds = [item.draft_s + item.verify_s for row in rows for item in row.rounds]
    if not seconds:
        return None
    first, mean = tuple(seconds[:FIRST_BLOCKS]), sum(seconds) / len(seconds)
    return model.BlockTimes(first=first, max=max(seconds), mean=mean)


def _arm_summary(rows: Sequence[Sample], one_graph: bool = False) -> model.ArmSummary:
    decoded = [len(row.tokens) - 1 for row in rows]
    verified = [item for row in rows for item in row.rounds if item.block >= 2]
    needles = [row.needle.hit for row in rows if row.needle]
    coded = [row.kv for row in rows if row.kv]
    generated, decode_s = sum(decoded) + len(rows), sum(row.decode_s or 0.0 for row in rows)
    whole_s = sum((row.prefill_s or 0.0) + (row.decode_s or 0.0) for row in rows)
    return model.ArmSummary(
        samples=len(rows),
        generated_tokens=generated,
        decoded_tokens=sum(decoded),
        median_decoded_tokens=median(decoded) if decoded else 0,
        decode_tokens_per_s=quotient(sum(decoded), decode_s),
        end_to_end_tokens_per_s=quotient(generated, whole_s),
        verify_rounds=len(verified),
        acceptance_length=quotient(sum(item.accepted + 1 for item in verified), len(verified)),
        recall=quotient(sum(needles), len(needles)),
        max_resident_bytes=max((row.cache.resident_bytes for row in rows), default=None),
        stored_bits_per_value=quotient(8 * sum(kv.bytes for kv in coded), sum(kv.values for kv in coded)),
        key_distortion=_mean([kv.key_distortion for kv in coded]),
        value_distortion=_mean([kv.value_distortion for kv in coded]),
        runaway_samples=sum(degeneration(row.tokens) is not None for row in rows),
        **({"block_s": _block_times(rows)} if one_graph else {}),
    )


def _mean(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return quotient(sum(known), len(known))


def _comparison(arm: Arm, baseline: Arm) -> model.Comparison:
    plain = {row.prompt_id: row for row in baseline.samples}
    pairs = [(row, plain[row.prompt_id]) for row in arm.samples if row.prompt_id in plain]
    ours, theirs = (_arm_summary(rows) for rows in ([a for a, _ in pairs], [b for _, b in pairs]))
    ratios = [
        ((b.decode_s or 0.0) / (len(b.tokens) - 1)) / (a.decode_s / (len(a.tokens) - 1))
        for a, b in pairs
        if len(a.tokens) > 1 and len(b.tokens) > 1 and a.decode_s
    ]
    return model.Comparison(
        arm=arm.name,
        baseline=baseline.name,
        decode_ratio=quotient(ours.decode_tokens_per_s, theirs.decode_tokens_per_s),
        median_decode_ratio=median(ratios) if ratios else None,
        end_to_end_ratio=quotient(ours.end_to_end_tokens_per_s, theirs.end_to_end_tokens_per_s),
        identical_samples=sum(a.tokens == b.tokens for a, b in pairs),
        compared_samples=len(pairs),
    )


def _parity_summary(rounds: Sequence[model.ParityRound]) -> model.ParitySummary:
    rows = sum(item.rows for item in rounds)
    paths = [item.path_equal for item in rounds if item.path_equal is not None]
    return model.ParitySummary(
        cases=len({item.case for item in rounds}),
        rounds=len(rounds),
        rows=rows,
        hidden_max_abs=_largest([item.hidden_max_abs for item in rounds]),
        logits_max_abs=_largest([item.logits_max_abs for item in rounds]),
        argmax_agreement=quotient(sum(item.argmax_agreement * item.rows for item in rounds), rows),
        paths_equal=sum(paths),
        paths_compared=len(paths),
    )


def _largest(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return max(known, default=None) if len(known) == len(figures) else None
