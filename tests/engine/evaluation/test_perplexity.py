"""Perplexity: figures are those of one forward over the chunk, codes are read, and the gate agrees."""

from __future__ import annotations

import json
import math
from pathlib import Path
from shutil import copytree
from typing import Any

import mlx.core as mx
import pytest

from bridge.evidence.gate import judge
from engine.cli import run
from engine.config import Engine, Options, open_engine
from engine.device import prepare
from engine.errors import ConfigurationError, MachineError, PromptError
from engine.evaluation.perplexity import (
    SAMPLE,
    PerplexitySwitches,
    chunks_of,
    measure_perplexity,
    open_pair,
    read_text,
    score,
)
from engine.memory import fit
from tests.engine.evaluation.test_measurements import check, quiet
from tests.engine.refusals import reweigh, spoil

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 2, 38, 4, 6, 26, 43, 3]


@pytest.fixture(scope="module")
def native(folders: tuple[Path, Path]) -> Engine:
    return open_engine(Options(folders[0], "none"))


def coded(folders: tuple[Path, Path], kv: str = "lattice-packed:e8,4@all") -> Engine:
    return open_engine(Options(folders[0], "none", kv=kv))


@pytest.mark.parametrize("piece", [1, 4, 18])
def test_native_pieces_score_as_one_forward(native: Engine, piece: int):
    logits = native.target.target.model(mx.array([TOKENS]))[0, :-1].astype(mx.float32)
    chosen = [logits[at, token].item() for at, token in enumerate(TOKENS[1:])]
    wanted = sum(mx.logsumexp(logits, axis=-1).tolist()) - sum(chosen)
    assert score(native, TOKENS, piece).nll == pytest.approx(wanted / (len(TOKENS) - 1), abs=1e-4)


def test_codes_are_read_whatever_the_piece(folders: tuple[Path, Path], native: Engine):
    engine = coded(folders)
    single, pieces = score(engine, TOKENS, 1), score(engine, TOKENS, 6)
    assert single.kv is not None
    assert single.nll == pytest.approx(pieces.nll, abs=1e-3)
    assert abs(single.nll - score(native, TOKENS, 1).nll) > 1e-5


def measured(engines: tuple[Engine, Engine], **changes: Any) -> dict[str, Any]:
    switches = PerplexitySwitches(**{"text": "code", "chunk": 64, "piece": 16, "limit": 8} | changes)
    return check(measure_perplexity(*engines, switches, prepare(), progress=quiet))


def test_report_of_the_shipped_target_passes_the_gate():
    engines = open_pair(Options(kv="affine:4,64"))
    document = measured(engines, max_increase=1.0)
    found = document["summary"]["perplexity"]
    assert document["claims"] == [{"name": "nll_increase", "at_most": 1.0}]
    assert found["chunks"] == 8
    assert found["tokens"] == 8 * 63
    assert found["stored_bits_per_value"] == 5.0
    assert found["native_perplexity"] == pytest.approx(math.exp(found["native_nll"]))
    low, high = found["nll_interval"]
    assert low < found["nll_increase"] < high
    assert judge(json.dumps(document).encode()).violations == ()


def test_packed_weights_are_compared_with_those_stored(folders: tuple[Path, Path]):
    ours, native = open_pair(Options(folders[0], quantize="8,32"))
    assert native.options.quantize is None
    assert score(ours, TOKENS, 4).nll != score(native, TOKENS, 4).nll


def test_room_for_both_is_wanted_before_either_is_read(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = Path(copytree(folders[0], tmp_path / "target"))
    reweigh(folder, spoil("model.norm.weight", float("nan")))  # reading them all would say so
    monkeypatch.setattr("engine.memory.free_memory", lambda: fit(folder, free=0).needed)
    with pytest.raises(MachineError, match="does not fit in memory twice, packed and as stored"):
        open_pair(Options(folder, quantize="8,32"))


def test_a_chunk_begins_as_the_tokenizer_begins_a_text(native: Engine):
    switches = PerplexitySwitches(text="code", chunk=32, piece=8, limit=3)
    beginning, chunks = chunks_of(native, read_text("code"), switches)
    assert [len(beginning) + len(chunk) for chunk in chunks] == [32, 32, 32]


def test_shipped_sample_is_long_enough_for_an_interval():
    assert len(read_text(SAMPLE)) > 25_000


def test_what_says_nothing_is_refused(folders: tuple[Path, Path], tmp_path: Path):
    with pytest.raises(ConfigurationError, match="nothing to compare with native caches; give --kv"):
        open_pair(Options(folders[0]))
    with pytest.raises(ConfigurationError, match="controls"):
        open_pair(Options(folders[0], kv="restored:exact:1,4"))
    with pytest.raises(ConfigurationError, match="--piece 64 is not less than --chunk 64"):
        PerplexitySwitches(chunk=64, piece=64).check()
    with pytest.raises(PromptError, match=r"cannot be read: .*; give a UTF-8 text file"):
        read_text(str(tmp_path / "absent.txt"))
    short = tmp_path / "short.txt"
    short.write_text("a b c")
    with pytest.raises(PromptError, match="tokens, fewer than --chunk 64"):
        measured(open_pair(Options(folders[0], kv="lattice-packed:e8,4@all")), text=str(short))
    with pytest.raises(PromptError, match="claimed of 8 chunks or more, and the text has 2"):
        measured(open_pair(Options(folders[0], kv="lattice-packed:e8,4@all")), limit=2, max_increase=0.1)


def test_the_command_says_what_the_gate_will_say(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A model of random weights predicts nothing; the gate, asked by itself, agrees."""
    report = tmp_path / "perplexity.json"
    options = ["--kv", "lattice-packed:e8,4@all", "--text", "code", "--chunk", "32", "--piece", "8"]
    given = ["--model", str(folders[0]), "--limit", "2", "--report", str(report)]
    assert run(["eval", "perplexity", *options, *given]) == 0
    out = capsys.readouterr().out
    gate = json.loads(out.strip().splitlines()[-1])["gate"]
    broken = [(each.code, each.message) for each in judge(report.read_bytes()).violations]
    assert [(each["code"], each["message"]) for each in gate["violations"]] == broken
    assert ("the gate will accept this report" in out) == gate["accepted"] == (not broken)
