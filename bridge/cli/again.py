"""``kakeya_mac again``: submit what was asked before as a new request."""

from __future__ import annotations

import click

from bridge.cli.options import RequestOptions, handle_options, param_option, submit_options
from bridge.cli.output import connect
from bridge.cli.run import show_plan, submit_and_follow
from bridge.client.rerun import Changes, plan_again, recall


@click.command(
    epilog="""\b
Examples:
  kakeya_mac again 20260301t120000z0123456789ab --wait
  kakeya_mac again 20260301t12 -p limit=8 --ref my-branch --wait 600 -o out/
  kakeya_mac again 20260301t12 --dry-run

--on '' lets any machine run it, whatever HANDLE was for. Exit codes as of `run`."""
)
@handle_options
@param_option("Changed; repeatable.")
@click.option("--ref", metavar="REV", help="Another workload (default: the same commit).")
@submit_options
def again(
    handle: str,
    remote: str | None,
    as_json: bool,
    params: tuple[str, ...],
    ref: str | None,
    options: RequestOptions,
) -> int:
    """Submit the same preset, parameters and commit as HANDLE, as a new request.

    It works from any clone, also for a request that was answered: what was asked is on its branch, or in the
    archive. What is given here is changed, everything else stays.
    """
    link = connect(remote, signing_key=options.signing_key, transport=options.transport)
    changes = Changes(
        params, ref, options.timeout_s, options.lifetime, transport=options.transport, on=options.on
    )
    with recall(link.config, link.git, link.bus, handle, changes) as original:
        plan = plan_again(link.config, original, changes)
        old, new = original.manifest, plan.manifest
        values = "".join(f"{name}={value} " for name, value in new.params.items())
        click.echo(f"repeating {old.nonce}: {new.preset} {values}of {new.workload_sha[:12]}", err=True)
        own, extra = original.git, {"again_of": old.nonce}
        if options.dry_run:
            return show_plan(plan, own, check_tree=False, as_json=as_json, extra=extra)
        is_head = ref == "HEAD"
        return submit_and_follow(
            link.config, own, plan, options, check_tree=is_head, as_json=as_json, extra=extra
        )
