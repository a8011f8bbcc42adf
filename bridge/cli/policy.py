"""``kakeya_mac runner policy``: what a Mac allows, written, checked and explained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import IO, Any

import click

from bridge import presets, settings
from bridge.bus.requests import RequestCommit
from bridge.cli import show
from bridge.cli.options import json_option
from bridge.errors import BridgeError, ManifestError, RequestRefused
from bridge.presets.preset import model_parameter
from bridge.protocol.manifest import MAX_BYTES, parse
from bridge.protocol.result import Reason
from bridge.protocol.sanitize import clean_line
from bridge.runner import admission, models
from bridge.runner import policy as policies
from bridge.runner.config import RunnerConfig, survey_config
from bridge.runner.job import program_words
from bridge.signing import keyfiles, ssh, trust

NOT_ASKED = (
    "whether the requester has too much waiting",
    "whether the request was answered before",
    "whether its commit has the files that it names",
    "whether its commit is on a branch of allow_workloads",
    "whether it is on the branch that it names, where allow_refs decides",
)
_NO_COMMIT = "0" * 40


@click.group(
    epilog="""\b
Examples:
  kakeya_mac runner policy init
  kakeya_mac runner policy check
  kakeya_mac runner policy explain request.json"""
)
def policy() -> None:
    """What this machine allows: policy.toml, presets and keys in the configuration folder."""


@policy.command(
    epilog="""\b
Examples:
  kakeya_mac runner policy init
  kakeya_mac runner policy init --require-signature
  kakeya_mac runner policy init --print

The file is written for you alone (0600, its folder 0700). It says the safe default: every installed preset,
no code of a repository, no network."""
)
@click.option("--force", is_flag=True, help="Replace the policy that is there.")
@click.option("--require-signature", is_flag=True, help="Take only requests of listed signers.")
@click.option("--print", "only_print", is_flag=True, help="Print it instead, and write nothing.")
def init(force: bool, require_signature: bool, only_print: bool) -> int:
    """Write the default policy, with every key explained."""
    text = policies.default_text(require_signature=require_signature)
    path = settings.config_dir() / policies.FILE_NAME
    policies.parse(path, text.encode())
    if only_print:
        click.echo(text, nl=False)
        return 0
    policies.write_default(path, text, force=force)
    click.echo(f"written: {path}")
    return 0


@policy.command(
    epilog="""\b
Examples:
  kakeya_mac runner policy check
  kakeya_mac runner policy check --json

