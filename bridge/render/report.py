"""Judged requests and evidence files as one page: HTML that loads nothing from anywhere, or Markdown.

Every figure is computed from rows that the gate read, whether it accepted them or not. Texts of others lose
harmful characters and are escaped where the template shows them (`_shown`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from bridge import __version__
from bridge.client.fetch import Judged
from bridge.evidence.gate import Judgement
from bridge.evidence.paired import CONFIDENCE, block_ratios, estimate
from bridge.protocol.result import ATTESTATION_KEY_FACT, Violation
from bridge.protocol.sanitize import clean_line
from bridge.render.evidence import (
    MISSING,
    EvidenceTable,
    bytes_text,
    evidence_tables,
    markdown_evidence,
    markdown_table,
    number_text,
    ratio_text,
    summary,
)
from bridge.render.outcome import paired_lines, verification_lines
from evidence_format.claims import FEWEST_SAMPLES
from evidence_format.figures import hit, pair_samples
from evidence_format.model import Report, Summary
from evidence_format.paired import Paired
from evidence_format.verification import Verification

MOST_BYTES = 2_000_000
# Rows of a table, reports on the page and characters of a text, until the page is small enough.
_LIMITS = ((300, 8, 1000), (40, 8, 400), (10, 4, 100), (0, 1, 50), (0, 0, 50))
_RESAMPLED = 60  # samples that an interval is computed from
_WIDTH, _ROW, _TOP = 360.0, 34.0, 6.0  # of a chart, in its own units
_LONGEST = 24  # tokens of a round that have a column of their own
_NAME = 22  # characters of an arm's name in a chart
_CHARTS = 6  # of one kind in a report
_ROLES = {"sut": "under test", "baseline": "baseline", "oracle": "oracle", "control": "control"}
# A log ratio; an interval that is wider than this says nothing.
_MAX_LOG_INTERVAL = 3.0


@dataclass(frozen=True)
class ReportSubject:
    """What a page is about: a request's judged result, or a file on this machine."""

    name: str  # the handle, or the path
    judgements: Mapping[str, Judgement]  # by path
    judged: Judged | None = None  # None: a file, which no signature covers


@dataclass(frozen=True)
class Shape:
    """A part of a chart: ``rect`` (x, y, width, height), ``line`` (two points), ``circle``, ``text``."""

    kind: str
    css: str
    at: tuple[float, ...]
    text: str = ""


@dataclass(frozen=True)
class Chart:
    """A drawing with the sentences that say the same."""

    title: str
    description: str
    height: float
    shapes: list[Shape]
    legend: tuple[tuple[str, str], ...] = ()  # css class and meaning


@dataclass(frozen=True)
class DataTable:
    """A table with its caption; a folded one opens by a click. `tints` colour cells from 0 to 4."""

    caption: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    broken: int = 0  # how many of the last rows name a broken rule
    folded: bool = False
    tints: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """One heading of a subject; without charts, tables and lines it is left out."""

    title: str
    charts: list[Chart] = field(default_factory=list)
    tables: list[DataTable] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """A subject as the template shows it."""

    name: str
    status: str
    message: str
    is_good: bool
    violations: list[Violation]
    facts: DataTable
    sections: list[Section]


