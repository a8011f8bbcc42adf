"""Does the result answer the request? A perfect report of ``limit=5`` does not answer ``limit=8``. Pure.

What could not be compared is listed, never passed over in silence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any

from bridge import presets
from bridge.bus.results import ExpectedRequest
from bridge.errors import ParameterError
from bridge.presets import Preset
from bridge.presets.argv import switches
from bridge.protocol.manifest import ParamValue
from bridge.protocol.result import ENGINE_FACT, Result, Status, weights_of
from evidence_format.model import SWITCHES, Report, ReportRequest
from evidence_format.paired import NAME as PAIRED
from evidence_format.paired import Paired
from evidence_format.policies import policy_of
from evidence_format.text import shown
from evidence_format.verification import NAME as VERIFICATION
from evidence_format.verification import Verification

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


Findings = Iterator[Difference | str]  # a text: what could not be compared


def compare(
    expected: ExpectedRequest | None,
    result: Result,
    reports: Mapping[str, Report],
    preset: Preset | None,
    verification: Verification | None = None,
    *,
    paired: Paired | None = None,
) -> Agreement:
    """Compare a result with its request, and its reports, by path, with both.

    Of a result that did not run only preset and workload are compared. `preset` is the one of that name that
    is installed here; its defaults count where it is the very file that the runner has. `verification` is the
    record of a result that replayed another request's report, `paired` that of a paired run.
    """
    known = preset if preset is not None and preset.digest == result.preset_digest else None
    params, found = _wanted(expected, result, known)
    found += _request(expected, result, known, params)
    if result.verdict.status is Status.PASSED:
        found += _in_file(PAIRED, _sides(expected, result, known, paired))
    for path, report in reports.items():
        found += _in_file(
            path,
            _stated(result, report.request),
            _configuration(params, preset, known, report),
            _machine(result, preset, report.environment.model_dump()),
            _weights(params, result, preset, known, report),
        )
    if verification is not None:
        found += _in_file(
            VERIFICATION,
            _stated(result, verification.request),
            _replay(params, verification),
            _machine(result, preset, verification.environment),
        )
    differences = tuple(each for each in found if isinstance(each, Difference))
    return Agreement(differences, tuple(dict.fromkeys(each for each in found if isinstance(each, str))))


def _in_file(path: str, *found: Findings) -> Findings:
    for each in (each for some in found for each in some):
        yield each if isinstance(each, str) else replace(each, file=path)


def _check(name: str, asked: Any, answered: Any, equal: bool | None = None) -> Iterator[Difference]:
    if not (_same(asked, answered) if equal is None else equal):
        yield Difference(name, asked, answered)


def _wanted(
    expected: ExpectedRequest | None, result: Result, known: Preset | None
) -> tuple[Mapping[str, ParamValue], list[Difference | str]]:
    """What was asked for, with the runner's defaults where they are known, else as the result says."""
    if expected is None or expected.params is None or not _has_run(result):
        return result.params, []
    if known is None or expected.preset != result.preset:
        return {**result.params, **expected.params}, []
    try:
        return presets.validate(known, expected.params), []
    except ParameterError as error:
        return expected.params, [Difference("params", error.message, dict(result.params))]


def _request(
    expected: ExpectedRequest | None, result: Result, known: Preset | None, params: Mapping[str, ParamValue]
) -> Findings:
    has_run = _has_run(result)
    if expected is None:
        yield "the request, which is gone from the remote"
    else:
        if expected.preset is not None and (has_run or result.preset is not None):
            yield from _check("preset", expected.preset, result.preset)
        if expected.workload_sha is not None and (has_run or result.workload_sha is not None):
            yield from _check("workload", expected.workload_sha, result.workload_sha)
        if has_run and expected.params is None:
            yield "parameters: the request cannot be read"
        elif has_run:
            for name in dict.fromkeys((*result.params, *params)):
                yield from _check(f"params.{name}", params.get(name), result.params.get(name))
    if known is not None:
        yield from _check("engine source", known.engine, result.engine_source)
    elif result.preset_digest is not None:  # without one no runner wrote it
        yield f"defaults of the preset {result.preset}: the runner has another version of it"


def _sides(
    expected: ExpectedRequest | None, result: Result, known: Preset | None, record: Paired | None
) -> Findings:
    """What a paired run compared, with what it was asked to compare."""
    if record is not None:
        yield from _check("workload.params", dict(result.params), record.workload.params)
    if expected is None or expected.params is None:  # nothing of the request can be read
        return
    asked = expected.against
    if asked is None or record is None:
        stated = None if record is None else record.against.workload_sha
        yield from _check("against", None if asked is None else asked.workload_sha, stated)
        return
    yield from _check("against.workload", asked.workload_sha, record.against.workload_sha)
    params: Mapping[str, ParamValue] = {**record.against.params, **asked.params}
    if known is not None:
        with contextlib.suppress(ParameterError):  # then the runner would have refused it
            params = presets.validate(known, asked.params)
    yield from _check("against.params", dict(params), record.against.params)


def _stated(result: Result, stated: ReportRequest | None) -> Findings:
    """What a report says of its request with the result that carries it."""
    for name in ("nonce", "workload_sha", "preset_digest", "engine_source"):
        yield from _check(f"request.{name}", getattr(result, name), getattr(stated, name, None))


