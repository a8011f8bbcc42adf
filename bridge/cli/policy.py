"""``kakeya_mac runner policy``: what a Mac allows, written, checked and explained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import IO, Any

import click

from bridge import settings
from bridge.cli import show
from bridge.cli.options import json_option
from bridge.protocol.manifest import MAX_BYTES
from bridge.protocol.sanitize import clean_line
from bridge.runner import explain as library
from bridge.runner import policy as policies
from bridge.signing import MAX_SIGNATURE_BYTES


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
    rules, findings = library.check_config(folder, state_dir=settings.state_dir())
    document = {
        "ok": rules is not None,
        "folder": str(folder),
        "findings": [asdict(finding) for finding in findings],
        "summary": None if rules is None else rules.summary(),
    }
    lines = []
    for finding in findings:
        lines.append(f"{'fault' if finding.fault else 'note'}: {_line(finding.message)}")
        lines += [f"  {_line(finding.remedy)}"] if finding.remedy is not None else []
    if rules is None:
        lines.append(f"a runner would not serve with {folder}")
    else:
        path = folder / policies.FILE_NAME
        written = path if rules.is_written else f"the default ({path} does not exist)"
        lines += [f"policy: {written}", rules.summary()]
    show(as_json, document, lines)
    return 2 if rules is None else 0


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
    answer = library.explain(
        manifest.read(MAX_BYTES + 1),
        state_dir=settings.state_dir(),
        config_dir=settings.config_dir(),
        now=datetime.now(UTC),
        remote=remote,
        signature=None if signature is None else signature.read(MAX_SIGNATURE_BYTES + 1),
        requester=requester,
    )
    show(as_json, answer, _explanation(answer))
    return 0 if answer["allowed"] else 2


def _explanation(answer: dict[str, Any]) -> Iterator[str]:
    if not answer["allowed"]:
        yield f"refused: {answer['reason']}"
        yield from (f"  {_line(answer[key])}" for key in ("message", "line", "remedy") if answer[key])
        return
    yield "allowed"
    job = answer["job"]
    rows = {
        "preset": job["preset"],
        "requester": job["requester"] or "unsigned",
        "begins": "at once" if job["waits_for"] is None else f"within {job['waits_for']}",
        "params": json.dumps(job["params"]),
        "argv": json.dumps(job["argv"]),
        "time": f"{job['timeout_s']} s",
        "limits": ", ".join(_limit(name, limit) for name, limit in job["limits"].items()),
        "network": "the machine's" if job["network"] else "none",
        "environment": ", ".join(job["environment"]) or "the usual variables",
    }
    yield from (f"  {name:<12} {_line(text)}" for name, text in rows.items())


def _limit(name: str, limit: int | None) -> str:
    if limit is None:
        amount = "four fifths of the machine's"
    else:
        amount = f"{limit / (1 << 20):g} MiB" if name.endswith("_bytes") else str(limit)
    return f"{name.removesuffix('_bytes')} {amount}"


def _line(text: str) -> str:
    return clean_line(text, limit=2000)
