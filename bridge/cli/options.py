"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime, time, timedelta
from math import isfinite
from pathlib import Path
from typing import Any

import click

from bridge import settings
from bridge.cli.completion import complete_param

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

_MONTH_S = 30 * 86_400

option_with_default = functools.partial(click.option, show_default=True)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
remote_option = click.option("--remote", metavar="URL", help="Git remote of the bus (default: origin).")
allow_unsigned_option = click.option(
    "--allow-unsigned", is_flag=True, help="Accept a result that no trusted runner signed (0 in place of 7)."
)
signing_key_option = click.option(
    "--signing-key", metavar="KEY", help="Sign with this file, this public key of the SSH agent, or 'none'."
)
all_option = click.option("--all", "every", is_flag=True, help="All keys of NAME.")


def keys_of_name(function: Function) -> Function:
    """``NAME`` and ``--key KEY``, which of its keys; the command gets them as `name` and `which`."""
    text = "Only this key of NAME: its SHA256:…, the key itself, or a .pub file."
    return click.argument("name")(click.option("--key", "which", metavar="KEY", help=text)(function))


def param_option(text: str) -> Decorator:
    values: dict[str, Any] = {"multiple": True, "metavar": "KEY=VALUE", "shell_complete": complete_param}
    return click.option("-p", "--param", "params", help=text, **values)


def path_option(*names: str, text: str, metavar: str = "DIR", **more: Any) -> Decorator:
    return click.option(*names, type=click.Path(path_type=Path), metavar=metavar, help=text, **more)


def output_option(text: str) -> Decorator:
    """``-o DIR``; a folder that the result cannot go to is refused before anything is asked or waited for."""

    def check(_context: click.Context, _option: click.Parameter, folder: Path | None) -> Path | None:
        if folder is not None:
            from bridge.client.save import require_free

            require_free(folder)
        return folder

    return path_option("-o", "--output", text=text, callback=check)


def seconds_option(*names: str, bounds: tuple[float, float | None], text: str, **more: Any) -> Decorator:
    more.setdefault("metavar", "SECONDS")
    more["callback"] = lambda _, option, s: s if isfinite(s or 0) else option.type.fail("not finite")
    return click.option(*names, type=click.FloatRange(*bounds), help=text, **more)


def wait_option(until: str) -> Decorator:
    """``--wait [SECONDS]``: follow the request until something, as named."""
    text = f"Follow the request until {until} (default 3600 s)."
    optional = {"is_flag": False, "flag_value": 3600.0, "metavar": "[SECONDS]"}
    return seconds_option("--wait", "wait_s", bounds=(0, _MONTH_S), text=text, **optional)


def parse_until(text: str) -> datetime:
    """When a key stops to count: ``2027-01-31`` (its end, in local time) or ``2027-01-31T12:00[:00][Z]``."""
    try:
        if len(text) > len("2027-01-31"):
            return datetime.fromisoformat(text).astimezone(UTC)
        return datetime.combine(datetime.fromisoformat(text) + timedelta(days=1), time()).astimezone()
    except (ValueError, OverflowError):
        shown = ascii(text)[:60]
        raise click.BadParameter(f"{shown} is no time; write 2027-01-31 or 2027-01-31T12:00Z") from None


until_option = click.option(
    "--valid-until", type=parse_until, metavar="TIME", help="It counts until then: 2027-01-31[T12:00Z]."
)


@dataclass(frozen=True)
class RequestOptions:
    """What `submit_options` collects: how a request is submitted and followed."""

    params: tuple[str, ...]
    ref: str | None
    remote: str | None
    on: str | None
    wait_s: float | None
    timeout_s: int | None
    expires: timedelta | None
    output: Path | None
    allow_unsigned: bool
    signing_key: str | None
    transport: str | None
    require_runner: bool
    dry_run: bool
    as_json: bool

    def asked(self) -> dict[str, Any]:
        """What they say of the request, as `plan_request` and `plan_again` take it; None: not given."""
        return {name: getattr(self, name) for name in ("ref", "timeout_s", "expires", "transport", "on")}

    def settings(self) -> settings.Settings:
        """The settings in force, these options included."""
        names = ("remote", "signing_key", "transport", "allow_unsigned")
        return settings.load(**{name: getattr(self, name) for name in names})


_SUBMIT_OPTIONS = (
    param_option("A parameter; repeatable."),
    click.option("--ref", metavar="REV", help="The workload (default: HEAD; of `again`: the same commit)."),
    remote_option,
    click.option("--on", metavar="CONDITIONS", help="Which machines may run it: chip=M4*,memory>=64 …"),
    wait_option("its result is published"),
    click.option(
        "--timeout", "timeout_s", type=click.IntRange(1, 86_400), metavar="SECONDS", help="Limit of the job."
    ),
    click.option(
        "--expires", type=click.IntRange(1, _MONTH_S), metavar="SECONDS", help="Unclaimed so long: refused."
    ),
    output_option("With --wait: save the result in this new or empty folder."),
    click.option(
        "--transport",
        type=click.Choice(["auto", "embedded", "actions"]),
        help="Who takes it: a runner's daemon, GitHub Actions, or (auto, the default) what is there.",
    ),
    signing_key_option,
    allow_unsigned_option,
    click.option(
        "--require-runner",
        is_flag=True,
        help="Push nothing that no live runner would take (exit code 9).",
    ),
    click.option("--dry-run", is_flag=True, help="Show the manifest and what would run; push nothing."),
    json_option,
)


def submit_options(function: Function) -> Function:
    """The options of a command that submits a request, which gets them as `options`."""

    @functools.wraps(function)
    def collected(**given: Any) -> Any:
        given["expires"] = given["expires"] and timedelta(seconds=given["expires"])
        options = RequestOptions(**{each.name: given.pop(each.name) for each in fields(RequestOptions)})
        for name, value in (("-o", options.output), ("--allow-unsigned", options.allow_unsigned)):
            if value and options.wait_s is None:
                raise click.UsageError(f"{name} needs --wait; later: kakeya_mac result HANDLE {name}")
        return function(options=options, **given)

    decorated: Function = collected
    for option in reversed(_SUBMIT_OPTIONS):
        decorated = option(decorated)
    return decorated
