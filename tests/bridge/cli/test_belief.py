"""What the commands show of a result that anyone with push rights wrote, and how they end."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import presets, signing
from bridge.bus.requests import Submitted
from bridge.protocol import refs
from tests.bridge.evidence import reports
from tests.bridge.evidence.reports import Document
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import BIN, Done, RepoFixture, wait_for

HANDLE_COMMANDS = ("result", "status", "logs", "wait")
LOG, REPORT = "log.txt", "report.json"
TIMES = {"started_at": "2026-03-01T12:00:04Z", "finished_at": "2026-03-01T12:01:06Z"}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return signing.ensure_key(tmp_path / "key", "runner")


def trust(bus: BusFixture, key: Path) -> None:
    done = bus.repo.kakeya("runners", "trust", "studio", "--key", str(signing.public_key(key)))
    assert done.code == 0, done.err


def answer(
    bus: BusFixture, submitted: Submitted, report: bytes | None, key: Path | None = None, **changes: object
) -> None:
    """Answer a request with `passed`, a log and perhaps a report, signed with `key`."""
    files = {LOG: b"said by the job\n"} | ({} if report is None else {REPORT: report})
    fields: dict[str, object] = {"preset": "throughput", "preset_digest": "56" * 32, **TIMES, **changes}
    data = bus.result(bus.expected(submitted), files, {LOG: "log", REPORT: "evidence"}, **fields)
    signature = None if key is None else signing.sign(key, signing.RESULT_NAMESPACE, data)
    bus.answer(submitted, result=data, signature=signature, files=files)


def without_evidence(bus: BusFixture, key: Path | None = None) -> str:
    """The nonce of an answered request that needs no evidence."""
    submitted = bus.submit(preset="tests")
    answer(bus, submitted, None, key, preset="tests", engine_source="workload")
    return submitted.nonce


def report_for(bus: BusFixture, nonce: str) -> Document:
    """A report that belongs to a request, and to a job of `TIMES`."""
    document = reports.throughput()
    document["request"] |= {"nonce": nonce, "workload_sha": bus.repo.head()}
    return document


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize("command", HANDLE_COMMANDS)
@pytest.mark.parametrize("signed", ["unsigned", "by a stranger"])
def test_client_with_trusted_runners_shows_only_theirs_by_default(
    bus: BusFixture, key: Path, tmp_path: Path, signed: str, command: str
):
    trust(bus, key)
    stranger = None if signed == "unsigned" else signing.ensure_key(tmp_path / "stranger", "runner")
    nonce = without_evidence(bus, stranger)
    done = bus.repo.kakeya(command, nonce)
    assert done.code == 3
    assert done.out == ""
    assert "no signature" in done.err if stranger is None else "is not listed here" in done.err
    assert "kakeya_mac runners trust" in done.err
    assert "PASSED" not in done.err
    shown = bus.repo.kakeya(command, nonce, "--allow-unsigned")
    assert shown.code == 0, shown.err
    expected = (
        "said by the job" if command == "logs" else "anyone with push rights" if not stranger else "not"
    )
    assert expected in shown.out


def of_a_deleted_branch(bus: BusFixture, key: Path | None = None) -> str:
    """The nonce of a request whose branch was deleted before it was answered."""
    submitted = bus.submit(preset="tests")
    bus.repo.git("update-ref", "-d", submitted.ref, cwd=bus.repo.remote)
    answer(bus, submitted, None, key, preset="tests", engine_source="workload")
    return submitted.nonce


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("command", [*HANDLE_COMMANDS, "fetch", "cancel"])
@pytest.mark.parametrize("signed", ["unsigned", "by a stranger"])
def test_result_of_a_deleted_branch_is_shown_as_not_verifiable(
    bus: BusFixture, key: Path, signed: str, command: str
):
    nonce = of_a_deleted_branch(bus, None if signed == "unsigned" else key)
    done = bus.repo.kakeya(command, nonce)
    passed = 0 if command in ("logs", "fetch", "cancel") else 7
    assert done.code == passed, done.err
    expected = {"logs": "said by the job", "cancel": "already-finished: passed"}
    assert expected.get(command, "so what it answers cannot be checked") in done.out
    if command == "result":
        known = "anyone with push rights" if signed == "unsigned" else "a key that is not trusted here"
        assert known in done.out


@pytest.mark.slow
def test_run_believes_no_stranger_either(bus: BusFixture, key: Path):
    trust(bus, key)
    command = [str(BIN / "kakeya_mac"), "run", "--preset", "probe", "--wait", "60", "--json"]
    client = subprocess.Popen(
        command, cwd=bus.repo.clone, env=bus.repo.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(lambda: bus.git.list_refs(bus.remote, refs.INBOX), what="the request")
    [(ref, commit)] = bus.git.list_refs(bus.remote, refs.INBOX).items()
    nonce = ref.removeprefix(refs.INBOX)
    branch = refs.request_ref("probe", nonce, None)
    bus.answer(Submitted(nonce, commit, branch, in_inbox=True))
    out, err = client.communicate(timeout=60)
    assert client.returncode == 3, err.decode()
    assert "no signature" in json.loads(out.decode().splitlines()[-1])["message"]


def test_unsigned_results_are_allowed_only_where_one_is_shown(repo: RepoFixture):
    done = repo.kakeya("run", "--preset", "probe", "--allow-unsigned")
    assert done.code == 2
    assert "--wait" in done.err


@pytest.mark.sampled(14, 4)
@pytest.mark.parametrize("case", ["genuine", "edited", "of no request"])
@pytest.mark.parametrize("command", ["result", "status", "wait"])
def test_result_passes_only_with_evidence_that_this_gate_accepts(bus: BusFixture, command: str, case: str):
    submitted = bus.submit(preset="throughput")
    document = report_for(bus, submitted.nonce)
    if case == "edited":
        document["summary"]["comparisons"][0]["decode_ratio"] *= 1.5
    elif case == "of no request":
        del document["request"]
    answer(bus, submitted, reports.dump(document))
    text = bus.repo.kakeya(command, submitted.nonce)
    done = bus.repo.kakeya(command, submitted.nonce, "--json")
    if case == "genuine":
        assert (done.code, text.code) == (7, 7), done.out
        assert done.json["status"] == "passed"
        return
    assert_rejected(done, text, "evidence" if case == "edited" else "binding")
    codes = [violation["code"] for violation in done.json["violations"]]
    assert ("SUMMARY_MISMATCH" if case == "edited" else "WRONG_REQUEST") in codes
    assert done.json["violations"][0]["file"] == "report.json"


def assert_rejected(done: Done, text: Done, reason: str = "evidence") -> None:
    assert (done.code, text.code) == (3, 3), done.out + text.out
    assert done.json["status"] == "rejected"
    assert done.json["reason"] == reason
    assert f"rejected/{reason}" in text.out
    assert done.json["runner_status"] == "passed"
    assert done.json["exit_code"] == 3
    assert "REJECTED" in text.out
    assert "PASSED" not in text.out


def bound(bus: BusFixture, key: Path, edit: Callable[[Document], object], **result: object) -> Submitted:
    """A signed answer to `throughput` with limit=4, honest but for the changes."""
    preset, asked = presets.get("throughput"), {"limit": 4}
    submitted = bus.submit(preset=preset.name, params=asked)
    params = presets.validate(preset, asked)
    document = report_for(bus, submitted.nonce)
    document["request"]["preset_digest"] = preset.digest
    document["configuration"] |= {"command": "eval throughput", **params}
    edit(document)
    fields = {"preset_digest": preset.digest, "params": params, **result}
    answer(bus, submitted, reports.dump(document), key, **fields)
    return submitted


UNBOUND: dict[str, tuple[Callable[[Document], object], dict[str, object], str, object, object]] = {
    "report": (lambda d: d["configuration"].update(limit=3), {}, "configuration.limit", 4, 3),
    "result": (lambda d: None, {"preset": "baseline"}, "preset", "throughput", "baseline"),
    "workload": (
        lambda d: d["request"].update(workload_sha="cd" * 20),
        {"workload_sha": "cd" * 20},
        "workload",
        None,
        "cd" * 20,
    ),
}


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("case", UNBOUND)
def test_signed_answer_to_another_request_is_rejected_with_values(
    bus: BusFixture, key: Path, case: str, tmp_path: Path
):
    edit, changes, field, asked, answered = UNBOUND[case]
    trust(bus, key)
    submitted = bound(bus, key, edit, **changes)
    done = bus.repo.kakeya("result", submitted.nonce, "--json")
    assert (done.code, done.json["status"], done.json["reason"]) == (3, "rejected", "binding"), done.err
    told = {each["field"]: each for each in done.json["binding"]["differences"]}[field]
    assert (told["asked"], told["answered"]) == (asked or bus.repo.head(), answered)
    assert "BINDING" in [violation["code"] for violation in done.json["violations"]]
    text = bus.repo.kakeya("wait" if case == "report" else "status", submitted.nonce)
    assert text.code == 3
    assert "rejected/binding" in text.out
    assert f"{field}: asked {told['asked']!r}, answered {told['answered']!r}" in text.out
    if case != "report":
        fetched = bus.repo.kakeya("fetch", submitted.nonce, "-o", str(tmp_path / "out"))
        assert fetched.code == 3
        assert not (tmp_path / "out" / submitted.nonce).exists()


def test_unverified_pass_exits_with_7_unless_allowed(bus: BusFixture, key: Path):
    nonce = without_evidence(bus, key)
    kakeya = bus.repo.kakeya
    done = kakeya("result", nonce, "--json")
    assert (done.code, done.json["exit_code"], done.json["status"]) == (7, 7, "passed")
    assert (done.json["signature"], done.json["verified"]) == ("untrusted-key", False)
    assert "no trusted key signed it" in done.err
    assert "runners trust --first" in done.err
    assert kakeya("result", nonce, "--allow-unsigned").code == 0
    assert kakeya("status", nonce, KAKEYA_ALLOW_UNSIGNED="1").code == 0
    config = Path(bus.repo.env["KAKEYA_CONFIG"]) / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("allow_unsigned = true\n")
    assert kakeya("wait", nonce).code == 0
    assert kakeya("wait", nonce, KAKEYA_ALLOW_UNSIGNED="0").code == 7
    wrong = kakeya("wait", nonce, KAKEYA_ALLOW_UNSIGNED="yes")
    assert (wrong.code, "KAKEYA_ALLOW_UNSIGNED" in wrong.err and "got 'yes'" in wrong.err) == (2, True)
    trust(bus, key)
    assert kakeya("wait", nonce, KAKEYA_ALLOW_UNSIGNED="0").code == 0


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_wait_says_how_to_go_on(repo: RepoFixture, number: signal.Signals, code: int):
    command = [str(BIN / "kakeya_mac"), "run", "--preset", "probe", "--wait", "60"]
    log = repo.root / "client.log"
    with log.open("wb") as sink:
        client = subprocess.Popen(command, cwd=repo.clone, env=repo.env, stderr=sink)
        wait_for(lambda: "queued" in log.read_text(), what="the queue")
        client.send_signal(number)
        assert client.wait(60) == code
    said = log.read_text()
    [nonce] = [ref.rpartition("/")[2] for ref in repo.remote_refs() if "/inbox/" in ref]
    assert f"the request goes on: kakeya_mac wait {nonce}" in said
    assert "Traceback" not in said
