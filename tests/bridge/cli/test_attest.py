"""Attestations: made by a runner, checked by `attest`, verified by openssl, about their result alone."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import ResultError
from bridge.evidence.attestation import check, statements
from bridge.protocol.result import ATTESTATION_NAMES, File, Status
from tests.bridge.evidence import reports, test_paired
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import Done, RepoFixture, build_repo
from tests.fixtures.runner import RunnerFixture

PAGE = (Path(__file__).parents[3] / "docs" / "attestations.md").read_text(encoding="utf-8")


@dataclass
class Attested:
    """A runner that attests, on whose remote a request has its result."""

    runner: RunnerFixture
    nonce: str
    key: str  # the public key in PEM, as the owner hands it out

    @property
    def repo(self) -> RepoFixture:
        return self.runner.repo

    def attest(self, nonce: str, out: Path, **env: str) -> Done:
        # Elsewhere than on the Mac, whose keys would be used.
        return self.repo.kakeya(
            "attest", nonce, "-o", str(out), "--json", **{"KAKEYA_STATE": str(out.parent), **env}
        )


def serve(runner: RunnerFixture, preset: str = "echo") -> str:
    nonce = runner.ask(preset).nonce
    assert runner.serve_once() == 1
    return nonce


@pytest.fixture(scope="module")
def attested(tmp_path_factory: pytest.TempPathFactory) -> Attested:
    repo = build_repo(tmp_path_factory.mktemp("attested"))
    runner = RunnerFixture(repo)
    runner.install({"echo": "print('hello')"})
    runner.policy("attestations = true\n")
    repo.trust_runner("mac")
    made = repo.kakeya("runner", "key", "--attestation", "--make", "--name", "mac")
    assert made.code == 0, made.err
    return Attested(runner, serve(runner), made.out)


def payload(envelope: dict[str, Any]) -> bytes:
    return base64.b64decode(envelope["payload"])


def commands(heading: str) -> str:
    """The commands of a section of docs/attestations.md."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return section.partition("\n```\n")[2].partition("\n```\n")[0]


