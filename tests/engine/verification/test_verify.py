"""A replay confirms what was measured, and refutes what was changed, naming the row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.evidence.verification import parse_verification
from engine.cli import run
from engine.loading import SHIPPED_TARGET
from tests.bridge.evidence.derived import Document
from tests.engine.verification import forgeries
from tests.engine.verification.forgeries import PAIR

SHORT = ("quality", "--max-tokens", "16", "--block", "4", *PAIR)
ARM = "ours"
FIRST = "own-001"


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


def test_record_is_of_the_published_schema_and_names_the_report(
    genuine: Document, verify: Verifier, tmp_path: Path
) -> None:
    code, record, _ = verify(genuine, "--sample", "1", "--seed", "7")
    assert code == 0
    parsed = parse_verification(json.dumps(record).encode())
    assert parsed.report.sha256 == hashlib.sha256((tmp_path / "report.json").read_bytes()).hexdigest()
    assert (parsed.draw.seed, parsed.draw.source, parsed.draw.rows) == (7, "given", 6)
    assert parsed.environment["models"]["target"] == genuine["environment"]["models"]["target"]


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
