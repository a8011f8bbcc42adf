"""Options that several commands share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from bridge.protocol.sanitize import quoted
from bridge.protocol.target import parse_target

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


class _Target(click.ParamType[str]):
    """Conditions on the machine, checked before anything is pushed; an empty text asks for any machine."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            parse_target(value) if value else None
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return value


def _takes_a_handle(command: click.Command) -> bool:
    return any(param.name == "handle" for param in command.params)


remote_option = click.option(
    "--remote", metavar="URL", help="Git remote that carries the bus (default: origin)."
)


def handle_options(function: Function) -> Function:
    """The argument and options that every command about one request takes."""
    json_option = click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
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


signing_key_option = click.option(
    "--signing-key",
    metavar="KEY",
    help="Sign with this key: a file, a public key whose private half the SSH agent holds, or 'none'.",
)


@dataclass(frozen=True)
class RequestOptions:
    """What `submit_options` collects: how a request is submitted and followed."""

    on: str | None
    wait_s: float | None
    timeout_s: int | None
    expires: int | None
    output: Path | None
    allow_unsigned: bool
    signing_key: str | None
    transport: str | None
    dry_run: bool

    @property
    def lifetime(self) -> timedelta | None:
        """How long the request may wait; None: the setting."""
        return None if self.expires is None else timedelta(seconds=self.expires)


def submit_options(function: Function) -> Function:
    """The options of a command that submits a request, which gets them as `options`.

    Those that mean something only with ``--wait`` are refused without it.
    """

    @functools.wraps(function)
    def collected(**given: Any) -> Any:
        options = RequestOptions(**{each.name: given.pop(each.name) for each in fields(RequestOptions)})
        if options.output is not None and options.wait_s is None:
            raise click.UsageError("-o needs --wait; later: kakeya_mac result HANDLE -o DIR")
        if options.allow_unsigned and options.wait_s is None:
            raise click.UsageError("--allow-unsigned needs --wait: without it no result is shown")
        return function(options=options, **given)

    seconds, folder = "SECONDS", click.Path(path_type=Path)
    target = "Which machines may run it, as chip=M4*,memory>=64,label=lab; see `kakeya_mac runners`."
    who = "Who takes it (default: auto): a runner's daemon, a workflow of GitHub Actions, or what is there."
    month, day = click.IntRange(1, _MONTH_S), click.IntRange(1, 86_400)
    decorated: Function = collected
    for option in (
        click.option("--dry-run", is_flag=True, help="Show the manifest and what would run; push nothing."),
        allow_unsigned_option,
        signing_key_option,
        click.option("--transport", type=click.Choice(["auto", "embedded", "actions"]), help=who),
        click.option("-o", "--output", type=folder, metavar="DIR", help="With --wait: save the result."),
        click.option("--expires", type=month, metavar=seconds, help="Unclaimed so long: refused."),
        click.option("--timeout", "timeout_s", type=day, metavar=seconds, help="Limit of the job."),
        wait_option("its result is published"),
        click.option("--on", type=_Target(), metavar="CONDITIONS", help=target),
    ):
        decorated = option(decorated)
    return decorated
