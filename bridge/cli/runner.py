"""``kakeya_mac runner``: the Mac's side. `serve` is the embedded daemon."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING

import click

from bridge.cli import on_signals
from bridge.cli.mac import check, setup, uninstall
from bridge.cli.peers import key, peers
from bridge.cli.policy import policy
from bridge.cli.signers import signers
from bridge.cli.workflow import execute, publish

if TYPE_CHECKING:
    from bridge.runner.config import RunnerConfig
    from bridge.runner.daemon import Daemon

log = logging.getLogger(__name__)

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
runner.add_command(setup)
runner.add_command(check)
runner.add_command(uninstall)


@runner.command(
    epilog="""\b
Examples:
  kakeya_mac runner serve --remote git@example.org:you/workload.git --name studio
  kakeya_mac runner serve --once --idle-timeout 60

SIGTERM or Ctrl-C: finish the running job, then stop; a second one stops the job, too. What this machine
allows is in policy.toml of the configuration folder; the default runs no code of a repository."""
)
@click.option("--remote", metavar="URL", help="Git remote that carries the bus (default: origin).")
@click.option("--name", metavar="NAME", help="The runner's name in claims and results (default: the host's).")
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
    metavar="SECONDS",
    help="Longest pause between two looks at an idle queue (default: 5).",
)
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(min=2, max=900),
    metavar="SECONDS",
    help="After so long without a heartbeat another runner may take the request (default: 120; 300 on public"
    " hosts such as github.com).",
)
@click.option(
    "--beat",
    "beat_s",
    type=click.FloatRange(min=0.2, max=300),
    metavar="SECONDS",
    help="Pause between heartbeats, at most a third of the lease (default: 2 on a local remote, 15 on a"
    " server, 60 on public hosts).",
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
    once: bool,
    idle_timeout: float | None,
    idle_s: float | None,
    lease_s: float | None,
    beat_s: float | None,
    jobs: int,
    prune: bool,
) -> int:
    """Take requests from the remote, run the allowed ones, one at a time, and publish signed results.

    With --once: exit code 0 when a request was answered, 4 when none came within --idle-timeout.
    """
    from bridge import settings
    from bridge.client.remotes import resolve_remote
    from bridge.git.repo import GitRepo
    from bridge.log import configure
    from bridge.runner.config import host_name, open_config
    from bridge.runner.daemon import Daemon

    if idle_timeout is not None and not once:
        raise click.UsageError(
            "--idle-timeout needs --once: without it the runner serves until it is stopped."
        )
    settings_ = settings.load(remote=remote)
    bus = resolve_remote(GitRepo(Path.cwd()), settings_.remote)
    config = open_config(
        name or host_name(),
        bus.address,
        state_dir=settings_.state_dir,
        config_dir=settings_.config_dir,
        beat_s=beat_s,
        lease_s=lease_s,
    )
    config = _with_possible_lease(config, given=beat_s)
    configure(stream=sys.stdout)
    if jobs > 1:
        log.warning(
            "--jobs %d: one job runs at a time all the same, among all runners that keep their state in %s"
            " (KAKEYA_STATE)",
            jobs,
            settings_.state_dir,
        )
    tempfile.tempdir = str(config.temporary)  # made, and cleared of what a killed process left, by `serve`
    _introduce(config, bus.shown)
    daemon = Daemon(config, idle_s=idle_s, prunes=prune)
    stop = Event()
    with _draining(daemon, stop):
        answered = daemon.serve(once=once, stop=stop, idle_timeout_s=idle_timeout)
    log.info("stopped after %d request(s)", answered)
    return 4 if once and not answered and not stop.is_set() else 0


def _with_possible_lease(config: RunnerConfig, *, given: float | None) -> RunnerConfig:
    """A lease outlives some heartbeats: a default that is too slow is shortened, a flag is refused."""
    timing = config.timing
    longest = timing.lease_s / BEATS_A_LEASE
    if given is not None and given > longest:
        raise click.UsageError(
            f"--beat {given:g} is too slow for a lease of {timing.lease_s:g} s: a lease must outlive"
            f" {BEATS_A_LEASE} heartbeats; give at most --beat {longest:.3g}."
        )
    heartbeat_s = min(timing.heartbeat_s, longest)
    return dataclasses.replace(config, timing=dataclasses.replace(timing, heartbeat_s=heartbeat_s))


def _introduce(config: RunnerConfig, remote: str) -> None:
    name, key = config.identity.name, config.public_key
    log.info("serving %s as %s; %s", remote, name, config.rulebook.rules.summary())
    if key is None:
        log.warning("results are unsigned: ssh-keygen is not installed")
    else:
        log.info("clients trust this runner with: kakeya_mac runners trust %s --key '%s'", name, key)


@contextlib.contextmanager
def _draining(daemon: Daemon, stop: Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT drains, the second stops the job."""
    one_at_a_time = Lock()

    def heed() -> None:
        with one_at_a_time:
            if stop.is_set():
                daemon.abort()
            else:
                log.info("stopping after the running job; once more to stop it now")
                stop.set()

    with on_signals(heed):
        yield
