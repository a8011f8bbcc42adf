"""What grows and what must not: the bus on remotes with 10 to 20,000 finished requests, and a large checkout.

    python benchmarks/scale.py [--refs N,N,...] [--rounds N] [--files N] [--commits N] [--idle S] [--json]

For every number of finished requests: the look that discovers one new request, a claim, a heartbeat, a
publication, the scan of all branches, and a client's look while it waits. Sizes take turns round by round, so
the ratios hold when the machine's speed drifts. Then a submit and a look in a repository of many files and
commits beside one of ten, and what an idle runner costs. Prints for people, stores
``benchmarks/records/scale.json``, and ends with one JSON line (with ``--json`` that line alone).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from results_file import write

from bridge.bus.claims import Beat, Claim, Identity, claim
from bridge.bus.git import Git
from bridge.bus.mirror import Mirror
from bridge.bus.publish import publish
from bridge.bus.requests import Submitted, submit
from bridge.client.watch import watch
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Phase, Reason, Result, RunnerFacts, Status, Verdict

KAKEYA = Path(sys.executable).with_name("kakeya_mac")
RUNNER = Identity("bench", "0" * 16, "1" * 16)


def git(folder: Path, *args: str, text: str | None = None) -> str:
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *args], input=text, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}"


def finished_requests(count: int) -> str:
    """A fast-import stream of so many answered requests on top of ``main``."""
    now = datetime.now(UTC) - timedelta(days=1)
    who = "committer bench <bench@example.org> 1700000000 +0000"
    lines = []
    for number in range(count):
        nonce = refs.new_nonce(now + timedelta(seconds=number % 80_000), number.to_bytes(6, "big"))
        ref = refs.request_ref("probe", nonce, None)
        result = json.dumps({"nonce": nonce, "verdict": {"status": "passed"}})
        lines += [
            f"commit {ref}\n{who}\n{data('request')}\nfrom refs/heads/main",
            f"M 100644 inline .mac-bridge/request.json\n{data(nonce)}",
            f"commit {ref}\n{who}\n{data('result [skip ci]')}",
            f"M 100644 inline .mac-bridge/results/{nonce}/result.json\n{data(result)}",
        ]
    return "\n".join(lines) + "\n"


def workload(files: int, commits: int) -> str:
    """A fast-import stream of a ``main`` with so many files and commits."""
    who = "committer bench <bench@example.org> 1700000000 +0000"
    lines = [f"commit refs/heads/main\n{who}\n{data('first')}"]
    for number in range(files):
        path = f"src/{number // 1000:03d}/{number // 50 % 20:02d}/{number:06d}.txt"
        lines.append(f"M 100644 inline {path}\n{data(f'file {number}')}")
    for number in range(1, commits):
        lines.append(f"commit refs/heads/main\n{who}\n{data(f'commit {number}')}")
        lines.append(f"M 100644 inline log.txt\n{data(f'line {number}')}")
    return "\n".join(lines) + "\n"


class Place:
    """One remote, a clone of its ``main``, and a runner's mirror of it."""

    def __init__(self, root: Path, name: str, *, finished: int, files: int = 10, commits: int = 10) -> None:
        self.remote, self.clone = root / f"{name}.git", root / name
        subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(self.remote)], check=True)
        git(self.remote, "fast-import", "--quiet", text=workload(files, commits))
        if finished:
            git(self.remote, "fast-import", "--quiet", text=finished_requests(finished))
        git(self.remote, "pack-refs", "--all")
        git(self.remote, "gc", "--quiet")
        subprocess.run(
            ["git", "clone", "-q", "--no-local", "--single-branch", str(self.remote), str(self.clone)],
            check=True,
        )
        self.git = Git(self.clone)
        self.address = str(self.remote)
        self.mirror = Mirror(root / f"{name}-mirror.git", self.address, scan_interval_s=1e9)
        self.scanner = Mirror(root / f"{name}-scanner.git", self.address, scan_interval_s=0.0)
        self.mirror.refresh()
        self.head = self.git.resolve("HEAD")

    def submit(self) -> Submitted:
        """Push one request."""
        now = datetime.now(UTC).replace(microsecond=0)
        nonce = refs.new_nonce(now, secrets.token_bytes(6))
        manifest = Manifest(
            nonce=nonce,
            preset="probe",
            workload_sha=self.head,
            result_ref=refs.request_ref("probe", nonce, None),
            created_at=now,
            expires_at=now + timedelta(hours=1),
            audience=refs.audience_of(self.address),
        )
        return submit(self.git, self.address, manifest, None)

    def answer(self, submitted: Submitted, held: Claim) -> None:
        """Publish its result."""
        moment = "2026-01-01T00:00:00Z"
        result = Result(
            nonce=submitted.nonce,
            request_commit=submitted.commit,
            workload_sha=self.head,
            preset="probe",
            preset_digest="0" * 64,
            engine_source="installed",
            runner=RunnerFacts(name=RUNNER.name, id=RUNNER.id, version="0"),
            attempt=1,
            started_at=moment,
            finished_at=moment,
            verdict=Verdict(status=Status.PASSED, reason=Reason.OK),
        )
        publish(
            self.mirror.git,
            self.address,
            request_commit=submitted.commit,
            nonce=submitted.nonce,
            result_ref=submitted.ref,
            files={},
            result=result.to_bytes(),
            signature=None,
            claim=held,
            untouched=True,
        )

    def one_request(self) -> dict[str, float]:
        """Seconds of everything that one request's way asks of this remote."""
        seconds: dict[str, float] = {}

        def clocked(name: str, began: float) -> None:
            seconds[f"{name}_s"] = time.perf_counter() - began

        began = time.perf_counter()
        submitted = self.submit()
        clocked("submit", began)
        looks = watch(
            self.git,
            self.address,
            submitted.nonce,
            deadline=time.monotonic() + 60,
            sleep=lambda _: None,
        )
        began = time.perf_counter()
        next(looks)
        clocked("client_first_look", began)
        began = time.perf_counter()
        [pending] = self.mirror.refresh()
        clocked("discover", began)
        began = time.perf_counter()
        held = claim(
            self.mirror.git,
            self.address,
            pending,
            RUNNER,
            standing={refs.inbox_ref(pending.nonce): pending.commit, submitted.ref: pending.commit},
        )
        clocked("claim", began)
        if held is None:
            raise SystemExit("nobody else claims here, and yet the claim failed")
        began = time.perf_counter()
        held.beat(Beat(Phase.RUNNING, 1.0))
        clocked("beat", began)
        began = time.perf_counter()
        next(looks)
        clocked("client_next_look", began)
        began = time.perf_counter()
        self.answer(submitted, held)
        clocked("publish", began)
        looks.close()  # type: ignore[attr-defined]
        began = time.perf_counter()
        self.scanner.refresh()
        clocked("look_with_scan", began)
        if self.mirror.refresh():
            raise SystemExit("the request is answered, and yet pending")
        return seconds


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of every child it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def idle_runner(root: Path, place: Place, seconds: float) -> dict[str, float]:
    """What a runner that has nothing to do costs, and how soon it picks up a first request."""
    env = {**os.environ, "KAKEYA_STATE": str(root / "idle"), "KAKEYA_CONFIG": str(root / "config")}
    argv = [str(KAKEYA), "runner", "serve", "--remote", place.address, "--name", "idle"]
    with (root / "idle.log").open("wb") as log:
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
    try:
        time.sleep(50)  # past the fast window, into the longest pause
        before, began = cpu_seconds(process.pid), time.monotonic()
        time.sleep(seconds)
        share = (cpu_seconds(process.pid) - before) / (time.monotonic() - began)
        began = time.monotonic()
        submitted = place.submit()
        ref, remote = refs.claim_ref(submitted.nonce), Git(place.remote)
        while not remote.refs(ref):
            time.sleep(0.05)
        picked = time.monotonic() - began
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    return {"core_share": share, "picked_up_s": picked, "measured_s": seconds}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--refs", default="10,1000,20000", help="finished requests on the remotes")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--commits", type=int, default=20_000)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds an idle runner is watched; 0: not")
    parser.add_argument("--json", action="store_true", help="print the last line only, and store nothing")
    options = parser.parse_args()
    sizes = [int(size) for size in options.refs.split(",")]

    def say(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        places = {str(size): Place(root, f"refs{size}", finished=size) for size in sizes}
        places["large"] = Place(root, "large", finished=10, files=options.files, commits=options.commits)
        say(f"remotes with {options.refs} finished requests, and one of {options.files} files are made")
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in places}
        for number in range(options.rounds + 1):
            for name, place in places.items():
                row = place.one_request()
                if number:  # round 0 warms the caches
                    rows[name].append(row)
            say(f"round {number}/{options.rounds}")
        first, last = str(sizes[0]), str(sizes[-1])
        pairs = zip(rows[last], rows[first], strict=True)
        discovery = statistics.median(a["discover_s"] / b["discover_s"] for a, b in pairs)
        figures: dict[str, Any] = {
            "rounds": options.rounds,
            "finished_requests": {name: medians(rows[name]) for name in places if name != "large"},
            "large_repository": {
                "files": options.files,
                "commits": options.commits,
                **medians(rows["large"]),
            },
            f"discovery_{last}_to_{first}": discovery,
        }
        if options.idle:
            say(f"an idle runner is watched for {options.idle:g} s, after 50 s of settling")
            figures["idle_runner"] = idle_runner(root, places[first], options.idle)
    for name, row in figures["finished_requests"].items():
        say(f"{name:>6} finished: " + "  ".join(f"{k[:-2]} {v * 1000:.0f} ms" for k, v in row.items()))
    say(f"discovery among {last} costs {discovery:.2f} times one among {first}")
    stored = None if options.json else str(write("scale", figures))
    print(json.dumps({**figures, "stored": stored}))


if __name__ == "__main__":
    main()
