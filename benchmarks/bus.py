"""What the bus costs: round trips of a job that does nothing, beside the git operations none can do without.

    python benchmarks/bus.py [--requests N] [--runners K] [--remote URL] [--json]

A round trip is submit, discover, claim, run, gate, sign, publish, fetch and believe, by a client process that
is warm and embedded runners in their fast window. The floor is measured in the same run, in turns with the
round trips and with the runners halted: the pushes and fetches of git alone that the protocol cannot avoid.
The runners' memory is noted eleven times, by how many requests were done. Prints for people, stores
``benchmarks/records/bus.json``, and ends with one JSON line (with ``--json`` that line alone).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results_file import write

from bridge.bus.git import Git
from bridge.bus.results import believe
from bridge.client import trust
from bridge.client.submit import plan_request, submit_request
from bridge.client.watch import watch
from bridge.runner.station import open_station
from bridge.settings import Settings

KAKEYA = Path(sys.executable).with_name("kakeya_mac")
PRESET = """name = "nothing"
summary = "A job that does nothing."
argv = ["/usr/bin/true"]
engine = "installed"
workspace = "none"
timeout_s = 60
"""
WARM_UP = 5
# Between a round trip and the floor the runner gets ready for the next job, as it would between two requests.
SETTLE_S = 0.15


@dataclass(frozen=True)
class Bench:
    """A remote, a clone, and the settings of its client and runners, below one folder."""

    root: Path
    remote: str

    @property
    def clone(self) -> Path:
        """A checkout of the remote."""
        return self.root / "clone"

    @property
    def config(self) -> Path:
        """Configuration of client and runners."""
        return self.root / "config"

    @property
    def env(self) -> dict[str, str]:
        """The environment of the runners."""
        return {**os.environ, "KAKEYA_CONFIG": str(self.config)}

    @property
    def settings(self) -> Settings:
        """The settings of the client."""
        return Settings(self.remote, "bench", "none", self.root / "state", self.config, 3600)


def git(folder: Path, *args: str, text: str | None = None) -> str:
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *args], input=text, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def build(root: Path, remote: str | None) -> Bench:
    """Make a bare remote and a clone with one commit, or a clone of the remote that is given."""
    if remote is None:
        subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(root / "remote.git")], check=True)
    bench = Bench(root, remote or str(root / "remote.git"))
    subprocess.run(["git", "clone", "-q", bench.remote, str(bench.clone)], check=True, capture_output=True)
    if not git(bench.clone, "for-each-ref"):
        git(bench.clone, "commit", "-q", "--allow-empty", "-m", "a workload")
        git(bench.clone, "push", "-q", "origin", "HEAD:refs/heads/main")
    presets = bench.config / "presets"
    presets.mkdir(parents=True)
    (presets / "nothing.toml").write_text(PRESET)
    return bench


@contextlib.contextmanager
def runners(bench: Bench, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many runners, each with a state of its own as if on its own machine; trusted by the client."""
    processes = []
    for number in range(count):
        name, state = f"bench{number}", bench.root / f"mac{number}"
        station = open_station(name, bench.remote, state_dir=state, config_dir=bench.config)
        if station.public_key is not None:
            trust.add(bench.settings.trusted_runners, name, station.public_key)
        log = (bench.root / f"{name}.log").open("wb")
        argv = [str(KAKEYA), "runner", "serve", "--remote", bench.remote, "--name", name]
        env = {**bench.env, "KAKEYA_STATE": str(state)}
        processes.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log, cwd=bench.root))
    try:
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(30)