def holds(folder: Path, script: str) -> bool:
    """Whether a verifier's commands accept the attestations in ``out`` with the key ``studio.pem``."""
    done = subprocess.run(["sh", "-ec", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # neither a missing program nor a wrong flag
    return done.returncode == 0


def flip(text: str) -> str:
    """Base64 text with one bit of one byte in the middle changed."""
    data = bytearray(base64.b64decode(text))
    data[len(data) // 2] ^= 1
    return base64.b64encode(data).decode()


def alter(path: Path, field: str) -> None:
    """Change one byte of the payload or the signature of an envelope or bundle."""
    document = json.loads(path.read_bytes())
    envelope = document.get("dsseEnvelope", document)
    of = envelope if field == "payload" else envelope["signatures"][0]
    of[field] = flip(of[field])
    path.write_text(json.dumps(document))


def test_a_tool_that_is_not_ours_verifies_and_one_changed_byte_fails(attested: Attested, tmp_path: Path):
    done = attested.attest(attested.nonce, tmp_path / "out")
    assert (done.code, done.json["source"], done.json["key"]) == (0, "published", attested.key)
    (tmp_path / "studio.pem").write_text(attested.key)
    script = commands("Verify with OpenSSL")
    assert holds(tmp_path, script)
    path = tmp_path / "out" / "attestations" / "svr.json"
    whole = path.read_bytes()
    for field in ("payload", "sig"):
        path.write_bytes(whole)
        alter(path, field)
        assert not holds(tmp_path, script), field


@pytest.mark.exhaustive
@pytest.mark.parametrize("field", ["payload", "sig", "file"])
def test_cosign_verifies_and_one_changed_byte_fails(attested: Attested, tmp_path: Path, field: str):
    """`make attestations` builds cosign and puts it on PATH."""
    assert attested.attest(attested.nonce, tmp_path / "out").code == 0
    (tmp_path / "studio.pem").write_text(attested.key)
    scripts = commands("Verify with cosign").replace("\\\n", " ").splitlines()
    assert [holds(tmp_path, script) for script in scripts] == [True] * 3
    commit = attested.runner.answer(attested.nonce).result.workload_sha
    by_commit = scripts[0].replace("out/result.json", f"--digest {commit} --digestAlg gitCommit")
    assert holds(tmp_path, by_commit)
    assert not holds(tmp_path, by_commit.replace(str(commit), "0" * 40))
    assert not holds(tmp_path, scripts[0].replace("svr/v0.2", "svr/v0.1"))
    if field == "file":
        result = tmp_path / "out" / "result.json"
        result.write_bytes(result.read_bytes().replace(b"1", b"2", 1))
    else:
        for path in (tmp_path / "out" / "attestations").glob("*.sigstore.json"):
            alter(path, field)
    assert [holds(tmp_path, script) for script in scripts] == [False] * 3


def test_statements_say_what_was_asked_and_what_came_of_it(attested: Attested, tmp_path: Path):
    assert attested.attest(attested.nonce, tmp_path / "out").code == 0
    found = [
        json.loads(payload(json.loads((tmp_path / "out" / name).read_bytes()))) for name in ATTESTATION_NAMES
    ]
    svr, test, provenance = (statement["predicate"] for statement in found)
    believed = attested.runner.answer(attested.nonce)
    commits = [each["digest"]["gitCommit"] for each in found[0]["subject"] if "gitCommit" in each["digest"]]
    assert commits == [believed.result.workload_sha]
    assert [statement["subject"] for statement in found] == [found[0]["subject"]] * 3
    assert svr["properties"] == ["KAKEYA_MAC_JOB_PASSED"], "no gate judged this preset, and no commit ran"
    assert (test["result"], test["passedTests"], test["failedTests"]) == ("PASSED", ["job"], [])
    assert provenance["buildDefinition"]["externalParameters"]["params"] == {"word": "test"}
    assert [each["name"] for each in provenance["runDetails"]["byproducts"]] == ["log.txt"]


@pytest.mark.parametrize("status", [Status.PASSED, Status.REJECTED, Status.REFUSED])
def test_only_what_passed_is_a_verified_property(attested: Attested, status: Status):
    report = reports.dump(reports.throughput())
    result = attested.runner.answer(attested.nonce).result
    sha256 = hashlib.sha256(report).hexdigest()
    pair = reports.dump(test_paired.record())  # of a paired run: it claims nothing
    digest = hashlib.sha256(pair).hexdigest()
    files = (
        File(path="report.json", sha256=sha256, bytes=len(report), role="evidence"),
        File(path="paired.json", sha256=digest, bytes=len(pair), role="evidence"),
    )
    verdict = result.verdict.model_copy(update={"status": status})
    changes = {"verdict": verdict, "files": files, "engine_source": "workload"}
    made = statements(
        result.model_copy(update=changes).to_bytes(), {"report.json": report, "paired.json": pair}
    )
    svr, test, _ = map(json.loads, made.values())
    assert [each["name"] for each in svr["subject"]] == [
        "report.json",
        "paired.json",
        "result.json",
        "workload",
    ]
    claims = ["ACCEPTANCE_LENGTH", "IDENTICAL_OUTPUT", "RESIDENT_BYTES", "SPEEDUP"]
    all_of_them = ["JOB_PASSED", "GATE_PASSED", "COMMIT_MEASURED", *(f"CLAIM_{claim}" for claim in claims)]
    expected = [f"KAKEYA_MAC_{name}" for name in all_of_them] if status is Status.PASSED else []
    assert svr["predicate"]["properties"] == expected
    failed = {Status.PASSED: [], Status.REJECTED: ["gate"], Status.REFUSED: ["job"]}
    assert test["predicate"]["failedTests"] == failed[status]


def changed(envelope: bytes) -> bytes:
    """The same JSON, with one byte more in its payload."""
    document = json.loads(envelope)
    document["payload"] = base64.b64encode(payload(document) + b" ").decode()
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


@pytest.mark.parametrize(
    ("path", "change", "code", "words"),
    [
        ("attestations/svr.json", changed, 2, "the signature does not verify"),
        ("attestations/svr.json", lambda data: data.replace(b"  ", b"   ", 1), 2, "not written as"),
        pytest.param(
            "attestations/svr.json", lambda _: b"[]", 2, "not a DSSE envelope", marks=pytest.mark.slow
        ),
        pytest.param("attestations/svr.json", lambda _: None, 3, "lacks", marks=pytest.mark.slow),
        ("result.json.sig", lambda _: None, 3, "unsigned"),
    ],
    ids=["a byte of the payload", "a byte of the JSON", "no envelope", "one is missing", "unsigned result"],
)
def test_what_was_altered_on_the_bus_is_not_handed_on(
    attested: Attested,
    tmp_path: Path,
    path: str,
    change: Callable[[bytes], bytes | None],
    code: int,
    words: str,
):
    """Anyone with push rights can put another commit in the result's place."""
    repo, nonce = attested.repo, attested.nonce
    ref = next(ref for ref in repo.remote_refs() if ref.endswith(nonce))
    before = repo.git("rev-parse", ref, cwd=repo.remote)
    folder = f".mac-bridge/results/{nonce}"
    listed = repo.git("ls-tree", "-r", "--name-only", before, folder, cwd=repo.remote).splitlines()
    files: dict[str, bytes | None] = {
        each: subprocess.run(
            ["git", "cat-file", "blob", f"{before}:{each}"], cwd=repo.remote, capture_output=True
        ).stdout
        for each in listed
    }
    whole = files.pop(f"{folder}/{path}") or b""
    altered = change(whole)
    files |= {} if altered is None else {f"{folder}/{path}": altered}
    message = repo.git("log", "-1", "--format=%B", before, cwd=repo.remote)
    bus = BusFixture(repo, tmp_path)
    bus.point(ref, bus.commit(f"{before}^", files, message))
    try:
        done = attested.attest(nonce, tmp_path / "out")
    finally:
        bus.point(ref, before)
    assert done.code == code, done.err
    assert words in done.json["message"]
    assert not (tmp_path / "out").exists()


def test_an_attestation_of_another_result_is_not_handed_on(attested: Attested):
    """Signed by the runner's key, and copied from another request."""
    data = attested.runner.answer(attested.nonce).result.to_bytes()
    other = data.replace(attested.nonce.encode(), reports.NONCE.encode())
    [(path, statement), *_] = statements(other, {}).items()
    with pytest.raises(ResultError, match="is about other files or another commit"):
        check(path, statement, data)


@pytest.mark.slow
def test_without_the_switch_only_the_mac_itself_makes_them(attested: Attested, tmp_path: Path):
    runner, repo = attested.runner, attested.repo
    runner.policy("")
    try:
        nonce = serve(runner)
    finally:
        runner.policy("attestations = true\n")
    elsewhere = attested.attest(nonce, tmp_path / "elsewhere")
    assert (elsewhere.code, "attestations = true" in elsewhere.json["remedy"]) == (3, True)
    here = attested.attest(nonce, tmp_path / "here", KAKEYA_STATE=str(runner.state))
    assert (here.code, here.json["source"], here.json["key"]) == (0, "made_here", attested.key)
    (tmp_path / "studio.pem").write_text(attested.key)
    assert holds(tmp_path, commands("Verify with OpenSSL").replace("out/", "here/"))
    fetched = repo.kakeya("fetch", attested.nonce, "-o", str(tmp_path / "fetched"))
    assert (fetched.code, list((tmp_path / "fetched").rglob("svr.json"))) == (0, []), "these are unchecked"


def test_a_runner_does_not_start_without_the_key_that_its_policy_asks_for(attested: Attested):
    done = attested.repo.kakeya("runner", "serve", "--remote", str(attested.repo.remote), "--name", "other")
    assert done.code == 6
    assert "kakeya_mac runner key --attestation --make --name other" in done.err


def test_the_attestation_key_is_private_and_only_told_to_is_it_replaced(attested: Attested):
    path = attested.runner.state / "runner" / "lone" / "attestation.pem"
    words = ("runner", "key", "--attestation", "--name", "lone", "--json")
    assert attested.repo.kakeya(*words).code == attested.repo.kakeya(*words, "--renew").code == 2
    assert not path.parent.exists()
    made = attested.repo.kakeya(*words, "--make").json
    assert path.stat().st_mode & 0o777 == 0o600
    assert attested.repo.kakeya(*words, "--make").json == attested.repo.kakeya(*words).json == made
    secrets = attested.runner.config_of("lone").secrets()
    assert secrets.found_in(path.read_bytes()) == ("the runner's attestation key",)
    renewed = attested.repo.kakeya(*words, "--renew").json
    assert (renewed["replaced"], renewed["key"] == made["key"]) == (made["fingerprint"], False)
