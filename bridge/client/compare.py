"""Does the result answer the request? Request, result and reports are compared. Pure.

A signature says who wrote a result, the gate says that its report is consistent. Neither says that the report
is of what was asked: `limit=8` may be answered by a perfect report of `limit=5`. Compared here are preset,
parameters with their defaults, workload, engine source and digest, weights, and machine.

Defaults come from the preset file installed here, if it is the file that the result names by digest. Where it
is another one (another version, an owner's own preset), only the parameters that were asked for are compared
with the result's, the others are as the result states them. What could not be compared is listed, never
passed over in silence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any

from bridge import presets
from bridge.bus.results import ExpectedRequest
from bridge.errors import ParameterError
from bridge.evidence.model import Report, ReportRequest
from bridge.evidence.policies import parse_policy
from bridge.evidence.rules.identity import SWITCHES
from bridge.evidence.text import shown
from bridge.evidence.verification import NAME as VERIFICATION
from bridge.evidence.verification import Verification
from bridge.presets import Preset
from bridge.presets.argv import switches
from bridge.protocol.manifest import ParamValue
from bridge.protocol.result import ENGINE_FACT, WEIGHTS_FACT, Result, Status

ENGINE = "${engine}"
NONCE_SEED = "nonce"
_NONCE_START = re.compile(r"[0-9]{8}(?:t[0-9a-z]{0,19})?")
# Facts that the runner states of its machine and a report of the machine it ran on.
MACHINE = ("chip", "cpu_count", "machine", "memory_bytes", "os_release", "system")
# Switches of the engine that name a model, and the model's role in a report.
ROLES = {"model": "target", "drafter": "drafter", "projector": "projector"}
# Switches whose values a configuration repeats; of the others it has no words, or a list of its own spelling.
REPEATED = SWITCHES - ROLES.keys() - {"depths", "stop"}


@dataclass(frozen=True)
class Difference:
    """One thing that was answered otherwise than it was asked."""

    field: str  # what, e.g. ``params.limit``
    asked: Any  # by the request, or as the result says where the report differs from it
    answered: Any  # by the result, or by the report
    file: str | None = None  # the report that differs; None: the result does

    def __str__(self) -> str:
        where = "result.json" if self.file is None else self.file
        return f"{self.field}: asked {shown(self.asked)}, answered {shown(self.answered)} ({where})"

    def to_json(self) -> dict[str, Any]:
        """As commands show it with ``--json``."""
        return asdict(self)


@dataclass(frozen=True)
class Agreement:
    """Where request, result and reports differ."""

    differences: tuple[Difference, ...] = ()
    not_compared: tuple[str, ...] = ()  # what one of them does not state, in words


def compare(
    expected: ExpectedRequest | None,
    result: Result,
    reports: Mapping[str, Report],
    preset: Preset | None,
    verification: Verification | None = None,
) -> Agreement:
    """Compare a result with its request, and its reports, by path, with both.

    Of a result that did not run only preset and workload are compared. `preset` is the one of that name that
    is installed here, `verification` the record of a result that replayed another request's report.
    """
    known = preset if preset is not None and preset.digest == result.preset_digest else None
    found = _Comparison(result, preset, known, result.params)
    if expected is None:
        found.skip("the request, which is gone from the remote")
    else:
        found.compare_request(expected)
    if known is not None:
        found.compare("engine source", known.engine, result.engine_source)
    elif result.preset is not None:
        found.skip(f"defaults of the preset {result.preset}: the runner has another version of it")
    for path, report in reports.items():
        found.file = path
        found.compare_stated(report.request)
        found.compare_configuration(report)
        found.compare_machine(report.environment.model_dump())
        found.compare_weights(report)
    if verification is not None:
        found.file = VERIFICATION
        found.compare_stated(verification.request)
        found.compare_replay(verification)
        found.compare_machine(verification.environment)
    return Agreement(tuple(found.differences), tuple(found.not_compared))


@dataclass
class _Comparison:
    """What was compared so far."""

    result: Result
    preset: Preset | None  # the preset of that name that is installed here
    known: Preset | None  # the same, where it is the very file that the runner has
    # What was asked for, with the defaults; until the request is compared, what the result says
    params: Mapping[str, ParamValue]
    file: str | None = None  # the report that is compared; None: the result
    differences: list[Difference] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)

    def compare(self, name: str, asked: Any, answered: Any, equal: bool | None = None) -> None:
        if not (_same(asked, answered) if equal is None else equal):
            self.differences.append(Difference(name, asked, answered, self.file))

    def skip(self, what: str) -> None:
        if what not in self.not_compared:
            self.not_compared.append(what)

    def compare_request(self, expected: ExpectedRequest) -> None:
        result = self.result
        has_run = result.verdict.status in (Status.PASSED, Status.REJECTED)
        if expected.preset is not None and (has_run or result.preset is not None):
            self.compare("preset", expected.preset, result.preset)
        if expected.workload_sha is not None and (has_run or result.workload_sha is not None):
            self.compare("workload", expected.workload_sha, result.workload_sha)
        if not has_run:
            return
        if expected.params is None:
            self.skip("parameters: the request cannot be read")
            return
        wanted = dict(expected.params)
        if self.known is not None and expected.preset == result.preset:
            try:
                wanted = presets.validate(self.known, expected.params)
            except ParameterError as error:
                self.compare("params", error.message, dict(result.params), equal=False)
            for name in result.params.keys() - wanted.keys():
                self.compare(f"params.{name}", None, result.params[name])
        for name, value in wanted.items():
            self.compare(f"params.{name}", value, result.params.get(name))
        self.params = {**result.params, **wanted}

    def compare_stated(self, stated: ReportRequest | None) -> None:
        """What a report says of its request with the result that carries it."""
        for name in ("nonce", "workload_sha", "preset_digest", "engine_source"):
            self.compare(f"request.{name}", getattr(self.result, name), getattr(stated, name, None))

    def compare_configuration(self, report: Report) -> None:
        """The switches that a report says its engine had with the parameters.

        The preset's argv says which switch a parameter becomes. With the same preset file as the runner's,
        the switches that the preset itself sets are compared, too.
        """
        preset, stated = self.preset, report.configuration
        if preset is None or preset.argv[0] != ENGINE:
            if self.params:
                self.skip("parameters with the report: no preset that is installed here says what they set")
            return
        given = switches(preset.argv)
        words = takewhile(lambda word: not word.startswith(("-", "{", "$")), preset.argv[1:])
        command, told = " ".join(words), stated.get("command")
        if told is not None or self.known is not None:
            is_held = isinstance(told, str) and f"{told} ".startswith(f"{command} ")
            self.compare("configuration.command", command, told, equal=is_held)
        for switch in given:
            key = switch.flag.replace("-", "_")
            asked = switch.literal if switch.param is None else self.params.get(switch.param)
            if asked is None or (switch.param is None and self.known is None):
                continue
            if key in REPEATED:
                self._compare_switch(key, asked, report)
            elif switch.param is not None:
                self.skip(f"parameter {switch.param} with the report: its configuration does not repeat it")
        if self.known is not None and "seed" in stated and all(switch.flag != "seed" for switch in given):
            # The engine's default: generated prompts are the nonce's, a file's come in its order.
            self._compare_switch("seed", 0 if stated.get("context") is None else NONCE_SEED, report)

    def _compare_switch(self, key: str, asked: Any, report: Report) -> None:
        answered = report.configuration.get(key)
        if key == "kv" and report.configuration.get("command") == "eval server":
            # Of a server, the channel that its model was asked through.
            answered = str(report.configuration.get("model_id")).rpartition("@")[2]
        equal = _READERS.get(key, _is_plain)(asked, answered, report)
        self.compare(f"configuration.{key}", asked, answered, equal=equal)

    def compare_replay(self, record: Verification) -> None:
        """A record of a replay with what was to be replayed, and of how many rows."""
        if "sample" in self.params:
            self.compare("draw.sample", self.params["sample"], record.draw.sample)
        handle = self.params.get("request")
        named = None if handle is None else _NONCE_START.search(str(handle))
        if named is None:
            self.skip("which report was replayed: the request names it by no nonce")
        else:
            replayed = record.report.nonce
            self.compare("report.nonce", handle, replayed, (replayed or "").startswith(named[0]))

    def compare_machine(self, environment: Mapping[str, Any]) -> None:
        facts = self.result.runner.machine
        for name in MACHINE:
            self.compare(f"machine.{name}", facts.get(name), environment.get(name))
        if ENGINE_FACT in facts or (self.preset is not None and self.preset.argv[0] == ENGINE):
            source = environment.get("git")
            answered = source.get("source_sha256") if isinstance(source, Mapping) else None
            self.compare("engine digest", facts.get(ENGINE_FACT), answered)
        else:
            self.skip("engine digest: neither the result nor a preset that is installed here states one")

    def compare_weights(self, report: Report) -> None:
        facts, reported = self.result.runner.machine, report.environment.models
        weights = {
            name.removeprefix(WEIGHTS_FACT): value
            for name, value in facts.items()
            if name.startswith(WEIGHTS_FACT)
        }
        if not weights and (self.preset is None or not any(_roles(self.preset).values())):
            if reported:
                self.skip("model digests: the result states none, and no preset installed here names a model")
            return
        roles = None if self.known is None else _roles(self.known)
        if roles is not None and roles.get("target") and "target" not in reported:
            self.compare("weights of the target", weights.get(roles["target"] or ""), None)
        for role, model in reported.items():
            name, answered = f"weights of the {role}", model.weights_sha256
            if roles is None:
                stated = ", ".join(map(str, weights.values())) or None
                self.compare(name, stated, answered, answered in weights.values())
            elif role in roles:
                self.compare(name, weights.get(roles[role] or ""), answered)
            else:
                self.skip(f"{name}: the preset names no model for it")


def _roles(preset: Preset) -> dict[str, str | None]:
    """Role and name of each model in a preset's argv; None where it says that there is to be none."""
    return {
        ROLES[switch.flag]: switch.model
        for switch in switches(preset.argv)
        if switch.flag in ROLES and (switch.model is not None or switch.literal == "none")
    }


