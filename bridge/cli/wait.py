"""``kakeya_mac wait``: follow a request to its result."""

from __future__ import annotations

import time
from pathlib import Path

import click

from bridge.cli.options import allow_unsigned_option, output_option, seconds_option
from bridge.cli.output import Connection, Presentation, follow, present, read_hints, request_command


@click.command(
    epilog="""\b
Examples:
  kakeya_mac wait 20260301t120000z0123456789ab
  kakeya_mac wait 20260301t12 --seconds 600 -o out/ --json

JSON: that of `result`; where the wait gave up, status is "waiting", with phase and the keys of `status`.

Exit codes as of `run --wait`; 4 when the wait gave up, and the job goes on."""
)
@request_command
@seconds_option("--seconds", bounds=(0, None), default=3600.0, show_default=True, text="Give up after.")
@output_option("Save the result in this new or empty folder.")
@allow_unsigned_option
def wait(link: Connection, handle: str, as_json: bool, seconds: float, output: Path | None) -> int:
    """Follow the request HANDLE until its result is published."""
    how, began_s = Presentation(as_json, output), time.monotonic()
    state, answer = link.look_up(handle)
    if answer is not None:
        return present(link, answer, how)
    request, known = link.workflow_request(state), read_hints(link, state)
    wait_s = max(0.0, seconds - (time.monotonic() - began_s))
    return follow(link, state.nonce, how, wait_s=wait_s, state=state, request=request, known=known)
