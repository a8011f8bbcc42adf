"""``kakeya_mac cancel``: ask for a request to be stopped; with ``--wait``, see that it was."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from bridge.cli import show, warn
from bridge.cli.options import handle_options, signing_key_option, wait_option
from bridge.cli.output import Connection, Presentation, connect, follow, present, stop_run
from bridge.client import cancel as client
from bridge.client.runners import read_runners, require_signatures
from bridge.client.signing_key import choose
from bridge.errors import BridgeError

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
    link = connect(remote, signing_key=signing_key)
    signer = choose(link.config, link.git)
    done = client.cancel(link.config, link.git, link.bus, handle, reason=reason, signer=signer)
    warnings = list(signer.warnings)
    if done.finished is None and not done.signed:
        warnings += _warn_unsigned(link)
    warn(warnings)
    run = None if done.finished is not None else stop_run(link, done.nonce)
    run_json = None if run is None else run.as_json()
    if wait_s is None:
        document = {"status": done.outcome, "nonce": done.nonce, "signed": done.signed, "run": run_json}
        document |= {"warnings": warnings, "exit_code": 0}
        if done.finished is not None:
            document["result_status"] = done.finished[0].result.verdict.status
        return show(as_json, document, [_sentence(done)], untrusted=("warnings",))
    how = Presentation(as_json, document={"cancel": done.outcome})
    if done.finished is not None:
        return present(link.config, done.finished[1], how)
    click.echo(_sentence(done), err=True)
    how.document["run"] = run_json
    return follow(link, done.nonce, how, wait_s=wait_s)


def _warn_unsigned(link: Connection) -> list[str]:
    """That live runners ignore an unsigned cancel request, or that none could be looked at."""
    try:
        strict = require_signatures(read_runners(link.config, link.git, link.bus), datetime.now(UTC))
    except BridgeError as error:
        return [f"cannot tell which runners are there: {error.message}"]
    if not strict:
        return []
    return [
        f"the cancel request is unsigned, and {', '.join(strict[:_NAMED])} will ignore it: only the key that"
        " signed a request stops it there; cancel again with --signing-key and that key"
    ]


def _sentence(done: client.Cancelled) -> str:
    if done.outcome is client.Outcome.ALREADY_ASKED:
        return f"{done.nonce}: a cancel request is there already"
    if done.finished is None:
        return f"{done.nonce}: asked for it to be stopped; see: kakeya_mac wait {done.nonce}"
    verdict = done.finished[0].result.verdict
    return f"{done.nonce}: had finished already: {verdict.status} ({verdict.reason})"
