"""The shipped pair: token identity with mlx-lm's greedy decoding on every shipped prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import Engine, Options, open_engine
from engine.evaluation.arms import plain, speculate
from engine.evaluation.prompts import SHIPPED_SETS, encode, load_prompts

TOKENS = 96


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(Options())


@pytest.mark.sampled(0, 6)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("kind", SHIPPED_SETS)
def test_every_shipped_prompt_continues_as_mlx_lm_would(engine: Engine, kind: str, third: int):
    target, draft_length = engine.target, engine.new_draft_length()
    different = []
    for prompt in load_prompts(kind)[third::3]:
        tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
        expected = plain(target, tokens, TOKENS, 2048)
        found = speculate(engine, tokens, TOKENS, draft_length)
        if (found.tokens, found.text, found.finish) != (expected.tokens, expected.text, expected.finish):
            different.append(prompt.id)
    assert different == []


def test_the_shipped_drafter_fits_the_shipped_target_and_is_used(engine: Engine):
    assert engine.drafter is not None
    [prompt] = load_prompts("code", limit=1)
    target = engine.target
    tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
    outcome = speculate(engine, tokens, 64, engine.new_draft_length())
    blocks = [item for item in outcome.rounds if item.block > 1]
    assert blocks
    assert sum(item.accepted for item in blocks) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recall_of_prompts_decoded_together_is_accepted_by_the_gate(tmp_path: Path):
    report, programs = tmp_path / "recall.json", Path(sys.executable).parent
    measure = [programs / "kakeya_engine", "eval", "recall", "--batch", "5", "--limit", "12"]
    subprocess.run([*measure, "--report", report], cwd=tmp_path, check=True, capture_output=True)
    judged = subprocess.run([programs / "kakeya_mac", "gate", report], capture_output=True, check=False)
    assert judged.returncode == 0, judged.stdout
    document = json.loads(report.read_text())
    assert document["configuration"]["batch"] == 5
    ours, oracle, _ = document["arms"]
    assert [row["tokens"] for row in ours["samples"]] == [row["tokens"] for row in oracle["samples"]]
    assert {name for row in ours["samples"] for name in row["cache"]["classes"]} == {"RaggedKV"}
