"""Figures of finished requests over time: one series for each machine, preset version, parameters and arm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from bridge.bus.results import FetchedResult
from bridge.client.fetch import Judged, judge_answer
from bridge.client.history import Row, read_results
from bridge.errors import BridgeError, EvidenceError
from bridge.evidence.metrics import METRICS, figures
from bridge.evidence.threshold import Threshold
from bridge.evidence.trend import NewestValue, compare_newest
from bridge.git.cache import GitCache
from bridge.presets import Preset
from bridge.protocol.manifest import Fact, ParamValue
from bridge.protocol.result import ENGINE_FACT, Status, weights_of
from bridge.settings import Settings


@dataclass(frozen=True)
class Group:
    """What results must agree in for their figures to be compared."""

    preset: str
    preset_digest: str | None
    runner_id: str
    runner: str  # its name
    chip: str | None
    params: Mapping[str, ParamValue]
    against: Mapping[str, ParamValue] | None  # parameters of the other side of a paired run
    weights: Mapping[str, Fact]  # digests, by the model's name
    of: str  # the arm under test, and what it is compared with

    @property
    def digest(self) -> str:
        """Eight hex digits that tell it from others."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Point:
    """One value, and the result that it is of."""

    nonce: str
    finished_at: str
    commit: str | None  # the workload
    engine: str | None  # digest of the engine's source
    value: float
    low: float | None
    high: float | None
    archived: bool


@dataclass
class Series:
    """The values of one metric in one group, the oldest first."""

    metric: str
    group: Group
    points: list[Point] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """The values alone."""
        return [point.value for point in self.points]


_Value = tuple[str, Group, Point]  # a metric's


@dataclass(frozen=True)
class LeftOut:
    """A finished request whose figures do not count, and why."""

    nonce: str
    reason: str


@dataclass
class Figures:
    """Every figure of the results that were read, one after another, the newest first."""

    series: dict[tuple[str, str], Series] = field(default_factory=dict)  # by metric and group
    left_out: list[LeftOut] = field(default_factory=list)

    def of(self, metric: str) -> list[Series]:
        """The series of a metric, that with the newest value first."""
        return [each for each in self.series.values() if each.metric == metric]

    def newest(self, metric: str | None = None) -> str:
        """The newest result that counts and has a metric, or any; empty: there is none."""
        names = METRICS if metric is None else [metric]
        return max((each.points[-1].nonce for name in names for each in self.of(name)), default="")


def read_figures(
    cache: GitCache,
    settings: Settings,
    preset: str,
    *,
    installed: Mapping[str, Preset],
    limit: int,
    params: Mapping[str, str],
    runner: str | None,
    progress: Callable[[int], object],
) -> Figures:
    """Read the figures of the newest finished requests of a preset, at most `limit`, the archived ones too.

    Only results count that this client believes, that passed, and whose evidence its gate accepts; with
    `params` and `runner` only those that have these. `progress` hears how many results were read.
    """
    count, found = 0, Figures()

    def visit(row: Row, fetched: FetchedResult | BridgeError) -> LeftOut | list[_Value]:
        nonlocal count
        count += 1
        progress(count)
        try:
            judged = _judge(fetched, settings, installed)
        except EvidenceError as error:
            return LeftOut(row.nonce, error.message)
        result = judged.believed.result
        values = {name: str(value) for name, value in result.params.items()}
        if runner not in (None, result.runner.name) or params.items() - values.items():
            return []
        return list(_values(judged, archived=row.archived))

    for each in read_results(cache, visit, limit=limit, preset=preset):
        if isinstance(each, LeftOut):
            found.left_out.append(each)
            continue
        for metric, group, point in each:
            series = found.series.setdefault((metric, group.digest), Series(metric, group))
            series.points.insert(0, point)
    return found


def _judge(
    fetched: FetchedResult | BridgeError, settings: Settings, installed: Mapping[str, Preset]
) -> Judged:
    """A result that counts; an `EvidenceError` says why it does not."""
    if isinstance(fetched, BridgeError):
        raise EvidenceError(fetched.message)
    judged = judge_answer(settings, fetched, installed=installed)
    if judged.verdict.status is not Status.PASSED:
        raise EvidenceError(f"{judged.verdict.status} ({judged.verdict.reason}): {judged.verdict.message}")
    if judged.exit_code:
        raise EvidenceError(f"passed, but no trusted key signed it: {judged.believed.sentence}")
    return judged


def _values(judged: Judged, *, archived: bool) -> Iterator[_Value]:
    result, paired = judged.believed.result, judged.paired
    facts = result.runner.machine
    chip, engine = facts.get("chip"), facts.get(ENGINE_FACT)
    for figure in figures(judged.judgements, sum(command.seconds for command in result.commands)):
        group = Group(
            preset=result.preset or "",
            preset_digest=result.preset_digest,
            runner_id=result.runner.id,
            runner=result.runner.name,
            chip=None if chip is None else str(chip),
            params=dict(result.params),
            against=None if paired is None else dict(paired.against.params),
            weights=weights_of(facts),
            of=figure.of,
        )
        point = Point(
            nonce=result.nonce,
            finished_at=result.finished_at,
            commit=result.workload_sha,
            engine=None if engine is None else str(engine),
            value=figure.value,
            low=figure.low,
            high=figure.high,
            archived=archived,
        )
        yield figure.metric, group, point


@dataclass(frozen=True)
class SeriesCheck:
    """What was asked of the newest value of a series, and how it did; None: it was not asked."""

    series: Series
    threshold: Threshold | None
    comparison: NewestValue | None  # with the values before it
    too_few: bool = False  # values to compare it with

    @property
    def holds(self) -> bool | None:
        """Whether the value reaches the threshold; None: there is none."""
        return None if self.threshold is None else self.threshold.holds(self.series.values[-1])

    @property
    def failed(self) -> bool:
        """Whether the value misses the threshold or is a regression."""
        return self.holds is False or (self.comparison is not None and self.comparison.is_regression)


def check_newest(
    found: Figures, metric: str, threshold: Threshold | None, margin: float | None
) -> list[tuple[Series, SeriesCheck | None]]:
    """Ask a threshold, and no regression by more than a share, of the newest result that has a metric.

    Returns each series of the metric. That result has a value in several where it has several arms; of the
    others nothing is asked (None): what was bad there once would be bad for ever.
    """
    checked: list[tuple[Series, SeriesCheck | None]] = []
    newest = found.newest(metric)
    for series in found.of(metric):
        if series.points[-1].nonce != newest:
            checked.append((series, None))
            continue
        comparison = None
        if margin is not None:
            better = METRICS[metric].higher_is_better
            comparison = compare_newest(series.values, margin, higher_is_better=better)
        check = SeriesCheck(series, threshold, comparison, margin is not None and comparison is None)
        checked.append((series, check))
    return checked
