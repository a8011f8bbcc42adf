"""How often a paired run is right: requests of two commits whose difference is known, each to its verdict.

    python benchmarks/paired.py [--requests N] [--planted 20,0,5] [--limit S] [--parallel N] [--json]

A commit holds a program that counts to a number; the other commit's program counts 20 % further, 5 % further,
or exactly as far. Every request goes the whole way: client, remote, runner, sandbox where there is one, gate.
Each has a remote and a runner of its own, so that --parallel many may run where there are that many idle
cores. Prints for people, stores ``benchmarks/records/paired.json``, and ends with one JSON line
(with ``--json`` that line alone, and stores nothing).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bus import KAKEYA, build, git, runners
from results_file import write

PLANTED = {"20": 1.2, "0": 1.0, "5": 1.05}  # in percent
# What runs is the commit's; -I and no site packages: as little as possible that is not the counting.
PRESET = """
name = "count"
summary = "A program of the commit."
argv = ["${python}", "-I", "-S", "count.py"]
timeout_s = 1800
engine = "workload"
workspace = "full"
"""
COUNT = "for _ in range({steps}): pass\n"


def calibrate(seconds: float) -> int:
    """How far Python counts in so many seconds here."""
    steps = 2_000_000
    began = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-S", "-c", COUNT.format(steps=steps)], check=True)
    return round(steps * seconds / (time.perf_counter() - began))


def ask(root: Path, planted: float, steps: int, limit: int) -> dict[str, Any]:
    """One paired request for the slower commit against the other; what its result says."""
    bench = build(root)
    config = bench.settings.config_dir
    (config / "presets" / "count.toml").write_text(PRESET)
    (config / "policy.toml").write_text("allow_repo_code = true\nallow_unsandboxed = true\n")
    (config / "policy.toml").chmod(0o600)
    for factor in (1.0, planted):
        (bench.clone / "count.py").write_text(COUNT.format(steps=round(steps * factor)))
        git(bench.clone, "add", "count.py")
        git(bench.clone, "commit", "-q", "--allow-empty", "-m", f"count {factor:g} times as far")
    argv = [str(KAKEYA), "run", "--preset", "count", "--against", "HEAD~1", "--timeout", str(limit)]
    argv += ["--wait", "1800", "--json"]
    with runners(bench):
        done = subprocess.run(argv, cwd=bench.clone, env=bench.variables, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"a request ended with {done.returncode}: {done.stdout}{done.stderr}")
    paired: dict[str, Any] = json.loads(done.stdout)["paired"]
    return {key: paired[key] for key in ("verdict", "ratio", "interval", "smallest_effect", "blocks")}


def wrong(planted: str, found: dict[str, Any]) -> bool:
    """Whether a verdict breaks what docs/paired.md promises of it."""
    if planted == "0":
        return found["verdict"] in ("faster", "slower")
    if planted == "20":
        return found["verdict"] != "slower"
    could_see = (found["smallest_effect"] or 1.0) <= PLANTED[planted] - 1
    return found["verdict"] not in (("slower",) if could_see else ("slower", "inconclusive"))


def summary(planted: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Verdicts by number, and the spread of what was seen."""
    ratios = sorted(row["ratio"] for row in rows)
    smallest = sorted(row["smallest_effect"] or 1.0 for row in rows)
    blocks = sorted(row["blocks"] for row in rows)
    return {
        "verdicts": dict(Counter(row["verdict"] for row in rows)),
        "wrong": sum(wrong(planted, row) for row in rows),
        "ratio": [ratios[0], ratios[len(rows) // 2], ratios[-1]],
        "smallest_effect": [smallest[0], smallest[len(rows) // 2], smallest[-1]],
        "blocks": [blocks[0], blocks[len(rows) // 2], blocks[-1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--planted", default="20,0,5", help="differences in percent: of 20, 0 and 5")
    parser.add_argument("--limit", type=int, default=600, help="seconds of a request, at most")
    parser.add_argument("--requests", type=int, default=20, help="requests of each kind")
    parser.add_argument("--seconds", type=float, default=1.0, help="of the faster program")
    parser.add_argument("--parallel", type=int, default=1, help="so many requests at once")
    parser.add_argument("--json", action="store_true", help="print the last line only, and store nothing")
    options = parser.parse_args()
    steps = calibrate(options.seconds)
    kinds = options.planted.split(",")
    turns = [(planted, number) for number in range(options.requests) for planted in kinds]
    rows: dict[str, list[dict[str, Any]]] = {planted: [] for planted in kinds}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.parallel) as pool:
        asked = [
            pool.submit(ask, Path(folder) / f"{n}", PLANTED[kind], steps, options.limit)
            for n, (kind, _) in enumerate(turns)
        ]
        for (planted, number), future in zip(turns, asked, strict=True):
            found = future.result()
            rows[planted].append(found)
            if not options.json:
                print(f"planted {planted:>2} %, request {number:2}: {found}", flush=True)
    figures = {
        "program_s": options.seconds,
        "parallel": options.parallel,
        "limit_s": options.limit,
        "planted": {planted: {**summary(planted, of), "runs": of} for planted, of in rows.items()},
    }
    stored = None if options.json else str(write("paired", figures))
    if not options.json:
        for planted, of in rows.items():
            print(f"planted {planted} %: {summary(planted, of)}")
    print(json.dumps({**figures, "stored": stored}))


if __name__ == "__main__":
    main()
