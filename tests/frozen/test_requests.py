"""Requests from submission to archive: what lies on the remote after each step, and what commands say of it.

One site is told its story once; each test compares a part of it with its golden record. Where no slow test
of this file is asked for, the story is a short one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.frozen.driver import (
    GOLDEN,
    UNKNOWN,
    Names,
    Site,
    Transcript,
    build_site,
    check_golden,
    describe,
    next_second,
    plant_old,
    verified,
)

pytestmark = pytest.mark.timeout(900)

REQUEST = ".mac-bridge/request.json"


@dataclass
class Story:
    """One site, its requests by name, and what was seen on its remote after each step."""

    site: Site
    nonces: dict[str, str] = field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    signed: set[str] = field(default_factory=set)
    documents: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    running: Transcript = field(init=False)

    def ask(self, name: str, preset: str, *args: str) -> str:
        self.nonces[name] = self.site.request(preset, *args)
        return self.nonces[name]

    def look(self, step: str, nonce: str) -> None:
        """Record every ref of one request."""
        names = self.names(nonce)
        own = {ref: commit for ref, commit in sorted(self.site.refs().items()) if nonce in ref}
        self.steps[step] = {names.text(ref): self.describe(commit, names) for ref, commit in own.items()}

    def names(self, nonce: str) -> Names:
        first, second = self.site.git("rev-parse", "HEAD~", "HEAD").split()
        return Names(self.site, {nonce: "<nonce>", first: "<first commit>", second: "<workload>"})

    def describe(self, rev: str, names: Names) -> dict[str, Any]:
        for path, document in self.site.documents(rev).items():
            self.documents.setdefault(Path(path).name, []).append(document)
        return describe(self.site, rev, names)

    def verify(self, namespace: str, rev: str, path: str, key: str) -> None:
        """Check a signature under its namespace and under another one."""
        assert verified(self.site, rev, path, namespace, key), f"{path}.sig does not hold in {namespace}"
        assert not verified(self.site, rev, path, f"{namespace}-other", key)
        self.signed.add(f"{namespace} {Path(path).name}")

    def transcript(self) -> Transcript:
        said = Transcript(self.site)
        said.names.known |= {nonce: f"<{name}>" for name, nonce in self.nonces.items()}
        return said


@pytest.fixture(scope="module")
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    own = [item for item in request.session.items if item.path == request.path]
    whole = any(item.get_closest_marker("slow") for item in own)
    site = build_site(tmp_path_factory.mktemp("requests"))
    story = Story(site)
    runner_key = site.trust_runner()["key"]

    failed = story.ask("failed", "fail", "--signing-key", "none")
    story.look("submitted", failed)
    next_second()  # nonces, by which the queue is ordered, name seconds
    client_key = site.kakeya("key", "--make", "--json").json["key"]
    unstarted = story.ask("unstarted", "hold", "--timeout", "50", "--expires", "7200", "--ref", "HEAD~")
    story.look("submitted-signed", unstarted)
    story.verify("kakeya-mac-request", f"refs/mac-bridge/inbox/{unstarted}", REQUEST, client_key)
    story.running = story.transcript()
    # Only of a request that a runner has, cancelling leaves a cancel request.
    claim = f"refs/mac-bridge/claims/{unstarted}"
    site.git("update-ref", claim, "refs/heads/main", cwd=site.remote)
    story.running.run("cancel of a claimed request", "cancel", unstarted, "--reason", "superseded")
    site.git("update-ref", "-d", claim, cwd=site.remote)
    story.look("cancel-asked", unstarted)
    story.verify("kakeya-mac-cancel", f"refs/mac-bridge/cancel/{unstarted}", "cancel.json", client_key)
    if whole:
        story.running.run("queue with it", "queue")

    with site.runner():
        site.wait_answered(failed, unstarted)
        folder = _claim(story, runner_key)
        if whole:
            _commands(story)
        (folder / "go").touch()
        site.wait_answered(story.nonces["passed"])
        if whole:
            _others(story)
        story.steps["registered"] = {"refs/mac-bridge/runners/mac": _registration(story)}
        story.verify("kakeya-mac-runner", "refs/mac-bridge/runners/mac", "runner.json", runner_key)
    for name, nonce in story.nonces.items():
        story.look(f"finished-{name}", nonce)
    passed = story.nonces["passed"]
    path = f".mac-bridge/results/{passed}/result.json"
    story.verify("kakeya-mac-result", f"refs/heads/mac-bridge/hold-{passed}", path, runner_key)
    return story


def _claim(story: Story, runner_key: str) -> Path:
    """A running request, its claim and its heartbeat; the job's folder."""
    site, passed = story.site, story.ask("passed", "hold")
    folder = site.wait_running(passed)
    claim = f"refs/mac-bridge/claims/{passed}"
    story.look("running", passed)
    before, first, *_ = (site.remote / "logs" / claim).read_text().split()
    assert set(before) == {"0"}
    story.steps["claimed"] = {"<the claim's first commit>": story.describe(first, story.names(passed))}
    story.verify("kakeya-mac-claim", first, "status.json", runner_key)
    return folder


