"""Series of figures as lines, JSON, exports and an SVG plot. Texts of others pass `clean_line`."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from bridge.client.series import Figures, Series, SeriesCheck
from bridge.evidence.metrics import METRICS
from bridge.evidence.threshold import Threshold
from bridge.evidence.trend import FEWEST, changes
from bridge.protocol.sanitize import clean_line
from bridge.render import terminal
from bridge.render.outcome import bare_table, minute_text, plain
from bridge.render.terminal import document

_SHOWN_LEFT_OUT = 5
_TABLE_WIDTH = 100  # characters of a terminal that shows tables
# Columns of the exports that have one value a row.
_GROUP = ("preset", "preset_digest", "runner_id", "runner", "chip", "params", "against", "weights", "of")
_POINT = ("nonce", "finished_at", "commit", "engine", "value", "low", "high", "archived")


def series_lines(
    checked: Sequence[tuple[Series, SeriesCheck | None]], figures: Figures
) -> Iterator[str | Table]:
    """Each series as a table, the newest value last, what was asked of it, and what was left out."""
    for series, check in checked:
        yield from _heading(series)
        yield from _table(series)
        if check is not None:
            yield from check_lines(check)
        yield ""
    if figures.left_out:
        yield f"{len(figures.left_out)} of the requests left out:"
        for left in figures.left_out[:_SHOWN_LEFT_OUT]:
            yield f"  {left.nonce}  {clean_line(left.reason, limit=300)}"
        if len(figures.left_out) > _SHOWN_LEFT_OUT:
            yield "  ... (all of them: --json)"


def _heading(series: Series) -> Iterator[str]:
    metric, group = METRICS[series.metric], series.group
    better = "higher" if metric.higher_is_better else "lower"
    yield f"{series.metric} ({metric.unit}, {better} is better): {clean_line(group.of)}"
    yield f"  {clean_line(_where(series))}"


def _where(series: Series) -> str:
    group = series.group
    params = [f"{name}={value}" for name, value in group.params.items()]
    if group.against is not None:
        params += ["against", *(f"{name}={value}" for name, value in group.against.items())]
    chip = "" if group.chip is None else f" ({group.chip})"
    version = "" if group.preset_digest is None else f" {group.preset_digest[:12]}"
    return " ".join([f"{group.preset}{version} on {group.runner}{chip}", *params])


def _table(series: Series) -> Iterator[str | Table]:
    """One row a value; a narrow terminal gets lines without the columns that fit there no longer."""
    table = bare_table()
    for heading in ("request", "finished", "commit", series.metric, ""):
        table.add_column(heading, no_wrap=True, justify="right" if heading == series.metric else "left")
    found = changes(series.values)
    for number, point in enumerate(series.points):
        note = [] if number not in found else [_change_text(found[number])]
        note += ["archived"] if point.archived else []
        value, commit = figure_text(point.value), (point.commit or "")[:12]
        if terminal.width() < _TABLE_WIDTH:
            yield f"  {point.nonce}  {value:>8}  {', '.join(note)}".rstrip()
        table.add_row(*plain(point.nonce, minute_text(point.finished_at), commit, value, ", ".join(note)))
    if terminal.width() >= _TABLE_WIDTH:
        yield table


def _change_text(change: float | None) -> str:
    return "change" if change is None else f"change of {change:+.1%}"


def check_lines(check: SeriesCheck) -> Iterator[str]:
    """What was asked of the newest value and how it did, a line each."""
    value, compared = figure_text(check.series.values[-1]), check.comparison
    if check.threshold is not None:
        limit = f"{check.series.metric}{check.threshold.operator}{check.threshold.value:g}"
        yield f"  {'ok' if check.holds else 'FAILED'}  threshold: {value} against {limit}"
    if check.too_few:
        earlier = len(check.series.points) - 1
        yield f"  too few values to tell a regression: {earlier} earlier, {FEWEST} needed"
    if compared is not None:
        middle = figure_text(compared.median)
        if compared.worse is None:
            said = "compared with"
        else:
            said = f"{abs(compared.worse):.1%} {'worse' if compared.worse > 0 else 'better'} than"
        verdict = "REGRESSION" if compared.is_regression else "ok"
        yield (
            f"  {verdict}  {value} is {said} {middle}, the median of {compared.earlier} earlier values"
            f" (their noise {figure_text(compared.noise)})"
        )


def figure_text(value: float) -> str:
    """A figure for people: four significant digits, or all of a whole number."""
    return f"{value:.0f}" if value.is_integer() and abs(value) >= 1000 else f"{value:.4g}"


def series_json(series: Series, check: SeriesCheck | None) -> dict[str, Any]:
    """One series as JSON. `judged`: whether the newest result is in it."""
    metric, found = METRICS[series.metric], changes(series.values)
    compared = None if check is None else check.comparison
    return {
        "metric": series.metric,
        "unit": metric.unit,
        "higher_is_better": metric.higher_is_better,
        **vars(series.group),
        "judged": check is not None,
        "threshold_holds": check and check.holds,
        "comparison": None if compared is None else vars(compared),
        "values": [
            {
                "handle": point.nonce,
                **vars(point),
                "is_change": number in found,
                "change": found.get(number),
            }
            for number, point in enumerate(series.points)
        ],
    }


# Exports --------------------------------------------------------------------------------------------------


def to_bmf(found: Figures, metrics: Sequence[str]) -> str:
    """The newest result's figures in the Bencher Metric Format (https://bencher.dev/bmf.json).

    The format has no time: one document is one run. A benchmark is a group, a measure is a metric.
    """
    benchmarks: dict[str, dict[str, dict[str, float]]] = {}
    for series in (each for metric in metrics for each in found.of(metric)):
        point = series.points[-1]
        if point.nonce != found.newest():
            continue
        name = clean_line(f"{series.group.of}: {_where(series)}", limit=1000)
        bounds = {"lower_value": point.low, "upper_value": point.high}
        measure = {"value": point.value, **{key: each for key, each in bounds.items() if each is not None}}
        benchmarks.setdefault(f"{name} #{series.group.digest}", {})[series.metric] = measure
    return json.dumps(benchmarks, indent=2, sort_keys=True) + "\n"


def to_csv(found: Figures, metrics: Sequence[str]) -> str:
    """Every value, a row each. A text that a spreadsheet would take for a formula gets an apostrophe."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["metric", "unit", *_GROUP, *_POINT], lineterminator="\n")
    writer.writeheader()
    for row in _rows(found, metrics):
        writer.writerow({key: _cell(value) for key, value in row.items()})
    return text.getvalue()


