"""``kakeya_mac history``: what ran, on branches and in the archive, and how its figures went over time."""

from __future__ import annotations

import re
import time
from typing import Any

import click

from bridge import presets
from bridge.cli import show, show_error, warn, write_text
from bridge.cli.completion import complete_preset
from bridge.cli.options import allow_unsigned_option, param_option, path_option
from bridge.cli.output import Connection, bus_command
from bridge.client.history import history as read_history
from bridge.client.recent import remember
from bridge.client.series import Figures, check_newest, read_figures
from bridge.errors import ParameterError, TooFewResults
from bridge.evidence.metrics import METRICS
from bridge.evidence.threshold import Threshold, parse_threshold
from bridge.protocol.result import Status
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import request_table, row_json
from bridge.render.series import EXPORTS, check_lines, series_json, series_lines, to_svg

_LISTED, _READ = 20, 100  # requests, unless -n says another number
_PAUSE_S = 2.0  # between two lines of progress
_NAMES = "".join(f"  {name:<24} {each.text}\n" for name, each in METRICS.items())


def _share(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """``5%`` as 0.05."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)%", text.strip())
    if match is None:
        raise click.BadParameter(f"{ascii(text)[:60]} is no percentage; write 5%")
    return float(match[1]) / 100


def _threshold(_context: click.Context, _option: click.Parameter, text: str | None) -> Threshold | None:
    return None if text is None else parse_threshold(text)


@click.command(
    epilog=f"""\b
Examples:
  kakeya_mac history
  kakeya_mac history -n 100 --preset throughput --status failed
  kakeya_mac history --preset throughput --metric decode_ratio --threshold 'ratio>=1.5' --regression 5%
  kakeya_mac history --preset throughput --metric decode_ratio --plot speed.svg
  kakeya_mac history --preset throughput --export csv > figures.csv

\b
Metrics, as the gate installed here computes them from each report:
{_NAMES}
\b
A series has the values of one runner, preset version, set of parameters, weights and arm. --threshold and
--regression ask about the newest result that counts: 0 it is good, 1 it fails or is a regression, 4 too few
results to tell. docs/history.md has the rules.

JSON: {{"requests": [...], "complete": BOOL}}; each request has handle, nonce, preset, requested_by (as it
says), requested_at, age_s, state (finished), terminal (true), status, reason (null: not readable), runner,
attempt, started_at, finished_at, elapsed_s (took), expired, archived and commit_measured (false: its preset
runs the installed engine and reads nothing of the commit; null: the preset is not installed here).
complete is false where a filter gave up before the oldest request.
With --metric: series (each with its group, values and comparison), left_out, newest, status, exit_code."""
)
@click.option(
    "-n",
    "count",
    type=click.IntRange(1, 5000),
    help=f"So many at most (default: {_LISTED}; with --metric or --export {_READ}, which are read).",
)
@click.option(
    "--preset", metavar="NAME", help="Only requests of this preset.", shell_complete=complete_preset
)
@click.option(
    "--status", type=click.Choice([each.value for each in Status]), help="Only requests that ended so."
)
@click.option(
    "--metric",
    type=click.Choice(list(METRICS)),
    metavar="NAME",
    help="Show this figure over time; see below.",
)
@click.option(
    "--threshold", metavar="CONDITION", callback=_threshold, help="'decode_ratio>=1.5': else exit code 1."
)
@click.option(
    "--regression", "margin", metavar="PERCENT", callback=_share, help="So much worse, as 5%: exit code 1."
)
@path_option("--plot", text="Write the series to this SVG file.", metavar="FILE")
@click.option("--export", type=click.Choice(list(EXPORTS)), help="Print the figures in this format instead.")
@param_option("With a metric or an export: only results with this parameter; repeatable.")
@click.option("--runner", metavar="NAME", help="Likewise: only results of this runner.")
@allow_unsigned_option
@bus_command
def history(link: Connection, count: int | None, as_json: bool, **given: Any) -> int:
    """The newest finished requests, the archived ones included; or a figure of theirs over time.

    In the list, statuses are shown as published and not checked; `kakeya_mac result HANDLE` checks digests,
    signature and evidence of one. With --metric or --export every result is checked like that, and only those
    that passed count.
    """
    is_list = given["metric"] is None and given["export"] is None
    _check_usage(is_list, as_json, given)
    if is_list:
        return _list(link, count or _LISTED, given["preset"], given["status"], as_json)
    found = _read(link, count or _READ, given)
    if given["export"] is not None:
        metrics = list(METRICS) if given["metric"] is None else [given["metric"]]
        if not any(map(found.of, metrics)):
            raise _nothing(found, given)
        click.echo(EXPORTS[given["export"]](found, metrics), nl=False)
    return 0 if given["metric"] is None else _judge(found, as_json, given)


def _check_usage(is_list: bool, as_json: bool, given: dict[str, Any]) -> None:
    for name in ("threshold", "margin", "plot"):
        if given[name] is not None and given["metric"] is None:
            option = "regression" if name == "margin" else name
            raise click.UsageError(f"--{option} needs --metric NAME")
    if not is_list and given["preset"] is None:
        raise click.UsageError("--metric and --export need --preset NAME")
    for name in ("params", "runner") if is_list else ("status",):
        if given[name]:
            option = {"params": "-p"}.get(name, f"--{name}")
            where = "with --metric or --export" if is_list else "with the list"
            raise click.UsageError(f"{option} goes {where} alone")
    if given["export"] is not None and as_json:
        raise click.UsageError("--export prints a format of its own; leave out --json")
    for text in given["params"]:
        if "=" not in text:
            raise click.UsageError(f"{ascii(text)[:100]} is no parameter; write KEY=VALUE")
    threshold, metric = given["threshold"], given["metric"]
    names = {metric, "ratio"} if metric is not None and metric.endswith("_ratio") else {metric}
    if threshold is not None and threshold.name not in names:
        raise ParameterError(
            f"the threshold is about {threshold.name}, and the metric is {metric}",
            f"write '{metric}{threshold.operator}{threshold.value:g}', or name another --metric",
        )


def _list(link: Connection, count: int, preset: str | None, status: str | None, as_json: bool) -> int:
    wanted = None if status is None else Status(status)
    rows, is_complete = read_history(link.cache(), limit=count, preset=preset, status=wanted)
    remember(link.config.state_dir, [(row.nonce, row.preset) for row in reversed(rows)])
    now, installed = time.time(), presets.load_all(link.config.presets)
    none = "no finished request" + ("" if preset is None and status is None else " of that kind")
    document = {"requests": [row_json(row, now, installed) for row in rows], "complete": is_complete}
    lines = request_table(rows, now, installed) if rows else [none]
    show(as_json, document, lines, untrusted=("requests",), note=bool(rows))
    if not as_json and not is_complete:
        click.echo("older requests were not looked through", err=True)
    return 0


def _read(link: Connection, count: int, given: dict[str, Any]) -> Figures:
    said_at = time.monotonic()

    def progress(done: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > _PAUSE_S:
            said_at = time.monotonic()
            click.echo(f"read {done} results, {count} at most", err=True)

    return read_figures(
        link.cache(),
        link.config,
        given["preset"],
        installed=presets.load_all(link.config.presets),
        limit=count,
        params=dict(text.split("=", 1) for text in given["params"]),
        runner=given["runner"],
        progress=progress,
    )


def _judge(found: Figures, as_json: bool, given: dict[str, Any]) -> int:
    """Show a metric's series, unless they were exported, and what was asked of them; the exit code."""
    metric, threshold, margin = given["metric"], given["threshold"], given["margin"]
    series = found.of(metric)
    if not series:
        raise _nothing(found, given)
    checked = check_newest(found, metric, threshold, margin)
    checks = [check for _, check in checked if check is not None]
    newest = found.newest(metric)
    too_few = None
    if any(each.too_few for each in checks):
        too_few = TooFewResults(
            f"too few results like {newest} to tell a regression",
            "run the preset more often with the same parameters, or look further back with -n",
        )
    if given["plot"] is not None:
        write_text(given["plot"], to_svg(series, threshold))
        click.echo(f"plot: {given['plot']}", err=True)
    failed = any(each.failed for each in checks)
    code = 1 if failed else 0 if too_few is None else too_few.exit_code
    document = {
        "status": "failed" if failed else "ok" if too_few is None else "too_few_results",
        "exit_code": code,
        "newest": newest,
        "threshold": None if threshold is None else str(threshold),
        "regression": margin,
        "series": [series_json(each, check) for each, check in checked],
        "left_out": [{"handle": left.nonce, **vars(left)} for left in found.left_out],
    }
    if given["export"] is None:
        show(
            as_json,
            document,
            series_lines(checked, found),
            untrusted=("series", "left_out"),
            note=True,
        )
    else:
        for line in (line for each in checks for line in check_lines(each)):
            click.echo(line, err=True)
    newer = {found.newest(): f"has no {metric}"} | {left.nonce: left.reason for left in found.left_out[:1]}
    for nonce, reason in newer.items():
        if nonce > newest:
            warn([f"{nonce} is newer and does not count: {clean_line(reason, limit=300)}"])
    if too_few is not None and not failed:
        show_error(too_few)
    return code


def _nothing(found: Figures, given: dict[str, Any]) -> TooFewResults:
    """Why there is no value at all, and what to do."""
    names = sorted({metric for metric, _ in found.series})
    what = given["metric"] or "any figure"
    if names:
        return TooFewResults(
            f"no result of the preset {given['preset']} has {what}", f"these have: {', '.join(names)}"
        )
    reasons = [clean_line(left.reason, limit=200) for left in found.left_out]
    many = f"; {len(reasons)} left out, the newest because: {reasons[0]}" if reasons else ""
    remedy = (
        f"run it first: kakeya_mac run --preset {given['preset']} --wait; or check --preset, -p and --runner"
    )
    if any("no trusted key" in reason or "--allow-unsigned" in reason for reason in reasons):
        remedy = "pin the runner's key: kakeya_mac runners trust --first; or count them: --allow-unsigned"
    return TooFewResults(f"no result of the preset {given['preset']} counts{many}", remedy)
