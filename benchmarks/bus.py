"""What the bus costs: seconds and git processes of a request, and pushes of a busy runner on a public host.

    python benchmarks/bus.py [--requests N] [--remote URL] [--busy SECONDS] [--json]

A round trip is submit, look, claim, run, sign, publish, fetch and believe, by a client process that is warm
and one runner. The floor is measured in turns with it while the runner is halted: the pushes and fetches of
git alone that the protocol cannot avoid. Git processes are counted on an 11-second job that ``kakeya_mac run
--wait`` submits and follows. Pushes a minute are counted while a job runs on a remote that is named as
github.com and answers from this machine. Prints for people, stores ``benchmarks/records/bus.json``, and ends
with one JSON line (with ``--json`` that line alone).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from results_file import write

from bridge.bus.results import believe
from bridge.client.submit import Submission, find_preset, plan_request, submit_request
from bridge.client.watch import watch
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.runner.config import open_config
from bridge.settings import Settings
from bridge.signing import trust

KAKEYA = Path(sys.executable).with_name("kakeya_mac")
JOB_S = 11
WARM_UP = 5
# Between a round trip and the floor the runner gets ready for the next job, as it would between two requests.
SETTLE_S = 0.15

Runner = subprocess.Popen[bytes]


def git(folder: Path, *args: str, text: str | None = None) -> str:
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *args], input=text, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


# Counting git's processes ---------------------------------------------------------------------------------


@dataclass
class GitCall:
    """One git process that the bridge started: its command, when (Unix seconds), and how it ended."""

    argv: Sequence[str]
    started: float
    command: str = ""
    ended: float = 0.0
    code: int | None = None
    children: int = 0
    looks: bool = False  # lists everything but the requests' branches: what waits, and who has it
    lists_all: bool = False  # lists the branches of all requests, or all refs of the remote

    def pushes(self, ref: str) -> list[str]:
        """What it pushes to a ref: ``<sha>:<ref>``; without the sha it deletes the ref."""
        return [spec for spec in self.argv if self.command == "push" and f":{ref}" in spec and spec[0] != "-"]


class GitTrace:
    """A ``git`` in front of the real one on a program's PATH: git's own trace tells of every process.

    What a listing asks the server is kept as well, because no trace tells which refs were listed.
    """

    def __init__(self, folder: Path) -> None:
        self._calls, self._asked, program = folder / "calls", folder / "asked", folder / "git"
        self._asked.mkdir(parents=True)
        self.clear()
        program.write_text(
            f'#!/bin/sh\nexport GIT_TRACE2_EVENT={self._calls}\ncase " $* " in\n'
            f'*" upload-pack "*|*" kakeya-ssh "*) cat >{self._asked}/$$; exec <{self._asked}/$$ ;;\nesac\n'
            f'exec {shutil.which("git")} "$@"\n'
        )
        program.chmod(0o755)
        self.env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    def clear(self) -> None:
        """Forget what was started until now."""
        self._calls.write_bytes(b"")

    def calls(self) -> list[GitCall]:
        """Every git process that was started, in order; those that git started itself are its children."""
        found: dict[str, GitCall] = {}
        for line in self._calls.read_text().splitlines():
            event = json.loads(line)
            name, _, child = event["sid"].partition("/")
            at = datetime.fromisoformat(event["time"]).timestamp()
            if event["event"] == "start":
                call = found.setdefault(name, GitCall(event["argv"], at))
                call.children += bool(child)
            elif name in found and not child and event["event"] == "cmd_name":
                found[name].command = event["name"].strip("_")
            elif name in found and not child and event["event"] == "exit":
                found[name].ended, found[name].code = at, event["code"]
        for name, call in found.items():
            asked = self._asked / str(int(name.rpartition("-P")[2], 16))
            prefixes = asked.read_bytes() if asked.exists() else b""
            call.looks = b"ref-prefix refs/mac-bridge/\n" in prefixes
            call.lists_all = b"ref-prefix refs/heads/mac-bridge/\n" in prefixes or call.command == "ls-remote"
        return list(found.values())


def counts(calls: Sequence[GitCall], per: int = 1) -> dict[str, Any]:
    """Processes by git command, so many requests' together; and those that git started for them."""
    commands = Counter(call.command for call in calls)
    children = sum(call.children for call in calls)
    return {
        "processes": len(calls) / per,
        "by_command": {command: number / per for command, number in commands.most_common()},
        "children_of_git": children / per,
    }


