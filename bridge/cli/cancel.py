"""``kakeya_mac cancel``: ask for a request to be stopped; with ``--wait``, see that it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json
from bridge.cli.handles import handle_options

if TYPE_CHECKING:
    from bridge.client.cancel import Cancelled


@click.command(
    epilog="""\b
Examples:
  kakeya_mac cancel 20260301t120000z0123456789ab
  kakeya_mac cancel 20260301t12 --reason "wrong model" --wait 60 --json

Exit code: 0 once the wish is on the remote, or when the request had finished before. With --wait that of its
end: 5 cancelled, or what it came to in spite of the wish."""
)
@handle_options
@click.option("--reason", metavar="TEXT", help="Why, for whoever reads the result (at most 500 characters).")
@click.option(
    "--wait",
    "wait_s",
    is_flag=False,
    flag_value=3600.0,
    default=None,
    type=click.FloatRange(min=0, max=30 * 86_400),
    metavar="[SECONDS]",
    help="Follow the request until it has ended (default 3600 s).",
)
def cancel(handle: str, remote: str | None, as_json: bool, reason: str | None, wait_s: float | None) -> int:
    """Stop the request HANDLE, whether it waits or runs.

    The wish is signed where a signing key is configured: a machine that takes signed requests only honours
    nobody else's. A stopped job's result is `cancelled`, with what it had printed so far.
    """
    from bridge import settings
    from bridge.bus.git import Git
    from bridge.cli.follow import follow
    from bridge.client.cancel import Outcome, cancel_request
    from bridge.client.remotes import resolve_remote

    config = settings.load(remote=remote)
    git = Git(Path.cwd())
    bus = resolve_remote(git, config.remote)
    done = cancel_request(config, git, bus, handle, reason=reason)
    for warning in done.warnings:
        click.echo(f"warning: {warning}", err=True)
    if wait_s is None:
        _say(done, as_json)
        return 0
    if done.outcome is not Outcome.ALREADY_FINISHED:
        click.echo(_sentence(done), err=True)
    return follow(
        config,
        git,
        bus,
        done.nonce,
        wait_s=wait_s,
        as_json=as_json,
        extra={"cancel": done.outcome},
    )


def _say(done: Cancelled, as_json: bool) -> None:
    if not as_json:
        click.echo(_sentence(done))
        return
    document = {"status": done.outcome, "nonce": done.nonce, "signed": done.signed, "exit_code": 0}
    if done.finished is not None:
        document["result_status"] = done.finished[0].result.verdict.status
    echo_json(document)


def _sentence(done: Cancelled) -> str:
    from bridge.client.cancel import Outcome

    if done.outcome is Outcome.ALREADY_ASKED:
        return f"{done.nonce}: somebody has asked for it to be stopped already"
    if done.finished is None:
        return f"{done.nonce}: asked for it to be stopped; see: kakeya_mac wait {done.nonce}"
    verdict = done.finished[0].result.verdict
    return f"{done.nonce}: had finished already: {verdict.status} ({verdict.reason})"
