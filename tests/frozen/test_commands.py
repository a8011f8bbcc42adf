"""Commands that need no answered request: errors, keys, policy, gate, doctor, workflow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.frozen.driver import GOLDEN, UNKNOWN, UPDATE, Site, Transcript, build_site, check_golden

pytestmark = pytest.mark.timeout(900)

EVIDENCE = GOLDEN / "evidence"
NOWHERE = "/nonexistent/remote.git"
HANDLE_COMMANDS = ["status", "wait", "logs", "result", "fetch", "cancel", "again"]
REMOTE_COMMANDS = [
    *([command, UNKNOWN] for command in ("status", "result")),
    *(["queue"], ["history"], ["prune"], ["runners"], ["run", "--preset", "echo"], ["doctor"]),
    ["runner", "serve", "--once", "--idle-timeout", "0"],
]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A site on which nothing is asked; tests change nothing of it."""
    return build_site(tmp_path_factory.mktemp("empty"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return build_site(tmp_path)


def test_waiting_request(site: Site) -> None:
    said = Transcript(site)
    said.run("dry run", "run", "--preset", "echo", "-p", "word=other", "--timeout", "9", "--dry-run")
    asked = said.run("run", "run", "--preset", "echo", "--signing-key", "none")
    nonce = asked["nonce"]
    said.run("status by prefix", "status", nonce[:20])
    said.run("logs", "logs", nonce)
    said.run("result", "result", nonce)
    said.run("wait that ends early", "wait", nonce, "--seconds", "0.2")
    said.run("queue", "queue")
    said.check("waiting")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[] if command == "status" else pytest.mark.slow)
        for command in HANDLE_COMMANDS
    ],
)
def test_unknown_handle(empty: Site, command: str) -> None:
    said = Transcript(empty)
    said.run("unknown handle", command, UNKNOWN)
    said.check(f"unknown-{command}")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=words[0], marks=[] if words[0] == "run" else pytest.mark.slow)
        for words in REMOTE_COMMANDS
    ],
)
def test_unreachable_remote(empty: Site, words: list[str]) -> None:
    """Every command that needs the remote ends in the same way, but `doctor`, `runners` and `serve`."""
    done = empty.kakeya(*words, "--remote", NOWHERE, *(["--json"] if words[0] != "runner" else []))
    record = {"exit_code": done.code}
    if words[0] not in {"runner", "doctor"}:
        record["status"], record["error"] = done.json.get("status"), done.json.get("error")
    check_golden(f"unreachable-{words[0]}", record)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("preset", ["--preset", "nonesuch"]),
        pytest.param("value", ["--preset", "echo", "-p", "word=-x"], marks=pytest.mark.slow),
        pytest.param("parameter", ["--preset", "echo", "-p", "other=1"], marks=pytest.mark.slow),
        pytest.param("revision", ["--preset", "echo", "--ref", "nonesuch"], marks=pytest.mark.slow),
        pytest.param("key", ["--preset", "echo", "--signing-key", "/nonesuch"], marks=pytest.mark.slow),
        pytest.param("usage", [], marks=pytest.mark.slow),
        pytest.param("limit", ["--preset", "echo", "--timeout", "0"], marks=pytest.mark.slow),
    ],
)
def test_run_is_refused(empty: Site, name: str, words: list[str]) -> None:
    said = Transcript(empty)
    said.run(name, "run", *words)
    assert not empty.refs("refs/mac-bridge")
    said.check(f"run-bad-{name}")


def test_presets(empty: Site) -> None:
    """The listing keeps each preset's digest; presets may be added."""
    said = Transcript(empty)
    said.run("one", "presets", "echo")
    said.run("unknown", "presets", "nonesuch")
    listed = empty.kakeya("presets", "--json")
    presets = {preset["name"]: preset for preset in listed.json["presets"]}
    keys = {tuple(sorted(preset)) for preset in presets.values()}
    installed = {name: preset["digest"] for name, preset in presets.items()}
    path = GOLDEN / "presets.json"
    if not UPDATE:  # what is new since is no break
        known = json.loads(path.read_text())["listed"]["digests"]
        installed = {name: digest for name, digest in installed.items() if name in known}
    said.steps["listed"] = {
        "exit_code": listed.code,
        "keys": sorted(listed.json),
        "keys of a preset": sorted(map(list, keys)),
        "digests": installed,
    }
    said.check("presets")


