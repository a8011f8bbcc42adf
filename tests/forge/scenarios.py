"""What is done to the forge, and what has to come of it. Each scenario leaves the forge as it found it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bridge.cli.demo import write_policy
from bridge.protocol import refs
from tests.forge.server import (
    BIN,
    HOSTED,
    HOSTED_LABELS,
    MAC,
    MAC_LABELS,
    MEMBER,
    OWNER,
    SLUG,
    Forge,
    password,
)

WORKFLOW = "mac-bridge.yaml"
WAIT_S = 240
# Runs for a minute or more on two cores, so there is time to stop it.
LONG = ("--preset", "throughput", "-p", "prompts=all", "-p", "limit=40", "-p", "max_tokens=512")
PROBE = ("--preset", "probe")


@dataclass
class Answer:
    """What a command of the client said."""

    code: int
    document: dict[str, Any]
    errors: str

    @property
    def verdict(self) -> tuple[str, str]:
        return str(self.document.get("status")), str(self.document.get("reason"))

    @property
    def nonce(self) -> str:
        return str(self.document["nonce"])


@dataclass
class Site:
    """The forge, and a member's checkout on a machine that has no token for the API."""

    forge: Forge
    first: str = ""  # the handle of a request that passed

    @property
    def clone(self) -> Path:
        return self.forge.folder / "clone"

    def prepare(self) -> None:
        """Start everything and say what the Mac allows."""
        forge = self.forge
        intruder = forge.folder / "intruder"
        change = 'find "$1" -name log.txt -exec sh -c \'echo "and more" >>"$1"\' sh {} \\;'
        intruder.write_text(f'#!/bin/sh\nif [ -e "{self.tampering}" ]; then {change}; fi\n')
        intruder.chmod(0o755)
        forge.start()
        forge.build_project()
        write_policy(forge.home(MAC) / "config")
        forge.git("clone", "--quiet", forge.remote, str(self.clone), cwd=forge.folder)
        self.start_mac()
        forge.start_runner(HOSTED, HOSTED_LABELS, jobs=2)

    @property
    def tampering(self) -> Path:
        """While this file exists, artifacts are changed after their upload."""
        return self.forge.folder / "tampering"

    def start_mac(self) -> None:
        self.forge.start_runner(MAC, MAC_LABELS)

    @contextmanager
    def mac_away(self) -> Iterator[None]:
        """The Mac takes no job meanwhile."""
        self.forge.stop(MAC)
        try:
            yield
        finally:
            self.start_mac()

    @contextmanager
    def variable(self, name: str, value: str) -> Iterator[None]:
        """The repository has this variable meanwhile."""
        self.forge.set_variable(name, value)
        try:
            yield
        finally:
            self.forge.set_variable(name, None)

    def client(self, *args: str, cwd: Path | None = None, **env: str) -> Answer:
        """Run the installed client with ``--json``."""
        outside = {**self.forge.environment(MEMBER), "GIT_TERMINAL_PROMPT": "0", **env}
        argv = [str(BIN / "kakeya_mac"), *args, "--json"]
        done = subprocess.run(
            argv, cwd=cwd or self.clone, env=outside, capture_output=True, timeout=30 * WAIT_S
        )
        lines = done.stdout.decode(errors="replace").splitlines()
        return Answer(
            done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr.decode(errors="replace")
        )

    def ask(self, *args: str, wait_s: int | None = None, **env: str) -> Answer:
        """Ask over Actions; results are accepted unsigned where no key is trusted."""
        wait = ("--wait", str(wait_s), "--allow-unsigned") if wait_s else ()
        return self.client("run", *args, "--transport", "actions", *wait, **env)

    def branch(self, nonce: str) -> str:
        return next(ref for ref in self.forge.refs() if ref.startswith("refs/heads/") and ref.endswith(nonce))

    def result(self, nonce: str, wait_s: int = WAIT_S) -> Answer:
        return self.client("wait", nonce, "--seconds", str(wait_s), "--allow-unsigned")

    def with_token(self) -> dict[str, str]:
        """The environment of a client that has an API token of the owner."""
        return {
            "KAKEYA_GITHUB_API": f"{self.forge.url}/api/v1",
            "KAKEYA_GITHUB_TOKEN": self.forge.token(OWNER),
        }

    def until_running(self, nonce: str) -> int:
        """Wait until the Mac executes a request's job; the id of its workflow run."""
        run = int(self.forge.run_of(self.branch(nonce))["id"])
        self.forge.wait_for_job(run, "run", "in_progress")
        jobs = self.forge.home(MAC) / "state"
        self.forge.wait("the job runs", lambda: any(jobs.glob("runner/*/jobs/*/workspace")), 60)
        return run

    def mac_key(self) -> str:
        """The line that makes a client trust the Mac: its name and public key."""
        name = self.published(self.passed())["runner"]["name"]
        env = self.forge.environment(MAC)
        argv = [str(BIN / "kakeya_mac"), "runner", "key", "--name", name, "--json"]
        shown = json.loads(subprocess.run(argv, env=env, capture_output=True, check=True).stdout)
        return f"{name} {' '.join(shown['key'].split()[:2])}"

    def passed(self) -> str:
        """The handle of a request that passed."""
        if not self.first:
            self.first = self.ask(*PROBE, wait_s=WAIT_S).nonce
        return self.first

    def published(self, nonce: str) -> dict[str, Any]:
        """The ``result.json`` on a request's branch."""
        branch = self.branch(nonce)
        self.forge.git("fetch", "--quiet", "origin", branch, cwd=self.clone)
        path = f"FETCH_HEAD:.mac-bridge/results/{nonce}/result.json"
        return dict(json.loads(self.forge.git("show", path, cwd=self.clone)))

    def left(self, nonce: str) -> set[str]:
        """Refs of a request beside its branch."""
        return {ref for ref in self.forge.refs() if nonce in ref and not ref.startswith("refs/heads/")}