def claim_pushes(calls: Sequence[GitCall]) -> list[GitCall]:
    """Pushes that try to claim a request; heartbeats replace a claim, and are none."""
    lease = f"--force-with-lease={refs.CLAIMS}"
    return [
        call for call in calls if any(word.startswith(lease) and word.endswith(":") for word in call.argv)
    ]


def moments(calls: Sequence[GitCall], nonce: str) -> tuple[float, float]:
    """When a request was claimed, and when its result was published (Unix seconds)."""
    done = [call for call in calls if call.code == 0]
    claimed = [c.ended for c in claim_pushes(done) if c.pushes(refs.CLAIMS + nonce)]
    inbox = refs.INBOX + nonce
    published = [call.ended for call in done if f":{inbox}" in call.pushes(inbox)]
    return claimed[0], published[0]


# The bus --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """A remote, a clone, and the settings of its client and runners, below one folder."""

    root: Path
    remote: str
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def clone(self) -> Path:
        """A checkout of the remote."""
        return self.root / "clone"

    @property
    def settings(self) -> Settings:
        """The settings of the client."""
        return Settings(
            remote=self.remote,
            requested_by="bench",
            signing_key="none",
            request_lifetime_s=3600,
            transport="embedded",
            state_dir=self.root / "state",
            config_dir=self.root / "config",
        )

    @property
    def variables(self) -> dict[str, str]:
        """The environment of client and runners."""
        config = {"KAKEYA_CONFIG": str(self.root / "config"), "KAKEYA_STATE": str(self.root / "state")}
        return {**os.environ, **config, "KAKEYA_SIGNING_KEY": "none", **self.env}


def build(root: Path, remote: str | None = None, seconds: float = JOB_S) -> Bench:
    """Make a bare remote, or use the one that is given; a clone with one commit; and two presets."""
    root.mkdir(exist_ok=True)
    if remote is None:
        git(root, "init", "-q", "--bare", "-b", "main", "remote.git")
    bench = Bench(root, remote or str(root / "remote.git"))
    git(root, "clone", "-q", bench.remote, "clone")
    if not git(bench.clone, "for-each-ref"):
        git(bench.clone, "commit", "-q", "--allow-empty", "-m", "a workload")
        git(bench.clone, "push", "-q", "origin", "HEAD:refs/heads/main")
    presets = bench.settings.config_dir / "presets"
    presets.mkdir(parents=True)
    for name, argv in (("nothing", ["/usr/bin/true"]), ("sleep", ["/bin/sleep", str(seconds)])):
        text = f'name = "{name}"\nsummary = "A benchmark\'s job."\nargv = {json.dumps(argv)}\n'
        text += 'engine = "installed"\nworkspace = "none"\ntimeout_s = 1000\n'
        (presets / f"{name}.toml").write_text(text)
    return bench


@contextlib.contextmanager
def runners(bench: Bench, count: int = 1, trace: GitTrace | None = None) -> Iterator[list[Runner]]:
    """So many registered runners, each with a state as if on its own machine; trusted by the client."""
    processes = []
    for number in range(count):
        name, state = f"bench{number}", bench.root / f"mac{number}"
        config = open_config(name, bench.remote, state_dir=state, config_dir=bench.settings.config_dir)
        if config.public_key is not None:
            trust.pin(bench.settings.trusted_runners, name, config.public_key)
        log = (bench.root / f"{name}.log").open("wb")
        argv = [str(KAKEYA), "runner", "serve", "--remote", bench.remote, "--name", name]
        env = {**bench.variables, "KAKEYA_STATE": str(state), **(trace.env if trace else {})}
        processes.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log, cwd=bench.root))
    try:
        while len(listed(bench, refs.RUNNERS)) < count:
            time.sleep(0.1)
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(60)


def listed(bench: Bench, prefix: str) -> dict[str, str]:
    """Refs of the remote below a prefix."""
    return GitRepo(bench.clone, environment=bench.env).list_refs(bench.remote, prefix)


