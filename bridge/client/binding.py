"""Does the answer belong to the question? Request, result and report held against each other. Pure.

A signature says who wrote a result, the gate says that its report is consistent. Neither says that the report
is of what was asked: `limit=8` may be answered by a perfect report of `limit=5`. Compared here are preset,
parameters with their defaults, workload, engine source and digest, weights, and machine.

Defaults come from the preset file installed here, if it is the file that the result names by digest. Where it
is another one (another version, somebody's own preset), only the parameters that were asked for are compared
with the result's, the others are taken as the result states them. What could not be compared is listed, never
passed over in silence.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from bridge import presets
from bridge.bus.answers import Asked
from bridge.errors import ParameterError
from bridge.evidence.policies import parse_policy
from bridge.evidence.report import Report, Request
from bridge.evidence.rules.switches import SWITCHES
from bridge.evidence.shown import shown
from bridge.evidence.verification import NAME as VERIFICATION
from bridge.evidence.verification import Request as Replayed
from bridge.evidence.verification import Verification
from bridge.presets import Preset
from bridge.presets.template import switches
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
    """One thing that was answered otherwise than it was asked.

    Attributes:
        field: What, e.g. ``params.limit``.
        asked: By the request, or as the result says where the report differs from it.
        answered: By the result, or by the report.
        file: The report that differs; None: the result does.
    """

    field: str
    asked: Any
    answered: Any
    file: str | None = None

    def __str__(self) -> str:
        where = "result.json" if self.file is None else self.file
        return f"{self.field}: asked {shown(self.asked)}, answered {shown(self.answered)} ({where})"

    def to_json(self) -> dict[str, Any]:
        """As commands show it with ``--json``."""
        return {"field": self.field, "asked": self.asked, "answered": self.answered, "file": self.file}


@dataclass(frozen=True)
class Agreement:
    """Whether request, result and reports agree.

    Attributes:
        differences: Where they do not.
        not_compared: What one of them does not state, in words.
    """

    differences: tuple[Difference, ...] = ()
    not_compared: tuple[str, ...] = ()


@dataclass
class _Comparison:
    file: str | None = None
    differences: list[Difference] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)

    def hold(self, name: str, asked: Any, answered: Any, equal: bool | None = None) -> None:
        if not (_same(asked, answered) if equal is None else equal):
            self.differences.append(Difference(name, asked, answered, self.file))

    def skip(self, what: str) -> None:
        if what not in self.not_compared:
            self.not_compared.append(what)


def compare(
    asked: Asked | None,
    result: Result,
    reports: Mapping[str, Report],
    preset: Preset | None,
    verification: Verification | None = None,
) -> Agreement:
    """Hold a result against its request, and its reports against both.

    Args:
        asked: The request; None: it is gone.
        result: The answer. One that did not run is held against preset and workload alone.
        reports: The reports that could be read, by path.
        preset: The preset of that name that is installed here; None: there is none.
        verification: The record of a result that replayed another request's report; None: it has none.
    """
    found = _Comparison()
    known = preset if preset is not None and preset.digest == result.preset_digest else None
    params: Mapping[str, ParamValue] = result.params
    if asked is None:
        found.skip("the request, which is gone from the remote")
    else:
        params = _with_request(found, asked, result, known)
    if known is not None:
        found.hold("engine source", known.engine, result.engine_source)
    elif result.preset is not None:
        found.skip(f"defaults of the preset {result.preset}: the runner has another version of it")
    for path, report in reports.items():
        found.file = path
        _with_stated(found, result, report.request)
        _with_configuration(found, params, report, known, preset)
        _with_machine(found, result, report.environment.model_dump(), preset)
        _with_weights(found, result, report, known, preset)
    if verification is not None:
        found.file = VERIFICATION
        _with_stated(found, result, verification.request)
        _with_replay(found, params, verification)
        _with_machine(found, result, verification.environment, preset)
    return Agreement(tuple(found.differences), tuple(found.not_compared))


def _with_request(
    found: _Comparison, asked: Asked, result: Result, known: Preset | None
) -> Mapping[str, ParamValue]:
    """Hold a result against its request; the parameters that were asked for, defaults included."""
    ran = result.verdict.status in (Status.PASSED, Status.REJECTED)
    if asked.preset is not None and (ran or result.preset is not None):
        found.hold("preset", asked.preset, result.preset)
    if asked.workload_sha is not None and (ran or result.workload_sha is not None):
        found.hold("workload", asked.workload_sha, result.workload_sha)
    if not ran:
        return result.params
    if asked.params is None:
        found.skip("parameters: the request cannot be read")
        return result.params
    expected = dict(asked.params)
    if known is not None and asked.preset == result.preset:
        try:
            expected = presets.validate(known, asked.params)
        except ParameterError as error:
            found.hold("params", error.message, dict(result.params), equal=False)
        for name in result.params.keys() - expected.keys():
            found.hold(f"params.{name}", None, result.params[name])
    for name, value in expected.items():
        found.hold(f"params.{name}", value, result.params.get(name))
    return {**result.params, **expected}


def _with_stated(found: _Comparison, result: Result, stated: Request | Replayed | None) -> None:
    """Hold what a report says of its request against the result that carries it."""
    for name in ("nonce", "workload_sha", "preset_digest", "engine_source"):
        answered = None if stated is None else getattr(stated, name)
        found.hold(f"request.{name}", getattr(result, name), answered)


def _with_configuration(
    found: _Comparison,
    params: Mapping[str, ParamValue],
    report: Report,
    known: Preset | None,
    preset: Preset | None,
) -> None:
    """Hold the switches that a report says its engine had against the parameters.

    The preset's argv says which switch a parameter becomes. With the same preset file as the runner's, the
    switches that the preset itself sets are compared, too.
    """
    if preset is None or preset.argv[0] != ENGINE:
        if params:
            found.skip("parameters with the report: no preset that is installed here says what they set")
        return
    command = " ".join(_words(preset))
    stated = report.configuration.get("command")
    if stated is not None or known is not None:
        held = isinstance(stated, str) and f"{stated} ".startswith(f"{command} ")
        found.hold("configuration.command", command, stated, equal=held)
    for switch in switches(preset):
        key = switch.flag.replace("-", "_")
        asked = switch.literal if switch.param is None else params.get(switch.param)
        if asked is None or (switch.param is None and known is None):
            continue
        if key in REPEATED:
            answered, equal = _READERS.get(key, _plain)(asked, key, report)
            found.hold(f"configuration.{key}", asked, answered, equal=equal)
        elif switch.param is not None:
            found.skip(f"parameter {switch.param} with the report: its configuration does not repeat it")
    if (
        known is not None
        and "seed" in report.configuration
        and all(switch.flag != "seed" for switch in switches(known))
    ):
        # The engine's default: generated prompts are the nonce's, those of a file come in the file's order.
        asked = 0 if report.configuration.get("context") is None else NONCE_SEED
        answered, equal = _seed(asked, "seed", report)
        found.hold("configuration.seed", asked, answered, equal=equal)


def _with_replay(found: _Comparison, params: Mapping[str, ParamValue], record: Verification) -> None:
    """Hold a record of a replay against what was to be replayed, and of how many rows."""
    if "sample" in params:
        found.hold("draw.sample", params["sample"], record.draw.sample)
    handle = params.get("request")
    named = None if handle is None else _NONCE_START.search(str(handle))
    if named is not None:
        replayed = record.report.nonce
        found.hold("report.nonce", handle, replayed, (replayed or "").startswith(named[0]))
    else:
        found.skip("which report was replayed: the request names it by no nonce")


def _with_machine(
    found: _Comparison, result: Result, environment: Mapping[str, Any], preset: Preset | None
) -> None:
    """Hold the machine and the engine of a report against what the runner says of them."""
    facts = result.runner.machine
    for name in MACHINE:
        found.hold(f"machine.{name}", facts.get(name), environment.get(name))
    if ENGINE_FACT in facts or (preset is not None and preset.argv[0] == ENGINE):
        source = environment.get("git")
        answered = source.get("source_sha256") if isinstance(source, Mapping) else None
        found.hold("engine digest", facts.get(ENGINE_FACT), answered)
    else:
        found.skip("engine digest: the result does not state it, and no preset installed here says it must")


def _with_weights(
    found: _Comparison, result: Result, report: Report, known: Preset | None, preset: Preset | None
) -> None:
    """Hold the weights of a report against what the runner says of them."""
    facts, models = result.runner.machine, report.environment.models
    weights = {
        name.removeprefix(WEIGHTS_FACT): value
        for name, value in facts.items()
        if name.startswith(WEIGHTS_FACT)
    }
    if not weights and (preset is None or not any(name for _, name in _roles(preset))):
        if models:
            found.skip("model digests: the result states none, and no preset installed here names a model")
        return
    roles = None if known is None else dict(_roles(known))
    if roles is not None and roles.get("target") and "target" not in models:
        found.hold("weights of the target", weights.get(roles["target"] or ""), None)
    for role, model in models.items():
        name, answered = f"weights of the {role}", model.weights_sha256
        if roles is None:
            stated = ", ".join(map(str, weights.values())) or None
            found.hold(name, stated, answered, answered in weights.values())
        elif role in roles:
            found.hold(name, weights.get(roles[role] or ""), answered)
        else:
            found.skip(f"{name}: the preset names no model for it")


def _roles(preset: Preset) -> Iterator[tuple[str, str | None]]:
    """Role and name of each model in a preset's argv; None where it says that there is to be none."""
    for switch in switches(preset):
        role = ROLES.get(switch.flag)
        if role is not None and (switch.model is not None or switch.literal == "none"):
            yield role, switch.model