def _commands(story: Story) -> None:
    """What commands say while the request runs."""
    said, site, passed = story.running, story.site, story.nonces["passed"]
    said.names.known[passed] = "<passed>"
    said.run("status", "status", passed, until=lambda found: bool(found["claim"]))
    said.run("queue", "queue", "--recent", "0", until=lambda found: bool(found["requests"][0]["claim"]))
    said.run("logs", "logs", passed, until=lambda found: bool(found["logs"]))
    said.run("presets of runners", "presets", "echo", "--remote", str(site.remote), only="echo")
    said.run("runners", "runners", only="echo")


def _others(story: Story) -> None:
    """Requests that end in other ways."""
    others = [story.ask(name, name) for name in ("rejecting", "forge", "tests", "endless")]
    stopped = story.ask("stopped", "hold")
    story.site.wait_answered(*others)
    story.site.wait_running(stopped)
    story.running.run("cancel of a running request", "cancel", stopped, "--wait", "300")


def _registration(story: Story) -> dict[str, Any]:
    """The runner's own ref; of the presets it offers only one, because others come and go."""
    seen = story.describe("refs/mac-bridge/runners/mac", Names(story.site))
    document = seen["documents"]["runner.json"]
    document["presets"] = [offer for offer in document["presets"] if offer["name"] == "echo"]
    return seen


@pytest.mark.parametrize(
    "step",
    [
        *("submitted", "submitted-signed", "cancel-asked", "claimed", "running", "registered"),
        *("finished-passed", "finished-failed", "finished-unstarted"),
        *(
            pytest.param(f"finished-{name}", marks=pytest.mark.slow)
            for name in ("stopped", "rejecting", "forge", "tests", "endless")
        ),
    ],
)
def test_refs_and_documents(story: Story, step: str) -> None:
    check_golden(f"wire-{step}", story.steps[step])


def test_signatures_hold_in_their_namespaces(story: Story) -> None:
    assert story.signed == {
        "kakeya-mac-request request.json",
        "kakeya-mac-cancel cancel.json",
        "kakeya-mac-claim status.json",
        "kakeya-mac-result result.json",
        "kakeya-mac-runner runner.json",
    }


@pytest.mark.parametrize("kind", ["request", "cancel", "status", "result", "runner"])
def test_documents_keep_the_schema(story: Story, kind: str) -> None:
    schema = json.loads((GOLDEN / "schema" / f"{kind}.json").read_text())
    found = story.documents[f"{kind}.json"]
    assert found
    for document in found:
        jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)


def test_commands_while_requests_run(story: Story) -> None:
    story.running.check("running")


@pytest.mark.parametrize(
    "name",
    [
        "passed",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("forge", "stopped", "failed", "tests", "unstarted", "rejecting", "endless")
        ),
    ],
)
def test_result(story: Story, name: str) -> None:
    said = story.transcript()
    said.run("result", "result", story.nonces[name])
    said.check(f"result-{name}")


