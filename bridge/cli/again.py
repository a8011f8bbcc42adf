"""``kakeya_mac again``: submit what was asked before as a new request."""

from __future__ import annotations

import click

from bridge.cli.completion import complete_handle
from bridge.cli.options import RequestOptions, submit_options
from bridge.cli.output import connect
from bridge.cli.run import submit_and_follow
from bridge.client.rerun import plan_again


@click.command(
    epilog="""\b
Examples:
  kakeya_mac again 20260301t120000z0123456789ab --wait
  kakeya_mac again 20260301t12 -p limit=8 --ref my-branch --wait 600 -o out/
  kakeya_mac again 20260301t12 --dry-run

--on '' lets any machine run it, whatever HANDLE was for. Exit codes as of `run`."""
)
@click.argument("handle", shell_complete=complete_handle)
@submit_options
def again(handle: str, options: RequestOptions) -> int:
    """Submit the same preset, parameters and commit as HANDLE, as a new request.

    It works from any clone, also for an archived request. Only what is given here is changed.
    """
    link = connect(options.settings())
    asked = plan_again(link.config, link.git, link.bus, handle, words=options.params, **options.asked())
    with asked as (old, plan, own):
        new = plan.manifest
        values = "".join(f"{name}={value} " for name, value in new.params.items())
        click.echo(f"repeating {old.nonce}: {new.preset} {values}of {new.workload_sha[:12]}", err=True)
        return submit_and_follow(link.config, own, plan, options, again_of=old.nonce)
