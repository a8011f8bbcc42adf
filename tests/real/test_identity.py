"""Greedy tokens on published models are those of mlx-lm's `generate_step`, whatever drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.models import GEMMA, SMOL, opened, ours, problems, reference

pytestmark = [pytest.mark.real, pytest.mark.timeout(20_000)]
DRAFTERS = {
    SMOL: ("prompt-lookup", f"{SMOL}-4bit", f"prompt-lookup+{SMOL}-4bit"),
    GEMMA: ("prompt-lookup", f"{GEMMA}-4bit", f"prompt-lookup+{GEMMA}-4bit"),
}
TOKENS = 64


def differing(real_folder: Path, model: str, count: int, step: int) -> list[str]:
    """Prompts and drafters, of each `step`-th of `count` problems, whose tokens are not mlx-lm's."""
    engines = {drafter: opened(real_folder, model, drafter) for drafter in DRAFTERS[model]}
    fixed = {f"{model}-4bit in blocks of 5": opened(real_folder, model, f"{model}-4bit", block="5")}
    found = []
    for number, text in list(enumerate(problems(real_folder)[:count]))[::step]:
        engine = next(iter(engines.values()))
        prompt = engine.target.tokenizer.encode(text)
        wanted = reference(engine, prompt, TOKENS)
        for drafter, each in (engines | fixed).items():
            if ours(each, prompt, TOKENS) != wanted:
                found.append(f"problem {number} with {drafter}")
    return found


@pytest.mark.parametrize(("model", "count", "step"), [(SMOL, 164, 82), (GEMMA, 40, 40)])
def test_some_of_humaneval_is_as_mlx_lm_decodes_it(real_folder: Path, model: str, count: int, step: int):
    assert differing(real_folder, model, count, step) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "count"), [(SMOL, 164), (GEMMA, 40)])
def test_humaneval_is_as_mlx_lm_decodes_it(real_folder: Path, model: str, count: int):
    assert differing(real_folder, model, count, 1) == []