def test_keys_of_requester_and_signers(site: Site) -> None:
    said = Transcript(site)
    said.run("no key", "key")
    key = said.run("make", "key", "--make")["key"]
    said.run("key", "key")
    said.run("add", "runner", "signers", "add", "ann", "--key", key)
    said.run("add again", "runner", "signers", "add", "ann", "--key", key, "--valid-until", "2099-01-31")
    said.run("bad key", "runner", "signers", "add", "bob", "--key", "no key")
    said.run("list", "runner", "signers", "list")
    said.run("revoke", "runner", "signers", "revoke", "ann")
    said.run("list revoked", "runner", "signers", "list")
    said.run("remove", "runner", "signers", "remove", "ann")
    said.run("remove unknown", "runner", "signers", "remove", "ann")
    said.run("list empty", "runner", "signers", "list")
    said.check("signers")


def test_keys_of_runners(site: Site) -> None:
    said = Transcript(site)
    key = said.run("key", "runner", "key", "--name", "mac", "--make")["key"]
    said.run("renew", "runner", "key", "--name", "mac", "--renew")
    said.run("none trusted", "runners")
    codes = {}
    for step, *words in (
        ("trust without a key", "trust", "mac"),
        ("trust", "trust", "mac", "--key", key, "--valid-until", "2099-01-31"),
        ("trust again", "trust", "mac", "--key", key),
        ("bad key", "trust", "mac", "--key", "no key"),
        ("first, where none is seen", "trust", "--first"),
        ("distrust unknown", "distrust", "studio"),
    ):
        codes[step] = site.kakeya("runners", *words).code
    said.run("trusted", "runners")
    for step, *words in (
        ("revoke", "revoke", "mac"),
        ("trust revoked", "trust", "mac", "--key", key),
        ("distrust", "distrust", "mac"),
    ):
        codes[step] = site.kakeya("runners", *words).code
    said.run("distrusted", "runners")
    said.steps["exit codes"] = codes
    said.check("runners")


@pytest.mark.slow
def test_known_runners(site: Site) -> None:
    said = Transcript(site)
    key = site.kakeya("runner", "key", "--make", "--name", "studio", "--json").json["key"]
    said.run("add", "runner", "peers", "add", "studio", "--key", key)
    said.run("list", "runner", "peers", "list")
    said.run("remove", "runner", "peers", "remove", "studio")
    said.run("remove unknown", "runner", "peers", "remove", "studio")
    said.check("peers")


def test_policy(site: Site) -> None:
    said = Transcript(site)
    policy = site.config / "policy.toml"
    manifest = site.root / "request.json"
    for preset in ("tests", "echo"):
        document = site.kakeya("run", "--preset", preset, "--dry-run", "--json").json["manifest"]
        manifest.write_text(json.dumps(document))
        said.run(f"explain {preset}", "runner", "policy", "explain", str(manifest))
    init = site.kakeya("runner", "policy", "init")
    said.steps["init"] = {"exit_code": init.code, "mode": f"{policy.stat().st_mode & 0o777:04o}"}
    said.run("check", "runner", "policy", "check")
    policy.write_text("require_signature = true\n")
    said.run("explain, a signature required", "runner", "policy", "explain", str(manifest))
    said.run("as of a requester", "runner", "policy", "explain", str(manifest), "--requester", "ann")
    policy.write_text("\nnonesuch = 1\n")
    said.run("check of a bad one", "runner", "policy", "check")
    said.run("explain by a bad one", "runner", "policy", "explain", str(manifest))
    said.check("policy")


def test_gate(empty: Site) -> None:
    """The reports are copies of real ones: what this version judged of them, later ones judge, too."""
    said = Transcript(empty)
    folder = empty.root / "reports"
    folder.mkdir()
    report = json.loads((EVIDENCE / "throughput.json").read_text())
    report["claims"][0]["value"] = 99.0
    (folder / "edited.json").write_text(json.dumps(report))
    (folder / "other.json").write_text("{}")
    judged = said.run("accepted", "gate", "throughput.json", "probe.json", cwd=EVIDENCE)
    for shown, file in zip(said.steps["accepted"]["json"]["files"], judged["files"], strict=True):
        shown |= {"figures": file["figures"], "claims": file["claims"]}  # to the last digit
    said.run("of another request", "gate", "probe.json", "--nonce", UNKNOWN, cwd=EVIDENCE)
    said.run("edited, in a folder", "gate", ".", cwd=folder)
    said.run("no report", "gate", "other.json", cwd=folder)
    said.run("nothing given", "gate")
    said.run("explain", "gate", "--explain", "SPEEDUP_SAMPLES")
    said.run("explain what is no rule", "gate", "--explain", "NONESUCH")
    said.check("gate")