def _configuration(
    params: Mapping[str, ParamValue], preset: Preset | None, known: Preset | None, report: Report
) -> Findings:
    """The switches that a report says its engine had: the preset's argv says which a parameter becomes."""
    stated = report.configuration
    if preset is None or preset.argv[0] != ENGINE:
        if params:
            yield "parameters with the report: no preset that is installed here says what they set"
        return
    words = takewhile(lambda word: not word.startswith(("-", "{", "$")), preset.argv[1:])
    command, told = " ".join(words), stated.get("command")
    if told is not None or known is not None:
        is_held = isinstance(told, str) and f"{told} ".startswith(f"{command} ")
        yield from _check("configuration.command", command, told, is_held)
    given: dict[str, Any] = {
        switch.flag.replace("-", "_"): switch.literal if switch.param is None else params.get(switch.param)
        for switch in switches(preset.argv)
        if switch.param is not None or known is not None
    }
    if known is not None and "seed" in stated:
        # The engine's default: generated prompts are the nonce's, a file's come in its order.
        given.setdefault("seed", 0 if stated.get("context") is None else NONCE_SEED)
    for key, asked in given.items():
        if asked is not None and key in REPEATED:
            answered = stated.get(key)
            if key == "kv" and told == "eval server":  # the channel that its model was asked through
                answered = str(stated.get("model_id")).rpartition("@")[2]
            equal = _is_switch(key, asked, answered, report)
            yield from _check(f"configuration.{key}", asked, answered, equal)
    for switch in switches(preset.argv):
        if switch.param in params and switch.flag.replace("-", "_") not in REPEATED:
            yield f"parameter {switch.param} with the report: its configuration does not repeat it"


def _is_switch(key: str, asked: Any, answered: Any, report: Report) -> bool:
    """Whether a configuration repeats a switch, whatever its spelling."""
    match key:
        case "golden":  # a folder of the workload; a configuration repeats its name alone
            return bool(PurePosixPath(asked).name == answered)
        case "kv":
            return asked == answered or _policies([asked]) == _policies([answered])
        case "policies":
            with contextlib.suppress(TypeError, ValueError):
                return _policies(asked.split()) == _policies(json.loads(answered))
            return False
        case "seed" if asked == NONCE_SEED:  # the number that the engine makes of the request's nonce
            nonce = "" if report.request is None else report.request.nonce
            return _same(int(hashlib.sha256(nonce.encode()).hexdigest()[:8], 16), answered)
        case "thinking" if asked == "default" and report.configuration.get("command") == "eval server":
            return answered in ("default", "on", "off")  # left to the served model's own entry
    if isinstance(answered, (int, float)) and isinstance(asked, str):  # a literal of the argv
        with contextlib.suppress(ValueError):
            return asked == str(answered) or float(asked) == answered
    return _same(asked, answered)


def _policies(listed: Any) -> list[object] | None:
    """KV policies, whatever their spelling; None: these are none."""
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        return None
    return [policy_of(each) or each for each in listed]


def _replay(params: Mapping[str, ParamValue], record: Verification) -> Findings:
    """A record of a replay with what was to be replayed, and of how many rows."""
    if "sample" in params:
        yield from _check("draw.sample", params["sample"], record.draw.sample)
    handle = params.get("request")
    named = None if handle is None else _NONCE_START.search(str(handle))
    if named is None:
        yield "which report was replayed: the request names it by no nonce"
    else:
        replayed = record.report.nonce
        yield from _check("report.nonce", handle, replayed, (replayed or "").startswith(named[0]))


def _machine(result: Result, preset: Preset | None, environment: Mapping[str, Any]) -> Findings:
    facts = result.runner.machine
    for name in MACHINE:
        yield from _check(f"machine.{name}", facts.get(name), environment.get(name))
    if ENGINE_FACT in facts or (preset is not None and preset.argv[0] == ENGINE):
        source = environment.get("git")
        answered = source.get("source_sha256") if isinstance(source, Mapping) else None
        yield from _check("engine digest", facts.get(ENGINE_FACT), answered)
    else:
        yield "engine digest: neither the result nor a preset that is installed here states one"


def _weights(
    params: Mapping[str, ParamValue],
    result: Result,
    preset: Preset | None,
    known: Preset | None,
    report: Report,
) -> Findings:
    reported, weights = report.environment.models, weights_of(result.runner.machine)
    if not weights and (preset is None or not any(_roles(preset).values())):
        if reported:
            yield "model digests: the result states none, and no preset installed here names a model"
        return
    roles = None if known is None else _roles(known)
    if roles is not None and known is not None:
        names = presets.model_names(known, params)
        roles = {role: name and names[name] for role, name in roles.items()}
    if roles is not None and roles.get("target") and "target" not in reported:
        yield from _check("weights of the target", weights.get(roles["target"] or ""), None)
    for role, model in reported.items():
        name, answered = f"weights of the {role}", model.weights_sha256
        if roles is None:
            stated = ", ".join(map(str, weights.values())) or None
            yield from _check(name, stated, answered, answered in weights.values())
        elif role in roles:
            yield from _check(name, weights.get(roles[role] or ""), answered)
        else:
            yield f"{name}: the preset names no model for it"


def _roles(preset: Preset) -> dict[str, str | None]:
    """Role and name of each model in a preset's argv; None where it says that there is to be none."""
    return {
        ROLES[switch.flag]: switch.model
        for switch in switches(preset.argv)
        if switch.flag in ROLES and (switch.model is not None or switch.literal == "none")
    }


def _has_run(result: Result) -> bool:
    return result.verdict.status in (Status.PASSED, Status.REJECTED)


def _same(asked: Any, answered: Any) -> bool:
    """Equal as JSON has it: 1 is 1.0, and neither is true."""
    return isinstance(asked, bool) is isinstance(answered, bool) and bool(asked == answered)
