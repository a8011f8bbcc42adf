"""What the gate knows of the engine: every switch it writes, its prompt sets, its targets' caches."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from engine.config import Options, open_engine
from engine.device import prepare
from engine.evaluation.environment import target_card
from engine.evaluation.kv import KVSwitches
from engine.evaluation.measure import configuration
from engine.evaluation.prompts import SHIPPED_SETS, load_prompts
from engine.evaluation.quality import QualitySwitches
from engine.evaluation.recall import RecallSwitches
from engine.evaluation.server import ServerSwitches
from engine.evaluation.throughput import Switches
from engine.generate import GenerateSwitches
from engine.target.loading import LoadedTarget, load_target
from evidence_format.model import SWITCHES
from evidence_format.prompt_sets import known_sets
from tests.engine import families

ROOT = Path(__file__).resolve().parents[3]


def test_every_switch_of_the_engine_is_known(folders: tuple[Path, Path]) -> None:
    engine = open_engine(Options(folders[0], str(folders[1])))
    written: set[str] = set()
    switches: list[Any] = [Switches(), QualitySwitches(), RecallSwitches(), KVSwitches(), GenerateSwitches(8)]
    for each in (*switches, ServerSwitches()):
        written |= configuration(engine, prepare(), "eval", each).keys()
    assert written <= SWITCHES


def test_the_shipped_prompts_are_those_the_gate_knows() -> None:
    generated = runpy.run_path(str(ROOT / "scripts" / "generate_docs.py"))["prompt_sets_text"]()
    assert generated == (ROOT / "evidence_format" / "prompt_sets.json").read_text(encoding="utf-8")
    document = json.loads(generated)
    for name in SHIPPED_SETS:
        assert known_sets().sets[name] == tuple(prompt.id for prompt in load_prompts(name))
        assert list(document["sets"][name]) == list(known_sets().sets[name])


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_5", "qwen3_next"]
)
def test_cache_layers_of_a_target_are_described(family: str, tmp_path: Path) -> None:
    target: LoadedTarget = load_target(families.save(tmp_path / family, family))
    layers = target_card(target).cache_layers
    assert layers is not None
    assert any(layer.kind != "other" and layer.values > 0 for layer in layers)
    for layer in layers:
        assert (layer.window is not None) == (layer.kind == "sliding")
        assert (layer.values == 0) == (layer.kind == "other")
