"""``kakeya_mac wait``: follow a request to its result."""

from __future__ import annotations

from pathlib import Path

import click

from bridge.cli.options import allow_unsigned_option, handle_options


@click.command(
    epilog="""\b
Examples:
  kakeya_mac wait 20260301t120000z0123456789ab
  kakeya_mac wait 20260301t12 --seconds 600 -o out/ --json

Exit codes as of `run --wait`."""
)
@handle_options
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=3600.0, show_default=True, help="Give up after."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Save the result.")
@allow_unsigned_option
def wait(
    handle: str,
    remote: str | None,
    as_json: bool,
    seconds: float,
    output: Path | None,
    allow_unsigned: bool,
) -> int:
    """Follow the request HANDLE until its result is published."""
    from bridge.cli.output import Presentation, connect, follow, present
    from bridge.cli.workflow_runs import watch_run
    from bridge.client.fetch import look_up
    from bridge.errors import UnknownHandle

    config, git, bus = connect(remote)
    how = Presentation(as_json, output, allow_unsigned)
    found = look_up(git, bus, handle, config.state_dir)
    if found.answer is None:
        try:
            watcher = watch_run(git, bus, found.state)
            return follow(
                config, git, bus, found.nonce, how, wait_s=seconds, state=found.state, watcher=watcher
            )
        except UnknownHandle:  # published and archived between two looks?
            found = look_up(git, bus, found.nonce, config.state_dir)
            if found.answer is None:
                raise
    return present(config, found.answer, how)
