"""A machine with Metal runs the named model or refuses; elsewhere the result says what stood in."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bridge.bus.results import Believed
from bridge.cli.demo import write_policy
from bridge.presets import load_all
from bridge.runner.models import shipped
from bridge.runner.policy import load
from tests.bridge.runner.bench import Bench
from tests.houses import House

MODEL = '[models.big]\nmac = "a big model"\nstand_in = "demo-target"\n'


@pytest.fixture
def bench(house: House) -> Bench:
    made = Bench(house)
    made.preset("modelled", ["/bin/ls", "${model:big}"], tail=MODEL)
    return made


def served(bench: Bench, machine: Mapping[str, bool]) -> Believed:
    """What a runner on a machine with these facts makes of a request."""
    asked = bench.ask("modelled")
    config = bench.config_of()
    config = replace(config, machine={**config.machine, **machine}, home=bench.house.root)
    bench.runner(config=config).serve(once=True, idle_timeout_s=20)
    return bench.answer(asked.nonce)


@pytest.mark.slow
def test_stand_in_is_named_in_result_and_log(bench: Bench) -> None:
    answer = served(bench, {"metal": False})
    assert answer.result.verdict.status == "passed"
    fact = answer.result.runner.machine["model:big"]
    assert str(fact).startswith("stand-in demo-target: /")
    assert f"runner: model big: {fact}\n" in answer.files["log.txt"].decode()
    assert "config.json" in answer.files["log.txt"].decode()


@pytest.mark.slow
def test_request_is_refused_where_metal_needs_the_model(bench: Bench) -> None:
    result = served(bench, {"metal": True}).result
    assert (result.verdict.status, result.verdict.reason) == ("refused", "model_missing")
    assert result.commands == ()


def test_policy_of_the_demo_names_every_shipped_stand_in(bench: Bench) -> None:
    write_policy(bench.config)
    named = load(bench.config / "policy.toml").models
    for preset in load_all().values():
        for name, need in preset.models.items():
            folder = shipped(need.stand_in) if need.stand_in else None
            assert folder is None or not folder.is_dir() or named[name] == folder
