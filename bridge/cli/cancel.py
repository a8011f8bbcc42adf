"""``kakeya_mac cancel``: withdraw a request, or have it stopped; with ``--wait``, see that it was."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from bridge.bus.requests import RequestState
from bridge.cli import show, warn
from bridge.cli.options import signing_key_option, wait_option
from bridge.cli.output import Connection, Presentation, api_warnings, follow, present, request_command
from bridge.client import cancel as client
from bridge.client import runners, signing_key
from bridge.errors import BridgeError
from bridge.github.api import RunView


@click.command(
    epilog="""\b
Examples:
  kakeya_mac cancel 20260301t120000z0123456789ab
  kakeya_mac cancel 20260301t12 --reason "wrong model" --wait 60 --json

JSON: status (withdrawn, cancelling, already-asked, already-finished), handle, nonce, terminal, cancelling,
signed, run (its workflow run).

Exit code: 0 once it is withdrawn, or the cancel request is on the remote, or when the request had finished;
with --wait that of its end: 5 cancelled, or what it came to all the same."""
)
@request_command
@click.option("--reason", metavar="TEXT", help="Why, for the result (at most 500 characters).")
@wait_option("it has ended")
@signing_key_option
def cancel(link: Connection, handle: str, as_json: bool, reason: str | None, wait_s: float | None) -> int:
    """Stop the request HANDLE, whether it waits or runs.

    A request that no runner has is withdrawn at once: its result, `cancelled`, is published from here. So is
    one over GitHub Actions where no token tells whether a machine has it; then its job stops. Else its runner
    is asked to stop. That cancel request is signed where there is a key (see `kakeya_mac key`): a machine
    that takes only signed requests obeys only their signer. A stopped job's result is `cancelled`, with what
    it had printed so far.
    """
    signer = signing_key.choose(link.config, link.git)
    warnings, run = list(signer.warnings), None

    def is_on_machine(state: RequestState) -> bool:
        nonlocal run
        run = link.find_run(state).run
        return run is not None and not run.is_over and run.machine is not None

    done = client.cancel(
        link.config, link.git, link.bus, handle, reason=reason, signer=signer, is_on_machine=is_on_machine
    )
    line, document = f"{done.nonce}: {done.outcome}", dict[str, Any]()
    if done.finished is not None:
        ended = done.finished[0].result.verdict
        line += f": {ended.status} ({ended.reason})"
        document = {"result_status": ended.status}
    else:
        if done.outcome != "withdrawn" and run is None and not done.signed:
            warnings += _warn_unsigned(link)
        _stop_run(link, run)
    warn(warnings)
    run_json = run and run.as_json()
    if wait_s is None:
        is_over = done.outcome in ("withdrawn", "already-finished")
        document |= {"status": done.outcome, "nonce": done.nonce, "signed": done.signed, "run": run_json}
        document |= {"terminal": is_over, "cancelling": not is_over}
        document |= {"warnings": warnings, "exit_code": 0}
        return show(as_json, document, [line], untrusted=("warnings",))
    how = Presentation(as_json, document={"cancel": done.outcome})
    if done.finished is not None:
        return present(link, done.finished[1], how)
    click.echo(line, err=True)
    how.document["run"] = run_json
    return follow(link, done.nonce, how, wait_s=wait_s)


def _warn_unsigned(link: Connection) -> list[str]:
    """That live runners ignore an unsigned cancel request, or that none could be looked at."""
    try:
        registry = runners.read_runners(link.config, link.git, link.bus)
        strict = runners.require_signatures(registry, datetime.now(UTC))
    except BridgeError as error:
        return [f"cannot tell which runners are there: {error.message}"]
    said = f"the cancel request is unsigned: {', '.join(strict)} will ignore it; use the request's key"
    return [said] if strict else []


def _stop_run(link: Connection, run: RunView | None) -> None:
    """Stop the workflow run, too. One that starts all the same finds the result and publishes nothing."""
    github = None if run is None or run.is_over else link.api()
    if run is None or github is None:
        return
    with api_warnings():
        github.cancel(run.id)
        click.echo(f"its run was stopped, too: {run.url}", err=True)
        return
    click.echo(f"its run may still wait for a machine: {run.url}", err=True)