@contextlib.contextmanager
def halted(processes: Sequence[Runner]) -> Iterator[None]:
    """Without the runners' looks, which would slow down what is measured."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def submit(bench: Bench, checkout: GitRepo) -> Submission:
    """Submit a request for nothing."""
    preset = find_preset(bench.settings, checkout, "nothing")
    plan = plan_request(bench.settings, checkout, preset=preset, params={})
    return submit_request(bench.settings, plan, checkout)


def round_trip(bench: Bench, checkout: GitRepo) -> tuple[Submission, dict[str, float]]:
    """One request there and back; seconds of its parts."""
    began = time.perf_counter()
    submission = submit(bench, checkout)
    submitted, found = time.perf_counter(), None
    deadline = time.monotonic() + 60
    trusted, expected = bench.settings.trusted_runners, submission.expected
    for update in watch(
        checkout,
        bench.remote,
        submission.manifest.nonce,
        deadline=deadline,
        expected=expected,
        trusted=trusted,
    ):
        found = update.result
    if found is None:
        raise SystemExit(f"{submission.manifest.nonce} has no result")
    believed = believe(found, trusted=trusted, expected=expected)
    if believed.result.verdict.status != "passed":
        raise SystemExit(f"{submission.manifest.nonce}: {believed.result.verdict}")
    phases = {f"{phase}_s": seconds for phase, seconds in believed.result.phase_seconds.items()}
    return submission, {"total_s": time.perf_counter() - began, "submit_s": submitted - began, **phases}


def floor(bench: Bench) -> dict[str, float]:
    """The git commands of one request, run alone: push, fetch, claim, result, fetch. Seconds of each."""
    clone, to, nonce, seconds = bench.clone, bench.remote, secrets.token_hex(8), dict[str, float]()
    cache, home = (bench.root / f"floor-{name}.git" for name in ("runner", "client"))
    for folder in (cache, home):
        if not folder.exists():
            git(bench.root, "init", "-q", "--bare", str(folder))
    branch, inbox = f"refs/heads/floor/{nonce}", f"refs/mac-bridge/floor-inbox/{nonce}"
    claim = f"refs/mac-bridge/floor-claims/{nonce}"

    def timed(name: str, folder: Path, *args: str) -> None:
        began = time.perf_counter()
        git(folder, *args)
        seconds[name] = time.perf_counter() - began

    push, fetch = (
        ("push", "-q", "--atomic", to),
        ("fetch", "-q", "--no-tags", "--no-write-fetch-head", "--depth=2", to),
    )
    tree = git(clone, "mktree", text="")
    request = git(clone, "commit-tree", tree, "-p", "HEAD", "-m", f"request {nonce}")
    timed("push_s", clone, *push, f"{request}:{branch}", f"{request}:{inbox}")
    timed("discover_s", cache, *fetch, f"+{inbox}:{inbox}")
    held = git(cache, "commit-tree", tree, "-m", f"claim {nonce}")
    timed("claim_s", cache, *push, f"{held}:{claim}")
    result = git(cache, "commit-tree", tree, "-p", request, "-m", f"result {nonce}")
    timed("result_s", cache, *push, f"{result}:{branch}", f":{inbox}", f":{claim}")
    timed("fetch_s", home, *fetch, f"+{branch}:{branch}")
    git(clone, "push", "-q", to, f":{branch}")
    return {"total_s": sum(seconds.values()), **seconds}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}": ordered[round(share / 100 * (len(ordered) - 1))] for share in (50, 90, 99, 100)}


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "total_s"}


def time_round_trips(bench: Bench, requests: int) -> dict[str, Any]:
    """Round trips and the floor, in turns."""
    checkout, rows, floors, sizes = GitRepo(bench.clone), [], [], []
    with runners(bench) as processes:
        for _ in range(requests + WARM_UP):
            rows.append(round_trip(bench, checkout)[1])
            time.sleep(SETTLE_S)
            with halted(processes):
                floors.append(floor(bench))
            sizes.append(psutil.Process(processes[0].pid).memory_info().rss)
    rows, floors = rows[WARM_UP:], floors[WARM_UP:]
    trips, bare = (percentiles([row["total_s"] for row in each]) for each in (rows, floors))
    return {
        "requests": requests,
        "round_trip_s": trips,
        "floor_s": bare,
        "median_to_floor": trips["p50"] / bare["p50"],
        "parts_s": medians(rows),
        "floor_parts_s": medians(floors),
        "runner_resident_bytes": {"first": sizes[WARM_UP], "last": sizes[-1]},
    }


def follow_job(bench: Bench, trace: GitTrace) -> tuple[list[GitCall], list[GitCall], float, float, float]:
    """A job from ``kakeya_mac run --wait``: the client's git processes, the runner's, and three moments."""
    client = GitTrace(bench.root / "client-git")
    trace.clear()
    argv = [str(KAKEYA), "run", "--wait", "--transport", "embedded", "--remote", bench.remote]
    done = subprocess.run(
        [*argv, "--preset", "sleep", "--json"],
        cwd=bench.clone,
        env={**bench.variables, **client.env},
        stdout=subprocess.PIPE,
        check=True,
    )
    nonce = json.loads(done.stdout.splitlines()[-1])["nonce"]
    [submitted] = [call.ended for call in client.calls() if call.pushes(refs.INBOX + nonce)]
    claimed, published = moments(trace.calls(), nonce)
    calls = [call for call in trace.calls() if submitted <= call.ended and call.started <= published]
    return client.calls(), calls, submitted, claimed, published


def count_processes(root: Path) -> dict[str, Any]:
    """Git processes of one job, of the client and of the runner."""
    bench, trace = build(root), GitTrace(root.with_suffix(".git-trace"))
    with runners(bench, trace=trace):
        client, runner, submitted, claimed, published = follow_job(bench, trace)
    return {
        "job_s": JOB_S,
        "client": counts(client),
        "runner": counts(runner),
        "full_listings": sum(call.lists_all for call in runner),
        "submit_to_claim_s": claimed - submitted,
        "submit_to_publish_s": published - submitted,
    }


def count_pushes(root: Path, seconds: float) -> dict[str, Any]:
    """Pushes and reads a minute of a runner whose job runs so long, on a host of GitHub's kind."""
    server = build(root / "server", seconds=seconds)
    ssh = root / "ssh"  # stands in for ssh to github.com: runs git's command here
    ssh.write_text('#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n')
    ssh.chmod(0o755)
    env = {"GIT_SSH_COMMAND": str(ssh), "GIT_SSH_VARIANT": "ssh"}
    bench = Bench(server.root, f"ssh://git@github.com{server.remote}", env)
    trace = GitTrace(root / "git-trace")
    with runners(bench, trace=trace):
        _, calls, _, claimed, published = follow_job(bench, trace)
    busy = [call for call in calls if call.started >= claimed and call.ended < published]
    minutes = (published - claimed) / 60
    pushes = sum(call.command == "push" for call in busy)
    reads = sum(call.command in ("upload-pack", "fetch", "ls-remote", "run_shell_alias") for call in busy)
    return {"job_s": seconds, "pushes_a_minute": pushes / minutes, "reads_a_minute": reads / minutes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--remote", help="an address you may push to; default: a bare repository made here")
    parser.add_argument(
        "--busy", type=float, default=240, help="seconds of the job on a public host; 0: none"
    )
    parser.add_argument("--json", action="store_true", help="print the last line only, and store nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        figures: dict[str, Any] = {
            "remote": "given" if options.remote else "a local bare repository",
            **time_round_trips(build(root / "timed", options.remote), options.requests),
            "git_processes": count_processes(root / "counted"),
        }
        if options.busy:
            (root / "public").mkdir()
            figures["public_host"] = count_pushes(root / "public", options.busy)
    stored = None if options.json else str(write("bus", figures))
    if not options.json:
        base, job = figures["floor_s"]["p50"], figures["git_processes"]
        print(
            f"round trip: median {figures['round_trip_s']['p50'] * 1000:.0f} ms ="
            f" {figures['median_to_floor']:.2f} x the floor of {base * 1000:.0f} ms\n"
            f"git processes of a {JOB_S}-second job: client {job['client']['processes']:.0f},"
            f" runner {job['runner']['processes']:.0f}; full listings {job['full_listings']}"
        )
        if options.busy:
            print(
                "a busy runner on a public host: {pushes_a_minute:.1f} pushes a minute,".format(
                    **figures["public_host"]
                )
            )
    print(json.dumps({**figures, "stored": stored}))


if __name__ == "__main__":
    main()