def html(subjects: Sequence[ReportSubject], compared: Sequence[str] = ()) -> str:
    """The page, of at most `MOST_BYTES` bytes; it says what it leaves out.

    `compared`: what a comparison of them found.
    """
    page = ""
    for rows, reports, characters in _LIMITS:
        each = max(1, reports // len(subjects)) if reports else 0
        page = _template(characters).render(
            blocks=[_block(subject, rows, each) for subject in subjects],
            comparison=_comparison(subjects) if len(subjects) > 1 else None,
            compared=compared,
            characters=characters if characters < _LIMITS[0][2] else None,
            version=__version__,
        )
        if len(page.encode()) <= MOST_BYTES:
            return page
    raise ValueError(f"the page has {len(page.encode())} bytes, more than {MOST_BYTES}")


def markdown(subjects: Sequence[ReportSubject], compared: Sequence[str] = ()) -> str:
    """The same in GitHub's Markdown, without charts and whole."""
    parts = []
    if len(subjects) > 1:
        table = _comparison(subjects)
        parts.append("## Comparison\n\n" + markdown_table(table.headings, table.rows))
        if compared:
            parts.append(markdown_table(("compared",), [(line,) for line in compared]))
    for subject in subjects:
        if subject.judged is not None:
            parts.append(summary(subject.name, subject.judged))
        else:
            parts.append("\n".join(markdown_evidence(subject.judgements)).lstrip("\n") + "\n")
    return "\n".join(parts)


@cache
def _template(characters: int) -> Template:
    environment = Environment(
        loader=PackageLoader("bridge", "render"),
        autoescape=True,
        finalize=partial(_shown, characters),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def _shown(characters: int, value: Any) -> Any:
    """A value on its way into the page; jinja2 escapes it afterwards, except what a macro made."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return clean_line(value, limit=characters)
    return value


# Blocks and sections --------------------------------------------------------------------------------------


def _block(subject: ReportSubject, rows: int, reports: int) -> Block:
    judged, shown = subject.judged, dict(list(subject.judgements.items())[:reports])
    sections: list[Section] = []
    for path, judgement in shown.items():
        sections += _evidence(path if len(subject.judgements) > 1 else "", judgement, rows)
    if left := len(subject.judgements) - len(shown):
        sections.append(Section("Other reports", lines=[f"{left} more reports of this result are not shown"]))
    if judged is not None and judged.gate_record is not None:
        entries = judged.gate_record.files
        table = DataTable(
            "Reports that the job judged",
            ("file", "gate", "kind", "broken rules"),
            [
                (
                    each.file,
                    "accepted" if each.accepted else "REJECTED",
                    each.kind or MISSING,
                    " ".join(violation.code for violation in each.violations[:20]),
                )
                for each in entries[:rows]
            ],
        )
        sections.append(Section("Judged in the job", tables=[table], lines=_left_out(len(entries), rows)))
    if judged is not None and judged.verification is not None:
        sections.append(_verification(judged.verification, rows))
    if judged is None:
        accepted = all(judgement.accepted for judgement in shown.values())
        broken = [each for judgement in shown.values() for each in judgement.violations]
        status = "accepted" if accepted else "rejected"
        message = "judged by the gate installed here; a file, so no signature says who wrote it"
        facts = DataTable("The evidence", (), list(_file_facts(shown)))
        return Block(subject.name, status, message, accepted, broken[:50], facts, _filled(sections))
    verdict = judged.verdict
    broken = list(verdict.violations or (each for j in shown.values() for each in j.violations))
    facts = DataTable("The request", (), list(_facts(judged)))
    if judged.believed.result.files:
        files = [
            (file.path, file.role, f"{file.bytes} B", file.sha256) for file in judged.believed.result.files
        ]
        table = DataTable("Published files", ("file", "role", "size", "sha256"), files[:rows], folded=True)
        sections.append(Section("Files", tables=[table], lines=_left_out(len(files), rows)))
    is_good = judged.exit_code == 0
    return Block(
        subject.name, verdict.status, _message(judged), is_good, broken[:50], facts, _filled(sections)
    )


def _file_facts(judgements: Mapping[str, Judgement]) -> Iterator[tuple[str, str]]:
    for judgement in judgements.values():
        yield "kind", judgement.kind or "not a report that can be read"
        record = judgement.report or judgement.paired
        request = None if record is None else record.request
        if request is not None:
            yield "stated request", request.nonce
            yield "stated workload commit", request.workload_sha


def _message(judged: Judged) -> str:
    verdict = judged.verdict
    if verdict.message and verdict.reason != "ok":
        return f"{verdict.reason}: {verdict.message}"
    return judged.believed.sentence


def _filled(sections: Sequence[Section]) -> list[Section]:
    return [each for each in sections if each.charts or each.tables or each.lines]


def _left_out(count: int, limit: int) -> list[str]:
    return [f"{limit} of {count} rows are shown, to keep this page small"] if count > limit else []


def _facts(judged: Judged) -> Iterator[tuple[str, str]]:
    """Who ran what, from the result."""
    believed, result = judged.believed, judged.believed.result
    yield "verdict", f"{judged.verdict.status}/{judged.verdict.reason}"
    yield "signature", believed.sentence
    yield "preset", result.preset or MISSING
    for name, value in result.params.items():
        yield f"parameter {name}", str(value)
    yield "workload commit", result.workload_sha or MISSING
    if result.engine_source is not None:
        of_commit = result.engine_source == "workload"
        said = "code of that commit" if of_commit else "installed on the Mac; the commit was not measured"
        yield "engine", said
    yield "request commit", result.request_commit
    yield "result commit", f"{believed.commit} on {believed.ref}"
    yield "runner", f"{result.runner.name}, kakeya-mac {result.runner.version}, attempt {result.attempt}"
    yield "time", f"{result.started_at} to {result.finished_at}"
    for phase, seconds in list(result.phase_seconds.items())[:20]:
        yield f"seconds {phase}", f"{seconds:.1f}"
    if expected := believed.expected:
        yield "requested by", expected.requested_by or MISSING
    for text in judged.agreement.not_compared:
        yield "not compared", text
    if key := result.runner.machine.get(ATTESTATION_KEY_FACT):
        yield "attestation key", f"Ed25519 {key}; kakeya_mac attest {result.nonce} checks its signatures"


def _evidence(path: str, judgement: Judgement, rows: int) -> Iterator[Section]:
    """The sections of one report; `path` is named where there are several."""
    of = f" ({path})" if path else ""
    tables = [_data(table, of) for table in evidence_tables(judgement)]
    claims = [table for table in tables if table.headings[0] == "gate"]
    yield Section(f"Gate{of}", tables=claims)
    if judgement.paired is not None:
        yield _paired(judgement.paired, of, rows)
    report, figures = judgement.report, judgement.figures
    if report is None or figures is None:
        return
    yield Section(f"Figures{of}", tables=[table for table in tables if table.headings[0] != "gate"])
    yield _speed(report, of, rows)
    yield _acceptance(report, figures, of)
    yield _time_split(report, of)
    yield _recall(report, of)
    yield _memory(report, of)
    yield _environment(report, of)


def _data(table: EvidenceTable, of: str) -> DataTable:
    first = table.headings[0]
    caption = {"gate": "Claims and broken rules", "arm": "Figures of each arm"}.get(first, first)
    headings = tuple(heading or "value" for heading in table.headings)
    return DataTable(f"{caption}{of}", headings, table.rows, table.broken)


def _verification(record: Verification, rows: int) -> Section:
    table = DataTable(
        "Replayed rows",
        ("row", "drawn", "tokens checked", "largest gap", "allowed", "rounds replayed", "differing"),
        [
            (
                f"{row.arm}/{row.prompt_id}",
                "yes" if row.drawn else "in addition",
                str(row.tokens.checked),
                f"{row.tokens.largest_gap:.3g}",
                f"{row.tokens.allowed:.3g}",
                str(row.rounds.replayed),
                str(row.rounds.differing),
            )
            for row in record.rows[:rows]
        ],
        folded=True,
    )
    lines = [line.strip() for line in verification_lines(record)]
    shown = lines[:40] + ([f"{len(lines) - 40} more lines are not shown"] if len(lines) > 40 else [])
    tables = [table] if table.rows else []
    return Section("Verification", tables=tables, lines=shown + _left_out(len(record.rows), rows))


def _paired(record: Paired, of: str, rows: int) -> Section:
    """Ratio by block, with the interval that the record states."""
    found = record.summary
    blocks = [(block, math.exp(log)) for block, log in block_ratios(record.runs)]
    lines = [line.strip() for line in paired_lines(record)]
    if found.ratio is None:
        return Section(f"Paired run{of}", lines=lines)
    low, high = found.interval or (found.ratio, found.ratio)
    ratios = [ratio for _, ratio in blocks]
    strip = ("workload / against", f"{found.ratio:.3f}", ratios, (found.ratio, low, high))
    description = f"Time of the workload over that of the other side, one dot a block. {' '.join(lines[1:])}"
    chart = _strips("Time ratio by block", description, [strip], unit="above 1: slower", reference=1.0)
    table = DataTable(
        f"Blocks{of}",
        ("block", "workload, s", "against, s", "against, s", "workload, s", "ratio"),
        [
            (str(number), *(f"{run.value:.6g}" for run in block), f"{ratio:.4f}")
            for number, (block, ratio) in enumerate(blocks, 1)
        ][:rows],
        folded=True,
    )
    return Section(f"Paired run{of}", [chart], [table], lines)


def _speed(report: Report, of: str, rows: int) -> Section:
    """Tokens per second of each sample; intervals of each arm's speed, and of its ratio to the baseline."""
    arms = [arm for arm in report.arms if arm.steps_s]
    if not arms:
        return Section("Speed")
    plain = next(iter(report.with_role("baseline") or report.with_role("oracle")), None)
    strips, intervals = [], []
    for arm in arms:
        steps = arm.steps_s
        speed = _interval([-math.log(step) for step in steps], arm.name)
        ratio = None
        if plain is not None and arm is not plain:
            pairs = [(ours.step_s, theirs.step_s) for ours, theirs in pair_samples(arm, plain)]
            ratio = _interval([math.log(b / a) for a, b in pairs if a and b], arm.name)
        strips.append(
            (arm.name, _range(speed, number_text), _sample_evenly([1 / step for step in steps], rows), speed)
        )
        cells = (str(len(steps)), _range(speed, number_text), _range(ratio, ratio_text))
        intervals.append((arm.name, *cells))
    said = "; ".join(f"{name}: {text}" for name, text, *_ in strips[:8])
    description = f"One dot a sample, the bar is the interval at {CONFIDENCE:.0%}. Tokens per second: {said}."
    against = "" if plain is None else f" to {plain.name}"
    summary_table = DataTable(
        f"Typical speed and its {CONFIDENCE:.0%} interval{of}",
        ("arm", "samples", "decode tok/s", f"ratio{against}"),
        intervals,
    )
    samples = [
        (
            arm.name,
            sample.prompt_id,
            str(sample.prompt_tokens),
            str(len(sample.tokens)),
            number_text(None if sample.step_s is None else 1 / sample.step_s),
            sample.finish_reason,
            sample.path,
        )
        for arm in arms
        for sample in arm.samples
        if sample.step_s
    ]
    table = DataTable(
        f"Samples{of}",
        ("arm", "prompt", "prompt tokens", "tokens", "decode tok/s", "end", "path"),
        _sample_evenly(samples, rows),
        folded=True,
    )
    lines = [
        "Each prompt counts alike: a 20 % trimmed mean over the prompts with a bootstrap-t interval."
        " The gate judges the ratio of totals under Figures."
    ]
    if any(len(arm.steps_s) > _RESAMPLED for arm in arms):
        lines.append(f"Intervals are computed from {_RESAMPLED} samples of an arm, spread evenly.")
    charts = [_strips("Decode speed by sample", description, strips, unit="tokens per second")]
    return Section(f"Speed{of}", charts, [summary_table, table], lines + _left_out(len(samples), rows))


def _acceptance(report: Report, figures: Summary, of: str) -> Section:
    """How many tokens a drafted round gave, as the gate's acceptance length counts them."""
    counted = {
        arm.name: Counter(min(turn.accepted + 1, _LONGEST) for turn in arm.rounds if turn.block >= 2)
        for arm in report.arms
        if arm.drafted_blocks
    }
    if not counted:
        return Section("Acceptance length")
    longest = max(max(counts) for counts in counted.values())
    sizes = range(1, longest + 1)
    names = [f"{_LONGEST}+" if size == _LONGEST else str(size) for size in sizes]
    tested = [arm.name for arm in report.with_role("sut") if arm.name in counted] or list(counted)
    means = {name: number_text(figures.arms[name].acceptance_length) for name in counted}
    charts = []
    for name in tested[:_CHARTS]:
        counts, total = counted[name], counted[name].total()
        mean = means[name]
        description = f"{total} rounds, {mean} tokens a round. Rounds by tokens: " + ", ".join(
            f"{text}: {counts[size]}" for size, text in zip(sizes, names, strict=True) if counts[size]
        )
        shares = [counts[size] / total for size in sizes]
        charts.append(_columns(f"{_cut(name)}: {mean} tokens a round", description, names, shares))
    rows = [(name, *(str(counts[size]) for size in sizes)) for name, counts in counted.items()]
    table = DataTable(f"Rounds by tokens{of}", ("arm", *names), rows, folded=True)
    lines = ["Accepted drafts and the one token that each round adds, of the rounds that verified drafts."]
    return Section(f"Acceptance length{of}", charts, [table], lines + _fewer(len(tested)))


def _fewer(count: int) -> list[str]:
    return [f"{_CHARTS} of {count} arms are drawn; the table has all"] if count > _CHARTS else []


def _time_split(report: Report, of: str) -> Section:
    """Milliseconds of a round: draft, verification and the rest of its arm's decoding time."""
    parts = ("draft", "verify", "other")
    bars, rows = [], []
    for arm in report.arms:
        turns = arm.rounds
        if not turns:
            continue
        draft = 1e3 * sum(turn.draft_s for turn in turns) / len(turns)
        verify = 1e3 * sum(turn.verify_s for turn in turns) / len(turns)
        total = 1e3 * sum(s.decode_s or 0.0 for s in arm.samples if s.rounds) / len(turns)
        split = (draft, verify, max(0.0, total - draft - verify))
        bars.append((arm.name, f"{sum(split):.2f} ms", list(zip(parts, split, strict=True))))
        rows.append((arm.name, str(len(turns)), *(f"{each:.3f}" for each in (*split, sum(split)))))
    if not bars:
        return Section("Time of a round")
    said = "; ".join(f"{row[0]}: {row[2]}, {row[3]}, {row[4]}" for row in rows[:8])
    description = f"Milliseconds a round for drafting, verification and everything else. {said}."
    legend = (("draft", "draft"), ("verify", "verify"), ("other", "other"))
    chart = _bars("Milliseconds of a round", description, bars, legend)
    headings = ("arm", "rounds", "draft, ms", "verify, ms", "other, ms", "round, ms")
    return Section(
        f"Time of a round{of}", [chart], [DataTable(f"Milliseconds of a round{of}", headings, rows)]
    )


def _recall(report: Report, of: str) -> Section:
    """Answers that came back, by how deep in the prompt they were hidden."""
    depths = sorted({needle.depth for arm in report.arms for needle in arm.needles})
    if not depths:
        return Section("Recall by depth")
    shown = depths[:16]
    rows, tints = [], []
    for arm in report.arms:
        cells, colours = [], []
        for depth in shown:
            hits = [hit(s) for s in arm.samples if s.needle is not None and s.needle.depth == depth]
            cells.append(f"{sum(hits)}/{len(hits)}" if hits else MISSING)
            colours.append(round(4 * sum(hits) / len(hits)) if hits else -1)
        rows.append((arm.name, arm.control or _ROLES[arm.role], *cells))
        tints.append((-1, -1, *colours))
    headings = ("arm", "role", *(f"{depth:.0%}" for depth in shown))
    table = DataTable(f"Answers found, by depth in the prompt{of}", headings, rows, tints=tints)
    lines = [f"{len(shown)} of {len(depths)} depths are shown"] if len(depths) > len(shown) else []
    return Section(f"Recall by depth{of}", tables=[table], lines=lines)


def _memory(report: Report, of: str) -> Section:
    """The largest caches of each arm, by its KV policy."""
    bars, rows = [], []
    for arm in report.arms:
        if not arm.samples:
            continue
        largest = max(arm.samples, key=lambda sample: sample.cache.resident_bytes).cache
        text = bytes_text(largest.resident_bytes)
        bars.append((arm.name, text, [("bytes", float(largest.resident_bytes))]))
        rows.append((arm.name, arm.system.kv, text, "measured" if largest.measured else "by formula"))
    if not bars:
        return Section("KV cache")
    said = "; ".join(f"{name}: {text}" for name, text, _ in bars[:8])
    chart = _bars("Largest KV cache", f"Resident bytes of the largest cache of each arm. {said}.", bars)
    headings = ("arm", "KV policy", "largest cache", "how known")
    return Section(
        f"KV cache{of}", [chart], [DataTable(f"KV cache by policy{of}", headings, rows, folded=True)]
    )


def _environment(report: Report, of: str) -> Section:
    """Machine, versions, source, models and switches, as the report states them."""
    where = report.environment
    share = where.load.other_cpu_share
    facts = [
        ("chip", f"{where.chip}, {where.cpu_count} cores, {bytes_text(where.memory_bytes)}"),
        ("system", f"{where.system} {where.os_release} on {where.machine}"),
        ("device", f"{where.device}, BLAS {where.blas}, Metal {'yes' if where.metal else 'no'}"),
        ("power, thermal state", f"{where.power_source}, {where.thermal_state}"),
        ("other load", MISSING if share is None else f"{share:.1%} of the CPU time"),
        ("versions", ", ".join(f"{name} {version}" for name, version in where.versions)),
        ("source commit", f"{where.git.sha or MISSING}{' with changes' if where.git.dirty else ''}"),
        ("source sha256", where.git.source_sha256),
        ("measured", f"{report.started_at:%Y-%m-%d %H:%M:%S}Z to {report.finished_at:%Y-%m-%d %H:%M:%S}Z"),
    ]
    facts += [
        (f"fallback of {fall.component}", f"{fall.reason} ({fall.count} times)")
        for fall in report.liveness.fallbacks[:10]
    ]
    models = [
        (
            role,
            model.id,
            model.dtype,
            model.quantization or MISSING,
            f"{model.parameters:,}",
            model.weights_sha256,
        )
        for role, model in where.models.items()
    ]
    settings = [(name, str(value)) for name, value in report.configuration.items()]
    tables = [DataTable(f"Environment{of}", (), facts)]
    headings = ("role", "model", "type", "quantization", "parameters", "weights sha256")
    if models:
        tables.append(DataTable(f"Models{of}", headings, models, folded=True))
    if settings:
        tables.append(DataTable(f"Configuration{of}", ("switch", "value"), settings, folded=True))
    return Section(f"Environment and configuration{of}", tables=tables)


def _comparison(subjects: Sequence[ReportSubject]) -> DataTable:
    """The subjects next to each other."""
    columns = [dict(_compared_facts(subject)) for subject in subjects]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, MISSING) for column in columns)) for name in names]
    headings = ("what", *(clean_line(subject.name, limit=60) for subject in subjects))
    return DataTable("Side by side", headings, rows)