def assert_finished(
    site: Site, nonce: str, verdict: tuple[str, str] = ("passed", "ok"), wait_s: int = WAIT_S
) -> None:
    """That a request has this result, and nothing of it waits any more."""
    answer = site.result(nonce, wait_s)
    assert answer.verdict == verdict, (
        f"{nonce}: {answer.verdict}, {answer.document.get('message')} {answer.errors}"
    )
    assert not site.left(nonce), f"left of {nonce}: {site.left(nonce)}"


def probe(site: Site) -> str:
    """A request is pushed, runs on the Mac, is published"""
    answer = site.ask(*PROBE, wait_s=WAIT_S)
    assert (answer.code, answer.verdict) == (0, ("passed", "ok")), answer
    assert_finished(site, answer.nonce)
    site.first = answer.nonce
    return "passed/ok"


def throughput(site: Site) -> str:
    """The engine is measured, and the report is judged on both sides"""
    answer = site.ask("--preset", "throughput", "-p", "limit=1", "-p", "max_tokens=16", wait_s=WAIT_S)
    assert (answer.code, answer.verdict) == (0, ("passed", "ok")), answer
    return "passed/ok"


def four_at_once(site: Site) -> str:
    """Four clients ask at the same moment and wait"""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: site.ask(*PROBE, wait_s=2 * WAIT_S), range(4)))
    assert [answer.verdict for answer in answers] == [("passed", "ok")] * 4, answers
    return "4 × passed/ok"


def twenty_within_ten_seconds(site: Site) -> str:
    """The client makes twenty requests; they are pushed while the Mac is away, and it comes back"""
    forge, outbox = site.forge, site.forge.folder / "outbox.git"
    forge.git("clone", "--quiet", "--bare", str(site.clone), str(outbox), cwd=forge.folder)
    # Git takes the outbox for the server: on two cores twenty starts of the client take longer than that.
    server, rewrite = f"{forge.url}/{SLUG}", forge.folder / "outbox.gitconfig"
    login = f"!printf 'username=%s\\npassword=%s\\n' {MEMBER} {password(MEMBER)} #"
    forge.git("config", "--file", str(rewrite), "credential.helper", login, cwd=forge.folder)
    forge.git("config", "--file", str(rewrite), f"url.{outbox}.pushInsteadOf", server, cwd=forge.folder)
    nonces = [site.ask(*PROBE, "--remote", server, GIT_CONFIG_GLOBAL=str(rewrite)).nonce for _ in range(20)]
    refs_of = {
        nonce: [
            ref
            for ref in forge.git("for-each-ref", "--format=%(refname)", cwd=outbox).split()
            if nonce in ref
        ]
        for nonce in nonces
    }
    assert all(len(found) == 2 for found in refs_of.values()), refs_of
    with site.mac_away():
        start_s = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            four = [[ref for nonce in nonces[i::4] for ref in refs_of[nonce]] for i in range(4)]
            list(pool.map(lambda own: forge.git("push", "--quiet", forge.remote, *own, cwd=outbox), four))
        took_s = time.monotonic() - start_s
    assert took_s <= 10, f"pushed in {took_s:.1f} s"
    for nonce in nonces:
        assert_finished(site, nonce, wait_s=20 * WAIT_S)
    return f"20 × passed/ok, pushed in {took_s:.1f} s"


