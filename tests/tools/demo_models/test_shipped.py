"""The shipped pair is what its digests, card, prompts and figures say."""

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

import engine
from engine.haystack_text import HELD_OUT, TRAIN, Fact
from tests.tools.demo_models.test_corpora import HELD_OUT_PHRASINGS
from tools.demo_models import card, demo_target, drafter, export, prompts, proposer
from tools.demo_models.tokenizer import DemoTokenizer

PACKAGE = Path(engine.__file__).resolve().parent
PAIR = PACKAGE / "models" / "demo"
SETS = PACKAGE / "evaluation" / "prompts"


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((PAIR / "evaluation.json").read_text(encoding="utf-8"))
    return found


def test_every_file_has_the_digest_on_record() -> None:
    recorded = json.loads((PAIR / export.DIGESTS).read_text(encoding="utf-8"))
    assert recorded == export.digests(PAIR)
    assert {f"{name}/model.safetensors" for name in ("target", "drafter", "proposer")} <= set(recorded)


def test_the_pair_is_small_and_half_precision() -> None:
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= 12_000_000
    assert sum(path.stat().st_size for path in (PAIR / "proposer").iterdir()) <= 2_500_000
    for name in ("target", "drafter", "proposer"):
        with safe_open(PAIR / name / "model.safetensors", "np") as weights:
            assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"F16"}  # noqa: SIM118


def test_the_configurations_are_those_the_code_would_write() -> None:
    for name, config in (
        ("target", demo_target.configuration()),
        ("drafter", drafter.configuration(demo_target.configuration())),
        ("proposer", proposer.configuration(demo_target.configuration())),
    ):
        shipped = json.loads((PAIR / name / "config.json").read_text(encoding="utf-8"))
        assert shipped == {**config, "dtype": "float16"}


def test_the_card_shows_the_recorded_figures(report: dict[str, dict[str, object]]) -> None:
    assert (PAIR / "README.md").read_text(encoding="utf-8") == card.render(report)


def test_the_prompt_sets_come_from_the_generator(tmp_path: Path) -> None:
    prompts.write(DemoTokenizer.load(PAIR / "target"), tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert (SETS / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["code", "chat", "retrieval"])
def test_a_prompt_set_is_large_enough_and_held_out(kind: str) -> None:
    shipped = prompts.read(SETS / f"{kind}.jsonl")
    assert len(shipped) >= 20
    assert len({prompt["id"] for prompt in shipped}) == len(shipped)
    for index, prompt in enumerate(shipped):
        assert prompt["kind"] == kind
        text = prompt["messages"][0]["content"] if kind == "chat" else prompt["prompt"]
        if kind == "chat":  # the invented atlas is the same in both; its questions are not
            assert HELD_OUT_PHRASINGS.match(text)
        elif kind == "retrieval":
            assert not set(re.findall(r"[a-z]+", text)) & set(TRAIN.nouns)
        elif prompts.code_kind(index) == "words":  # a template's own words may be training nouns
            assert set(re.findall(r"[a-z]+", text)) & set(HELD_OUT.nouns + HELD_OUT.fields)
        assert not any(f" {name} " in text for name in TRAIN.names)


def test_retrieval_prompts_hold_their_needle_once() -> None:
    tokenizer = DemoTokenizer.load(PAIR / "target")
    for prompt in prompts.read(SETS / "retrieval.jsonl"):
        name = prompt["needle"].split()[4]
        assert prompt["needle"] == Fact(name, prompt["answer"]).sentence.strip()
        assert prompt["prompt"].count(prompt["needle"]) == 1
        assert prompt["prompt"].endswith(Fact(name, "").question)
        assert 370 <= tokenizer.count(prompt["prompt"]) <= 400


def test_the_recorded_figures_reach_the_floors(
    report: dict[str, dict[str, dict[str, dict[str, object]]]],
) -> None:
    assert report["recall"]["400"]["all"] >= 0.95  # type: ignore[operator]
    for tokens in ("64", "128"):
        sets = report["shipped"][tokens]
        assert sets["code"]["acceptance"]["8"] >= 3.5  # type: ignore[index]
        assert sets["retrieval"]["acceptance"]["8"] >= 2.5  # type: ignore[index]
        assert sets["code"]["looping"] == []


def test_the_proposers_tokenizer_is_the_targets() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (PAIR / "proposer" / name).read_bytes() == (PAIR / "target" / name).read_bytes()


@pytest.mark.parametrize(("kind", "floor"), [("code", 2.2), ("chat", 1.5), ("retrieval", 2.3)])
def test_the_proposer_is_accepted_on_every_set(
    report: dict[str, dict[str, dict[str, dict[str, float]]]], kind: str, floor: float
) -> None:
    assert list(report["proposer"]["acceptance"]) == ["1", "2", "4"]
    for found in report["proposer"]["acceptance"].values():
        assert found[kind] >= floor


def test_the_held_out_names_are_single_tokens_of_the_shipped_tokenizer() -> None:
    tokenizer = DemoTokenizer.load(PAIR / "target")
    assert all(tokenizer.count(f" {name}") == 1 for name in HELD_OUT.names)
