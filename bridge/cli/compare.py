"""``kakeya_mac compare``: which of two finished requests was faster."""

from __future__ import annotations

import click

from bridge import presets
from bridge.cli import show
from bridge.cli.options import allow_unsigned_option
from bridge.cli.output import Connection, bus_command
from bridge.client.fetch import Judged, judge_answer
from bridge.errors import EvidenceError, ParameterError
from bridge.evidence.paired import FEWEST_BLOCKS, compare_reports
from bridge.protocol.result import Status, weights_of
from bridge.protocol.sanitize import clean_line
from evidence_format.model import Report
from evidence_format.paired import PairedSummary


@click.command(
    epilog="""\b
Examples:
  kakeya_mac compare 20260302t12 20260301t12
  kakeya_mac compare 20260302t12 20260301t12 --json

Both must have passed, with throughput reports that hold a baseline, on the same machine, of the same version
of the same preset, with the same weights. Better, because at one time: kakeya_mac run --against.

Exit code 0, whichever is faster. 2: they cannot be compared; 3: a result is not believed; 4: no
result yet."""
)
@click.argument("handle")
@click.argument("against")
@bus_command
@allow_unsigned_option
def compare(link: Connection, handle: str, against: str, as_json: bool) -> int:
    """Compare the request HANDLE with the finished request AGAINST, prompt by prompt.

    The same machine was not the same at both times, so what is compared is each side's step in units of
    mlx-lm's plain step, which its own report measured in turns with it. That takes ten prompts or more.
    """
    own, other = (fetch_judged(link, each) for each in (handle, against))
    found = compare_judged(own, other)
    left, right = own.believed.result, other.believed.result
    document = {
        "status": "compared",
        "exit_code": 0,
        "handle": left.nonce,
        "against": right.nonce,
        "preset": left.preset,
        "runner": left.runner.name,
        "params": dict(left.params),
        "against_params": dict(right.params),
        "metric": "step_of_plain_step",
        **found.model_dump(mode="json", exclude={"blocks"}),
        "prompts": found.blocks,
    }
    return show(
        as_json,
        document,
        verdict_lines(own, other, found),
        untrusted=("preset", "runner", "params", "against_params"),
    )


def compare_judged(own: Judged, other: Judged) -> PairedSummary:
    """Compare two passed requests; an error says why these two cannot be compared."""
    for judged in (own, other):
        if judged.verdict.status is not Status.PASSED:
            nonce, status = judged.believed.result.nonce, judged.verdict.status
            raise EvidenceError(f"the request {nonce} is {status}, so its figures are not compared")
    first, second = _conditions(own), _conditions(other)
    for name in {**first, **second}:
        left, right = first.get(name), second.get(name)
        if left != right:
            if left is None or right is None:
                left, right = left or "not used", right or "not used"
            raise ParameterError(
                f"the two requests differ in {name}: {clean_line(str(left))} and {clean_line(str(right))}",
                "compare both in one job: kakeya_mac run --against, or --against-params (as model=NAME)",
            )
    seed = f"{own.believed.result.nonce} {other.believed.result.nonce}"
    try:
        return compare_reports(_report(own), _report(other), seed)
    except ValueError as error:
        raise ParameterError(f"a report cannot be compared: {error}") from None


def verdict_lines(own: Judged, other: Judged, found: PairedSummary) -> list[str]:
    """What a comparison found, for people. Each is one line."""
    left, right = own.believed.result, other.believed.result
    lines = [f"{found.verdict.upper()}  {left.nonce} against {right.nonce} ({clean_line(str(left.preset))})"]
    if found.ratio is not None:
        low, high = found.interval or (None, None)
        within = "" if low is None else f", {found.confidence:.0%} interval {low:.3f} to {high:.3f}"
        lines.append(f"  time ratio {found.ratio:.3f}{within}, in units of plain steps; above 1 is slower")
    effect = found.smallest_effect
    few = f"too few to tell: {FEWEST_BLOCKS} prompts are needed (-p limit={FEWEST_BLOCKS})"
    said = few if effect is None else f"smallest effect they could show {effect:.1%}"
    lines.append(f"  {found.blocks} prompts, {said}")
    for name in sorted({*left.params, *right.params}):
        if left.params.get(name) != right.params.get(name):
            values = (str(side.params.get(name)) for side in (left, right))
            lines.append(f"  {name}: {clean_line(' against '.join(values))}")
    return lines


def fetch_judged(link: Connection, handle: str) -> Judged:
    """The judged result of a finished request."""
    _, fetched = link.look_up_result(handle)
    return judge_answer(link.config, fetched, installed=presets.load_all(link.config.presets))


def _report(judged: Judged) -> Report:
    found = [each.report for each in judged.judgements.values() if each.report is not None]
    if len(found) != 1 or found[0].kind != "throughput":
        kinds = ", ".join(report.kind for report in found) or "no report"
        raise ParameterError(
            f"the request {judged.believed.result.nonce} has {kinds}, not one throughput report"
        )
    return found[0]


def _conditions(judged: Judged) -> dict[str, object]:
    """What both sides must agree in, by name: machine, preset and weights."""
    result = judged.believed.result
    machine = result.runner.machine
    return {
        "the runner": result.runner.id,
        "the chip": machine.get("chip"),
        "the preset": result.preset,
        "the preset's digest": result.preset_digest,
        **{f"{name}'s weights": digest for name, digest in sorted(weights_of(machine).items())},
    }
