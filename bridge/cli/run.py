"""``kakeya_mac run``: submit a request; with ``--wait``, follow it home."""

from __future__ import annotations

from pathlib import Path

import click

from bridge.cli.options import asking_options, check_asking


@click.command(
    epilog="""\b
Examples:
  kakeya_mac run --preset probe --wait
  kakeya_mac run --preset throughput -p prompts=code -p limit=4 --wait 600 -o out/
  kakeya_mac run --preset tests -p path=tests/unit --ref my-branch --json
  kakeya_mac run --preset throughput --dry-run
  kakeya_mac run --preset probe --transport actions --wait

Exit codes with --wait: 0 passed, 1 failed, 2 refused, 3 evidence rejected, 4 the wait timed out (the job goes
on), 5 cancelled or lost, 6 git or the network failed."""
)
@click.option("--preset", required=True, metavar="NAME", help="What to run; see `kakeya_mac presets`.")
@click.option("-p", "--param", "params", multiple=True, metavar="KEY=VALUE", help="A parameter; repeatable.")
@click.option(
    "--ref", default="HEAD", show_default=True, metavar="REV", help="The workload: branch, tag or commit."
)
@click.option("--remote", metavar="URL", help="Git remote that carries the bus (default: origin).")
@asking_options
@click.option("--json", "as_json", is_flag=True, help="One JSON line at the end.")
def run(
    preset: str,
    params: tuple[str, ...],
    ref: str,
    remote: str | None,
    wait_s: float | None,
    timeout_s: int | None,
    expires: int | None,
    output: Path | None,
    allow_unsigned: bool,
    signing_key: str | None,
    transport: str | None,
    resend_after_s: float | None,
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
    from bridge.cli.asking import finish, send, show_plan
    from bridge.client.lookout import Lookout
    from bridge.client.submit import left_behind, plan_request

    check_asking(wait_s=wait_s, output=output, allow_unsigned=allow_unsigned, resend_after_s=resend_after_s)
    here = Path.cwd()
    config = settings.load(remote=remote, signing_key=signing_key, transport=transport)
    known = presets.get(preset, config.presets)
    for name in presets.left_out(known, params, preset):
        click.echo(f"warning: {name} has no counterpart in {known.name} and is left out", err=True)
    plan = plan_request(
        config,
        repository=here,
        preset=preset,
        params=presets.parse_cli(known, params, preset),
        ref=ref,
        expires=None if expires is None else timedelta(seconds=expires),
        timeout_s=timeout_s,
    )
    if dry_run:
        behind = left_behind(here) if ref == "HEAD" else None
        show_plan(plan, [*plan.warnings, *([behind] if behind else [])], as_json=as_json)
        return 0
    lookout = Lookout(Git(here), plan.remote.address, config.trusted_runners, count=True)
    submission = send(config, plan, repository=here, check_tree=ref == "HEAD")
    return finish(
        config,
        Git(here),
        submission,
        wait_s=wait_s,
        as_json=as_json,
        output=output,
        allow_unsigned=allow_unsigned,
        lookout=lookout,
        resend_after_s=resend_after_s,
    )
