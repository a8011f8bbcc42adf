"""``kakeya_mac run``: submit a request; with ``--wait``, follow it home."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json
from bridge.cli.options import allow_unsigned_option

if TYPE_CHECKING:
    from bridge.client.submit import Plan


@click.command(
    epilog="""\b
Examples:
  kakeya_mac run --preset probe --wait
  kakeya_mac run --preset throughput -p prompts=code -p limit=4 --wait 600 -o out/
  kakeya_mac run --preset tests -p path=tests/unit --ref my-branch --json
  kakeya_mac run --preset throughput --dry-run

Exit codes with --wait: 0 passed, 1 failed, 2 refused, 3 evidence rejected, 4 the wait timed out (the job goes
on), 5 cancelled or lost, 6 git or the network failed."""
)
@click.option("--preset", required=True, metavar="NAME", help="What to run; see `kakeya_mac presets`.")
@click.option("-p", "--param", "params", multiple=True, metavar="KEY=VALUE", help="A parameter; repeatable.")
@click.option(
    "--ref", default="HEAD", show_default=True, metavar="REV", help="The workload: branch, tag or commit."
)
@click.option("--against", metavar="REV", help="A second commit, for presets that compare.")
@click.option("--remote", metavar="URL", help="Git remote that carries the bus (default: origin).")
@click.option(
    "--wait",
    "wait_s",
    is_flag=False,
    flag_value=3600.0,
    default=None,
    type=click.FloatRange(min=0, max=30 * 86_400),
    metavar="[SECONDS]",
    help="Follow the request until its result is home (default 3600 s).",
)
@click.option(
    "--timeout", "timeout_s", type=click.IntRange(1, 86_400), metavar="SECONDS", help="Limit of the job."
)
@click.option(
    "--expires", type=click.IntRange(1, 30 * 86_400), metavar="SECONDS", help="Unclaimed so long: refused."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="With --wait: save the result."
)
@allow_unsigned_option
@click.option("--dry-run", is_flag=True, help="Show the manifest and what would run; push nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line at the end.")
def run(
    preset: str,
    params: tuple[str, ...],
    ref: str,
    against: str | None,
    remote: str | None,
    wait_s: float | None,
    timeout_s: int | None,
    expires: int | None,
    output: Path | None,
    allow_unsigned: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Ask for one preset to be run for one commit of this checkout.

    The request is a commit of its own on top of REV, pushed to a branch of its own. Work tree, index and
    current branch are not touched, and uncommitted changes are not part of it.
    """
    from datetime import timedelta

    from bridge import presets, settings
    from bridge.bus.git import Git
    from bridge.bus.refs import is_local
    from bridge.cli.follow import follow
    from bridge.client.submit import left_behind, plan_request, submit_request

    if output is not None and wait_s is None:
        raise click.UsageError("-o needs --wait; later: kakeya_mac result HANDLE -o DIR")
    if allow_unsigned and wait_s is None:
        raise click.UsageError("--allow-unsigned needs --wait: without it no result is shown")
    here = Path.cwd()
    config = settings.load(remote=remote)
    plan = plan_request(
        config,
        repository=here,
        preset=preset,
        params=presets.parse_cli(presets.get(preset), params),
        ref=ref,
        expires=None if expires is None else timedelta(seconds=expires),
        against=against,
        timeout_s=timeout_s,
    )
    if dry_run:
        behind = left_behind(here) if ref == "HEAD" else None
        _show_plan(plan, [*plan.warnings, *([behind] if behind else [])], as_json)
        return 0
    if not is_local(plan.remote.address):
        click.echo(f"pushing the request to {plan.remote.shown}", err=True)
    submission = submit_request(config, plan, repository=here, check_tree=ref == "HEAD")
    for warning in submission.warnings:
        click.echo(f"warning: {warning}", err=True)
    handle = {
        "nonce": submission.nonce,
        "ref": submission.ref,
        "request_commit": submission.commit,
        "workload_sha": submission.manifest.workload_sha,
        "preset": submission.manifest.preset,
        "remote": submission.remote.shown,
        "signed": submission.signed,
    }
    if wait_s is None:
        if as_json:
            echo_json({"status": "queued", "exit_code": 0, **handle})
        else:
            click.echo(f"queued  {submission.nonce}")
            click.echo(f"  {submission.ref} at {submission.commit[:12]}")
            click.echo(f"  follow it: kakeya_mac wait {submission.nonce}")
        return 0
    click.echo(f"submitted {submission.nonce} to {submission.remote.shown}", err=True)
    return follow(
        config,
        Git(here),
        submission.remote,
        submission.nonce,
        wait_s=wait_s,
        as_json=as_json,
        asked=submission.asked,
        output=output,
        extra=handle,
        allow_unsigned=allow_unsigned,
    )


def _show_plan(plan: Plan, warnings: list[str], as_json: bool) -> None:
    import json

    manifest = json.loads(plan.manifest.to_bytes())
    if as_json:
        echo_json(
            {
                "status": "dry-run",
                "exit_code": 0,
                "manifest": manifest,
                "argv": list(plan.argv),
                "remote": plan.remote.shown,
                "warnings": warnings,
            }
        )
        return
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(json.dumps(manifest, indent=2, sort_keys=True))
    click.echo(f"\nwould push to  {plan.remote.shown}")
    click.echo(f"would run      {' '.join(plan.argv)}")