def test_finished_request(story: Story) -> None:
    said, passed, failed = story.transcript(), story.nonces["passed"], story.nonces["failed"]
    said.run("wait", "wait", passed)
    said.run("status", "status", failed)
    said.run("logs", "logs", failed)
    said.run("cancel", "cancel", passed)
    out = story.site.root / "out"
    said.run("fetch", "fetch", passed, failed, "-o", str(out))
    saved = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    said.steps["fetch"]["saved"] = sorted(said.names.text(path) for path in saved)
    said.run("fetch one that is unknown", "fetch", passed, UNKNOWN, "-o", str(out))
    said.check("finished")


def test_history(story: Story) -> None:
    said = story.transcript()
    said.run("history", "history")
    said.run("filtered", "history", "--status", "failed", "--preset", "fail", "-n", "1")
    said.steps["history"]["json"]["requests"].sort(key=lambda row: row["nonce"])  # many are of one second
    said.check("history")


def test_trust_decides(story: Story) -> None:
    said, site, passed = story.transcript(), story.site, story.nonces["passed"]
    other = str(site.root / "other")
    said.run("no key trusted", "result", passed, KAKEYA_CONFIG=other)
    said.run("allowed unsigned", "result", passed, "--allow-unsigned", KAKEYA_CONFIG=other)
    key = site.kakeya("runner", "key", "--make", "--name", "other", "--json", KAKEYA_STATE=other).json["key"]
    assert site.kakeya("runners", "trust", "other", "--key", key, KAKEYA_CONFIG=other).code == 0
    said.run("another key trusted", "result", passed, KAKEYA_CONFIG=other)
    said.check("trust")


def test_altered_result_is_not_believed(story: Story) -> None:
    said, site, passed = story.transcript(), story.site, story.nonces["passed"]
    ref, index = f"refs/heads/mac-bridge/hold-{passed}", {"GIT_INDEX_FILE": str(site.root / "index")}
    before = site.refs()[ref]
    path = f".mac-bridge/results/{passed}/log.txt"
    site.git("read-tree", before, cwd=site.remote, **index)
    blob = site.git("hash-object", "-w", "--stdin", data=b"altered\n", cwd=site.remote)
    site.git("update-index", "--cacheinfo", f"100644,{blob},{path}", cwd=site.remote, **index)
    tree = site.git("write-tree", cwd=site.remote, **index)
    message = site.git("log", "-1", "--format=%B", before, cwd=site.remote)
    altered = site.git("commit-tree", tree, "-p", f"{before}^", "-m", message, cwd=site.remote)
    site.git("update-ref", ref, altered, cwd=site.remote)
    try:
        said.run("result", "result", passed)
        said.run("fetch", "fetch", passed, "-o", str(site.root / "altered"))
    finally:
        site.git("update-ref", ref, before, cwd=site.remote)
    said.check("altered")


def test_again(story: Story) -> None:
    said = story.transcript()
    said.run("dry run", "again", story.nonces["passed"], "-p", "word=more", "--dry-run")
    nonce = said.run("again", "again", story.nonces["passed"])["nonce"]
    said.run("of another's request, with a key", "again", story.nonces["failed"])
    story.look("again", nonce)
    said.steps["remote"] = story.steps["again"]
    said.check("again")


def test_prune_keeps_results_readable(story: Story) -> None:
    """The last test, because it moves a request into the archive, whose layout is not part of the record."""
    said, site = story.transcript(), story.site
    old = plant_old(site, story.nonces["failed"], days=40)
    said.names.known[old] = "<old>"
    said.run("result before", "result", old)
    before = set(site.refs())
    said.run("dry run", "prune", "--older-than", "30d", "--dry-run")
    said.run("prune", "prune", "--older-than", "30d")
    after = set(site.refs())
    changed = {"gone": before - after, "new": after - before}
    said.steps["refs"] = {kind: sorted(map(said.names.text, refs)) for kind, refs in changed.items()}
    said.run("result", "result", old)
    said.run("logs", "logs", old)
    fresh = site.root / "fresh"
    site.git("clone", "--quiet", str(site.remote), str(fresh), cwd=site.root)
    said.run("result from a fresh clone", "result", old, cwd=fresh)
    said.check("prune")