def cancel_waiting(site: Site) -> str:
    """Without a token, while the Mac is away; the run that comes later changes nothing"""
    with site.mac_away():
        nonce = site.ask(*PROBE).nonce
        run = site.forge.run_of(site.branch(nonce))["id"]
        answer = site.client("cancel", nonce)
        assert (answer.code, answer.document.get("status")) == (0, "withdrawn"), answer
        assert_finished(site, nonce, ("cancelled", "requested"))
        tip = site.forge.refs()[site.branch(nonce)]
    site.forge.wait_for_job(run, "publish", "completed")
    assert site.forge.refs()[site.branch(nonce)] == tip, "the result was replaced"
    return "cancelled/requested, by the client"


def cancel_running(site: Site) -> str:
    """`cancel` of a request that runs, without a token"""
    nonce = site.ask(*LONG).nonce
    site.until_running(nonce)
    answer = site.client("cancel", nonce)
    assert answer.code == 0, answer
    assert_finished(site, nonce, ("cancelled", "requested"))
    return "cancelled/requested"


def cancel_on_page(site: Site) -> str:
    """A person cancels the run on its page; `status` says so, `cancel` ends the request"""
    nonce = site.ask(*LONG).nonce
    run = site.until_running(nonce)
    site.forge.cancel_on_page(run)
    site.forge.wait(
        "the run ends",
        lambda: site.forge.api("GET", f"/repos/{SLUG}/actions/runs/{run}")["status"] == "completed",
        60,
    )
    time.sleep(5)  # publish would have begun
    token = site.with_token()
    said = site.client("status", nonce, **token)
    if said.document.get("status") != "cancelled":  # Gitea cancels publish, too
        problem = said.document.get("run_problem")
        assert problem, said
        assert "kakeya_mac cancel" in problem, said
        rows = site.client("queue", **token).document["requests"]
        assert [row["run_problem"] for row in rows if row["nonce"] == nonce] == [problem], rows
        answer = site.client("cancel", nonce, **token)
        assert (answer.code, answer.document.get("status")) == (0, "withdrawn"), answer
    assert_finished(site, nonce, ("cancelled", "requested"))
    return "cancelled/requested"


def killed_runner(site: Site) -> str:
    """The Mac loses power in the middle of a job"""
    nonce = site.ask(*LONG).nonce
    site.until_running(nonce)
    site.forge.stop(MAC, kill=True)
    site.start_mac()
    assert_finished(site, nonce, ("lost", "run_lost"))
    return "lost/run_lost"


def time_limit(site: Site) -> str:
    """The job's time limit is over before the job is"""
    with site.variable("KAKEYA_RUN_MINUTES", "0.5"):
        nonce = site.ask(*LONG[:2], "-p", "prompts=all", "-p", "limit=40", "-p", "max_tokens=1024").nonce
        assert_finished(site, nonce, ("failed", "timeout"))
    return "failed/timeout"


def tampered_artifact(site: Site) -> str:
    """The artifact is changed between the two jobs"""
    site.tampering.touch()
    try:
        nonce = site.ask(*PROBE).nonce
        assert_finished(site, nonce, ("rejected", "tampered"))
    finally:
        site.tampering.unlink()
    return "rejected/tampered"


