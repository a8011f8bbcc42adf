"""A machine with Metal runs the named model or refuses; elsewhere the result says what stood in."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bridge.bus.results import Believed
from bridge.cli.demo import write_policy
from bridge.presets import load_all
from bridge.runner.models import shipped
from bridge.runner.policy import load
from tests.fixtures.repo import RepoFixture
from tests.fixtures.runner import RunnerFixture

MODEL = '[models.big]\nmac = "a big model"\nstand_in = "demo-target"\n'


@pytest.fixture
def runner(repo: RepoFixture) -> RunnerFixture:
    made = RunnerFixture(repo)
    made.preset("modelled", ["/bin/ls", "${model:big}"], tail=MODEL)
    return made


def served(runner: RunnerFixture, machine: Mapping[str, bool]) -> Believed:
    """What a runner on a machine with these facts makes of a request."""
    asked = runner.ask("modelled")
    config = runner.config_of()
    config = replace(config, machine={**config.machine, **machine}, home=runner.repo.root)
    runner.daemon(config=config).serve(once=True, idle_timeout_s=20)
    return runner.answer(asked.nonce)


@pytest.mark.slow
def test_stand_in_is_named_in_result_and_log(runner: RunnerFixture) -> None:
    answer = served(runner, {"metal": False})
    assert answer.result.verdict.status == "passed"
    fact = answer.result.runner.machine["model:big"]
    assert str(fact).startswith("stand-in demo-target: /")
    assert f"runner: model big: {fact}\n" in answer.files["log.txt"].decode()
    assert "config.json" in answer.files["log.txt"].decode()


@pytest.mark.slow
def test_request_is_refused_where_metal_needs_the_model(runner: RunnerFixture) -> None:
    result = served(runner, {"metal": True}).result
    assert (result.verdict.status, result.verdict.reason) == ("refused", "model_missing")
    assert result.commands == ()


def test_policy_of_the_demo_names_every_shipped_stand_in(runner: RunnerFixture) -> None:
    write_policy(runner.config)
    named = load(runner.config / "policy.toml").models
    for preset in load_all().values():
        for name, need in preset.models.items():
            folder = shipped(need.stand_in) if need.stand_in else None
            assert folder is None or not folder.is_dir() or named[name] == folder