def _words(preset: Preset) -> Iterator[str]:
    """The engine's command: the words before the first switch."""
    for word in preset.argv[1:]:
        if word.startswith(("-", "{", "$")):
            return
        yield word


def _same(asked: Any, answered: Any) -> bool:
    """Equal as JSON has it: 1 is 1.0, and neither is true."""
    if isinstance(asked, bool) is not isinstance(answered, bool):
        return False
    return bool(asked == answered)


def _plain(asked: Any, key: str, report: Report) -> tuple[Any, bool]:
    answered = report.configuration.get(key)
    if isinstance(answered, (int, float)) and isinstance(asked, str):  # a literal of the argv
        return answered, asked == str(answered) or _number(asked) == answered
    return answered, _same(asked, answered)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _policy(asked: Any, key: str, report: Report) -> tuple[Any, bool]:
    """A KV policy in any spelling; of a server, the channel that its model was asked through."""
    if report.configuration.get("command") == "eval server":
        channel = str(report.configuration.get("model_id")).rpartition("@")[2]
        return channel, asked == channel
    answered = report.configuration.get(key)
    return answered, isinstance(answered, str) and _spelled(asked) == _spelled(answered)


def _spelled(policy: str) -> object:
    return parse_policy(policy) or policy


def _policies(asked: Any, key: str, report: Report) -> tuple[Any, bool]:
    """Several policies, which a configuration repeats as a JSON list."""
    answered = report.configuration.get(key)
    try:
        listed = json.loads(answered) if isinstance(answered, str) else None
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        return answered, False
    return answered, [*map(_spelled, asked.split())] == [*map(_spelled, listed)]


def _folder(asked: Any, key: str, report: Report) -> tuple[Any, bool]:
    """A folder of the workload, of which a configuration repeats the name alone."""
    answered = report.configuration.get(key)
    return answered, PurePosixPath(asked).name == answered


def _seed(asked: Any, key: str, report: Report) -> tuple[Any, bool]:
    """A number, or `nonce`: the number that the engine makes of the request's."""
    answered = report.configuration.get(key)
    if asked == NONCE_SEED:
        nonce = "" if report.request is None else report.request.nonce
        return answered, _same(int(hashlib.sha256(nonce.encode()).hexdigest()[:8], 16), answered)
    return _plain(asked, key, report)


def _thinking(asked: Any, key: str, report: Report) -> tuple[Any, bool]:
    """`default` leaves it to the served model's own entry, and the configuration says what that came to."""
    answered = report.configuration.get(key)
    left = asked == "default" and report.configuration.get("command") == "eval server"
    return answered, answered == asked or (left and answered in ("on", "off"))


_READERS: dict[str, Callable[[Any, str, Report], tuple[Any, bool]]] = {
    "golden": _folder,
    "kv": _policy,
    "policies": _policies,
    "seed": _seed,
    "thinking": _thinking,
}
