"""Options that several commands share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from bridge.protocol.manifest import parse_target
from bridge.protocol.sanitize import quoted

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

_MONTH_S = 30 * 86_400

option_with_default = functools.partial(click.option, show_default=True)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
remote_option = click.option(
    "--remote", metavar="URL", help="Git remote that carries the bus (default: origin)."
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


def param_option(text: str) -> Decorator:
    """``-p KEY=VALUE``, any number of times."""
    return click.option("-p", "--param", "params", multiple=True, metavar="KEY=VALUE", help=text)


def seconds_option(*names: str, least: float, most: float | None = None, text: str) -> Decorator:
    """An option that takes seconds."""
    return click.option(*names, type=click.FloatRange(least, most), metavar="SECONDS", help=text)


def output_option(text: str) -> Decorator:
    """``-o DIR``."""
    return click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help=text)


def handle_options(function: Function) -> Function:
    """The argument and options that every command about one request takes."""
    return click.argument("handle")(remote_option(json_option(function)))


class _WaitSeconds(click.FloatRange):
    """Seconds that may be left out. A handle right after the option is read as its value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if re.fullmatch(r"[0-9.eE+-]+", str(value)) is None:
            takes_handle = ctx is not None and any(each.name == "handle" for each in ctx.command.params)
            first = "; HANDLE goes first" if takes_handle else ""
            self.fail(f"--wait takes seconds, or nothing, not {quoted(value, 80)}{first}.", param, ctx)
        return super().convert(value, param, ctx)


def wait_option(until: str) -> Decorator:
    """``--wait [SECONDS]``: follow the request until something, as named."""
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


def _check_target(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse conditions that are none before anything is read; an empty text asks for any machine."""
    try:
        parse_target(value or "chip=*")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


_SUBMIT_OPTIONS = (
    click.option(
        "--on",
        callback=_check_target,
        metavar="CONDITIONS",
        help="Which machines may run it, as chip=M4*,memory>=64,label=lab; see `kakeya_mac runners`.",
    ),
    wait_option("its result is published"),
    click.option(
        "--timeout", "timeout_s", type=click.IntRange(1, 86_400), metavar="SECONDS", help="Limit of the job."
    ),
    click.option(
        "--expires", type=click.IntRange(1, _MONTH_S), metavar="SECONDS", help="Unclaimed so long: refused."
    ),
    output_option("With --wait: save the result."),
    click.option(
        "--transport",
        type=click.Choice(["auto", "embedded", "actions"]),
        help="Who takes it (default: auto): a runner's daemon, a workflow of GitHub Actions, or what is"
        " there.",
    ),
    signing_key_option,
    allow_unsigned_option,
    click.option("--dry-run", is_flag=True, help="Show the manifest and what would run; push nothing."),
)


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

    decorated: Function = collected
    for option in reversed(_SUBMIT_OPTIONS):
        decorated = option(decorated)
    return decorated