def _compared_facts(subject: ReportSubject) -> Iterator[tuple[str, str]]:
    judged = subject.judged
    if judged is not None:
        result = judged.believed.result
        yield "verdict", f"{judged.verdict.status}/{judged.verdict.reason}"
        yield "preset", result.preset or MISSING
        yield "runner", result.runner.name
        yield "workload", (result.workload_sha or MISSING)[:12]
        for name, value in result.params.items():
            yield f"parameter {name}", clean_line(str(value), limit=100)
    else:
        accepted = all(judgement.accepted for judgement in subject.judgements.values())
        yield "gate", "accepted" if accepted else "REJECTED"
    for judgement in list(subject.judgements.values())[:1]:
        report, figures = judgement.report, judgement.figures
        if report is None or figures is None:
            continue
        yield "chip", report.environment.chip
        yield "kind", report.kind
        ratios = {pair.arm: pair for pair in figures.comparisons}
        for arm in report.arms[:16]:
            found, name = figures.arms[arm.name], clean_line(arm.name, limit=60)
            yield f"{name}: decode tok/s", number_text(found.decode_tokens_per_s)
            if arm.name in ratios:
                yield f"{name}: ratio", ratio_text(ratios[arm.name].decode_ratio)
            if found.acceptance_length is not None:
                yield f"{name}: acceptance length", number_text(found.acceptance_length)
            if found.recall is not None:
                yield f"{name}: recall", number_text(found.recall)
            yield f"{name}: KV cache", bytes_text(found.max_resident_bytes)


