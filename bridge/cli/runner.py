"""``kakeya_mac runner``: the Mac's side. `serve` is the embedded daemon."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import click

from bridge.cli.hook import hook
from bridge.cli.mac import check, setup, uninstall
from bridge.cli.peers import key, peers
from bridge.cli.policy import policy
from bridge.cli.signers import signers
from bridge.cli.workflow import execute, publish

if TYPE_CHECKING:
    from bridge.runner.serve import Runner
    from bridge.runner.station import Station

# Of a lease, so many heartbeats may be late or lost before others take the request over.
BEATS_A_LEASE = 3


@click.group()
def runner() -> None:
    """Commands for the machine that does the work."""


runner.add_command(policy)
runner.add_command(signers)
runner.add_command(peers)
runner.add_command(key)
runner.add_command(execute)
runner.add_command(publish)
runner.add_command(hook)
runner.add_command(setup)
runner.add_command(check)
runner.add_command(uninstall)


@runner.command(
    epilog="""\b
Examples:
  kakeya_mac runner serve --remote git@example.org:you/workload.git --name studio
  kakeya_mac runner serve --once --idle-timeout 60
  kakeya_mac runner serve --transport actions    (as another user than the workflow's runner: see docs)

SIGTERM or Ctrl-C: finish the running job, then stop; a second one stops the job, too. What this machine
allows is in policy.toml of the configuration folder; the default runs no code of a repository."""
)
@click.option("--remote", metavar="URL", help="Git remote that carries the bus (default: origin).")
@click.option("--name", metavar="NAME", help="The runner's name in claims and results (default: the host's).")
@click.option(
    "--transport",
    type=click.Choice(("embedded", "actions", "both")),
    default="embedded",
    show_default=True,
    help="Which requests to take. Those of a workflow only where it leaves them to this daemon: its policy"
    ' says [actions] execute = "daemon".',
)
@click.option("--once", is_flag=True, help="Answer one request, then stop.")
@click.option(
    "--idle-timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="With --once: give up after waiting.",
)
@click.option(
    "--idle",
    "idle_s",
    type=click.FloatRange(min=0.1, max=3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest pause between two looks at an idle queue.",
)
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(min=2, max=900),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Silent so long, this runner loses its request to another one.",
)
@click.option(
    "--beat",
    "beat_s",
    type=click.FloatRange(min=0.2, max=300),
    metavar="SECONDS",
    help="Pause between heartbeats, at most a third of the lease (default: 2 on a local remote, else 15).",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Jobs at once. Runners of one state folder run one at a time: more than 1 is said and stays 1.",
)
@click.option(
    "--prune/--no-prune",
    default=True,
    show_default=True,
    help="When idle, archive results older than 14 days or beyond the newest 500, and delete their branches.",
)
def serve(
    remote: str | None,
    name: str | None,
    transport: str,
    once: bool,
    idle_timeout: float | None,
    idle_s: float,
    lease_s: float,
    beat_s: float | None,
    jobs: int,
    prune: bool,
) -> int:
    """Take requests from the remote, run the allowed ones, one at a time, and publish signed results.

    With --once: exit code 0 when a request was answered, 4 when none came within --idle-timeout.
    """
    from bridge import settings
    from bridge.bus.git import Git
    from bridge.client.remotes import resolve_remote
    from bridge.runner.serve import Runner
    from bridge.runner.station import host_name, open_station

    if idle_timeout is not None and not once:
        raise click.UsageError(
            "--idle-timeout needs --once: without it the runner serves until it is stopped."
        )
    if beat_s is not None and beat_s * BEATS_A_LEASE > lease_s:
        raise click.UsageError(
            f"--beat {beat_s:g} is too slow for --lease {lease_s:g}: a lease must outlive {BEATS_A_LEASE}"
            f" heartbeats; give at most --beat {lease_s / BEATS_A_LEASE:.3g}."
        )
    config = settings.load(remote=remote)
    bus = resolve_remote(Git(Path.cwd()), config.remote)
    station = open_station(
        name or host_name(),
        bus.address,
        state_dir=config.state_dir,
        config_dir=config.config_dir,
        beat_s=beat_s,
        lease_s=lease_s,
    )
    transports = frozenset({"embedded", "actions"} if transport == "both" else {transport})
    beat_s = min(station.beat_s, lease_s / BEATS_A_LEASE)
    station = dataclasses.replace(station, beat_s=beat_s, transports=transports)
    if jobs > 1:
        click.echo(
            f"--jobs {jobs}: one job runs at a time all the same, among all runners that keep their state in"
            f" {config.state_dir} (KAKEYA_STATE)"
        )
    tempfile.tempdir = str(station.temporary)  # made, and cleared of what a killed process left, by `serve`
    _introduce(station, bus.shown)
    daemon = Runner(station, say=click.echo, idle_s=idle_s, upkeep=prune)
    stop = Event()
    with _draining(daemon, stop):
        answered = daemon.serve(once=once, stop=stop, idle_timeout_s=idle_timeout)
    click.echo(f"stopped after {answered} request(s)")
    return 4 if once and not answered and not stop.is_set() else 0


def _introduce(station: Station, remote: str) -> None:
    key = station.public_key
    click.echo(f"serving {remote} as {station.identity.name}; {station.rulebook.rules.summary()}")
    if key is None:
        click.echo("results are unsigned: ssh-keygen is not installed")
    else:
        click.echo(
            f"clients trust this runner with: kakeya_mac runners trust {station.identity.name} --key '{key}'"
        )


@contextlib.contextmanager
def _draining(daemon: Runner, stop: Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT drains, the second stops the job."""
    one_at_a_time = Lock()

    def heed() -> None:
        with one_at_a_time:
            if stop.is_set():
                daemon.abort()
            else:
                click.echo("stopping after the running job; once more to stop it now")
                stop.set()

    def handle(_number: int, _frame: Any) -> None:
        # Beside what the signal interrupted: that may hold the lock of the event, or of standard output.
        _thread.start_new_thread(heed, ())

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