def to_jsonl(found: Figures, metrics: Sequence[str]) -> str:
    """Every value, a JSON document each."""
    return "".join(json.dumps(row, sort_keys=True) + "\n" for row in _rows(found, metrics))


EXPORTS = {"bmf": to_bmf, "csv": to_csv, "jsonl": to_jsonl}


def _rows(found: Figures, metrics: Sequence[str]) -> Iterator[dict[str, Any]]:
    for series in (each for metric in metrics for each in found.of(metric)):
        group = {"metric": series.metric, "unit": METRICS[series.metric].unit, **vars(series.group)}
        yield from (document({**group, **vars(point)}) for point in series.points)


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = json.dumps(value, sort_keys=True)
    if isinstance(value, str):
        value = clean_line(value, limit=4000)
        return f"'{value}" if value.startswith(("=", "+", "-", "@")) else value
    return value


# Plot -----------------------------------------------------------------------------------------------------

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 240, 74, 20, 52, 34
_STYLE = """
svg { --ink: #24292f; --faint: #57606a; --line: #0969da; --mark: #bc4c00; background: #ffffff }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6edf3; --faint: #8b949e; --line: #58a6ff; --mark: #f0883e; background: #0d1117 }
}
text { fill: var(--ink); font: 12px system-ui, sans-serif }
.faint { fill: var(--faint) } .end { text-anchor: end } .mark { fill: var(--mark) }
line { stroke: var(--faint) } polyline { fill: none; stroke: var(--line); stroke-width: 1.5 }
circle { fill: var(--line) } .change { stroke: var(--mark); stroke-dasharray: 4 3 }
.limit { stroke: var(--mark) }
"""