def untrusted_runner(site: Site) -> str:
    """The repository trusts other keys than the Mac's; then the Mac's"""
    line = site.mac_key()
    other = re.sub(r"AAAA\S+", "AAAAC3NzaC1lZDI1NTE5AAAAIGx4bW1ubm9wcXJzdHV2d3h5ejAxMjM0NTY3ODlhYmNk", line)
    ended = []
    for trusted in (other, line):
        with site.variable("KAKEYA_TRUSTED_RUNNERS", trusted):
            nonce = site.ask(*PROBE).nonce
            run = site.forge.run_of(site.branch(nonce))["id"]
            job = site.forge.wait_for_job(run, "publish", "completed", WAIT_S)
            ended.append(job["conclusion"])
            if trusted is other:
                assert "rejected/untrusted" in site.forge.log(run, "publish"), site.forge.log(run, "publish")
    assert ended == ["failure", "success"], ended
    return "rejected/untrusted, then passed/ok"


def hostile_manifests(site: Site) -> str:
    """Requests with an argv, a shell command, another branch for the result, a megabyte of braces"""
    main, outside = site.forge.refs()["refs/heads/main"], site.forge.folder / "pwned"
    harmful = {
        "argv": ({"argv": ["touch", str(outside)]}, None),
        "param": ({"preset": "gate", "params": {"path": f"$(touch {outside})"}}, None),
        "result_ref": ({"result_ref": "refs/heads/main"}, None),
        "bomb": ({}, b'{"a":' * 200_000),
    }
    pushed = {name: push_by_hand(site, changes, data) for name, (changes, data) in harmful.items()}
    for name, nonce in pushed.items():
        answer = site.result(nonce)
        assert answer.verdict[0] == "refused", f"{name}: {answer}"
    assert site.forge.refs()["refs/heads/main"] == main, "the default branch moved"
    assert not outside.exists(), "a request ran a command"
    return f"{len(harmful)} × refused"


def hostile_branches(site: Site) -> str:
    """Branch names that a shell or an expression would execute"""
    forge, before = site.forge, {run["id"] for run in site.forge.runs()}
    heads = {ref: commit for ref, commit in forge.refs().items() if ref.startswith("refs/heads/")}
    for name in ('$(touch${IFS}pwned)`touch${IFS}pwned`;"&|ü', "probe-${{github.token}}"):
        push_by_hand(site, {}, None, branch=f"mac-bridge/{name}")

    def started() -> list[int]:
        return [run["id"] for run in forge.runs() if run["id"] not in before]

    forge.wait("a run for each", lambda: started()[1:], 30)
    for run in started():
        forge.wait_for_job(run, "publish", "completed")
    assert not [*forge.folder.rglob("pwned")], "a branch name was executed"
    after = forge.refs()
    assert all(after.get(ref) == commit for ref, commit in heads.items()), "another branch moved"
    return "nothing is executed, no other branch moves"


def dispatch(site: Site) -> str:
    """A commit with another workflow file: the default branch's is dispatched by the API"""
    git, clone = site.forge.git, site.clone
    git("switch", "--quiet", "-c", "other", cwd=clone)
    try:
        file = clone / ".github" / "workflows" / WORKFLOW
        file.write_text(file.read_text() + "# changed\n")
        who = ("-c", "user.name=alice", "-c", "user.email=alice@example.org")
        git(*who, "commit", "--quiet", "-am", "another workflow file", cwd=clone)
        git("push", "--quiet", "origin", "other", cwd=clone)
        answer = site.ask(*PROBE, wait_s=WAIT_S, **site.with_token())
    finally:
        git("switch", "--quiet", "main", cwd=clone)
    assert (answer.code, answer.verdict) == (0, ("passed", "ok")), answer
    runs = [
        run for run in site.forge.runs() if answer.nonce in run["display_title"] + str(run["head_branch"])
    ]
    assert [run["event"] for run in runs] == ["workflow_dispatch"], runs
    return "passed/ok"


def mac_run(site: Site) -> str:
    """`mac-run.yaml` asks a daemon on the Mac, as it has to on this server, and gates on the verdict"""
    forge = site.forge
    env, log = forge.environment(MAC), (forge.folder / "daemon.log").open("ab")
    argv = [str(BIN / "kakeya_mac"), "runner", "serve", "--remote", forge.remote, "--name", "daemon"]
    with log:
        daemon = subprocess.Popen(argv, env=env, stdout=log, stderr=log, cwd=forge.home(MAC))
        try:
            ended = [
                run_workflow(site, inputs)
                for inputs in ({"preset": "probe"}, {"preset": "gate", "params": "path=../x"})
            ]
        finally:
            daemon.terminate()
            daemon.wait(60)
    assert ended == ["success", "failure"], ended
    return "passed; a bad parameter fails the job"


