"""``kakeya_mac wait``: follow a request to its result."""

from __future__ import annotations

from pathlib import Path

import click

from bridge.cli.options import allow_unsigned_option, handle_options, option_with_default, output_option
from bridge.cli.output import Presentation, connect, follow, present, watch_run
from bridge.errors import UnknownHandle


@click.command(
    epilog="""\b
Examples:
  kakeya_mac wait 20260301t120000z0123456789ab
  kakeya_mac wait 20260301t12 --seconds 600 -o out/ --json

Exit codes as of `run --wait`."""
)
@handle_options
@option_with_default("--seconds", type=click.FloatRange(min=0), default=3600.0, help="Give up after.")
@output_option("Save the result.")
@allow_unsigned_option
def wait(
    handle: str, remote: str | None, as_json: bool, seconds: float, output: Path | None, allow_unsigned: bool
) -> int:
    """Follow the request HANDLE until its result is published."""
    link = connect(remote)
    how = Presentation(as_json, output, allow_unsigned)
    found = link.look_up(handle)
    if found.answer is None:
        state, nonce = found.state, found.nonce
        try:
            watcher = watch_run(link, state)
            return follow(link, nonce, how, wait_s=seconds, state=state, watcher=watcher)
        except UnknownHandle:  # published and archived between two looks?
            found = link.look_up(nonce)
            if found.answer is None:
                raise
    return present(link.config, found.answer, how)
