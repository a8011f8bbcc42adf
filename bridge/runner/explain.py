"""What this machine would do with a request, and whether its configuration is right: for the owner.

`explain` asks the admission code of the runner itself. What only the bus knows is not asked: see `NOT_ASKED`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from bridge import presets
from bridge.bus.requests import RequestCommit
from bridge.errors import BridgeError, ManifestError
from bridge.protocol.manifest import Manifest, parse
from bridge.protocol.result import Reason
from bridge.runner import models
from bridge.runner.admission import Admitted, Refusal, Refused, Request, check_machine, decide, find_signer
from bridge.runner.config import Rulebook, RunnerConfig, survey_config
from bridge.runner.job import program_words
from bridge.runner.policy import FILE_NAME
from bridge.signing import Signer, read_keys
from bridge.signing.keyfiles import UNSIGNED

NOT_ASKED = (
    "whether the requester has too much waiting",
    "whether the request was answered before",
    "whether its commit has the files that it names",
    "whether its commit is on a branch of allow_workloads",
    "whether it is on the branch that it names, where allow_refs decides",
)
_NO_COMMIT = "0" * 40


def explain(
    data: bytes,
    *,
    state_dir: Path,
    config_dir: Path,
    now: datetime,
    remote: str | None = None,
    signature: bytes | None = None,
    requester: str | None = None,
) -> dict[str, Any]:
    """What would become of a manifest here, as ``policy explain --json`` prints it.

    It is given by its exact bytes and its detached signature, and judged for the `remote` it is meant for
    unless one is given, with a `requester` as if that one had signed it. ``line`` is the key of the policy
    that refuses, with its value, and ``job`` what the job would get.
    """
    try:
        manifest = parse(data)
    except ManifestError as error:
        return _answer(Refused(Reason.BAD_MANIFEST, error.message, error.remedy))
    config = survey_config(remote or manifest.audience, state_dir=state_dir, config_dir=config_dir)
    if remote is None:
        config = replace(config, audience=manifest.audience)
    commit = RequestCommit(_NO_COMMIT, manifest.workload_sha, data, signature)
    request = Request(manifest.nonce, _NO_COMMIT, manifest.result_ref, data=commit, manifest=manifest)
    if requester is None:
        find_signer(request, config, now)
    else:
        request.signer = Signer("", requester)
    decision = request.refusal or decide(request, config, now, assumed=requester is not None)
    if isinstance(decision, Admitted):
        return _answer(None, job=_job(request, decision, manifest, config, now))
    return _answer(decision, None if decision.key is None else config.policy.setting(decision.key))


def _answer(
    refused: Refused | None, setting: str | None = None, job: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "allowed": refused is None,
        "reason": refused and refused.reason,
        "message": refused.message if refused else "",
        "remedy": refused and refused.remedy,
        "line": setting,
        "job": job,
        "not_asked": list(NOT_ASKED),
    }


def _job(
    request: Request, admitted: Admitted, manifest: Manifest, config: RunnerConfig, now: datetime
) -> dict[str, Any]:
    preset = admitted.preset
    places = config.model_places()
    found = {} if preset.runs_repo_code else models.resolve(preset.models, places)

    def resolve(kind: str, name: str) -> list[str]:
        if kind == "model" and name in found:
            return [str(found[name].folder)]
        return program_words(kind) or presets.show(kind, name)  # only a running job has the rest

    policy = config.policy
    return {
        "preset": preset.name,
        "requester": request.requester,
        "waits_for": None if policy.is_open(now) else policy.hours_text,
        "params": dict(admitted.params),
        "argv": presets.argv(preset, admitted.params, resolve),
        "timeout_s": policy.timeout_s(preset, manifest.timeout_s),
        "limits": policy.limits.model_dump(),
        "network": policy.opens_network(preset),
        "environment": [name for name in policy.environment if name in config.environment],
    }


@dataclass(frozen=True)
class PolicyFinding:
    """What is wrong in a configuration folder, or worth a look; with a `fault` a runner would not serve."""

    fault: bool
    message: str
    remedy: str | None = None


def check_config(folder: Path, *, state_dir: Path) -> tuple[Rulebook | None, list[PolicyFinding]]:
    """The rules of a configuration folder and notes for its owner; no rules where there is a fault."""
    try:
        config = survey_config("", state_dir=state_dir, config_dir=folder)
        signers = {entry.name for entry in read_keys(config.allowed_signers)}
    except BridgeError as error:
        return None, [PolicyFinding(True, error.message, error.remedy)]
    rules = config.rulebook
    unused = [PolicyFinding(False, f"{FILE_NAME}: {note}") for note in _unused_names(rules, signers)]
    return rules, [*unused, *_unable(config)]


def _unused_names(rules: Rulebook, signers: set[str]) -> Iterator[str]:
    """Names in the policy that change nothing."""
    policy, installed = rules.policy, rules.installed
    for name in policy.allow_presets or ():
        if name not in installed:
            yield f"allow_presets: {name} is not a preset of this machine"
    for name, rule in policy.presets.items():
        if rule.network and not installed[name].network:
            yield f"presets.{name}.network: {name} does not ask for the network and gets none"
    needed = {need.name for preset in installed.values() for need in preset.models}
    for name, path in policy.models.items():
        if not path.is_dir():
            yield f"models.{name}: there is no folder {path}"
        if name not in needed:
            yield f"models.{name}: no preset needs a model of the name {name}"
    if policy.require_signature and not signers:
        yield "require_signature: allowed_signers lists no key, so every request is refused"
    lists = {"allow_requesters": policy.allow_requesters, "quotas": tuple(policy.quotas)}
    lists |= {f"presets.{name}.requesters": rule.requesters for name, rule in policy.presets.items()}
    for key, listed in lists.items():
        for name in listed or ():
            if name not in {UNSIGNED, *signers} and not set(name) & set("*?["):
                yield f"{key}: no key in allowed_signers belongs to {name}"


def _unable(config: RunnerConfig) -> Iterator[PolicyFinding]:
    """Presets that are allowed and cannot run here."""
    for preset in filter(config.policy.allows, config.presets.values()):
        try:
            check_machine(preset, config)
        except Refusal as refusal:
            why = refusal.message.removeprefix(f"the preset {preset.name} cannot run here: ")
            message = f"the preset {preset.name} is allowed and cannot run here: {why}"
            yield PolicyFinding(False, message, refusal.remedy)
