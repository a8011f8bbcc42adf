"""A request through the real commands: submit, a runner of its own, follow, fetch, check, tamper."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import signing
from tests.houses import House, build_house, wait_for
from tests.worlds import World


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[House, dict]:
    """A house whose remote holds one answered `probe` request; trusted key; its JSON line."""
    house = build_house(tmp_path_factory.mktemp("answered"))
    with house.runner():
        done = house.kakeya("run", "--preset", "probe", "--wait", "90", "--json")
    assert done.code == 0, done.err + house.runner_log()
    return house, done.json


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
    answered: tuple[House, dict],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: tuple[str, ...],
    forged: object,
    field: str,
):
    """What the real runner signed, with one value of its report changed, signed with its key once more."""
    house, last = answered
    assert last["binding"] == {"differences": [], "not_compared": []}
    for name, value in house.env.items():
        monkeypatch.setenv(name, value)
    world = World(house, tmp_path)
    saved = house.kakeya("result", last["nonce"], "-o", str(tmp_path / "out"))
    assert saved.code == 0, saved.err
    submitted = world.submit(preset="probe")
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
    signature = signing.sign(house.trust_runner(), signing.RESULT_NAMESPACE, data)
    world.answer(submitted, result=data, signature=signature, files=files)
    done = house.kakeya("result", submitted.nonce, "--json")
    assert (done.code, done.json["reason"], done.json["signature"]) == (3, "binding", "trusted"), done.out
    [told] = done.json["binding"]["differences"]
    assert (told["field"], told["asked"], told["answered"]) == (field, genuine, forged)
    assert told["file"] == report_name


def folder_of(last: dict) -> str:
    return f".mac-bridge/results/{last['nonce']}"


def path_of(last: dict, role: str) -> str:
    return next(file["path"] for file in last["files"] if file["role"] == role)


def test_a_probe_passes_and_says_who_ran_it(answered: tuple[House, dict]):
    _, last = answered
    assert last["status"] == "passed"
    assert last["runner"] == "testmac"
    assert last["attempt"] == 1
    assert (last["signature"], last["verified"]) == ("trusted", True)


def test_the_result_is_one_commit_on_the_request_and_the_inbox_is_empty(answered: tuple[House, dict]):
    house, last = answered
    assert house.git("rev-parse", f"{last['ref']}~1", cwd=house.remote) == last["request_commit"]
    changed = house.git(
        "diff-tree", "-r", "--no-commit-id", "--name-only", last["result_commit"], cwd=house.remote
    )
    assert changed
    assert all(name.startswith(folder_of(last) + "/") for name in changed.splitlines())
    assert not [ref for ref in house.remote_refs() if "/inbox/" in ref or "/claims/" in ref]
    message = house.git("log", "-1", "--format=%B", last["ref"], cwd=house.remote)
    assert "[skip ci]" in message


@pytest.mark.slow
def test_result_works_from_another_clone_by_prefix_and_saves_files(
    answered: tuple[House, dict], tmp_path: Path
):
    house, last = answered
    other = tmp_path / "other"
    house.git("clone", "--quiet", str(house.remote), str(other), cwd=tmp_path)
    done = house.kakeya("result", last["nonce"][:20], "-o", str(tmp_path / "out"), "--json", cwd=other)
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "result.json").exists()
    report = str(tmp_path / "out" / path_of(last, "evidence"))
    assert house.kakeya("gate", report, "--nonce", last["nonce"]).code == 0
    assert house.kakeya("gate", report, "--nonce", "20200101t000000z000000000000").code == 3
    assert house.git("status", "--porcelain", cwd=other) == ""


Tamper = Callable[[str], str]


def rewrite(house: House, last: dict, name: str, change: Tamper, tmp_path: Path, *, amend: bool) -> None:
    """Change one published file, as anyone with push rights could."""
    clone = tmp_path / "tamper"
    branch = last["ref"].removeprefix("refs/heads/")
    house.git("clone", "--quiet", "--branch", branch, str(house.remote), str(clone), cwd=tmp_path)
    path = clone / folder_of(last) / name
    path.write_text(change(path.read_text()))
    house.git("add", "--all", cwd=clone)
    identity = ("-c", "user.name=Mallory", "-c", "user.email=mallory@example.org")
    message = house.git("log", "-1", "--format=%B", cwd=clone)
    house.git(*identity, "commit", "--quiet", "-m", message, *(["--amend"] if amend else []), cwd=clone)
    house.git("push", "--quiet", "--force", "origin", branch, cwd=clone)


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
    answered: tuple[House, dict], tmp_path: Path, target: str, change: Tamper, amend: bool
):
    house, last = answered
    name = target if target == "result.json" else path_of(last, target)
    try:
        rewrite(house, last, name, change, tmp_path, amend=amend)
        done = house.kakeya("result", last["nonce"], "--json")
        assert done.code == 3, done.out + done.err
        assert "Traceback" not in done.err
    finally:
        house.git("update-ref", last["ref"], last["result_commit"], cwd=house.remote)


def test_an_old_result_copied_onto_a_new_request_is_rejected(answered: tuple[House, dict], tmp_path: Path):
    house, last = answered
    new = house.kakeya("run", "--preset", "probe", "--json").json
    clone = tmp_path / "copy"
    branch = new["ref"].removeprefix("refs/heads/")
    house.git("clone", "--quiet", "--branch", branch, str(house.remote), str(clone), cwd=tmp_path)
    house.git("fetch", "--quiet", "origin", last["ref"], cwd=clone)
    identity = ("-c", "user.name=Mallory", "-c", "user.email=mallory@example.org")
    house.git(*identity, "cherry-pick", "FETCH_HEAD", cwd=clone)
    old, fresh = clone / folder_of(last), clone / folder_of(new)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    old.rename(fresh)
    house.git("add", "--all", cwd=clone)
    message = house.git("log", "-1", "--format=%B", cwd=clone)
    house.git(*identity, "commit", "--quiet", "--amend", "-m", message, cwd=clone)
    house.git("push", "--quiet", "--force", "origin", branch, cwd=clone)
    done = house.kakeya("result", new["nonce"], "--json")
    assert done.code == 3
    assert "copied" in done.err


@pytest.mark.slow
def test_a_refused_request_exits_2_with_the_reason_published(tmp_path: Path):
    house = build_house(tmp_path / "house", {"tests/test_canary.py": "open('/tmp/canary', 'w')\n"})
    with house.runner():
        done = house.kakeya("run", "--preset", "tests", "--wait", "60", "--json")
    assert done.code == 2, done.err
    assert done.json["status"] == "refused"
    assert done.json["reason"] == "policy"


@pytest.mark.slow
def test_the_runner_stops_on_sigterm_with_nothing_left(house: House):
    with house.runner() as process:
        wait_for(lambda: "serving" in house.runner_log(), what="the runner's first line")
    assert process.returncode in (0, 143)


@pytest.mark.slow
@pytest.mark.timeout(300)  # two runners and four commands on a busy machine
def test_of_two_runners_the_one_that_matches_answers(house: House, tmp_path: Path):
    config = tmp_path / "config"
    config.mkdir(mode=0o700)
    (config / "policy.toml").write_text('labels = ["lab"]\n')
    (config / "policy.toml").chmod(0o600)
    own = {"KAKEYA_CONFIG": str(config), "KAKEYA_STATE": str(tmp_path / "state")}
    on = "label=lab,cores>=1"
    with house.runner(name="plain"):
        wait_for(lambda: "refs/mac-bridge/runners/plain" in house.remote_refs(), 60, "a registration")
        alone = house.kakeya("run", "--preset", "probe", "--on", on, "--json")
        assert "no live runner can take this request now: plain: " in alone.err
        status = house.kakeya("status", alone.json["nonce"])
        assert f"  for machines with {on}: no live runner can take this request now: plain: " in status.out
        with house.runner(name="labelled", **own):
            wait_for(lambda: "refs/mac-bridge/runners/labelled" in house.remote_refs(), 60, "another one")
            done = house.kakeya("wait", alone.json["nonce"], "--json")
    assert (done.code, done.json["runner"]) == (0, "labelled"), done.err + house.runner_log("plain")


def test_bad_condition_pushes_nothing(house: House):
    before = house.remote_refs()
    done = house.kakeya("run", "--preset", "probe", "--on", "chip=M4*,color=red", "--json")
    assert done.code == 2
    assert "'color=red' is no condition; write NAME=VALUE with NAME one of" in done.err
    assert house.remote_refs() == before
    shown = house.kakeya("run", "--preset", "probe", "--on", "chip=M4*", "--dry-run", "--json")
    assert shown.json["manifest"]["on"] == "chip=M4*"
