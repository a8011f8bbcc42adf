"""``python -m tests.e2e.faults``: requests, runners, kills, and whether every promise held.

Exit code 0: all held. 1: something did not, with the evidence and the folder it lies in. 130: interrupted.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import results_file
from bridge.cli import COMMANDS
from tests.e2e.faults import jobs, plan, procs, referee
from tests.e2e.faults.course import Course, Unfinished
from tests.e2e.faults.machines import Machine
from tests.e2e.faults.requesters import CLIENT_FILE, isolate
from tests.e2e.faults.witness import Witness
from tests.fixtures.repo import build_repo

LEASE_S = 4.0
MOST_SHOWN = 15
_LOG_LINES = 8
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
_AGAIN_S = 5
_NONCE = re.compile(r"[0-9]{8}t[0-9]{6}z[0-9a-f]{12}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, judge, print, and perhaps store."""
    options = _options(argv)
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    for number in _STOPS:
        signal.signal(number, _interrupt)
    root = Path(tempfile.mkdtemp(prefix="kakeya-faults-"))
    failed = False
    try:
        failed = not _run(options, seed, root)
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    finally:
        for number in _STOPS:
            signal.signal(number, signal.SIG_IGN)
        for left in procs.end_all(root):
            _say(f"would not end: {left}")
        if failed or options.keep:
            click.echo(f"the folder with every log is kept: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    return int(failed)


def _run(options: argparse.Namespace, seed: int, root: Path) -> bool:
    repo = build_repo(root / "repo", {"README.md": "a workload\n", CLIENT_FILE: "{}\n"})
    jobs.install(repo)
    # A killed process leaves what it had in its temporary folder; it goes with the rest.
    temporary = root / "tmp"
    temporary.mkdir()
    repo.env["TMPDIR"] = tempfile.tempdir = str(temporary)
    isolate(repo)
    machines = [Machine(repo, f"mac{index + 1}", LEASE_S) for index in range(options.runners)]
    count = options.requests
    limit = options.limit or 120 + 1.5 * count
    cancels = "cancel" in COMMANDS
    _say(f"seed {seed}: {count} requests, {options.runners} runners, at most {limit:.0f} s; {root}")
    began = time.monotonic()
    course = Course(
        repo=repo,
        machines=machines,
        asks=plan.asks(seed, count, cancels=cancels),
        clients=plan.clients(seed, count),
        blows=iter(()) if options.calm else plan.blows(seed, options.runners, LEASE_S),
        deadline=began + limit,
        say=_say,
    )
    problems: list[str] = []
    with Witness(repo, machines):
        try:
            course.run()
        except Unfinished as error:
            problems.append(f"unfinished: {error}")
        finished = not problems
        seconds = time.monotonic() - began
        left = procs.belonging_to(root) if finished else []
        problems += [f"a process was left: {procs.command(pid)}" for pid in left if procs.command(pid)]
        procs.end_all(root)
    _say("looking at what there is now")
    report = referee.judge(repo, machines, course.requester, course.visitors, finished=finished)
    problems += report.problems
    if options.calm and set(report.attempts) - {1}:
        problems.append(f"nothing befell a runner, and a lease was lost: attempts {dict(report.attempts)}")
    figures = _figures(options, course, report, seed=seed, seconds=seconds, problems=len(problems))
    _show(figures)
    _show_problems(problems, machines)
    if options.store and not problems:
        _say(f"stored in {results_file.write('faults', figures)}")
    if options.json:
        click.echo(json.dumps({"status": "failed" if problems else "passed", **figures}, sort_keys=True))
    return not problems


def _figures(
    options: argparse.Namespace,
    course: Course,
    report: referee.Report,
    *,
    seed: int,
    seconds: float,
    problems: int,
) -> dict[str, Any]:
    said = "".join(machine.text() for machine in course.machines)
    latencies = sorted(course.latencies.values())
    killed = sum(visitor.killed for visitor in course.visitors)
    return {
        "seed": seed,
        "calm": options.calm,
        "requests": len(course.asks),
        "runners": len(course.machines),
        "lease_s": LEASE_S,
        "seconds": round(seconds, 1),
        "accepted": len(course.requester.accepted),
        "results": len(report.results),
        "problems": problems,
        "clients": {"started": len(course.visitors), "killed": killed, "killed_arrived": report.arrived},
        "faults": {fault.value: course.faults[fault] for fault in plan.Fault},
        "verdicts": dict(sorted(report.verdicts.items())),
        "attempts": {str(attempt): count for attempt, count in sorted(report.attempts.items())},
        "job_starts": {str(starts): count for starts, count in sorted(report.runs.items()) if count},
        "said": {
            "results kept": said.count("its result is kept"),
            "leases lost": said.count("the lease was lost"),
            "failures in a row": len(re.findall(r"failure \d+ in a row", said)),
            "requests deferred": said.count("; retrying in "),
        },
        "latency_s": {
            name: round(_quantile(latencies, share), 2)
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
        },
    }


def _show(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        text = "  ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
        click.echo(f"  {name:<10} {text}")


def _show_problems(problems: list[str], machines: list[Machine]) -> None:
    if not problems:
        click.echo("every request has exactly one result, its own; nothing else is left")
        return
    click.echo(f"\n{len(problems)} things do not hold:")
    grouped: dict[str, list[str]] = {}
    for problem in problems:
        match = _NONCE.match(problem)
        grouped.setdefault(match[0] if match else problem, []).append(problem)
    for about, said in list(grouped.items())[:MOST_SHOWN]:
        click.echo("\n".join(f"- {problem}" for problem in said))
        for machine in machines if _NONCE.match(about) else ():
            lines = [line for line in machine.text().splitlines() if about in line]
            for line in lines[-_LOG_LINES:]:
                click.echo(f"    {machine.name}: {line[:300]}")
    if len(grouped) > MOST_SHOWN:
        click.echo(f"and {len(grouped) - MOST_SHOWN} more of the kind")


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.faults",
        description="Requests over one bare remote, several runners, and kill -9 of runners, their git"
        " children and clients throughout. Afterwards every accepted request must have exactly one result.",
        epilog="The seed decides the requests, the faults and their pauses; when each meets a runner depends"
        " on the machine's speed. Exit code 1: something did not hold, and the folder is kept.",
    )
    parser.add_argument("--requests", type=_whole, default=150, metavar="N", help="default: 150")
    parser.add_argument("--seed", type=int, metavar="SEED", help="default: a fresh one, which is printed")
    parser.add_argument("--runners", type=_whole, default=4, metavar="K", help="default: 4")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="fail after so long (default: 120 + 1.5 a request)"
    )
    parser.add_argument("--calm", action="store_true", help="no faults: then no lease may be lost either")
    parser.add_argument("--keep", action="store_true", help="keep the folder with every log in any case")
    parser.add_argument("--json", action="store_true", help="one JSON line at the end")
    parser.add_argument("--store", action="store_true", help="write benchmarks/records/faults.json")
    return parser.parse_args(argv)


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is needed, got {text}")
    return number


def _say(line: str) -> None:
    click.echo(line, err=True)


def _interrupt(_number: int, _frame: object) -> None:
    """Unwind; what is raised while the interpreter forks is lost, so that it is raised once more later."""
    signal.alarm(_AGAIN_S)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
