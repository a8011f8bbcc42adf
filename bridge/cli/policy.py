"""``kakeya_mac runner policy``: what a Mac allows, written, checked and explained."""

from __future__ import annotations

import json
from typing import IO, Any

import click

from bridge.cli import echo_json

_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")


@click.group()
def policy() -> None:
    """What this machine allows: policy.toml, presets and keys in the configuration folder."""


@policy.command(
    epilog="""\b
Examples:
  kakeya_mac runner policy init
  kakeya_mac runner policy init --require-signature
  kakeya_mac runner policy init --print

The file is written for you alone (0600, its folder 0700). It says the safe default: every installed preset,
no code of a repository, no netjob."""
)
@click.option("--force", is_flag=True, help="Replace the policy that is there.")
@click.option("--require-signature", is_flag=True, help="Take only requests of listed signers.")
@click.option("--print", "only_print", is_flag=True, help="Print it instead, and write nothing.")
def init(force: bool, require_signature: bool, only_print: bool) -> int:
    """Write the default policy, with every key explained."""
    from bridge import settings
    from bridge.runner.policy import FILE_NAME, default_text, parse, write_default

    text = default_text(require_signature=require_signature)
    path = settings.config_dir() / FILE_NAME
    parse(path, text.encode())
    if only_print:
        click.echo(text, nl=False)
        return 0
    write_default(path, text, force=force)
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
@_JSON
def check(as_json: bool) -> int:
    """Check everything that a runner here reads from its owner."""
    from dataclasses import asdict

    from bridge import settings
    from bridge.protocol.sanitize import clean_line
    from bridge.runner.explain import check_config
    from bridge.runner.policy import FILE_NAME

    folder = settings.config_dir()
    rules, findings = check_config(folder, state_dir=settings.state_dir())
    if as_json:
        summary = None if rules is None else rules.summary()
        rows = [asdict(finding) for finding in findings]
        echo_json({"ok": rules is not None, "folder": str(folder), "findings": rows, "summary": summary})
        return 2 if rules is None else 0
    for finding in findings:
        click.echo(f"{'fault' if finding.fault else 'note'}: {clean_line(finding.message, limit=2000)}")
        if finding.remedy is not None:
            click.echo(f"  {clean_line(finding.remedy, limit=2000)}")
    if rules is None:
        click.echo(f"a runner would not serve with {folder}")
        return 2
    written = folder / FILE_NAME if rules.written else f"the default ({folder / FILE_NAME} does not exist)"
    click.echo(f"policy: {written}")
    click.echo(rules.summary())
    return 0


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
@_JSON
def explain(
    manifest: IO[bytes],
    signature: IO[bytes] | None,
    requester: str | None,
    remote: str | None,
    as_json: bool,
) -> int:
    """Show whether this request would run here and with what, or which key of the policy refuses it."""
    from datetime import UTC, datetime

    from bridge import settings
    from bridge.protocol import manifest as manifests
    from bridge.runner.explain import explain as explained
    from bridge.signing import MAX_SIGNATURE_BYTES

    if signature is not None and requester is not None:
        raise click.UsageError("Give --signature or --requester: one of them says who asks.")
    answer = explained(
        manifest.read(manifests.MAX_BYTES + 1),
        state_dir=settings.state_dir(),
        config_dir=settings.config_dir(),
        now=datetime.now(UTC),
        remote=remote,
        signature=None if signature is None else signature.read(MAX_SIGNATURE_BYTES + 1),
        requester=requester,
    )
    if as_json:
        echo_json(answer)
    else:
        click.echo("\n".join(_lines(answer)))
    return 0 if answer["allowed"] else 2


def _lines(answer: dict[str, Any]) -> list[str]:
    from bridge.protocol.sanitize import clean_line

    if answer["allowed"]:
        return ["allowed", *(f"  {name:<12} {text}" for name, text in _rows(answer["job"]))]
    said = [answer["message"], answer["line"], answer["remedy"]]
    return [f"refused: {answer['reason']}", *(f"  {clean_line(text, limit=2000)}" for text in said if text)]


def _rows(job: dict[str, Any]) -> list[tuple[str, str]]:
    """What a job would get, by name."""
    limits = ", ".join(
        f"{name.removesuffix('_bytes')} {_amount(name, limit)}" for name, limit in job["limits"].items()
    )
    return [
        ("preset", job["preset"]),
        ("requester", job["requester"] or "unsigned"),
        ("begins", "at once" if job["waits_for"] is None else f"within {job['waits_for']}"),
        ("params", json.dumps(job["params"])),
        ("argv", json.dumps(job["argv"])),
        ("time", f"{job['timeout_s']} s"),
        ("limits", limits),
        ("network", "the machine's" if job["network"] else "none"),
        ("environment", ", ".join(job["environment"]) or "the usual variables"),
    ]


def _amount(name: str, limit: int | None) -> str:
    if limit is None:
        return "four fifths of the machine's"
    return f"{limit / (1 << 20):g} MiB" if name.endswith("_bytes") else str(limit)
