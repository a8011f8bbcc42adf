"""The command: its switches, engines that are missing or cannot run, and a whole run with those that can."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import peers
import pytest
import results_file
from peerbench import sizes
from peerbench.engines import registry
from peerbench.engines.base import World
from peerbench.engines.registry import open_engines

from engine.target.loading import load_target

SMALL = sizes.Shape(hidden=32, layers=6, feed_forward=64, heads=2, kv_heads=1, vocabulary=300, head_dim=16)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `tiny` that is over in no time, and a folder for the results."""
    monkeypatch.setitem(sizes.SHAPES, "tiny", SMALL)
    monkeypatch.setattr(results_file, "UNJUDGED", tmp_path / "unjudged")
    return tmp_path


def test_switches_have_the_documented_defaults() -> None:
    chosen = peers.options([])
    assert (chosen.size, chosen.blocks, chosen.modes) == ("tiny", [8, 16, "auto"], ["plain"])
    assert (chosen.tokens, chosen.repetitions, chosen.names) == (256, 7, list(registry.ENGINES))
    assert peers.options(["--size", "demo"]).tokens == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block", "8,one"], "--block 'one' is neither auto nor a length"),
        (["--block", "1"], "--block '1' is neither auto nor a length"),
        (["--mode", "guess"], "--mode 'guess' is not one of"),
        (["--size", "huge"], "invalid choice: 'huge'"),
        *((["--tokens", count], "--tokens must be at least 2") for count in ("1", "0", "-1", "-256")),
        (["--tokens", "many"], "--tokens: invalid int value: 'many'"),
        *((["--repetitions", count], "--repetitions at least 1") for count in ("0", "-1", "-7")),
        (["--repetitions", "1.5"], "--repetitions: invalid int value: '1.5'"),
    ],
)
def test_a_bad_switch_is_one_error_and_nothing_is_measured(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(peers, "run")
    with pytest.raises(SystemExit) as ended:
        peers.main(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_missing_engine_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry.ENGINES, "z-lab", ("no_such_package", "zlab", "ZLab"))
    assert peers.main(["--engines", "kakeya,z-lab"]) == 1
    error = capsys.readouterr().err
    assert "not installed here: z-lab" in error
    assert "make peers-env" in error
    assert "--engines kakeya" in error


def test_an_unknown_engine_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--engines", "vllm"]) == 1
    assert "unknown engine 'vllm'" in capsys.readouterr().err


def test_unsuitable_engine_is_left_out_with_its_reason(small: Path) -> None:
    folders = replace(sizes.make_folders("tiny", small), small=None)
    engines, left_out = open_engines(["kakeya", "mlx-lm"], World(folders, load_target(folders.target)))
    assert list(engines) == ["kakeya"]
    assert "needs a small model" in left_out["mlx-lm"]


@pytest.mark.exhaustive
def test_run_gives_the_tokens_of_plain_decoding_and_of_its_modes(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--engines", "kakeya,mlx-lm", "--block", "4,auto", "--mode", "oracle,noisy,plain"]
    assert peers.main([*arguments, "--tokens", "25", "--repetitions", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["mode"], row["engine"], row["block"]): row for row in document["rows"]}
    assert len(rows) == 12
    assert all(row["identical"] for row in rows.values())
    assert rows["oracle", "kakeya", 4]["tokens_per_round"] == 4
    # Drafts 4, 9, 14 … are wrong: rounds end at tokens 4, 8, 9, 13, 14, 18, 19, 23 and 24.
    assert rows["noisy", "kakeya", 4]["tokens_per_round"] == pytest.approx(24 / 9)
    assert rows["plain", "kakeya", 4]["tokens_per_round"] < 2
    stored = json.loads(Path(document["stored"]).read_text())
    assert set(stored["modes"]) == {"oracle", "noisy", "plain"}
    assert stored["modes"]["oracle"]["machine"]["cores"]


def test_a_mode_measured_later_keeps_the_sections_of_the_others(small: Path) -> None:
    peers.store("tiny", {"plain": {"rows": [1]}, "oracle": {"rows": [2]}}, whole=True)
    file = peers.store("tiny", {"oracle": {"rows": [3]}}, whole=True)
    modes = json.loads(file.read_text())["modes"]
    assert (modes["plain"]["rows"], modes["oracle"]["rows"]) == ([1], [3])


@pytest.mark.parametrize(
    "less", [["--engines", "kakeya,mlx-lm"], ["--block", "8,auto"], ["--tokens", "255"], []], ids=str
)
def test_partial_measurement_does_not_replace_a_whole_one(small: Path, less: list[str]) -> None:
    whole = peers.is_whole(peers.options(["--size", "tiny", *less]))
    assert whole == (not less)
    kept = peers.store("tiny", {"plain": {"rows": [1]}}, whole=True)
    peers.store("tiny", {"plain": {"rows": [2]}}, whole=whole)
    assert json.loads(kept.read_text())["modes"]["plain"]["rows"] == [2 if whole else 1]


def test_an_earlier_commit_is_measured_beside_the_present_one(small: Path) -> None:
    chosen = peers.options(
        [
            "--engines",
            "kakeya",
            "--block",
            "4",
            "--tokens",
            "6",
            "--repetitions",
            "1",
            "--against",
            "HEAD",
            "--mode",
            "oracle",
        ]
    )
    rows = peers.run(chosen, small)["oracle"]["rows"]
    assert {row["engine"]: row["identical"] for row in rows} == {"kakeya": True, "kakeya-earlier": True}


def test_an_unknown_commit_is_an_error(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--engines", "kakeya", "--against", "no-such-commit"]) == 1
    assert "--against no-such-commit cannot be read" in capsys.readouterr().err
