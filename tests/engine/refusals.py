"""Copies of a target and a drafter to spoil, and the command line, which must refuse them before any work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.cli import run
from engine.drafters.block import BlockDrafter
from engine.target.model import Target


class Bench:
    """Copies of a target and a drafter to spoil, and the command line that is given them."""

    def __init__(self, target: Path, drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.target, self.drafter, self._capsys = target, drafter, capsys

    def _run(
        self, arguments: Sequence[str], prompt: str = "hello", command: Sequence[str] = ()
    ) -> tuple[int, str, str]:
        models = ["--model", str(self.target), "--drafter", str(self.drafter)]
        code = run([*(command or ("generate", prompt)), "--json", *models, *arguments])
        return (code, *self._capsys.readouterr())

    def refused(self, *arguments: str, prompt: str = "hello", command: Sequence[str] = ()) -> str:
        """The one line of a refusal, by ``generate`` with the prompt or by another command."""
        code, out, err = self._run(arguments, prompt, command)
        assert (code, out) == (2, ""), err
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("kakeya_engine: ")
        return lines[0].removeprefix("kakeya_engine: ")

    def assert_accepted(self, *arguments: str) -> None:
        """Nothing is refused: a model is about to run."""
        code, _, err = self._run(arguments)
        assert code == 70
        assert "Target ran before the input was checked" in err


def make_bench(
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    """A bench with copies of both folders, on which a model that runs is an error."""

    def ran(self: Any, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{type(self).__name__} ran before the input was checked")

    monkeypatch.setattr(Target, "forward", ran)
    monkeypatch.setattr(BlockDrafter, "propose", ran)  # the memory check calls networks, on shapes alone
    monkeypatch.setenv("KAKEYA_STATE", str(tmp_path / "state"))
    target = Path(shutil.copytree(folders[0], tmp_path / "target"))
    return Bench(target, Path(shutil.copytree(folders[1], tmp_path / "drafter")), capsys)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of a config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def reweigh(folder: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> None:
    """Rewrite the weights."""
    path = str(folder / "model.safetensors")
    weights = change({name: mx.array(value) for name, value in dict(mx.load(path)).items()})
    mx.eval(*weights.values())
    mx.save_safetensors(path, weights, {"format": "mlx"})


def spoil(name: str, value: float) -> Callable[[dict[str, mx.array]], dict[str, mx.array]]:
    """For `reweigh`: put a value into one weight."""

    def change(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        weights[name][0] = value
        return weights

    return change
