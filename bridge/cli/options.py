"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bridge.protocol.sanitize import quoted
from bridge.settings import TRANSPORTS

Function = Callable[..., Any]

_MONTH_S = 30 * 86_400


class _WaitSeconds(click.FloatRange):
    """Seconds that may be left out. So a handle that stands behind the option is taken for its value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if math.isnan(seconds):
            first = "; HANDLE goes first" if ctx is not None and _takes_a_handle(ctx.command) else ""
            self.fail(f"--wait takes seconds, or nothing, not {quoted(value, 80)}{first}.", param, ctx)
        return super().convert(seconds, param, ctx)


def _takes_a_handle(command: click.Command) -> bool:
    return any(param.name == "handle" for param in command.params)


def handle_options(function: Function) -> Function:
    """The argument and options that every command about one request takes."""
    json_option = click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
    remote_option = click.option(
        "--remote", metavar="URL", help="Git remote that carries the bus (default: origin)."
    )
    argument = click.argument("handle")
    return argument(remote_option(json_option(function)))


def wait_option(until: str) -> Callable[[Function], Function]:
    """``--wait [SECONDS]``: follow the request.

    Args:
        until: What ends the wait; reads on after "until".
    """
    return click.option(
        "--wait",
        "wait_s",
        is_flag=False,
        flag_value=3600.0,
        default=None,
        type=_WaitSeconds(min=0, max=_MONTH_S),
        metavar="[SECONDS]",
        help=f"Follow the request until {until} (default 3600 s).",
    )


allow_unsigned_option = click.option(
    "--allow-unsigned",
    is_flag=True,
    help="Show a result that no trusted runner signed all the same, and say so; one that passed ends in 0"
    " instead of 7 (or: allow_unsigned = true in config.toml, KAKEYA_ALLOW_UNSIGNED=1).",
)


resend_option = click.option(
    "--resend-after",
    "resend_after_s",
    type=click.FloatRange(1, _MONTH_S),
    metavar="SECONDS",
    help="Over GitHub Actions, waiting: push the request again when it is so old and there is no sign of it"
    " (default: 900 s more than its job may take). With a token that"
    " does, never: an evicted run is then seen, and started again.",
)


signing_key_option = click.option(
    "--signing-key",
    metavar="KEY",
    help="Sign with this key: a file, a public key whose private half the SSH agent holds, or 'none'.",
)


def asking_options(function: Function) -> Function:
    """The options of a command that asks for something, whatever it is."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Show the manifest and what would run; push nothing."),
        allow_unsigned_option,
        signing_key_option,
        click.option(
            "--transport",
            type=click.Choice(TRANSPORTS),
            help="Who takes it: a runner's daemon, a workflow of GitHub Actions, or whichever is there"
            " (default: auto).",
        ),
        resend_option,
        click.option(
            "-o",
            "--output",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="With --wait: save the result.",
        ),
        click.option(
            "--expires",
            type=click.IntRange(1, _MONTH_S),
            metavar="SECONDS",
            help="Unclaimed so long: refused.",
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.IntRange(1, 86_400),
            metavar="SECONDS",
            help="Limit of the job.",
        ),
        wait_option("its result is home"),
    ):
        function = option(function)
    return function


def check_asking(
    *, wait_s: float | None, output: Path | None, allow_unsigned: bool, resend_after_s: float | None
) -> None:
    """Refuse options that mean something only with ``--wait``.

    Raises:
        click.UsageError: One of them is given without it.
    """
    if output is not None and wait_s is None:
        raise click.UsageError("-o needs --wait; later: kakeya_mac result HANDLE -o DIR")
    if allow_unsigned and wait_s is None:
        raise click.UsageError("--allow-unsigned needs --wait: without it no result is shown")
    if resend_after_s is not None and wait_s is None:
        raise click.UsageError("--resend-after needs --wait: nobody would be there to do it")
