"""``kakeya_mac runner status``, ``drain`` and ``stop``: a runner of this machine, from another terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bridge import settings
from bridge.cli import show
from bridge.cli.options import json_option, seconds_option
from bridge.errors import MachineError, WaitTimeout
from bridge.protocol.sanitize import clean_line
from bridge.runner import control
from bridge.runner.config import checked_name

name_option = click.option("--name", metavar="NAME", help="The runner's name (default: the one that serves).")


@click.command(
    epilog="""\b
Examples:
  kakeya_mac runner status
  kakeya_mac runner status --name studio --json

JSON: {"runners": [...]}; each has name, serving, draining, state (idle, busy, stopped), job {handle, preset,
started_at} or null, failure (why it takes nothing, or null), pid, remote, service (launchd or systemd and its
name, or null) and started_at.

Exit code 0: a runner serves; 1: none does."""
)
@name_option
@json_option
def status(name: str | None, as_json: bool) -> int:
    """What the runners of this machine do."""
    folders = _folders(name)
    found = [(folder, known) for folder in folders if (known := control.read_status(folder)) is not None]
    rows = [_row(folder, known) for folder, known in found]
    code = 0 if any(row["serving"] for row in rows) else 1
    lines = [line for row in rows for line in _lines(row)]
    lines = lines or [f"no runner{f' named {name}' if name else ''} has served here yet"]
    return show(as_json, {"runners": rows, "exit_code": code}, lines, untrusted=("runners",))


@click.command(
    epilog="""\b
Examples:
  kakeya_mac runner drain
  kakeya_mac runner drain --name studio --off

Its registration says so, and `run` counts it as unable. A service that is started again drains on;
`runner serve` typed by a person takes requests again. Exit code 6: no such runner serves here."""
)
@name_option
@click.option("--off", is_flag=True, help="Take requests again.")
@json_option
def drain(name: str | None, off: bool, as_json: bool) -> int:
    """Have a runner finish its job and take nothing new; it goes on serving, and says that it drains."""
    folder, _ = _serving(name)
    control.set_draining(folder, not off)
    row = _row(folder, control.read_status(folder))
    what = "takes requests again" if off else "drains: it takes nothing new"
    lines = [f"{row['name']} {what}, from its next look on", *_job_lines(row)]
    if not off:
        lines.append(f"  take requests again: kakeya_mac runner drain --off --name {row['name']}")
    return show(as_json, {**row, "exit_code": 0}, lines, untrusted=("job", "failure"))


@click.command(
    epilog="""\b
Examples:
  kakeya_mac runner stop
  kakeya_mac runner stop --name studio --wait 600

A service is started again by launchd or systemd: it drains from then on, and the command that ends it for
good is printed. Exit code 4: it has not ended yet, and will, when its job is done; 6: none serves here."""
)
@name_option
@seconds_option(
    "--wait", "wait_s", bounds=(0, None), default=7200.0, show_default=True, text="Wait so long for its end."
)
@json_option
def stop(name: str | None, wait_s: float, as_json: bool) -> int:
    """Have a runner finish its job, publish the result, say that it is gone, and end."""
    folder, known = _serving(name)
    row = _row(folder, known)
    if known.service is not None:  # what is started again is to take nothing
        control.set_draining(folder, True)
    for line in _job_lines(row):
        click.echo(f"{known.name} finishes its job first\n{line}", err=True)
    if not control.end(known, wait_s=wait_s):
        raise WaitTimeout(
            f"the runner {known.name} still has its job; it ends when that is done",
            f"see kakeya_mac runner status --name {known.name}; stop the job, too: kill {known.pid}",
        )
    row |= {"serving": False, "state": "stopped", "job": None, "draining": control.is_draining(folder)}
    lines = [f"{known.name} has ended"]
    if known.service is not None:
        row["ends_service"] = control.ending_command(known.service)
        lines.append(
            f"  {known.service} may start it again; it then drains. To end it: {row['ends_service']}"
        )
    return show(as_json, {**row, "exit_code": 0}, lines, untrusted=("job", "failure"))


def _folders(name: str | None) -> list[Path]:
    state_dir = settings.load().state_dir
    folders = control.runner_folders(state_dir)
    return folders if name is None else [each for each in folders if each.name == checked_name(name)]


def _serving(name: str | None) -> tuple[Path, control.LocalStatus]:
    """The runner that is meant: the one of that name, or the only one that serves."""
    found = [
        (folder, known)
        for folder in _folders(name)
        if (known := control.read_status(folder)) is not None and known.is_serving
    ]
    if not found:
        which = f"named {name} " if name else ""
        raise MachineError(
            f"no runner {which}serves on this machine with the state folder {settings.load().state_dir}",
            "see kakeya_mac runner status; another account's or folder's: KAKEYA_STATE",
        )
    if len(found) > 1:
        names = ", ".join(known.name for _, known in found)
        raise MachineError(f"{len(found)} runners serve here: {names}", "name one with --name")
    return found[0]


def _row(folder: Path, known: control.LocalStatus | None) -> dict[str, Any]:
    assert known is not None  # noqa: S101 - it was read before
    serving = known.is_serving
    job = known.job if serving else None
    return {
        "name": known.name,
        "serving": serving,
        "draining": control.is_draining(folder),
        "state": known.state if serving else "stopped",
        "job": job and {"handle": job.nonce, "preset": job.preset, "started_at": job.started_at},
        "failure": known.failure if serving else None,
        "pid": known.pid if serving else None,
        "remote": known.remote,
        "service": known.service,
        "started_at": known.started_at,
    }


def _lines(row: dict[str, Any]) -> list[str]:
    if not row["serving"]:
        return [f"{row['name']}  does not serve; it served {row['remote']}"]
    draining = ", draining: it takes nothing new" if row["draining"] else ""
    by = f", as {row['service']}" if row["service"] else ""
    lines = [f"{row['name']}  {row['state']}{draining}; serves {row['remote']} (process {row['pid']}{by})"]
    failure = [f"  takes nothing: {clean_line(row['failure'])}"] if row["failure"] else []
    return [*lines, *_job_lines(row), *failure]


def _job_lines(row: dict[str, Any]) -> list[str]:
    job = row["job"]
    return [] if job is None else [f"  job {job['handle']} ({job['preset']}), since {job['started_at']}"]