@pytest.mark.parametrize(
    "role", ["client", *(pytest.param(r, marks=pytest.mark.slow) for r in ("runner", "ci"))]
)
def test_doctor(site: Site, role: str) -> None:
    """Which checks there are is not part of the record, but for a few names."""
    said = Transcript(site)
    document = said.run("doctor", "doctor", "--role", role)
    checks = document["checks"]
    assert {tuple(sorted(check)) for check in checks} == {("finding", "fix", "level", "looked_at", "name")}
    assert {check["level"] for check in checks} <= {"ok", "warn", "fail"}
    found = {check["name"]: check["level"] for check in checks}
    step = said.steps["doctor"]
    step["json"]["checks"] = {
        name: found[name] for name in ("kakeya-mac", "git", "ssh-keygen", "remote", "push") if name in found
    }
    if role == "runner":  # whether this machine may be one is another matter
        del step["exit_code"], step["json"]["exit_code"], step["json"]["status"]
    said.check(f"doctor-{role}")


@pytest.mark.slow
def test_runner_check(site: Site) -> None:
    """Which steps there are depends on the machine and is not part of the record."""
    document = site.kakeya("runner", "check", "--json").json
    assert {tuple(sorted(step)) for step in document["steps"]} == {
        ("done", "finding", "fix", "looked_at", "name", "state", "would")
    }
    assert {step["state"] for step in document["steps"]} <= {"done", "to do", "advice", "missing"}
    assert set(document) == {"changed", "command", "dry_run", "exit_code", "ready", "steps"}
    assert document["exit_code"] == (0 if document["ready"] else 1)


def test_workflow_jobs(site: Site) -> None:
    """A request over a workflow, executed and published without a forge."""
    said = Transcript(site)
    site.trust_runner()
    said.run("without a workflow file", "run", "--preset", "echo", "--transport", "actions")
    workflow = site.clone / ".github" / "workflows" / "mac-bridge.yaml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text("name: mac-bridge\n")
    site.git("add", "--all")
    site.git("commit", "--quiet", "--message", "workflow")
    site.git("push", "--quiet", "origin", "main")
    asked = said.run("run", "run", "--preset", "echo", "--transport", "actions")
    request = ["--commit", asked["request_commit"], "--branch", asked["ref"], "--remote", str(site.remote)]
    sealed = said.run("execute", "runner", "execute", "--out", "out", "--name", "mac", *request)
    said.run("again into it", "runner", "execute", "--out", "out", "--name", "mac", *request)
    files = sorted(str(path.relative_to(site.clone / "out")) for path in (site.clone / "out").rglob("*"))
    said.steps["sealed files"] = [said.names.text(path) for path in files]
    delivery = ["--results", "out", "--digest", sealed["digest"], "--run-result", "success"]
    said.run("publish", "runner", "publish", *delivery, *request)
    said.run("result", "result", asked["nonce"])
    said.run("without a commit", "runner", "publish", "--results", "out", "--branch", asked["ref"])
    said.check("workflow")


def test_archive_of_this_version_stays_readable(site: Site) -> None:
    """`archive.bundle` holds the archive branch that the frozen version made of one failed request."""
    said = Transcript(site)
    branch = "refs/heads/mac-bridge-archive"
    site.git("fetch", "--quiet", str(GOLDEN / "archive.bundle"), f"{branch}:{branch}", cwd=site.remote)
    key = (GOLDEN / "archive-runner.pub").read_text()
    assert site.kakeya("runners", "trust", "old", "--key", key).code == 0
    nonce = said.run("history", "history")["requests"][0]["nonce"]
    said.run("result", "result", nonce)
    said.run("logs", "logs", nonce)
    said.check("archive")


@pytest.mark.slow
def test_serve_ends_when_nothing_is_asked(empty: Site) -> None:
    done = empty.kakeya("runner", "serve", "--once", "--idle-timeout", "0", "--name", "idle")
    assert done.code == 4
