"""``train projector`` writes a folder and ends with its figures as JSON; bad input ends it before that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.cli import run
from tests.engine import tiny
from tests.engine.refusals import Bench

SMALL = ["--window", "8", "--steps", "2", "--batches", "1", "--texts", "1", "--length", "192"]


def train(folders: tuple[Path, Path], out: Path, *arguments: str) -> int:
    models = ["--model", str(folders[0]), "--drafter", str(folders[1]), "--out", str(out)]
    return run(["train", "projector", *models, *SMALL, *arguments])


def test_json_is_one_line_with_the_held_out_figures(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folders, tmp_path / "new" / "projector", "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["projector"] == str(tmp_path / "new" / "projector")
    assert set(document["held_out"]) == {"regression", "distilled"}
    assert set(document["held_out"]["distilled"]) == {
        "direction", "norm", "key_error_2", "value_error_2", "key_error_5", "value_error_5",
    }  # fmt: skip
    assert "progress 0/" in err
    assert (tmp_path / "new" / "projector" / "model.safetensors").is_file()


@pytest.mark.slow
def test_people_get_a_table(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folders, tmp_path) == 0
    out, _ = capsys.readouterr()
    assert "held-out words" in out
    assert "value error 5" in out
    json.loads(out.splitlines()[-1])


def test_own_texts_are_trained_on(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("The sea was calm and the harbor slept. " * 100)
    assert train(folders, tmp_path / "out", "--texts-file", str(file)) == 0
    assert "held-out texts" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["training"]["switches"]["texts_file"] == str(file)


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "projector", "--help"]) == 0
    assert "kakeya_engine train projector --out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "-3"], "--steps must be at least 0, not -3"),
        (["--window", "0"], ": --window must lie in 1 to 1048576, not 0"),
        (["--sink", "-1"], ": --sink must lie in 0 to 1048576, not -1"),
        (["--layers", "7"], ": --layers 7: layer 7 is no attention layer"),
        (["--length", "100000"], "--length 100000 is more than the target's context of 512"),
        (["--dtype", "float8"], "dtype 'float8' is not one of"),
    ],
)
def test_bad_input_is_refused_with_its_value(
    arguments: list[str],
    message: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(folders, tmp_path / "out", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert not (tmp_path / "out").exists()


def test_a_drafter_of_another_target_is_refused_before_any_work(bench: Bench, tmp_path: Path) -> None:
    bench.drafter = tiny.save_drafter(tmp_path / "other", num_target_layers=9)
    message = bench.refused("--out", str(tmp_path / "out"), command=["train", "projector"])
    assert (
        message
        == "this drafter is for another target: number of target layers 9 in the drafter, 6 in the target"
    )


def test_another_target_needs_its_drafter(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "projector", "--model", str(folders[0]), "--out", str(tmp_path)]) == 2
    assert "needs its DFlash drafter; give --drafter FOLDER" in capsys.readouterr().err
