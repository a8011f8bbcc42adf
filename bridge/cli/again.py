"""``kakeya_mac again``: ask for what was asked before, as a new request."""

from __future__ import annotations

from pathlib import Path

import click

from bridge.cli.options import asking_options, check_asking, handle_options


@click.command(
    epilog="""\b
Examples:
  kakeya_mac again 20260301t120000z0123456789ab --wait
  kakeya_mac again 20260301t12 -p limit=8 --ref my-branch --wait 600 -o out/
  kakeya_mac again 20260301t12 --dry-run

Exit codes as of `run`."""
)
@handle_options
@click.option("-p", "--param", "params", multiple=True, metavar="KEY=VALUE", help="Changed; repeatable.")
@click.option("--ref", metavar="REV", help="Another workload (default: the same commit).")
@asking_options
def again(
    handle: str,
    remote: str | None,
    as_json: bool,
    params: tuple[str, ...],
    ref: str | None,
    wait_s: float | None,
    timeout_s: int | None,
    expires: int | None,
    output: Path | None,
    allow_unsigned: bool,
    signing_key: str | None,
    transport: str | None,
    resend_after_s: float | None,
    dry_run: bool,
) -> int:
    """Ask for the same preset, parameters and commit as HANDLE did, as a new request.

    It works from any clone, also for a request that was answered: what was asked stands on its branch, or in
    the archive. What is given here is changed, everything else stays. Where neither this clone nor the remote
    has the commit any more, the command is shown that asks the same anew in a clone that has it.
    """
    from datetime import timedelta

    from bridge import settings
    from bridge.bus.git import Git
    from bridge.cli.asking import finish, send, show_plan
    from bridge.client.again import plan_again, recall
    from bridge.client.anew import Changes
    from bridge.client.lookout import Lookout
    from bridge.client.remotes import resolve_remote

    check_asking(wait_s=wait_s, output=output, allow_unsigned=allow_unsigned, resend_after_s=resend_after_s)
    config = settings.load(remote=remote, signing_key=signing_key, transport=transport)
    git = Git(Path.cwd())
    bus = resolve_remote(git, config.remote)
    lifetime = None if expires is None else timedelta(seconds=expires)
    changes = Changes(params, ref, timeout_s, lifetime, remote, transport)
    with recall(config, git, bus, handle, changes) as original:
        plan = plan_again(config, original, changes)
        old, new = original.manifest, plan.manifest
        values = " ".join(f"{name}={value}" for name, value in new.params.items())
        click.echo(
            f"repeating {old.nonce}: {new.preset} {values}{' ' if values else ''}of {new.workload_sha[:12]}",
            err=True,
        )
        extra = {"again_of": old.nonce}
        if dry_run:
            show_plan(plan, list(plan.warnings), as_json=as_json, extra=extra)
            return 0
        lookout = Lookout(git, plan.remote.address, config.trusted_runners, count=True)
        submission = send(config, plan, repository=original.git, check_tree=ref == "HEAD")
    return finish(
        config,
        git,
        submission,
        wait_s=wait_s,
        as_json=as_json,
        output=output,
        allow_unsigned=allow_unsigned,
        lookout=lookout,
        resend_after_s=resend_after_s,
        extra=extra,
    )