def _same(asked: Any, answered: Any) -> bool:
    """Equal as JSON has it: 1 is 1.0, and neither is true."""
    return isinstance(asked, bool) is isinstance(answered, bool) and bool(asked == answered)


def _is_plain(asked: Any, answered: Any, _report: Report) -> bool:
    if isinstance(answered, (int, float)) and isinstance(asked, str):  # a literal of the argv
        with contextlib.suppress(ValueError):
            return asked == str(answered) or float(asked) == answered
    return _same(asked, answered)


def _policies(listed: Any) -> list[object] | None:
    """KV policies, whatever their spelling; None: these are none."""
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        return None
    return [parse_policy(each) or each for each in listed]


def _is_policy(asked: Any, answered: Any, _report: Report) -> bool:
    return asked == answered or (isinstance(answered, str) and _policies([asked]) == _policies([answered]))


def _are_policies(asked: Any, answered: Any, _report: Report) -> bool:
    """Several policies, which a configuration repeats as a JSON list."""
    try:
        return _policies(asked.split()) == _policies(json.loads(answered))
    except (TypeError, ValueError):
        return False


def _is_seed(asked: Any, answered: Any, report: Report) -> bool:
    """A number, or `nonce`: the number that the engine makes of the request's."""
    if asked != NONCE_SEED:
        return _is_plain(asked, answered, report)
    nonce = "" if report.request is None else report.request.nonce
    return _same(int(hashlib.sha256(nonce.encode()).hexdigest()[:8], 16), answered)


def _is_thinking(asked: Any, answered: Any, report: Report) -> bool:
    """`default` leaves it to the served model's own entry, and the configuration says what that came to."""
    is_left = asked == "default" and report.configuration.get("command") == "eval server"
    return bool(answered == asked) or (is_left and answered in ("on", "off"))


_READERS: dict[str, Callable[[Any, Any, Report], bool]] = {
    # A folder of the workload; a configuration repeats its name alone.
    "golden": lambda asked, answered, _report: bool(PurePosixPath(asked).name == answered),
    "kv": _is_policy,
    "policies": _are_policies,
    "seed": _is_seed,
    "thinking": _is_thinking,
}
