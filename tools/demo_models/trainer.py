"""The loop shared by all training: schedule, clipping, compiled steps, progress, checkpoints, resume.

A task supplies the loss and the batch of step n; the loop owns the optimiser. Progress goes to a callback, so
nothing is printed here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

Arrays = tuple[mx.array, ...]
Progress = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Schedule:
    """Step counts and rates: linear warm-up, a plateau, linear decay over the last `decay` share."""

    steps: int
    matrix_rate: float = 0.02  # Muon
    other_rate: float = 3e-3  # AdamW
    warmup: int = 40
    decay: float = 0.4
    floor: float = 0.03
    clip: float = 1.0

    def scale(self, step: int) -> float:
        """The factor on both rates at a 0-based step."""
        left = (self.steps - step) / (self.steps * self.decay)
        return min(1.0, (step + 1) / self.warmup) * (min(1.0, left) * (1 - self.floor) + self.floor)


class Task(Protocol):
    """What is trained."""

    @property
    def model(self) -> nn.Module:
        """Its trainable parameters are what is trained."""
        ...

    def variant(self, step: int) -> int:
        """A number that changes when the loss of the step needs another compiled graph."""
        ...

    def loss(self, variant: int, /, *arrays: mx.array) -> Arrays:
        """The loss and up to a few figures to report, all scalars."""
        ...

    def batch(self, step: int) -> Arrays:
        """The arrays of one step; the same step gives the same arrays."""
        ...

    figures: tuple[str, ...]  # the names of what `loss` returns after the loss


def named_parameters(model: nn.Module) -> dict[str, mx.array]:
    """Every parameter by its dotted name."""
    parameters: Any = model.parameters()  # type: ignore[no-untyped-call]
    return dict(tree_flatten(parameters))


def optimizer(schedule: Schedule, model: nn.Module) -> Any:
    """Muon on the matrices, AdamW on embeddings and norms.

    MLX adds Muon's weight decay to the gradient before the orthogonalisation, where it is as large as a
    clipped gradient: with 0.01 every feed-forward layer shrank to nothing within a thousand steps. Hence
    none.
    """
    muon = optim.Muon(schedule.matrix_rate, momentum=0.95, weight_decay=0.0)
    adam = optim.AdamW(schedule.other_rate, betas=[0.9, 0.98], weight_decay=0.01)
    both = optim.MultiOptimizer([muon, adam], [lambda name, w: w.ndim == 2 and "embed" not in name])
    both.init(model.trainable_parameters())  # type: ignore[no-untyped-call]
    return both


def save_state(folder: Path, model: nn.Module, state: Any, step: int) -> None:
    """Write a checkpoint; the step file is replaced last, so a crash leaves the previous or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / f"model-{step}.safetensors"), named_parameters(model))
    mx.save_safetensors(str(folder / f"optimizer-{step}.safetensors"), dict(tree_flatten(state)))
    marker = folder / "step.json.new"
    marker.write_text(json.dumps({"step": step}), encoding="utf-8")
    os.replace(marker, folder / "step.json")
    for old in folder.glob("*.safetensors"):
        if not old.stem.endswith(f"-{step}"):
            old.unlink()


def _last_step(folder: Path) -> int:
    marker = folder / "step.json"
    return int(json.loads(marker.read_text(encoding="utf-8"))["step"]) if marker.exists() else 0


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load the weights of the newest checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    step = _last_step(folder)
    if not step:
        raise FileNotFoundError(f"{folder} holds no checkpoint; train this stage first")
    model.load_weights(str(folder / f"model-{step}.safetensors"))


def load_state(folder: Path, model: nn.Module, chosen: Any) -> int:
    """Restore model and optimiser from a checkpoint; returns the next step, 0 where there is none."""
    step = _last_step(folder)
    if step:
        load_weights(folder, model)
        saved: Any = mx.load(str(folder / f"optimizer-{step}.safetensors"))
        chosen.state = tree_unflatten(list(saved.items()))
    return step


def fit(
    task: Task,
    schedule: Schedule,
    folder: Path,
    *,
    progress: Progress,
    every: int = 50,
    keep_every: int = 100,
    on_checkpoint: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train to `schedule.steps`, resuming from `folder` when it holds a checkpoint.

    Args:
        task: model, loss and batches.
        schedule: rates and step counts; a resumed run may use a longer one.
        folder: where checkpoints go.
        progress: called every `every` steps with averages over those steps.
        every: steps between progress reports.
        keep_every: steps between checkpoints.
        on_checkpoint: called after each checkpoint.
        clock: seconds, for the rate shown.
    """
    chosen = optimizer(schedule, task.model)
    first = load_state(folder, task.model, chosen)
    state = [task.model.state, chosen.state]
    compiled: dict[int, Any] = {}

    def build(variant: int) -> Any:
        gradient = nn.value_and_grad(task.model, partial(task.loss, variant))

        @partial(mx.compile, inputs=state, outputs=state)
        def update(*arrays: mx.array) -> Arrays:
            values, gradients = gradient(*arrays)
            gradients, _ = optim.clip_grad_norm(  # type: ignore[no-untyped-call]
                gradients, schedule.clip
            )
            chosen.update(task.model, gradients)
            return tuple(values)

        return update

    names = ("loss", *task.figures)
    totals, started = [0.0] * len(names), clock()
    for step in range(first, schedule.steps):
        scale = schedule.scale(step)
        for part, rate in zip(chosen.optimizers, (schedule.matrix_rate, schedule.other_rate), strict=True):
            part.learning_rate = mx.array(rate * scale)
        variant = task.variant(step)
        if variant not in compiled:
            compiled[variant] = build(variant)
        values = compiled[variant](*task.batch(step))
        mx.eval(values, state)
        totals = [total + float(value.item()) for total, value in zip(totals, values, strict=True)]
        done = step + 1
        if done % every == 0 or done == schedule.steps:
            count = every if done % every == 0 else schedule.steps % every
            figures = {name: round(total / count, 4) for name, total in zip(names, totals, strict=True)}
            seconds = (clock() - started) / count
            progress({"step": done, "seconds": round(seconds, 3), "scale": round(scale, 3), **figures})
            totals, started = [0.0] * len(names), clock()
        if done % keep_every == 0 or done == schedule.steps:
            save_state(folder, task.model, chosen.state, done)
            on_checkpoint()
