"""Sampling, seeds, penalties and stop strings through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli import run

ROOT = Path(__file__).resolve().parents[3]
PROMPT = "def f(x):"
SAMPLED = ("--temperature", "1.2", "--top-p", "0.95")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_STATE", str(tmp_path / "state"))


@pytest.fixture
def models(folders: tuple[Path, Path]) -> list[str]:
    return ["--model", str(folders[0]), "--drafter", str(folders[1])]


def generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON line of one generation in this process."""
    assert run(["generate", PROMPT, "--json", *arguments]) == 0
    line: dict[str, Any] = json.loads(capsys.readouterr().out)
    return line


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("block", ["auto", "5"])
def test_a_seed_gives_the_same_text_in_another_process(capsys, models: list[str], block: str):
    arguments = ("--max-tokens", "40", "--block", block, *SAMPLED, "--seed", "7", *models)
    here = generate(capsys, *arguments)
    other = subprocess.run(
        [sys.executable, "-I", "-m", "engine", "generate", PROMPT, "--json", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    there = json.loads(other.stdout)
    assert here["text"]
    assert (there["text"], there["verify_rounds"]) == (here["text"], here["verify_rounds"])


@pytest.mark.slow
def test_seeds_differ_and_no_seed_is_new_each_time(capsys, models: list[str]):
    base = ("--max-tokens", "24", *SAMPLED, *models)
    texts = [generate(capsys, *base, "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert len({generate(capsys, *base)["text"] for _ in range(2)}) == 2


@pytest.mark.slow
def test_a_top_k_of_one_is_greedy(capsys, models: list[str]):
    base = ("--max-tokens", "24", *models)
    greedy = generate(capsys, *base)
    assert generate(capsys, *base, "--temperature", "1.0", "--top-k", "1")["text"] == greedy["text"]


@pytest.mark.slow
def test_penalties_change_the_text_in_blocks_as_in_plain_decoding(capsys, models: list[str]):
    base = ("--max-tokens", "40", *models)
    plain = generate(capsys, *base, "--block", "1")["text"]
    for flag, value in [
        ("--repetition-penalty", "1.8"),
        ("--presence-penalty", "6"),
        ("--frequency-penalty", "6"),
    ]:
        penalised = generate(capsys, *base, "--block", "1", flag, value)["text"]
        assert penalised != plain, flag
        assert generate(capsys, *base, "--block", "6", flag, value)["text"] == penalised, flag


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("block", ["1", "auto"])
def test_the_text_ends_before_a_stop_string(capsys, block: str):
    base = ("--max-tokens", "48", "--block", block)
    whole = generate(capsys, *base)
    assert whole["finish_reason"] == "length"
    stop = whole["text"][60:66]
    end = whole["text"].index(stop)
    line = generate(capsys, *base, "--stop", "no such text", "--stop", stop)
    assert (line["text"], line["finish_reason"]) == (whole["text"][:end], "stop")
    assert line["generated_tokens"] < whole["generated_tokens"]
    assert run(["generate", PROMPT, "--text", *base, "--stop", stop]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == whole["text"][:end].removesuffix("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "-1"), "temperature must be 0 or lie in 0.000001 to 100"),
        (("--top-p", "0"), "top-p must lie in (0, 1]"),
        (("--min-p", "2"), "min-p must lie in [0, 1]"),
        (("--top-k", "-3"), "top-k must be at least 0"),
        (("--seed", "-1"), "the seed must lie in"),
        (("--repetition-penalty", "-1"), "--repetition-penalty must be 0 or lie in 0.01 to 100, not -1"),
        (("--repetition-penalty", "1e-45"), "--repetition-penalty must be 0 or lie in 0.01 to 100"),
        (("--temperature", "1e-50"), "temperature must be 0 or lie in 0.000001 to 100, not 1e-50"),
        *(
            ((f"--{name}-penalty", value), f"--{name}-penalty must be a finite number, not {value}")
            for name in ("repetition", "presence", "frequency")
            for value in ("nan", "inf", "-inf")
        ),
        (("--repetition-penalty", "1e999"), "--repetition-penalty must be a finite number, not inf"),
        (("--temperature", "nan"), "temperature must be 0 or lie in 0.000001 to 100"),
        (("--top-p", "nan"), "top-p must lie in (0, 1]"),
        (("--min-p", "nan"), "min-p must lie in [0, 1]"),
        (("--stop", ""), "--stop must not be empty"),
        (("--max-tokens", "0"), "--max-tokens must be at least 1"),
    ],
)
def test_a_switch_that_makes_no_sense_is_one_error(
    capsys, models: list[str], arguments: tuple[str, str], message: str
):
    assert run(["generate", PROMPT, *arguments, *models]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1
