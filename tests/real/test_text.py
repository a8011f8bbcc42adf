"""Published models answer by name, in text that makes sense."""

from __future__ import annotations

import json

import pytest

from engine.cli import run
from tests.real.models import GEMMA, SMOL

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((SMOL, "--chat", "What is the capital of France?"), "Paris"),
        ((SMOL, "--chat", "What is 7 plus 5?", "--kv", "lattice-packed:e8,5"), "12"),
        ((GEMMA, "The opposite of hot is"), "cold"),
        ((GEMMA, "def add(a, b):\n    return a"), "+ b"),
    ],
)
def test_an_answer_is_sensible(arguments: tuple[str, ...], wanted: str, capsys: pytest.CaptureFixture[str]):
    model, *prompt = arguments
    assert run(["generate", "--model", model, *prompt, "--max-tokens", "24", "--json"]) == 0
    assert wanted in json.loads(capsys.readouterr().out)["text"]


@pytest.mark.parametrize("model", [SMOL, GEMMA])
def test_a_model_says_what_it_is(model: str, capsys: pytest.CaptureFixture[str]):
    assert run(["model", "inspect", model, "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert (card["memory"]["fits"], card["context"]) == (True, {SMOL: 8192, GEMMA: 32768}[model])
    assert any(each["drafter"].endswith(f"{model}-4bit") for each in card["drafters"])
