"""The loop: schedule, learning, and resuming as if nothing had happened."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn

from tools.demo_models import trainer


@dataclass
class Regression:
    """Fit a small matrix."""

    model: nn.Module = field(default_factory=lambda: nn.Linear(6, 4, bias=False))
    figures: tuple[str, ...] = ("largest",)

    def __post_init__(self) -> None:
        self.model.load_weights([("weight", mx.zeros((4, 6)))])
        self.wanted = mx.random.normal((4, 6), key=mx.random.key(1))

    def variant(self, step: int) -> int:
        return step % 2

    def batch(self, step: int) -> tuple[mx.array, ...]:
        return (mx.random.normal((16 + 16 * (step % 2), 6), key=mx.random.key(step)),)

    def loss(self, _variant: int, *arrays: mx.array) -> tuple[mx.array, ...]:
        error = self.model(arrays[0]) - arrays[0] @ self.wanted.T
        return (error**2).mean(), mx.abs(error).max()


def test_a_run_learns_and_reports_averages(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    schedule = trainer.Schedule(steps=120, matrix_rate=0.1, warmup=5)
    trainer.fit(Regression(), schedule, tmp_path, progress=seen.append, every=20)
    assert [report["step"] for report in seen] == [20, 40, 60, 80, 100, 120]
    assert seen[-1]["loss"] < 0.02 * seen[0]["loss"]
    assert set(seen[0]) == {"step", "seconds", "scale", "loss", "largest"}


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    schedule = trainer.Schedule(steps=30, warmup=5)
    whole, halved = Regression(), Regression()
    trainer.fit(whole, schedule, tmp_path / "whole", progress=lambda _: None, keep_every=10)

    class Stop(Exception):
        pass

    def stop_at_twenty() -> None:
        if json.loads((tmp_path / "halved" / "step.json").read_text())["step"] == 20:
            raise Stop

    with pytest.raises(Stop):
        trainer.fit(
            halved,
            schedule,
            tmp_path / "halved",
            progress=lambda _: None,
            keep_every=10,
            on_checkpoint=stop_at_twenty,
        )
    again = Regression()
    trainer.fit(again, schedule, tmp_path / "halved", progress=lambda _: None, keep_every=10)
    assert mx.allclose(again.model.weight, whole.model.weight, atol=1e-6)


def test_only_the_newest_checkpoint_is_kept(tmp_path: Path) -> None:
    trainer.fit(Regression(), trainer.Schedule(steps=25), tmp_path, progress=lambda _: None, keep_every=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-25.safetensors",
        "optimizer-25.safetensors",
        "step.json",
    ]


def test_weights_of_a_stage_that_never_ran_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no checkpoint; train this stage first"):
        trainer.load_weights(tmp_path, nn.Linear(2, 2))


def test_the_schedule_warms_up_stays_and_decays() -> None:
    schedule = trainer.Schedule(steps=1000, warmup=50, decay=0.4, floor=0.03)
    assert schedule.scale(0) == pytest.approx(1 / 50)
    assert schedule.scale(49) == schedule.scale(599) == pytest.approx(1)
    assert schedule.scale(800) == pytest.approx(0.5 * 0.97 + 0.03)
    assert schedule.scale(999) < 0.04
