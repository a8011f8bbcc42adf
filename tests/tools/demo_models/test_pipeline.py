"""The one command runs every stage and leaves a pair that loads."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.drafters.registry import open_drafter
from engine.target.loading import load_drafter, load_target
from tools.demo_models import export
from tools.demo_models.__main__ import main


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_stages_run_and_the_pair_loads(tmp_path: Path) -> None:
    out, prompts = tmp_path / "demo", tmp_path / "prompts"
    common = ["--work", str(tmp_path / "work"), "--tiny", "--out", str(out), "--prompts", str(prompts)]
    result = CliRunner().invoke(main, [*common, "all"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    target = load_target(out / "target")
    drafter = load_drafter(out / "drafter", target.target)
    assert drafter.drafter.block_size == 8
    assert open_drafter(str(out / "proposer"), target).drafter.name == "masked-diffusion"
    assert json.loads((out / "projector" / "config.json").read_text())["training"]["switches"]["steps"] == 2
    assert json.loads((out / "DIGESTS.json").read_text()) == export.digests(out)
    assert sorted(path.name for path in prompts.iterdir()) == ["chat.jsonl", "code.jsonl", "retrieval.jsonl"]
    assert json.loads(result.output.splitlines()[-1])["needles"] == 4


def test_a_stage_without_its_predecessor_says_which_to_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--work", str(tmp_path), "--tiny", "drafter"])
    assert isinstance(result.exception, FileNotFoundError)
    assert "train this stage first" in str(result.exception)


@pytest.mark.slow
def test_the_corpus_command_shows_every_kind(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--work", str(tmp_path), "corpus", "--count", "1"])
    assert result.exit_code == 0
    assert result.output.count("--- ") == 3
    assert "Question: what is the secret code of" in result.output
    assert "<assistant>" in result.output
