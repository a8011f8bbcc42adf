"""``kakeya_mac cancel``: ask for a request to be stopped; with ``--wait``, see that it was."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from bridge.cli import echo_json
from bridge.cli.options import handle_options, signing_key_option, wait_option

if TYPE_CHECKING:
    from bridge.client.cancel import Cancelled
    from bridge.client.remotes import Remote
    from bridge.git.repo import GitRepo
    from bridge.github.dispatch import RunView
    from bridge.settings import Settings

_NAMED = 5


@click.command(
    epilog="""\b
Examples:
  kakeya_mac cancel 20260301t120000z0123456789ab
  kakeya_mac cancel 20260301t12 --reason "wrong model" --wait 60 --json

Exit code: 0 once the cancel request is on the remote, or when the request had finished before. With --wait
that of its end: 5 cancelled, or what it came to all the same."""
)
@handle_options
@click.option("--reason", metavar="TEXT", help="Why, for the result (at most 500 characters).")
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

    The cancel request is signed where there is a key (see `kakeya_mac key`): a machine that takes only signed
    requests obeys only their signer. A stopped job's result is `cancelled`, with what it had printed so far.
    """
    from bridge.cli.output import Presentation, connect, follow, present, warn
    from bridge.client import cancel as client
    from bridge.client.signing_key import choose

    config, git, bus = connect(remote, signing_key=signing_key)
    signer = choose(config, git)
    done = client.cancel(config, git, bus, handle, reason=reason, signer=signer)
    warnings = list(signer.warnings)
    if done.finished is None and not done.signed:
        warnings += _warn_unsigned(config, git, bus)
    warn(warnings)
    run = _stop_run(git, bus, done)
    if wait_s is None:
        _show(done, warnings, run, as_json=as_json)
        return 0
    if done.finished is not None:
        return present(config, done.finished[1], Presentation(as_json, extra={"cancel": done.outcome}))
    click.echo(_sentence(done), err=True)
    extra = {"cancel": done.outcome, "run": None if run is None else run.as_json()}
    return follow(config, git, bus, done.nonce, Presentation(as_json, extra=extra), wait_s=wait_s)


def _stop_run(git: GitRepo, bus: Remote, done: Cancelled) -> RunView | None:
    """Stop the workflow run, too, if a machine has it; one that waits reads the cancel request later.

    Returns:
        The run as it was; None: none is known.
    """
    from bridge.bus.state import resolve_handle
    from bridge.cli.workflow_runs import api_or_none, find_run, warn_api
    from bridge.errors import ApiConflict, ApiError

    github = None if done.finished is not None else api_or_none(bus)
    run = None if github is None else find_run(git, bus, resolve_handle(git, bus.address, done.nonce))
    if run is None or github is None or not run.is_on_a_machine:
        return run
    try:
        github.cancel(run.id)
    except ApiConflict:  # it has ended meanwhile
        return run
    except ApiError as error:
        warn_api(error)
        return run
    click.echo(f"its run was stopped, too: {run.url}", err=True)
    return run


def _warn_unsigned(config: Settings, git: GitRepo, bus: Remote) -> list[str]:
    """That live runners ignore an unsigned cancel request, or that none could be looked at."""
    from bridge.client.runners import read_runners, require_signatures
    from bridge.errors import BridgeError

    try:
        strict = require_signatures(read_runners(config, git, bus), datetime.now(UTC))
    except BridgeError as error:
        return [f"cannot tell which runners are there: {error.message}"]
    if not strict:
        return []
    return [
        f"the cancel request is unsigned, and {', '.join(strict[:_NAMED])} will ignore it: only the key that"
        " signed a request stops it there; cancel again with --signing-key and that key"
    ]


def _show(done: Cancelled, warnings: list[str], run: RunView | None, *, as_json: bool) -> None:
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
        return f"{done.nonce}: a cancel request is there already"
    if done.finished is None:
        return f"{done.nonce}: asked for it to be stopped; see: kakeya_mac wait {done.nonce}"
    verdict = done.finished[0].result.verdict
    return f"{done.nonce}: had finished already: {verdict.status} ({verdict.reason})"