@contextlib.contextmanager
def halted(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """The runners' looks would slow the floor down, and flatter us."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def round_trip(bench: Bench) -> dict[str, float]:
    """One request there and back; seconds of its parts."""
    checkout = Git(bench.clone)
    began = time.perf_counter()
    plan = plan_request(bench.settings, repository=bench.clone, preset="nothing", params={})
    submission = submit_request(bench.settings, plan, repository=bench.clone, check_tree=False)
    submitted = time.perf_counter()
    found = None
    deadline = time.monotonic() + 60
    for update in watch(checkout, bench.remote, submission.nonce, deadline=deadline, asked=submission.asked):
        found = update.result
    if found is None:
        raise SystemExit(f"{submission.nonce} did not come home")
    believed = believe(found, trusted=bench.settings.trusted_runners, asked=submission.asked)
    if believed.result.verdict.status != "passed":
        raise SystemExit(f"{submission.nonce}: {believed.result.verdict}")
    ended = time.perf_counter()
    return {
        "total_s": ended - began,
        "submit_s": submitted - began,
        **{f"{phase}_s": seconds for phase, seconds in believed.result.phase_seconds.items()},
    }


class Floor:
    """The git commands of one request, run alone: push, fetch, claim, result, fetch."""

    def __init__(self, bench: Bench) -> None:
        self._remote = bench.remote
        self._clone = bench.clone
        self._mirror = bench.root / "floor.git"
        self._home = bench.root / "floor-home.git"
        for folder in (self._mirror, self._home):
            subprocess.run(["git", "init", "-q", "--bare", str(folder)], check=True)
        self._head = git(self._clone, "rev-parse", "HEAD")
        self._tree = git(self._clone, "mktree", text="")

    def once(self) -> dict[str, float]:
        """Run them; seconds of each and together."""
        nonce = secrets.token_hex(8)
        branch, inbox, claim = (
            f"refs/heads/floor/{nonce}",
            f"refs/mac-bridge/floor-inbox/{nonce}",
            f"refs/mac-bridge/floor-claims/{nonce}",
        )
        request = git(self._clone, "commit-tree", self._tree, "-p", self._head, "-m", f"request {nonce}")
        seconds: dict[str, float] = {}

        def timed(name: str, folder: Path, *args: str) -> None:
            began = time.perf_counter()
            git(folder, *args)
            seconds[name] = time.perf_counter() - began

        push = ("push", "-q", "--atomic")
        fetch = ("fetch", "-q", "--no-tags", "--no-write-fetch-head", "--prune")
        timed("push_s", self._clone, *push, self._remote, f"{request}:{branch}", f"{request}:{inbox}")
        pattern = "+refs/mac-bridge/floor-inbox/*:refs/mac-bridge/floor-inbox/*"
        timed("discover_s", self._mirror, *fetch, "--depth=2", self._remote, pattern)
        held = git(self._mirror, "commit-tree", self._tree, "-m", f"claim {nonce}")
        timed("claim_s", self._mirror, *push, self._remote, f"{held}:{claim}")
        result = git(self._mirror, "commit-tree", self._tree, "-p", request, "-m", f"result {nonce}")
        timed(
            *("result_s", self._mirror, *push),
            *(self._remote, f"{result}:{branch}", f":{inbox}", f":{claim}"),
        )
        timed("fetch_s", self._home, *fetch, "--depth=2", self._remote, f"+{branch}:{branch}")
        subprocess.run(
            ["git", "-C", str(self._clone), "push", "-q", self._remote, f":{branch}"],
            check=True,
            capture_output=True,
        )
        return {"total_s": sum(seconds.values()), **seconds}


def resident_bytes(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """What the largest of some processes holds in memory; None where /proc does not say."""
    sizes = []
    for process in processes:
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        except FileNotFoundError:
            return None
        sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
    return max(sizes)


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": ordered[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--runners", type=int, default=1)
    parser.add_argument("--remote", help="an address you may push to; default: a bare repository made here")
    parser.add_argument("--json", action="store_true", help="print the last line only, and store nothing")
    options = parser.parse_args()

    def say(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        bench = build(Path(folder), options.remote)
        floor, floors, rows = Floor(bench), [], []
        sizes: dict[int, int | None] = {}  # by how many requests were done
        with runners(bench, options.runners) as processes:
            for number in range(options.requests + WARM_UP):
                row = round_trip(bench)
                time.sleep(SETTLE_S)
                with halted(processes):
                    bare = floor.once()
                if number >= WARM_UP:
                    rows.append(row)
                    floors.append(bare)
                if number >= WARM_UP and (number - WARM_UP) % max(1, options.requests // 10) == 0:
                    sizes[number - WARM_UP + 1] = resident_bytes(processes)
                if number % 20 == 0:
                    say(f"{number}/{options.requests}: {row['total_s']:.3f} s, floor {bare['total_s']:.3f} s")
            sizes[options.requests] = resident_bytes(processes)
    figures: dict[str, Any] = {
        "requests": options.requests,
        "runners": options.runners,
        "remote": "given" if options.remote else "a local bare repository",
        "round_trip_s": percentiles([row["total_s"] for row in rows]),
        "floor_s": percentiles([row["total_s"] for row in floors]),
        "runner_resident_bytes": {str(requests): size for requests, size in sizes.items()},
        "parts_s": {k: statistics.median(r[k] for r in rows) for k in rows[0] if k != "total_s"},
        "floor_parts_s": {k: statistics.median(r[k] for r in floors) for k in floors[0] if k != "total_s"},
    }
    base = figures["floor_s"]["p50"]
    figures["median_to_floor"] = figures["round_trip_s"]["p50"] / base
    figures["p99_to_floor"] = figures["round_trip_s"]["p99"] / base
    stored = None if options.json else str(write("bus", figures))
    say(
        f"round trip: median {figures['round_trip_s']['p50'] * 1000:.0f} ms = "
        f"{figures['median_to_floor']:.2f} x the floor of {base * 1000:.0f} ms; "
        f"p99 {figures['p99_to_floor']:.2f} x"
    )
    print(json.dumps({**figures, "stored": stored}))


if __name__ == "__main__":
    main()
