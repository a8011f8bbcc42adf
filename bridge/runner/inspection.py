"""Whether everything in an owner's configuration folder is right, before a runner stands on it.

A fault is what would stop a runner, or what it would stand on wrongly; a note is what the owner may have
meant otherwise: a name that is nowhere, a line that changes nothing, a model that is not here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge import presets
from bridge.errors import BridgeError, KeyListError, PolicyError, PresetError
from bridge.presets import Preset
from bridge.runner import facts, models
from bridge.runner.policy import FILE_NAME, UNSIGNED, Policy, Rules, load, narrowed
from bridge.runner.policy.permissions import KEY_LISTS, PRESETS, shared
from bridge.signing.listed import read_keys
from bridge.signing.revoked import is_revoked


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth a look.

    Attributes:
        fault: A runner would not serve with it.
        message: What it is.
        remedy: What to do about it.
    """

    fault: bool
    message: str
    remedy: str | None = None

    @classmethod
    def of(cls, error: BridgeError) -> Finding:
        """An error as a fault."""
        return cls(True, error.message, error.remedy)


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        findings: Faults first.
        rules: What holds; None: there is a fault.
    """

    findings: tuple[Finding, ...]
    rules: Rules | None

    @property
    def sound(self) -> bool:
        """Whether a runner would serve with it."""
        return not any(finding.fault for finding in self.findings)


def inspect(folder: Path, environment: Mapping[str, str], home: Path) -> Inspection:
    """Look at everything that decides something in a configuration folder.

    Args:
        folder: It need not exist: then the default policy holds.
        environment: The runner's.
        home: The user's home.
    """
    path = folder / FILE_NAME
    findings = [Finding.of(error) for error in shared(folder, path)]
    installed, broken = _installed(folder / PRESETS)
    findings += broken
    policy: Policy | None = None
    rules: Rules | None = None
    try:
        policy = load(path)
        if not broken:
            rules = Rules(policy, installed, narrowed(policy, installed), path.exists())
    except PolicyError as error:
        if error.message not in {finding.message for finding in findings}:
            findings.append(Finding.of(error))
    if policy is not None:
        findings += _names(policy, installed)
    if rules is not None:
        findings += _models(rules, environment, home)
    listed, faults = _listed(folder)
    # A list that others may write was named above, and is refused for that by who reads it, too.
    named = {word for finding in findings for word in finding.message.split()}
    findings += [each for each in faults if each.message.split()[0] not in named]
    if policy is not None:
        findings += _nobody(policy, listed)
    findings.sort(key=lambda finding: not finding.fault)
    return Inspection(tuple(findings), rules if all(not each.fault for each in findings) else None)


def _installed(folder: Path) -> tuple[dict[str, Preset], list[Finding]]:
    """The presets, those of the owner that are right among them, and what is wrong with the others."""
    found = presets.load_all()
    broken = []
    for path in sorted(folder.glob("*.toml")):
        try:
            presets.read(path)
        except PresetError as error:
            broken.append(Finding.of(error))
    if not broken and folder.is_dir():
        try:
            found = presets.load_all(folder)
        except PresetError as error:
            broken.append(Finding.of(error))
    return found, broken


def _names(policy: Policy, installed: Mapping[str, Preset]) -> Iterator[Finding]:
    """Names in the policy that change nothing."""
    for name in sorted(policy.allow_presets or ()):
        if name not in installed:
            yield _note(policy, ("allow_presets",), f"{name} is not a preset of this machine")
    for name in sorted(policy.network & installed.keys()):
        if not installed[name].network:
            yield _note(
                policy, ("presets", name, "network"), f"{name} does not ask for the network and gets none"
            )
    needed = {need.name for preset in installed.values() for need in preset.models}
    for name, folder in policy.models.items():
        if not folder.is_dir():
            yield _note(policy, ("models", name), f"there is no folder {folder}")
        if name not in needed:
            yield _note(policy, ("models", name), f"no preset needs a model of the name {name}")


def _note(policy: Policy, key: tuple[str, ...], message: str) -> Finding:
    return Finding(False, f"policy {policy.lines.place(key)}: {message}")


def _models(rules: Rules, environment: Mapping[str, str], home: Path) -> Iterator[Finding]:
    """Presets that are allowed and cannot run here."""
    places = models.Places(
        configured=rules.policy.models,
        environment=environment,
        home=home,
        metal=bool(facts.machine()["metal"]),
    )
    for preset in rules.presets.values():
        try:
            rules.policy.check(preset)
        except PolicyError:
            continue
        if lacking := facts.unfit(preset):
            yield Finding(False, f"the preset {preset.name} is allowed and cannot run here: {lacking}")
            continue
        try:
            if not preset.runs_repo_code:
                models.resolve(preset.models, places)
        except models.ModelMissing as error:
            yield Finding(
                False, f"the preset {preset.name} is allowed and cannot run: {error.message}", error.remedy
            )


def _listed(folder: Path) -> tuple[set[str], list[Finding]]:
    """The names in the list of signers, and what is wrong with that list and the others."""
    lists, findings = {}, []
    for name in KEY_LISTS[:2]:
        try:
            lists[name] = read_keys(folder / name)
        except KeyListError as error:
            lists[name] = ()
            findings.append(Finding.of(error))
    signers = lists[KEY_LISTS[0]]
    for entry in signers:
        try:
            if is_revoked(folder / KEY_LISTS[2], entry.key):
                message = f"{folder / KEY_LISTS[0]}:{entry.line}: this key of {entry.name} is revoked"
                findings.append(Finding(False, message))
        except KeyListError as error:
            findings.append(Finding.of(error))
            break
    return {entry.name for entry in signers}, findings


def _nobody(policy: Policy, known: Collection[str]) -> Iterator[Finding]:
    """Where the policy names or asks for signers that the list has not."""
    if policy.require_signature and not known:
        yield _note(policy, ("require_signature",), "nobody can ask: allowed_signers lists no key")
    for key, listed in [
        (("allow_requesters",), policy.allow_requesters),
        *((("presets", name, "requesters"), rule.requesters) for name, rule in policy.presets.items()),
        (("quotas",), tuple(policy.quotas)),
    ]:
        for name in listed or ():
            if name != UNSIGNED and name not in known and not set(name) & set("*?["):
                yield _note(policy, key, f"no key in allowed_signers belongs to {name}")
