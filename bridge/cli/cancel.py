"""``kakeya_mac cancel``: ask for a request to be stopped; with ``--wait``, see that it was."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge.cli import echo_json
from bridge.cli.options import handle_options, signing_key_option, wait_option

if TYPE_CHECKING:
    from bridge.bus.git import Git
    from bridge.client.cancel import Cancelled
    from bridge.client.lookout import Lookout
    from bridge.client.remotes import Remote
    from bridge.client.runs import RunView

_NAMED = 5


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
@wait_option("it has ended")
@signing_key_option
def cancel(
    handle: str,
    remote: str | None,
    as_json: bool,
    reason: str | None,
    wait_s: float | None,
    signing_key: str | None,
) -> int:
    """Stop the request HANDLE, whether it waits or runs.

    The wish is signed where there is a key (see `kakeya_mac key`): a machine that takes signed requests only
    honours nobody else's. A stopped job's result is `cancelled`, with what it had printed so far.
    """
    from bridge import settings
    from bridge.bus.git import Git
    from bridge.cli.follow import follow, present
    from bridge.client.cancel import cancel_request
    from bridge.client.keys import Pen, choose
    from bridge.client.lookout import Lookout
    from bridge.client.remotes import resolve_remote

    config = settings.load(remote=remote, signing_key=signing_key)
    git = Git(Path.cwd())
    bus = resolve_remote(git, config.remote)
    pen = Pen(choose(config, git))
    lookout = Lookout(git, bus.address, config.trusted_runners) if pen.key is None else None
    done = cancel_request(config, git, bus, handle, reason=reason, pen=pen)
    warnings = [*done.warnings, *(_unheeded(lookout) if lookout and done.finished is None else [])]
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    run = _stop_run(git, bus, done)
    if wait_s is None:
        _say(done, warnings, as_json, run)
        return 0
    if done.finished is not None:
        return present(config, *done.finished, as_json=as_json, output=None, extra={"cancel": done.outcome})
    click.echo(_sentence(done), err=True)
    return follow(
        config,
        git,
        bus,
        done.nonce,
        wait_s=wait_s,
        as_json=as_json,
        extra={"cancel": done.outcome, "run": None if run is None else run.as_json()},
    )


def _stop_run(git: Git, bus: Remote, done: Cancelled) -> RunView | None:
    """Stop the workflow run, too, if a machine has it; one that waits answers the wish when its turn comes.

    Returns:
        The run as it was; None: none is known.
    """
    from bridge.bus.handles import state_of
    from bridge.cli.attending import look_at_run, may_have_runs, usable_api, warn
    from bridge.errors import ApiConflict, ApiError

    if done.finished is not None or not may_have_runs(bus):
        return None
    run = look_at_run(git, bus, state_of(git.ls_remote(bus.address), done.nonce))
    github = usable_api(bus)
    if run is None or github is None or not run.is_on_a_machine:
        return run
    try:
        github.cancel(run.id)
    except ApiConflict:  # it has ended meanwhile
        return run
    except ApiError as error:
        warn(error)
        return run
    click.echo(f"its run was stopped, too: {run.url}", err=True)
    return run


def _unheeded(lookout: Lookout) -> list[str]:
    """That live runners do not heed an unsigned wish, or that nobody knows whether there are any."""
    from bridge.client.availability import signed_only

    catalogue, failure = lookout.result()
    if catalogue is None:
        return [] if failure is None else [failure]
    deaf = signed_only(catalogue.seen, datetime.now(UTC))
    if not deaf:
        return []
    return [
        f"the wish is unsigned, and {', '.join(deaf[:_NAMED])} will ignore it: only the key that signed a"
        " request stops it there; cancel once more with --signing-key and that key"
    ]


def _say(done: Cancelled, warnings: list[str], as_json: bool, run: RunView | None) -> None:
    if not as_json:
        click.echo(_sentence(done))
        return
    document: dict[str, Any] = {
        "status": done.outcome,
        "nonce": done.nonce,
        "signed": done.signed,
        "run": None if run is None else run.as_json(),
        "warnings": warnings,
        "exit_code": 0,
    }
    if done.finished is not None:
        document["result_status"] = done.finished[0].result.verdict.status
    echo_json(document, untrusted=("warnings",))


def _sentence(done: Cancelled) -> str:
    from bridge.client.cancel import Outcome

    if done.outcome is Outcome.ALREADY_ASKED:
        return f"{done.nonce}: somebody has asked for it to be stopped already"
    if done.finished is None:
        return f"{done.nonce}: asked for it to be stopped; see: kakeya_mac wait {done.nonce}"
    verdict = done.finished[0].result.verdict
    return f"{done.nonce}: had finished already: {verdict.status} ({verdict.reason})"
