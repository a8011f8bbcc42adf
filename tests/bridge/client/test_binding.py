"""A result counts only as the answer to what was asked: request, result and report name the same things."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bridge import presets
from bridge.bus.results import ExpectedRequest
from bridge.client.binding import MACHINE, REPEATED, ROLES, Agreement, compare
from bridge.presets import Preset, switches
from bridge.protocol.result import Reason, Result, RunnerFacts, Status, Verdict
from engine.cli.evaluation_options import seed_of
from evidence_format.model import ReportRequest
from evidence_format.parse import parse
from tests.bridge.evidence import reports
from tests.bridge.evidence.reports import Document

PRESET = presets.get("throughput")
NOT_REPEATED = {
    "report",
    "reference",
}  # where it is written, and a name that a parity report states elsewhere


@dataclass
class Answer:
    """An honest answer to `throughput` with limit=8, to be changed by a test."""

    preset: Preset = PRESET
    asked: dict[str, Any] = field(default_factory=lambda: {"limit": 8, "max_tokens": 96})
    result: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    report: Document = field(default_factory=reports.throughput)
    installed: bool = True  # whether the client has the preset

    def __post_init__(self) -> None:
        self.machine = reports.runner_facts(self.report)
        params = presets.validate(self.preset, self.asked)
        self.result = {
            "nonce": reports.NONCE,
            "request_commit": "ab" * 20,
            "workload_sha": reports.WORKLOAD,
            "preset": self.preset.name,
            "preset_digest": self.preset.digest,
            "params": params,
            "engine_source": self.preset.engine,
            "attempt": 1,
            "started_at": "2026-03-01T12:00:00Z",
            "finished_at": "2026-03-01T12:02:00Z",
            "verdict": Verdict(status=Status.PASSED, reason=Reason.OK),
        }
        self.report["request"]["preset_digest"] = self.preset.digest
        self.report["configuration"] |= {"command": "eval throughput", "drafter": "dflash", "kv": "native"}
        self.report["configuration"] |= params

    def compare(self) -> Agreement:
        parsed = parse(reports.dump(self.report))
        runner = RunnerFacts(name="studio", id="0" * 16, version="0.1.0", machine=self.machine)
        result = Result.model_validate({**self.result, "runner": runner})
        asked = ExpectedRequest(reports.NONCE, "ab" * 20, reports.WORKLOAD, self.preset.name, self.asked)
        return compare(asked, result, {"report.json": parsed}, self.preset if self.installed else None)


def test_an_honest_answer_agrees_in_everything_and_nothing_is_left_out() -> None:
    assert Answer().compare() == Agreement()


def both_limits(answer: Answer) -> None:
    answer.result["params"] |= {"limit": 5}
    answer.report["configuration"]["limit"] = 5


Edit = Callable[[Answer], Any]
# What is answered -> the first difference: field, asked, answered.
OTHERWISE: dict[str, tuple[Edit, tuple[str, Any, Any]]] = {
    "fewer prompts": (
        lambda a: a.report["configuration"].update(limit=5),
        ("configuration.limit", 8, 5),
    ),
    "fewer prompts, and the result says so": (both_limits, ("params.limit", 8, 5)),
    "other prompts": (
        lambda a: a.report["configuration"].update(prompts="chat"),
        ("configuration.prompts", "code", "chat"),
    ),
    "fewer tokens": (
        lambda a: a.report["configuration"].update(max_tokens=8),
        ("configuration.max_tokens", 96, 8),
    ),
    "another block": (
        lambda a: a.report["configuration"].update(block="4"),
        ("configuration.block", "auto", "4"),
    ),
    "no chat template": (
        lambda a: (a.asked.update(chat=True), a.result["params"].update(chat=True)),
        ("configuration.chat", True, False),
    ),
    "a number for a truth": (
        lambda a: a.report["configuration"].update(chat=0),
        ("configuration.chat", False, 0),
    ),
    "reasoning": (
        lambda a: a.report["configuration"].update(thinking="on"),
        ("configuration.thinking", "default", "on"),
    ),
    "a switch that is not told": (
        lambda a: a.report["configuration"].pop("limit"),
        ("configuration.limit", 8, None),
    ),
    "other prompts, by a seed that was not asked for": (
        lambda a: a.report["configuration"].update(seed=7),
        ("configuration.seed", 0, 7),
    ),
    "another command": (
        lambda a: a.report["configuration"].update(command="eval quality"),
        ("configuration.command", "eval throughput", "eval quality"),
    ),
    "another default": (
        lambda a: a.result["params"].update(prompts="chat"),
        ("params.prompts", "code", "chat"),
    ),
    "a parameter that is not there": (
        lambda a: a.result["params"].update(seed=3),
        ("params.seed", None, 3),
    ),
    "a default that is left out": (
        lambda a: a.result["params"].pop("block"),
        ("params.block", "auto", None),
    ),
    "another preset": (
        lambda a: a.result.update(preset="baseline"),
        ("preset", "throughput", "baseline"),
    ),
    "another preset's report": (
        lambda a: a.report["request"].update(preset_digest="0" * 64),
        ("request.preset_digest", PRESET.digest, "0" * 64),
    ),
    "another workload": (
        lambda a: a.result.update(workload_sha="cd" * 20),
        ("workload", reports.WORKLOAD, "cd" * 20),
    ),
    "a report of another workload": (
        lambda a: a.report["request"].update(workload_sha="cd" * 20),
        ("request.workload_sha", reports.WORKLOAD, "cd" * 20),
    ),
    "another request's report": (
        lambda a: a.report["request"].update(nonce="20200101t000000z000000000000"),
        ("request.nonce", reports.NONCE, "20200101t000000z000000000000"),
    ),
    "the requester's engine": (
        lambda a: a.result.update(engine_source="workload"),
        ("engine source", "installed", "workload"),
    ),
    "another engine": (
        lambda a: a.report["environment"]["git"].update(source_sha256="0" * 64),
        ("engine digest", "ef" * 32, "0" * 64),
    ),
    "another target": (
        lambda a: a.report["environment"]["models"]["target"].update(weights_sha256="0" * 64),
        ("weights of the target", "12" * 32, "0" * 64),
    ),
    "no target": (
        lambda a: a.report["environment"]["models"].pop("target"),
        ("weights of the target", "12" * 32, None),
    ),
    "target and drafter in each other's place": (
        lambda a: a.report["environment"]["models"]["drafter"].update(weights_sha256="12" * 32),
        ("weights of the drafter", "34" * 32, "12" * 32),
    ),
    "another machine": (
        lambda a: a.report["environment"].update(memory_bytes=128 * 2**30),
        ("machine.memory_bytes", 24 * 2**30, 128 * 2**30),
    ),
    "another chip": (
        lambda a: a.report["environment"].update(chip="Apple M4 Max"),
        ("machine.chip", "Apple M4", "Apple M4 Max"),
    ),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_what_is_answered_otherwise_is_told_with_both_values(case: str) -> None:
    edit, expected = OTHERWISE[case]
    answer = Answer()
    edit(answer)
    [found, *_] = answer.compare().differences
    assert (found.field, found.asked, found.answered) == expected
    assert "asked" in str(found)
    assert "answered" in str(found)


def seeded(nonce: str) -> int:
    """What the engine makes of a nonce where the seed of its prompts is not given."""
    return seed_of(
        None,
        ReportRequest(
            nonce=nonce, workload_sha=reports.WORKLOAD, preset_digest="0" * 64, engine_source="installed"
        ),
    )


def of(name: str, asked: dict[str, Any], **stated: Any) -> Answer:
    """An answer to another preset, whose report states its switches so."""
    preset = presets.get(name)
    answer = Answer(preset=preset, asked=asked)
    answer.report["configuration"] |= {"command": f"eval {preset.argv[2]}", **stated}
    return answer


def test_a_policy_may_be_spelled_in_any_way_and_must_be_the_same() -> None:
    asked = {"kv": "sliding-bounded:04,064"}
    assert of("throughput-bounded", asked, kv="sliding-bounded:4,64").compare().differences == ()
    [found] = of("throughput-bounded", asked, kv="sliding-bounded:4,32").compare().differences
    assert (found.field, found.answered) == ("configuration.kv", "sliding-bounded:4,32")


def test_policies_are_compared_one_by_one_and_in_order() -> None:
    asked = {"policies": "affine sink-window:4,64", "seed": "7"}
    fine = of("kv", asked, policies='["affine:4,64", "sink-window"]')
    assert fine.compare().differences == ()
    for policies in ('["sink-window", "affine"]', '["affine"]', "affine sink-window", None, "[1, 2]"):
        [found] = of("kv", asked, policies=policies).compare().differences
        assert found.field == "configuration.policies"


@pytest.mark.parametrize("preset", ["kv", "recall"])
def test_made_up_prompts_follow_the_nonce_unless_a_seed_is_given(preset: str) -> None:
    """`kv` has the seed as a parameter, `recall` leaves it to the engine."""
    stated: dict[str, Any] = {"context": 440, "prompts": "generated"}
    if preset == "kv":
        stated["policies"] = json.dumps(str(presets.get("kv").params["policies"].default).split())
    seed = seeded(reports.NONCE)
    assert of(preset, {}, **stated, seed=seed).compare().differences == ()
    for other in (0, seeded("20200101t000000z000000000000"), True, "nonce", None):
        [found] = of(preset, {}, **stated, seed=other).compare().differences
        assert (found.field, found.asked, found.answered) == ("configuration.seed", "nonce", other)
    if preset == "kv":
        assert of(preset, {"seed": "7"}, **stated, seed=7).compare().differences == ()
        [found] = of(preset, {"seed": "7"}, **stated, seed=seed).compare().differences
        assert (found.asked, found.answered) == ("7", seed)


def test_what_a_preset_sets_itself_is_compared_too() -> None:
    answer = of("baseline", {}, claim="none")
    del answer.report["environment"]["models"]["drafter"]
    assert answer.compare().differences == ()
    answer.report["configuration"]["claim"] = "speedup"
    [found] = answer.compare().differences
    assert (found.field, found.asked, found.answered) == ("configuration.claim", "none", "speedup")
    answer = of("baseline", {}, claim="none")
    [found] = answer.compare().differences
    assert (found.field, found.asked) == ("weights of the drafter", None)


def test_the_served_channel_is_the_policy_that_was_asked_for() -> None:
    stated = {"kv": "affine:8,64", "model_id": "demo@affine8", "thinking": "off"}
    assert of("server-smoke", {"kv": "affine8"}, **stated).compare().differences == ()
    [found] = of("server-smoke", {"kv": "native"}, **stated).compare().differences
    assert (found.field, found.asked, found.answered) == ("configuration.kv", "native", "affine8")


def test_with_another_preset_file_the_runners_defaults_are_named() -> None:
    answer = Answer()
    answer.result["preset_digest"] = answer.report["request"]["preset_digest"] = "0" * 64
    answer.result["params"]["prompts"] = answer.report["configuration"]["prompts"] = "chat"
    found = answer.compare()
    assert found.differences == ()
    assert found.not_compared == ("defaults of the preset throughput: the runner has another version of it",)
    answer.report["configuration"]["limit"] = 5
    [told] = answer.compare().differences
    assert (told.field, told.asked, told.answered) == ("configuration.limit", 8, 5)
    answer = Answer()
    answer.result["preset_digest"] = answer.report["request"]["preset_digest"] = "0" * 64
    answer.report["environment"]["models"]["target"]["weights_sha256"] = "0" * 64
    assert [each.field for each in answer.compare().differences] == ["weights of the target"]


def test_result_without_machine_engine_or_weights_is_a_difference() -> None:
    answer = Answer()
    answer.machine.clear()
    found = answer.compare()
    assert {each.field for each in found.differences} == {
        *(f"machine.{name}" for name in MACHINE),
        "engine digest",
        "weights of the target",
        "weights of the drafter",
    }
    assert {each.asked for each in found.differences} == {None}
    assert found.not_compared == ()


def test_weights_and_engine_of_an_unknown_preset_are_still_compared() -> None:
    answer = Answer(installed=False)
    assert answer.compare().differences == ()
    answer.report["environment"]["models"]["target"]["weights_sha256"] = "0" * 64
    assert [each.field for each in answer.compare().differences] == ["weights of the target"]
    answer.machine = {name: answer.machine[name] for name in MACHINE}
    found = answer.compare()
    assert found.differences == ()
    assert {each.partition(":")[0] for each in found.not_compared} >= {"engine digest", "model digests"}


def test_result_without_a_run_is_compared_by_preset_and_workload() -> None:
    answer = Answer()
    answer.result |= {"verdict": Verdict(status=Status.FAILED, reason=Reason.EXIT_CODE), "params": {}}
    runner = RunnerFacts(name="studio", id="0" * 16, version="0.1.0")
    result = Result.model_validate({**answer.result, "runner": runner})
    asked = ExpectedRequest(reports.NONCE, "ab" * 20, reports.WORKLOAD, "throughput", answer.asked)
    assert compare(asked, result, {}, PRESET).differences == ()
    other = replace(asked, preset="kv")
    assert [each.field for each in compare(other, result, {}, PRESET).differences] == ["preset"]


@pytest.mark.parametrize("name", [name for name, each in presets.load_all().items() if each.evidence])
def test_every_switch_of_a_bundled_preset_is_compared(name: str) -> None:
    preset = presets.get(name)
    flags = {switch.flag.replace("-", "_") for switch in switches(preset.argv)}
    assert flags - ROLES.keys() - NOT_REPEATED <= REPEATED
    assert {switch.param for switch in switches(preset.argv)} - {None} == set(preset.params) - {"model"}
