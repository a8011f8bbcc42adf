"""A request through the real commands: submit, a runner of its own, follow, fetch, check, tamper."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import signing
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import RepoFixture, build_repo, wait_for


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[RepoFixture, dict]:
    """A repository whose remote holds one answered `probe` request; trusted key; its JSON line."""
    repo = build_repo(tmp_path_factory.mktemp("answered"))
    with repo.runner():
        done = repo.kakeya("run", "--preset", "probe", "--wait", "90", "--json")
    assert done.code == 0, done.err + repo.runner_log()
    return repo, done.json


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    ("path", "forged", "field"),
    [
        (("environment", "git", "source_sha256"), "0" * 64, "engine digest"),
        (("environment", "memory_bytes"), 1 << 40, "machine.memory_bytes"),
    ],
    ids=["another engine", "another machine"],
)
def test_a_runner_that_answers_with_another_report_is_found_out(
    answered: tuple[RepoFixture, dict],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: tuple[str, ...],
    forged: object,
    field: str,
):
    """What the real runner signed, with one value of its report changed, signed with its key once more."""
    repo, last = answered
    assert last["binding"] == {"differences": [], "not_compared": []}
    for name, value in repo.env.items():
        monkeypatch.setenv(name, value)
    bus = BusFixture(repo, tmp_path)
    saved = repo.kakeya("result", last["nonce"], "-o", str(tmp_path / "out"))
    assert saved.code == 0, saved.err
    submitted = bus.submit(preset="probe")
    report_name = path_of(last, "evidence")
    report = json.loads((tmp_path / "out" / report_name).read_text())
    report["request"]["nonce"] = submitted.nonce
    inner = report
    for key in path[:-1]:
        inner = inner[key]
    genuine, inner[path[-1]] = inner[path[-1]], forged
    files = {file["path"]: (tmp_path / "out" / file["path"]).read_bytes() for file in last["files"]}
    files[report_name] = json.dumps(report).encode()
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    document |= {"nonce": submitted.nonce, "request_commit": submitted.commit}
    for file in document["files"]:
        data = files[file["path"]]
        file |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    data = json.dumps(document).encode()
    signature = signing.sign(repo.trust_runner(), signing.RESULT_NAMESPACE, data)
    bus.answer(submitted, result=data, signature=signature, files=files)
    done = repo.kakeya("result", submitted.nonce, "--json")
    assert (done.code, done.json["reason"], done.json["signature"]) == (3, "binding", "trusted"), done.out
    [told] = done.json["binding"]["differences"]
    assert (told["field"], told["asked"], told["answered"]) == (field, genuine, forged)
    assert told["file"] == report_name


def folder_of(last: dict) -> str:
    return f".mac-bridge/results/{last['nonce']}"


def path_of(last: dict, role: str) -> str:
    return next(file["path"] for file in last["files"] if file["role"] == role)


def test_a_probe_passes_and_says_who_ran_it(answered: tuple[RepoFixture, dict]):
    _, last = answered
    assert last["status"] == "passed"
    assert last["runner"] == "testmac"
    assert last["attempt"] == 1
    assert (last["signature"], last["verified"]) == ("trusted", True)


def test_result_is_one_commit_on_the_request_and_empties_the_inbox(answered: tuple[RepoFixture, dict]):
    repo, last = answered
    assert repo.git("rev-parse", f"{last['ref']}~1", cwd=repo.remote) == last["request_commit"]
    changed = repo.git(
        "diff-tree", "-r", "--no-commit-id", "--name-only", last["result_commit"], cwd=repo.remote
    )
    assert changed
    assert all(name.startswith(folder_of(last) + "/") for name in changed.splitlines())
    assert not [ref for ref in repo.remote_refs() if "/inbox/" in ref or "/claims/" in ref]
    message = repo.git("log", "-1", "--format=%B", last["ref"], cwd=repo.remote)
    assert "[skip ci]" in message


@pytest.mark.slow
def test_result_works_from_another_clone_by_prefix_and_saves_files(
    answered: tuple[RepoFixture, dict], tmp_path: Path
):
    repo, last = answered
    other = tmp_path / "other"
    repo.git("clone", "--quiet", str(repo.remote), str(other), cwd=tmp_path)
    done = repo.kakeya("result", last["nonce"][:20], "-o", str(tmp_path / "out"), "--json", cwd=other)
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "result.json").exists()
    report = str(tmp_path / "out" / path_of(last, "evidence"))
    assert repo.kakeya("gate", report, "--nonce", last["nonce"]).code == 0
    assert repo.kakeya("gate", report, "--nonce", "20200101t000000z000000000000").code == 3
    assert repo.git("status", "--porcelain", cwd=other) == ""


Tamper = Callable[[str], str]


def rewrite(repo: RepoFixture, last: dict, name: str, change: Tamper, tmp_path: Path, *, amend: bool) -> None:
    """Change one published file, as anyone with push rights could."""
    clone = tmp_path / "tamper"
    branch = last["ref"].removeprefix("refs/heads/")
    repo.git("clone", "--quiet", "--branch", branch, str(repo.remote), str(clone), cwd=tmp_path)
    path = clone / folder_of(last) / name
    path.write_text(change(path.read_text()))
    repo.git("add", "--all", cwd=clone)
    identity = ("-c", "user.name=Mallory", "-c", "user.email=mallory@example.org")
    message = repo.git("log", "-1", "--format=%B", cwd=clone)
    repo.git(*identity, "commit", "--quiet", "-m", message, *(["--amend"] if amend else []), cwd=clone)
    repo.git("push", "--quiet", "--force", "origin", branch, cwd=clone)


def one_byte(text: str) -> str:
    at = len(text) // 2
    return text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]


def in_result(text: str) -> str:
    document = json.loads(text)
    document["attempt"] += 1
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


@pytest.mark.sampled(24, 1)
@pytest.mark.parametrize("amend", [False, True], ids=["on top", "amended"])
@pytest.mark.parametrize(
    ("target", "change"), [("evidence", one_byte), ("result.json", in_result), ("log", one_byte)]
)
def test_an_edited_result_is_rejected(
    answered: tuple[RepoFixture, dict], tmp_path: Path, target: str, change: Tamper, amend: bool
):
    repo, last = answered
    name = target if target == "result.json" else path_of(last, target)
    try:
        rewrite(repo, last, name, change, tmp_path, amend=amend)
        done = repo.kakeya("result", last["nonce"], "--json")
        assert done.code == 3, done.out + done.err
        assert "Traceback" not in done.err
    finally:
        repo.git("update-ref", last["ref"], last["result_commit"], cwd=repo.remote)


def test_an_old_result_copied_onto_a_new_request_is_rejected(
    answered: tuple[RepoFixture, dict], tmp_path: Path
):
    repo, last = answered
    new = repo.kakeya("run", "--preset", "probe", "--json").json
    clone = tmp_path / "copy"
    branch = new["ref"].removeprefix("refs/heads/")
    repo.git("clone", "--quiet", "--branch", branch, str(repo.remote), str(clone), cwd=tmp_path)
    repo.git("fetch", "--quiet", "origin", last["ref"], cwd=clone)
    identity = ("-c", "user.name=Mallory", "-c", "user.email=mallory@example.org")
    repo.git(*identity, "cherry-pick", "FETCH_HEAD", cwd=clone)
    old, fresh = clone / folder_of(last), clone / folder_of(new)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    old.rename(fresh)
    repo.git("add", "--all", cwd=clone)
    message = repo.git("log", "-1", "--format=%B", cwd=clone)
    repo.git(*identity, "commit", "--quiet", "--amend", "-m", message, cwd=clone)
    repo.git("push", "--quiet", "--force", "origin", branch, cwd=clone)
    done = repo.kakeya("result", new["nonce"], "--json")
    assert done.code == 3
    assert "copied" in done.err


@pytest.mark.slow
def test_a_refused_request_exits_8_with_the_reason_published(tmp_path: Path):
    repo = build_repo(tmp_path / "repo", {"tests/test_canary.py": "open('/tmp/canary', 'w')\n"})
    with repo.runner():
        done = repo.kakeya("run", "--preset", "tests", "--wait", "60", "--json")
    assert done.code == 8, done.err
    assert done.json["status"] == "refused"
    assert done.json["reason"] == "policy"


@pytest.mark.slow
def test_the_runner_stops_on_sigterm_with_nothing_left(repo: RepoFixture):
    with repo.runner() as process:
        wait_for(lambda: "serving" in repo.runner_log(), what="the runner's first line")
    assert process.returncode in (0, 143)


@pytest.mark.slow
@pytest.mark.timeout(300)  # two runners and four commands on a busy machine
def test_of_two_runners_the_one_that_matches_answers(repo: RepoFixture, tmp_path: Path):
    config = tmp_path / "config"
    config.mkdir(mode=0o700)
    (config / "policy.toml").write_text('labels = ["lab"]\n')
    (config / "policy.toml").chmod(0o600)
    own = {"KAKEYA_CONFIG": str(config), "KAKEYA_STATE": str(tmp_path / "state")}
    on = "label=lab,cores>=1"
    with repo.runner(name="plain"):
        wait_for(lambda: "refs/mac-bridge/runners/plain" in repo.remote_refs(), 60, "a registration")
        alone = repo.kakeya("run", "--preset", "probe", "--on", on, "--json")
        assert "no live runner can take this request now: plain: " in alone.err
        status = repo.kakeya("status", alone.json["nonce"])
        assert f"  for machines with {on}: no live runner can take this request now: plain: " in status.out
        with repo.runner(name="labelled", **own):
            wait_for(lambda: "refs/mac-bridge/runners/labelled" in repo.remote_refs(), 60, "another one")
            done = repo.kakeya("wait", alone.json["nonce"], "--json")
    assert (done.code, done.json["runner"]) == (0, "labelled"), done.err + repo.runner_log("plain")


def test_bad_condition_pushes_nothing(repo: RepoFixture):
    before = repo.remote_refs()
    done = repo.kakeya("run", "--preset", "probe", "--on", "chip=M4*,color=red", "--json")
    assert done.code == 2
    assert "manifest: on: 'color=red' is no condition; write NAME=VALUE with NAME one of" in done.err
    assert repo.remote_refs() == before
    shown = repo.kakeya("run", "--preset", "probe", "--on", "chip=M4*", "--dry-run", "--json")
    assert shown.json["manifest"]["on"] == "chip=M4*"
