"""What grows and what must not: several runners on one remote, and remotes with thousands of old results.

    python benchmarks/scale.py [--runners N,N,...] [--burst N] [--finished N,N,...] [--rounds N] [--json]

For every number of runners, a burst of requests for nothing is submitted while they are halted; from then on
jobs a minute, git processes, full listings and lost claim pushes are counted. For every number of finished
requests, on their branches and in the archive, a runner answers single requests; the remotes take turns, so
the ratios hold when the machine's speed drifts. Prints for people, stores ``benchmarks/records/scale.json``,
and ends with one JSON line (with ``--json`` that line alone).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bus import (
    Bench,
    GitTrace,
    Runner,
    build,
    claim_pushes,
    counts,
    git,
    halted,
    listed,
    moments,
    percentiles,
    round_trip,
    runners,
    submit,
)
from results_file import write

from bridge.bus.archive import find_archived, prune
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.result import Reason, Result, RunnerFacts, Status, Verdict


def burst(root: Path, count: int, requests: int) -> dict[str, Any]:
    """So many runners answer so many requests that are there at once."""
    bench, trace = build(root), GitTrace(root / "git-trace")
    checkout = GitRepo(bench.clone)
    with runners(bench, count, trace) as processes:
        with halted(processes):
            nonces = [submit(bench, checkout).manifest.nonce for _ in range(requests)]
            trace.clear()
            began = time.time()
        while listed(bench, refs.INBOX):
            time.sleep(0.5)
        calls = trace.calls()
    published = [moments(calls, nonce)[1] for nonce in nonces]
    calls = [call for call in calls if call.started <= max(published)]
    claims = claim_pushes(calls)
    lost = sum(call.code != 0 for call in claims)
    return {
        "jobs_a_minute": 60 * requests / (max(published) - began),
        "lost_claim_pushes": lost / len(claims),
        "looks_a_job": sum(call.looks for call in calls) / requests,
        "full_listings_a_job": sum(call.lists_all for call in calls) / requests,
        "git_processes_a_job": counts(calls, requests),
        "waited_s": percentiles([moment - began for moment in published]),
    }


def data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}"


def answered(number: int) -> Iterable[str]:
    """A fast-import stream of so many requests of last month, each with its result, on top of ``main``."""
    who = "committer bench <bench@example.org> 1700000000 +0000"
    for index in range(number):
        created = datetime.now(UTC) - timedelta(days=30, seconds=-index)
        nonce = refs.new_nonce(created, index.to_bytes(6, "big"))
        ref = refs.request_ref("nothing", nonce, None)
        result = Result(
            nonce=nonce,
            request_commit="0" * 40,  # known only when the stream is imported
            workload_sha=None,
            preset="nothing",
            preset_digest=None,
            engine_source=None,
            runner=RunnerFacts(name="bench", id="0" * 16, version="0"),
            attempt=1,
            started_at="2026-01-01T00:00:00Z",
            finished_at="2026-01-01T00:00:01Z",
            verdict=Verdict(status=Status.PASSED, reason=Reason.OK),
        )
        yield f"commit {ref}\n{who}\n{data('request')}\nfrom refs/heads/main"
        yield f"M 100644 inline .mac-bridge/request.json\n{data(nonce)}"
        yield f"commit {ref}\n{who}\n{data('result [skip ci]')}"
        path = f".mac-bridge/results/{nonce}/result.json"
        yield f"M 100644 inline {path}\n{data(result.to_bytes().decode())}"


def fill(bench: Bench, finished: int, *, archived: bool) -> dict[str, float]:
    """Put finished requests on a remote, and archive them; seconds of that."""
    if not finished:
        return {}
    remote = Path(bench.remote)
    git(remote, "fast-import", "--quiet", text="\n".join(answered(finished)) + "\n")
    git(remote, "pack-refs", "--all")
    if not archived:
        return {}
    cache = GitCache(bench.root / "prune.git", bench.remote)
    began = time.perf_counter()
    done = prune(cache, now=datetime.now(UTC))
    pruned = time.perf_counter()
    if len(done.archived) != finished:
        raise SystemExit(f"{len(done.archived)} of {finished} requests were archived")
    reader = GitCache(bench.root / "reader.git", bench.remote)
    find_archived(reader, done.archived[0], found=reader.list_remote(refs.ARCHIVE))
    return {"prune_s": pruned - began, "first_read_of_archive_s": time.perf_counter() - pruned}


def old_results(root: Path, sizes: Iterable[int], rounds: int) -> dict[str, Any]:
    """What one request costs on remotes with so many finished ones."""
    figures: dict[str, Any] = {}
    benches: dict[str, tuple[Bench, GitTrace, list[Runner]]] = {}
    with contextlib.ExitStack() as stack:
        for name in [f"{size} {where}" for size in sizes for where in ("on branches", "archived")]:
            size, _, where = name.partition(" ")
            if name == "0 archived":
                continue
            bench, trace = build(root / name.replace(" ", "-")), GitTrace(root / f"git-trace-{len(benches)}")
            figures[name] = fill(bench, int(size), archived=where == "archived")
            benches[name] = (bench, trace, stack.enter_context(runners(bench, trace=trace)))
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in benches}
        for number in range(rounds + 1):
            for name, (bench, trace, own) in benches.items():
                others = [process for _, _, each in benches.values() if each is not own for process in each]
                with halted(others):
                    row = one_request(bench, trace)
                if number:  # round 0 warms the caches
                    rows[name].append(row)
    for name, each in rows.items():
        figures[name] |= {key: statistics.median(row[key] for row in each) for key in each[0]}
    return figures


def one_request(bench: Bench, trace: GitTrace) -> dict[str, float]:
    """Seconds of one request, and the runner's git processes."""
    trace.clear()
    began = time.time()
    submission, row = round_trip(bench, GitRepo(bench.clone))
    claimed, published = moments(trace.calls(), submission.manifest.nonce)
    submitted = began + row["submit_s"]
    calls = [call for call in trace.calls() if call.started <= published]
    found = max(index for index, call in enumerate(calls) if call.looks and call.ended <= claimed)
    return {
        "submit_s": row["submit_s"],
        "submit_to_claim_s": claimed - submitted,
        "submit_to_publish_s": published - submitted,
        "total_s": row["total_s"],
        "runner_git_processes": len(calls) - found,
        "look_s": calls[found].ended - calls[found].started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runners", default="1,2,4,8", help="runners on one remote")
    parser.add_argument("--burst", type=int, default=60, help="requests that wait for them")
    parser.add_argument("--finished", default="0,1000,5000", help="finished requests on the remotes")
    parser.add_argument("--rounds", type=int, default=11, help="requests on each of those")
    parser.add_argument("--json", action="store_true", help="print the last line only, and store nothing")
    options = parser.parse_args()

    def say(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    figures: dict[str, Any] = {"burst": options.burst, "rounds": options.rounds, "runners": {}}
    with tempfile.TemporaryDirectory() as folder:
        for count in map(int, filter(None, options.runners.split(","))):
            row = burst(Path(folder) / f"runners{count}", count, options.burst)
            figures["runners"][str(count)] = row
            say(
                f"{count} runner(s): {row['jobs_a_minute']:.0f} jobs a minute,"
                f" {row['lost_claim_pushes']:.0%} of the claim pushes lost,"
                f" {row['full_listings_a_job']:.2f} full listings,"
                f" {row['looks_a_job']:.2f} looks and"
                f" {row['git_processes_a_job']['processes']:.1f} git processes a job"
            )
        if sizes := [int(size) for size in options.finished.split(",") if size]:
            figures["finished_requests"] = old_results(Path(folder), sizes, options.rounds)
    for name, row in figures.get("finished_requests", {}).items():
        say(f"{name:>16}: " + "  ".join(f"{key} {value:.3g}" for key, value in row.items()))
    stored = None if options.json else str(write("scale", figures))
    print(json.dumps({**figures, "stored": stored}))


if __name__ == "__main__":
    main()