Looks at policy.toml, presets/*.toml, allowed_signers, known_runners, revoked_keys and who may write them.
Exit code 0: a runner would serve with it (notes do not matter); 2: it would not, and the first fault."""
)
@json_option
def check(as_json: bool) -> int:
    """Check everything that a runner here reads from its owner."""
    folder = settings.config_dir()
    path, summary = folder / policies.FILE_NAME, None
    try:
        config = survey_config("", state_dir=settings.state_dir(), config_dir=folder)
        notes = _notes(config, {entry.name for entry in keyfiles.read_keys(config.allowed_signers)})
        findings = [{"fault": False, "message": message, "remedy": remedy} for message, remedy in notes]
        summary = config.rulebook.summary()
        written = path if config.rulebook.is_written else f"the default ({path} does not exist)"
        end = f"policy: {written}\n{summary}"
    except BridgeError as error:
        findings = [{"fault": True, "message": error.message, "remedy": error.remedy}]
        end = f"a runner would not serve with {folder}"
    ok, lines = summary is not None, []
    for each in findings:
        lines.append(f"{'fault' if each['fault'] else 'note'}: {each['message']}")
        lines += [f"  {each['remedy']}"] if each["remedy"] else []
    document = {"ok": ok, "folder": str(folder), "findings": findings, "summary": summary}
    show(as_json, document, [*lines, end])
    return 0 if ok else 2


def _notes(config: RunnerConfig, signers: set[str]) -> Iterator[tuple[str, str | None]]:
    """Names in the policy that change nothing, and presets that are allowed and cannot run here."""
    yield from ((f"{policies.FILE_NAME}: {note}", None) for note in _unused_names(config, signers))
    for preset in filter(config.policy.allows, config.presets.values()):
        try:
            admission.check_machine(preset, config, {})
        except RequestRefused as refusal:
            why = refusal.message.removeprefix(f"the preset {preset.name} cannot run here: ")
            yield f"the preset {preset.name} is allowed and cannot run here: {why}", refusal.remedy


def _unused_names(config: RunnerConfig, signers: set[str]) -> Iterator[str]:
    policy, installed = config.policy, config.rulebook.installed
    for name in policy.allow_presets or ():
        if name not in installed:
            yield f"allow_presets: {name} is not a preset of this machine"
    for name, rule in policy.presets.items():
        if rule.network and not installed[name].network:
            yield f"presets.{name}.network: {name} does not ask for the network and gets none"
    used = set(_used_models(config))
    for name, path in policy.models.items():
        if not path.is_dir():
            yield f"models.{name}: there is no folder {path}"
        if name not in used:
            yield f"models.{name}: no preset needs a model of the name {name}"
    if policy.require_signature and not signers:
        yield "require_signature: allowed_signers lists no key, so every request is refused"
    lists = {"allow_requesters": policy.allow_requesters, "quotas": tuple(policy.quotas)}
    lists |= {f"presets.{name}.requesters": rule.requesters for name, rule in policy.presets.items()}
    for key, listed in lists.items():
        for name in listed or ():
            if name not in {keyfiles.UNSIGNED, *signers} and not set(name) & set("*?["):
                yield f"{key}: no key in allowed_signers belongs to {name}"


def _used_models(config: RunnerConfig) -> Iterator[str]:
    """Models that presets need, those that a request may choose in their place, and what goes with these."""
    for preset in config.presets.values():
        yield from preset.models
        key = model_parameter(preset)
        chosen = preset.params[key].enum or () if key else ()
        yield from (f"{name}{suffix}" for name in chosen for suffix in ("", *models.COMPANIONS))


@policy.command(
    epilog="""\b
Examples:
  kakeya_mac runner policy explain request.json
  kakeya_mac runner policy explain request.json --signature request.json.sig
  git show BRANCH:.mac-bridge/request.json | kakeya_mac runner policy explain - --requester ci@example.org

Uses the runner's own admission code. What only the bus knows is not asked: quotas, replays, the commit's
files. Exit code 0: allowed; 2: refused, with the key of the policy (or the default) that refuses."""
)
@click.argument("manifest", type=click.File("rb"))
@click.option("--signature", type=click.File("rb"), metavar="FILE", help="The manifest's detached signature.")
@click.option("--requester", metavar="NAME", help="As if NAME of allowed_signers had signed it.")
@click.option(
    "--remote", metavar="URL", help="The remote that is served (default: whichever it is meant for)."
)
@json_option
def explain(
    manifest: IO[bytes], signature: IO[bytes] | None, requester: str | None, remote: str | None, as_json: bool
) -> int:
    """Show whether this request would run here and with what, or which key of the policy refuses it."""
    if signature is not None and requester is not None:
        raise click.UsageError("Give --signature or --requester: one of them says who asks.")
    sealed = None if signature is None else signature.read(ssh.MAX_SIGNATURE_BYTES + 1)
    answer: dict[str, Any] = {"allowed": True, "message": "", "not_asked": list(NOT_ASKED)}
    answer |= dict.fromkeys(("reason", "remedy", "line", "job"))
    told = _explain(manifest.read(MAX_BYTES + 1), sealed, requester, remote)
    if not isinstance(told, tuple):
        answer["job"] = told
        lines = ["allowed", *(f"  {name:<12} {json.dumps(value)}" for name, value in told.items())]
    else:
        refusal, line = told
        answer |= {"allowed": False, "reason": refusal.reason, "line": line}
        answer |= {"message": refusal.message, "remedy": refusal.remedy}
        texts = (refusal.message, line, refusal.remedy)
        lines = [f"refused: {refusal.reason}"]
        lines += [f"  {clean_line(text, limit=2000)}" for text in texts if text]
    show(as_json, answer, lines)
    return 0 if answer["allowed"] else 2


def _explain(
    data: bytes, signature: bytes | None, requester: str | None, remote: str | None
) -> dict[str, Any] | tuple[admission.Refusal, str | None]:
    """What the job of a manifest would get here; or its refusal, and the line of the policy that refuses."""
    try:
        manifest = parse(data)
    except ManifestError as error:
        return admission.Refusal(Reason.BAD_MANIFEST, error.message, error.remedy), None
    folders = {"state_dir": settings.state_dir(), "config_dir": settings.config_dir()}
    config, now = survey_config(remote or manifest.audience, **folders), datetime.now(UTC)
    if remote is None:
        config = replace(config, audience=manifest.audience)
    commit = RequestCommit(_NO_COMMIT, manifest.commits, data, signature)
    request = admission.Request(
        manifest.nonce, _NO_COMMIT, manifest.result_ref, data=commit, manifest=manifest
    )
    if requester is None:
        admission.find_signer(request, config, now)
    else:
        request.signer = trust.Signature(trust.TrustLevel.TRUSTED, requester)
    decision = request.refusal or admission.decide(request, config, now, assumed=requester is not None)
    policy = config.policy
    if isinstance(decision, admission.Refusal):
        return decision, None if decision.key is None else policy.setting(decision.key)
    preset = decision.preset
    names = presets.model_names(preset, decision.params)
    needs = presets.model_needs(preset, decision.params)
    found = {} if preset.runs_repo_code else models.resolve(needs, config.model_places())

    def resolve(kind: str, name: str) -> list[str]:
        if kind == "model" and names[name] in found:
            return [str(found[names[name]].folder)]
        return program_words(kind) or presets.show(kind, name)  # only a running job has the rest

    return {
        "preset": preset.name,
        "requester": request.requester,
        "waits_for": None if policy.is_open(now) else policy.hours_text,
        "params": dict(decision.params),
        "argv": presets.argv(preset, decision.params, resolve),
        "timeout_s": policy.timeout_s(preset, manifest.timeout_s),
        "limits": policy.limits.model_dump(),
        "network": policy.opens_network(preset),
        "environment": [name for name in policy.environment if name in config.environment],
    }