def to_svg(found: Sequence[Series], threshold: Threshold | None) -> str:
    """One panel for each series: values in order, change points dashed, the threshold as a line."""
    metric = found[0].metric
    title = f"{metric} of {found[0].group.preset}"
    described = "; ".join(f"{each.group.of}, {_where(each)}: {len(each.points)} values" for each in found)
    height = _PANEL * len(found)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
            f' height="{height}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{_text(title)}</title>',
            f'<desc id="desc">{_text(described)}</desc>',
            f"<style>{_STYLE}</style>",
            *(line for number, each in enumerate(found) for line in _panel(each, number * _PANEL, threshold)),
            "</svg>\n",
        ]
    )


def _panel(series: Series, top: int, threshold: Threshold | None) -> Iterator[str]:
    values, points = series.values, series.points
    shown = [*values, *([] if threshold is None else [threshold.value])]
    low, high = min(shown), max(shown)
    margin = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin
    right, begin, end = _WIDTH - _RIGHT, top + _TOP, top + _PANEL - _BOTTOM

    def x(number: int) -> float:
        return _LEFT + (right - _LEFT) * (number + 0.5) / len(values)

    def y(value: float) -> float:
        return end - (end - begin) * (value - low) / (high - low)

    better = "higher" if METRICS[series.metric].higher_is_better else "lower"
    unit = METRICS[series.metric].unit
    yield f'<text x="{_LEFT}" y="{top + 18}">{_text(f"{series.metric} ({unit}, {better} is better)")}</text>'
    where = f"{series.group.of}: {_where(series)}"
    yield f'<text class="faint" x="{_LEFT}" y="{top + 36}">{_text(where, 105)}</text>'
    for value in (low + margin, high - margin):
        yield f'<line x1="{_LEFT}" y1="{y(value):.1f}" x2="{right}" y2="{y(value):.1f}" opacity="0.35"/>'
        label = figure_text(value)
        yield f'<text class="faint end" x="{_LEFT - 8}" y="{y(value) + 4:.1f}">{label}</text>'
    if threshold is not None:
        at = y(threshold.value)
        yield f'<line class="limit" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
        # On the side where no good value is.
        beyond = at + (14 if METRICS[series.metric].higher_is_better else -6)
        yield f'<text class="mark end" x="{right}" y="{beyond:.1f}">{_text(str(threshold))}</text>'
    for number, change in changes(values).items():
        at = (x(number - 1) + x(number)) / 2
        yield f'<line class="change" x1="{at:.1f}" y1="{begin}" x2="{at:.1f}" y2="{end}"/>'
        label = "change" if change is None else f"{change:+.1%}"
        yield f'<text class="mark" x="{at + 4:.1f}" y="{begin + 10}">{label}</text>'
    places = " ".join(f"{x(number):.1f},{y(value):.1f}" for number, value in enumerate(values))
    yield f'<polyline points="{places}"/>'
    for number, point in enumerate(points):
        commit = (point.commit or "")[:12]
        said = f"{figure_text(point.value)}, {point.nonce}, {point.finished_at}, commit {commit}"
        place = f'cx="{x(number):.1f}" cy="{y(point.value):.1f}" r="3.5"'
        yield f"<circle {place}><title>{_text(said)}</title></circle>"
    yield f'<text class="faint" x="{_LEFT}" y="{end + 20}">{_text(points[0].finished_at[:10])}</text>'
    last = points[-1].finished_at[:10]
    yield f'<text class="faint end" x="{right}" y="{end + 20}">{_text(last)}</text>'


def _text(text: str, limit: int = 1000) -> str:
    # XML has no place for the two, and `clean` leaves them.
    return html.escape(clean_line(text, limit=limit).replace("\ufffe", "").replace("\uffff", ""))