# Figures --------------------------------------------------------------------------------------------------

Interval = tuple[float, float, float]  # middle, low, high
T = TypeVar("T")


def _interval(logs: Sequence[float], seed: str) -> Interval | None:
    """The trimmed mean of logarithms with its interval, as values; None: too few, or they cannot tell."""
    if len(logs) < FEWEST_SAMPLES:
        return None
    found = _estimate(tuple(_sample_evenly(logs, _RESAMPLED)), seed)
    if not found.half < _MAX_LOG_INTERVAL:
        return None
    return tuple(math.exp(found.center + side * found.half) for side in (0, -1, 1))  # type: ignore[return-value]


_estimate = lru_cache(1024)(estimate)  # a page is made again while it is too large


def _range(found: Interval | None, text: Any) -> str:
    return MISSING if found is None else f"{text(found[0])} ({text(found[1])} to {text(found[2])})"


def _sample_evenly(values: Sequence[T], most: int) -> list[T]:
    """At most so many of the values, evenly from all of them."""
    if len(values) <= most:
        return list(values)
    return [values[index * len(values) // most] for index in range(most)]


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


# Charts ---------------------------------------------------------------------------------------------------


def _axis(low: float, high: float, bottom: float) -> tuple[list[Shape], Any]:
    """Grid lines with round numbers, and what places a value on them."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span))
    step = next(each for each in (step / 5, step / 2, step, step * 2) if span / each <= 5)
    shapes = []

    def place(value: float) -> float:
        return 4 + (value - low) / span * (_WIDTH - 8)

    tick = math.ceil(low / step - 1e-9) * step
    while tick <= high + step * 1e-9:
        x = place(tick)
        shapes.append(Shape("line", "grid", (x, _TOP, x, bottom)))
        css = "tick first" if x < 20 else "tick last" if x > _WIDTH - 20 else "tick"
        shapes.append(Shape("text", css, (x, bottom + 14), f"{tick:g}"))
        tick += step
    return shapes, place


def _head(number: int, name: str, value: str) -> list[Shape]:
    """The line above a row's marks."""
    y = _TOP + number * _ROW + 12
    return [Shape("text", "name", (0, y), _cut(name)), Shape("text", "value", (_WIDTH, y), value)]


def _strips(
    title: str,
    description: str,
    rows: Sequence[tuple[str, str, Sequence[float], Interval | None]],
    *,
    unit: str,
    reference: float | None = None,
) -> Chart:
    """A dot a value and a bar for its interval, one row each; from 0, or around the reference."""
    values = [value for _, _, dots, found in rows for value in (*dots, *(found or ()))]
    low, high = 0.0, max(values, default=1.0)
    if reference is not None:
        low, high = min([*values, reference]), max([*values, reference])
        low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    bottom = _TOP + len(rows) * _ROW + 2
    shapes, place = _axis(low, high, bottom)
    if reference is not None:
        shapes.append(Shape("line", "reference", (place(reference), _TOP, place(reference), bottom)))
    for number, (name, text, dots, found) in enumerate(rows):
        y = _TOP + number * _ROW + 24
        shapes += _head(number, name, text)
        shapes += [Shape("circle", "dot", (place(value), y, 3.5)) for value in dots]
        if found is not None:
            middle, left, right = map(place, found)
            shapes.append(Shape("rect", "interval", (left, y - 2, max(right - left, 1), 4)))
            shapes.append(Shape("rect", "middle", (middle - 2, y - 7, 4, 14)))
    shapes.append(Shape("text", "tick", (_WIDTH / 2, bottom + 30), unit))
    return Chart(title, description, bottom + 36, shapes)


def _bars(
    title: str,
    description: str,
    rows: Sequence[tuple[str, str, Sequence[tuple[str, float]]]],
    legend: tuple[tuple[str, str], ...] = (),
) -> Chart:
    """A bar a row, of one part or several; each value is in words above its bar."""
    longest = max(sum(amount for _, amount in parts) for _, _, parts in rows) or 1.0
    shapes: list[Shape] = []
    for number, (name, text, parts) in enumerate(rows):
        shapes += _head(number, name, text)
        x, y = 0.0, _TOP + number * _ROW + 17
        shapes.append(Shape("rect", "track", (0, y, _WIDTH, 11)))
        for css, amount in parts:
            width = amount / longest * _WIDTH
            shapes.append(Shape("rect", css, (x, y, width, 11)))
            x += width
    return Chart(title, description, _TOP + len(rows) * _ROW + 2, shapes, legend)


def _columns(title: str, description: str, names: Sequence[str], shares: Sequence[float]) -> Chart:
    """A column a share, with its name below and its per cent above."""
    top, bottom, wide = 20.0, 130.0, _WIDTH / len(names)
    highest = max(shares) or 1.0
    shapes = []
    for number, (name, share) in enumerate(zip(names, shares, strict=True)):
        x, height = number * wide, share / highest * (bottom - top)
        shapes.append(Shape("rect", "column", (x + wide * 0.1, bottom - height, wide * 0.8, height)))
        if len(names) <= 12 or number % 2 == 0:
            shapes.append(Shape("text", "tick", (x + wide / 2, bottom + 14), name))
        if len(names) <= 12 and share >= 0.005:
            shapes.append(Shape("text", "tick", (x + wide / 2, bottom - height - 4), f"{share:.0%}"))
    shapes.append(Shape("line", "grid", (0, bottom, _WIDTH, bottom)))
    shapes.append(Shape("text", "tick", (_WIDTH / 2, bottom + 30), "tokens a round (share of rounds)"))
    return Chart(title, description, bottom + 36, shapes)