def run_workflow(site: Site, inputs: dict[str, str]) -> str:
    """Start mac-run.yaml by hand; the conclusion of its job."""
    before = {run["id"] for run in site.forge.runs()}
    path = f"/repos/{SLUG}/actions/workflows/mac-run.yaml/dispatches"
    site.forge.api(
        "POST", path, {"ref": "main", "inputs": {"params": "", "ref": "", "wait": "200", **inputs}}
    )
    run = site.forge.wait(
        "a run", lambda: next((r for r in site.forge.runs() if r["id"] not in before), None), 30
    )
    return str(site.forge.wait_for_job(run["id"], "request", "completed", WAIT_S)["conclusion"])


def fresh_clone(site: Site) -> str:
    """Another checkout that trusts the Mac's key alone reads and believes the result"""
    line = site.mac_key()
    nonce = site.passed()
    other = site.forge.folder / "fresh"
    config = {"KAKEYA_CONFIG": str(other / "config"), "KAKEYA_STATE": str(other / "state")}
    try:
        site.forge.git("clone", "--quiet", site.forge.remote, str(other / "clone"), cwd=site.forge.folder)
        name, _, key = line.partition(" ")
        argv = [str(BIN / "kakeya_mac"), "runners", "trust", name, "--key", key]
        subprocess.run(argv, env=site.forge.environment(MEMBER) | config, cwd=other / "clone", check=True)
        answer = site.client("result", nonce, cwd=other / "clone", **config)
        assert (answer.code, answer.verdict) == (0, ("passed", "ok")), answer
    finally:
        shutil.rmtree(other)
    return "passed/ok, by a trusted key"


def push_by_hand(site: Site, changes: dict[str, Any], data: bytes | None, branch: str | None = None) -> str:
    """Push a commit that looks like a request, as somebody with push rights may; its nonce."""
    forge, clone = site.forge, site.clone
    base = forge.git("rev-parse", "origin/main", cwd=clone)
    now = datetime.now(UTC).replace(microsecond=0)
    nonce = refs.new_nonce(now, os.urandom(6))
    document = site.client("run", *PROBE, "--transport", "actions", "--dry-run").document["manifest"]
    ref = f"refs/heads/mac-bridge/probe-{nonce}"
    document |= {"nonce": nonce, "result_ref": ref, "workload_sha": base, **changes}
    index = {"GIT_INDEX_FILE": str(forge.folder / "hostile.index")}
    forge.git("read-tree", base, cwd=clone, **index)
    file = forge.folder / "hostile.json"
    file.write_bytes(data if data is not None else json.dumps(document).encode())
    blob = forge.git("hash-object", "-w", str(file), cwd=clone)
    forge.git(
        "update-index", "--add", "--cacheinfo", f"100644,{blob},.mac-bridge/request.json", cwd=clone, **index
    )
    tree = forge.git("write-tree", cwd=clone, **index)
    who = ("-c", "user.name=eve", "-c", "user.email=eve@example.org")
    commit = forge.git(*who, "commit-tree", tree, "-p", base, "-m", f"request {nonce}", cwd=clone)
    where = ref if branch is None else f"refs/heads/{branch}-{nonce}"
    forge.git("push", "--quiet", "origin", f"{commit}:{where}", cwd=clone)
    return nonce


SCENARIOS: dict[str, Callable[[Site], str]] = {
    "probe": probe,
    "throughput": throughput,
    "four at once": four_at_once,
    "twenty within ten seconds": twenty_within_ten_seconds,
    "cancel a waiting request": cancel_waiting,
    "cancel a running request": cancel_running,
    "cancel on the page": cancel_on_page,
    "killed runner": killed_runner,
    "time limit": time_limit,
    "tampered artifact": tampered_artifact,
    "untrusted runner": untrusted_runner,
    "hostile manifests": hostile_manifests,
    "hostile branch names": hostile_branches,
    "dispatch": dispatch,
    "mac-run.yaml": mac_run,
    "a fresh clone verifies": fresh_clone,
}
