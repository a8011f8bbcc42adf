"""A replay confirms what was measured, and refutes what was changed, naming the row."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cli import run
from engine.target.loading import SHIPPED_TARGET
from engine.verification.inputs import read_report
from engine.verification.verify import draw_rows
from evidence_format.verification import parse_verification
from tests.bridge.evidence.derived import Document
from tests.engine.verification import forgeries
from tests.engine.verification.forgeries import PAIR

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SHORT = ("quality", "--max-tokens", "16", "--block", "4", *PAIR)
ARM = "ours"
FIRST = "own-001"
HEAD = Path(__file__).parents[2] / "data" / "mtp" / "demo"  # a head for the shipped target, by itself


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forgeries.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def genuine(prompts: Path) -> Document:
    return forgeries.measure(prompts.with_name("report.json"), *SHORT, "--prompts", str(prompts))


class Verifier:
    """The command, on a document."""

    def __init__(self, folder: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._prompts, self._capsys = folder, prompts, capsys

    def __call__(
        self, document: Document, *words: str, with_prompts: bool = True
    ) -> tuple[int, Document, str]:
        """Exit code, record and what was said on standard error."""
        path = forgeries.write(self._folder / "report.json", document)
        record = self._folder / "record.json"
        record.unlink(missing_ok=True)
        given = ["--prompts", str(self._prompts)] if with_prompts else []
        code = run(["verify", str(path), "--record", str(record), *given, *words])
        said = self._capsys.readouterr().err
        return code, json.loads(record.read_text()) if record.exists() else {}, said


@pytest.fixture
def verify(tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> Verifier:
    return Verifier(tmp_path, prompts, capsys)


def test_genuine_report_is_confirmed_by_every_row(genuine: Document, verify: Verifier) -> None:
    code, record, said = verify(genuine, "--sample", "6")
    assert code == 0, said
    assert record["verdict"] == "confirmed"
    assert record["findings"] == []
    replayed = [row for row in record["rows"] if row["rounds"]["replayed"]]
    assert {row["arm"] for row in record["rows"]} == {"plain", ARM}
    assert len(record["rows"]) == 6
    assert sum(row["rounds"]["accepted"] for row in replayed) == sum(
        turn["accepted"] for row in genuine["arms"][1]["samples"] for turn in row["rounds"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", ["in the target's folder", "in its own"])
def test_report_of_a_next_token_head_is_confirmed(verify: Verifier, tmp_path: Path, place: str) -> None:
    folder = shutil.copytree(SHIPPED_TARGET, tmp_path / "demo-mtp")
    spec, given = "mtp", ["--model", str(folder)]
    if place == "in its own":
        spec = f"mtp:{HEAD}"
        given += ["--drafter", str(HEAD)]
    else:
        shutil.copy(HEAD / "mtp.safetensors", folder)
    own = forgeries.write_prompts(tmp_path / "prompts.jsonl")
    words = ("--max-tokens", "8", "--block", "4", "--model", str(folder), "--drafter", spec)
    document = forgeries.measure(tmp_path / "report.json", "quality", *words, "--prompts", str(own))
    code, record, said = verify(document, *given, "--sample", "6")
    assert (code, record["verdict"], record["findings"]) == (0, "confirmed", []), said
    assert sum(row["rounds"]["replayed"] for row in record["rows"]) > 0


@pytest.mark.slow
def test_record_has_the_published_schema(genuine: Document, verify: Verifier, tmp_path: Path) -> None:
    code, record, _ = verify(genuine, "--sample", "1", "--seed", str(2**63 - 1))
    assert code == 0
    parsed = parse_verification(json.dumps(record).encode())
    assert parsed.report.sha256 == hashlib.sha256((tmp_path / "report.json").read_bytes()).hexdigest()
    assert (parsed.draw.seed, parsed.draw.source, parsed.draw.rows) == (2**63 - 1, "given", 6)
    assert parsed.environment["models"]["target"] == genuine["environment"]["models"]["target"]


@pytest.mark.slow
def test_seed_repeats_the_draw_and_is_new_without_one(genuine: Document, verify: Verifier) -> None:
    def drawn(*words: str) -> tuple[int, list[str]]:
        _, record, _ = verify(genuine, "--sample", "1", *words)
        return record["draw"]["seed"], [row["prompt_id"] for row in record["rows"] if row["drawn"]]

    seed, first = drawn()
    assert drawn("--seed", str(seed)) == (seed, first)
    assert drawn()[0] != seed


def _inflate_without_drafter(document: Document) -> None:
    """What the arms declare is left out of the configuration, by which the drafter would be opened."""
    forgeries.inflate(document, ARM)
    del document["configuration"]["drafter"], document["configuration"]["block"]


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize(
    ("change", "where", "check"),
    [
        (lambda document: forgeries.swap_token(document, FIRST), f"{ARM}/{FIRST}", "tokens"),
        (lambda document: forgeries.swap_prompt(document, FIRST), f"plain/{FIRST}", "prompts"),
        (lambda document: forgeries.inflate(document, ARM), f"{ARM}/{FIRST}", "rounds"),
        (_inflate_without_drafter, f"{ARM}/{FIRST}", "rounds"),
        (forgeries.swap_model, "target", "models"),
    ],
    ids=["token", "prompt", "acceptance", "acceptance without a drafter", "model"],
)
def test_forgery_is_refuted_by_name(
    genuine: Document, verify: Verifier, change: Callable[[Document], None], where: str, check: str
) -> None:
    code, record, said = verify(forgeries.forged(genuine, change), "--sample", "6")
    assert code == 1
    assert record["verdict"] == "refuted"
    assert where in said
    assert (where, check) in [(finding["where"], finding["check"]) for finding in record["findings"]]


def _other_text(document: Document) -> None:
    for row in forgeries.rows(document, FIRST):
        row["text"] += " indeed"


def _other_end(document: Document) -> None:
    for row in forgeries.rows(document, FIRST):
        row["finish_reason"] = "stop"


def _fewer_bytes(document: Document) -> None:
    for row in document["arms"][1]["samples"]:
        row["cache"]["resident_bytes"] = int(row["cache"]["resident_bytes"] * 0.9)


def _more_parameters(document: Document) -> None:
    document["environment"]["models"]["drafter"]["parameters"] *= 2


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("change", "check"),
    [
        (_other_text, "text"),
        (_other_end, "rows"),
        (_fewer_bytes, "memory"),
        (_more_parameters, "models"),
    ],
)
def test_small_change_is_refuted(
    genuine: Document, verify: Verifier, change: Callable[[Document], None], check: str
) -> None:
    code, record, _ = verify(forgeries.forged(genuine, change), "--sample", "6")
    assert code == 1
    assert {finding["check"] for finding in record["findings"]} == {check}


@pytest.mark.slow
def test_undrawn_row_is_held_against_its_prompt(genuine: Document, verify: Verifier) -> None:
    for identifier in ("own-001", "own-002"):
        document = forgeries.forged(genuine, lambda document: forgeries.swap_prompt(document, identifier))  # noqa: B023
        code, _, said = verify(document, "--sample", "1")
        assert code == 1
        assert identifier in said


def test_other_folder_than_the_report_ran_is_refuted(genuine: Document, verify: Verifier) -> None:
    other = SHIPPED_TARGET.with_name("proposer")
    code, _, said = verify(genuine, "--model", str(other))
    assert code == 1
    assert "target" in said


def _unknown_model(document: Document) -> None:
    document["environment"]["models"]["target"] |= {"id": "some-model", "weights_sha256": "ab" * 32}


def _drawn_tokens(document: Document) -> None:
    document["configuration"] |= {"command": "generate", "temperature": 0.8}


@pytest.mark.parametrize(
    ("change", "named"),
    [(_unknown_model, "--model"), (lambda _: None, "--prompts FILE"), (_drawn_tokens, "temperature 0.8")],
    ids=["model", "prompts", "sampled"],
)
def test_what_cannot_be_replayed_is_bad_input(
    genuine: Document, verify: Verifier, change: Callable[[Document], None], named: str
) -> None:
    code, _, said = verify(forgeries.forged(genuine, change), with_prompts=False)
    assert code == 2
    assert named in said


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_report_of_a_typed_prompt_is_replayed_with_the_line_it_names(
    verify: Verifier, tmp_path: Path, chat: bool
) -> None:
    own = tmp_path / "typed.json"
    words = [*["--chat"] * chat, "--max-tokens", "8", *PAIR, "--report", str(own)]
    assert run(["generate", "hello there", *words]) == 0
    document = json.loads(own.read_text())
    code, _, said = verify(document, with_prompts=False)
    lines = re.findall(r'{"id": "prompt".*?"…"[]}]+', said)
    assert (code, len(lines)) == (2, 2)
    own.write_text(lines[chat].replace("…", "hello there"))
    assert verify(document, "--prompts", str(own), with_prompts=False)[0] == 0


@pytest.mark.parametrize("kind", ["parity", "probe"])
def test_report_without_rows_has_nothing_to_replay(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", f"tests/data/evidence/{kind}.json"]) == 2
    assert "nothing to replay" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"schema": "other/1"}', b"\xff"])
def test_file_that_is_no_report_is_bad_input(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    assert run(["verify", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert run(["verify", str(tmp_path / "none.json")]) == 2


def test_bad_switches_are_bad_input(genuine: Document, verify: Verifier) -> None:
    for words in (("--sample", "0"), ("--seed", "-1")):
        assert verify(genuine, *words)[0] == 2


# --- the stored reports, which are genuine and of the shipped pair ------------------------------------------


def stored(name: str) -> Document:
    document: Document = json.loads((RESULTS / f"{name}.json").read_text())
    return document


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("seed", range(12))
def test_draw_covers_every_claimed_arm_and_distortion(seed: int) -> None:
    claimed, _ = read_report(RESULTS / "kv.json")
    drawn, others = draw_rows(claimed, seed, 1)
    named = {claim.arm for claim in claimed.claims}
    assert {arm.name for arm, _ in drawn} == named
    assert {arm.name for arm, row in drawn if row.is_distortion_known} == named
    assert len(drawn) + len(others) == sum(len(arm.samples) for arm in claimed.arms)
    assert draw_rows(claimed, seed, 1)[0] == drawn != draw_rows(claimed, seed + 1, 1)[0]
    assert len(draw_rows(claimed, seed, 40)[0]) >= 40


def _rows_of(document: Document, arm: str) -> list[Document]:
    found: list[Document] = next(each for each in document["arms"] if each["name"] == arm)["samples"]
    return found


def _lost_facts_found(document: Document) -> None:
    """A window that forgets gets the tokens of native caches."""
    native = {row["prompt_id"]: row for row in _rows_of(document, "native")}
    for row in _rows_of(document, "sink-window:4,64@all"):
        of = native[row["prompt_id"]]
        row |= {name: of[name] for name in ("tokens", "text", "finish_reason", "rounds", "decode_s")}
    document["claims"].append({"name": "recall_parity", "arm": "sink-window:4,64@all", "baseline": "oracle"})


def _use(arm: str, name: str, factor: float) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        for row in _rows_of(document, arm):
            if row.get("kv", {}).get(name) is not None:
                row["kv"][name] = type(row["kv"][name])(row["kv"][name] * factor)

    return change


def _fewer_inner_bytes(document: Document) -> None:
    for row in _rows_of(document, "rotated:5,64@inner:2"):
        row["cache"]["resident_bytes"] = 230_000


FORGED_ARMS = {
    "sink-window:4,64@all": (_lost_facts_found, "tokens"),
    "affine:4,64@all": (_use("affine:4,64@all", "key_distortion", 0.5), "memory"),
    "restored:learned:4,64@full": (_use("restored:learned:4,64@full", "value_distortion", 0.5), "memory"),
    "lattice:e8,38@inner:2": (_use("lattice:e8,38@inner:2", "bytes", 0.7), "memory"),
    "lattice:d4,38@inner:2": (_use("lattice:d4,38@inner:2", "values", 1.4), "memory"),
    "rotated:5,64@inner:2": (_fewer_inner_bytes, "memory"),
}


@pytest.mark.exhaustive
def test_every_claimed_arm_of_a_shootout_is_replayed(verify: Verifier) -> None:
    document = stored("kv")
    for change, _ in FORGED_ARMS.values():
        document = forgeries.forged(document, change)
    code, record, _ = verify(document, "--sample", "1", with_prompts=False)
    assert code == 1
    found = {(each["where"].split("/")[0], each["check"]) for each in record["findings"]}
    assert found >= {(arm, check) for arm, (_, check) in FORGED_ARMS.items()}
    assert {arm for arm, _ in found} == FORGED_ARMS.keys()


@pytest.mark.slow
def test_one_inflated_round_in_each_row_is_refuted(verify: Verifier) -> None:
    """The share of rounds that differ is no more than that of near ties, but all of them err to one side."""
    document = stored("throughput-code")
    assert verify(document, "--sample", "20", with_prompts=False)[0] == 0
    forged = forgeries.forged(document, lambda each: forgeries.merge_rounds(each, "speculative", 16))
    code, record, _ = verify(forged, "--sample", "20", with_prompts=False)
    assert code == 1
    [found] = [
        each for each in record["findings"] if "most of the difference is in this row" in each["message"]
    ]
    assert found["where"].startswith("speculative/")
