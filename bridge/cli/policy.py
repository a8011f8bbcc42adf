"""``kakeya_mac runner policy``: what a Mac allows, written, checked and explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from bridge.cli import echo_json

if TYPE_CHECKING:
    from bridge.runner.explain import Explanation, Work

_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")


@click.group()
def policy() -> None:
    """What this machine allows: policy.toml, presets and keys of the configuration folder."""


@policy.command(
    epilog="""\b
Examples:
  kakeya_mac runner policy init
  kakeya_mac runner policy init --require-signature
  kakeya_mac runner policy init --repository me/workload --fetch git@github.com:me/workload.git --key FILE
  kakeya_mac runner policy init --print

The file is written for you alone (0600, its folder 0700). It says the safe default: every installed preset,
no code of a repository, no network."""
)
@click.option("--force", is_flag=True, help="Replace the policy that is there.")
@click.option("--require-signature", is_flag=True, help="Take only requests of listed signers.")
@click.option(
    "--repository", metavar="OWNER/NAME", help="Let the hook begin workflow runs of this repository."
)
@click.option("--fetch", metavar="URL", help="Where the hook reads it (default: the repository's page).")
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Private SSH key, of a deploy key that can only read, with which it does.",
)
@click.option("--print", "only_print", is_flag=True, help="Print it instead, and write nothing.")
def init(
    force: bool,
    require_signature: bool,
    repository: str | None,
    fetch: str | None,
    key: Path | None,
    only_print: bool,
) -> int:
    """Write the policy to begin with: the safe default, every key explained."""
    from bridge import settings
    from bridge.runner.policy import FILE_NAME
    from bridge.runner.policy.defaults import starter, write_starter
    from bridge.runner.policy.reading import read

    if key is not None:
        key = key.expanduser().absolute()
    text = starter(require_signature=require_signature, repository=repository, fetch=fetch, key=key)
    path = settings.config_dir() / FILE_NAME
    read(path, text.encode())
    if only_print:
        click.echo(text, nl=False)
        return 0
    write_starter(path, text, force=force)
    click.echo(f"written: {path}")
    return 0


@policy.command(
    epilog="""\b
Examples:
  kakeya_mac runner policy check
  kakeya_mac runner policy check --json

Looks at policy.toml, presets/*.toml, allowed_signers, known_runners, revoked_keys and who may write them.
Exit code 0: a runner would serve with it, notes or not; 2: it would not."""
)
@_JSON
def check(as_json: bool) -> int:
    """Is everything right that a runner here would stand on?"""
    import os

    from bridge import settings
    from bridge.protocol.sanitize import clean_line
    from bridge.runner.inspection import inspect
    from bridge.runner.policy import FILE_NAME

    folder = settings.config_dir()
    found = inspect(folder, os.environ, Path.home())
    if as_json:
        rows = [
            {"fault": each.fault, "message": each.message, "remedy": each.remedy} for each in found.findings
        ]
        summary = None if found.rules is None else found.rules.summary()
        echo_json({"ok": found.sound, "folder": str(folder), "findings": rows, "summary": summary})
        return 0 if found.sound else 2
    for finding in found.findings:
        click.echo(f"{'fault' if finding.fault else 'note'}: {clean_line(finding.message, limit=2000)}")
        if finding.remedy is not None:
            click.echo(f"  {clean_line(finding.remedy, limit=2000)}")
    if found.rules is None:
        click.echo(f"a runner would not serve with {folder}")
        return 2
    written = (
        folder / FILE_NAME if found.rules.written else f"the default ({folder / FILE_NAME} is not there)"
    )
    click.echo(f"policy: {written}")
    click.echo(found.rules.summary())
    return 0


@policy.command(
    epilog="""\b
Examples:
  kakeya_mac runner policy explain request.json
  kakeya_mac runner policy explain request.json --signature request.json.sig
  git show BRANCH:.mac-bridge/request.json | kakeya_mac runner policy explain - --requester ci@example.org

Asked by the runner's own code, but for what only the bus knows: quotas, replays, the commit's files.
Exit code 0: allowed; 2: refused, with the line of the policy or the default that refuses."""
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
    """Would this request run here, and with what? If not, which line refuses it?"""
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
        echo_json(answer.as_json())
    else:
        click.echo("\n".join(_lines(answer)))
    return 0 if answer.reason is None else 2


def _lines(answer: Explanation) -> list[str]:
    from bridge.protocol.sanitize import clean_line

    if answer.work is not None:
        return ["allowed", *(f"  {name:<12} {text}" for name, text in _rows(answer.work))]
    said = [answer.message, answer.line, answer.remedy]
    return [f"refused: {answer.reason}", *(f"  {clean_line(text, limit=2000)}" for text in said if text)]


def _rows(work: Work) -> list[tuple[str, str]]:
    """What a job would get, by name."""
    limits = ", ".join(
        f"{name.removesuffix('_bytes')} {_amount(name, limit)}" for name, limit in work.limits.items()
    )
    return [
        ("preset", work.preset),
        ("requester", work.requester or "unsigned"),
        ("begins", "at once" if work.waits_for is None else f"within {work.waits_for}"),
        ("params", json.dumps(work.params)),
        ("argv", json.dumps(list(work.argv))),
        ("time", f"{work.timeout_s} s"),
        ("limits", limits),
        ("network", "the machine's" if work.network else "none"),
        ("environment", ", ".join(work.environment) or "the usual variables"),
    ]


def _amount(name: str, limit: int | None) -> str:
    if limit is None:
        return "four fifths of the machine's"
    return f"{limit / (1 << 20):g} MiB" if name.endswith("_bytes") else str(limit)
