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

import click

from bridge import settings
from bridge.cli import on_signals
from bridge.cli.options import remote_option, seconds_option
from bridge.cli.peers import key, log_key, peers
from bridge.cli.policy import policy
from bridge.cli.signers import signers
from bridge.cli.workflow import execute, publish
from bridge.client.remotes import resolve_remote
from bridge.git.repo import GitRepo
from bridge.log import configure
from bridge.mac.setup import main as run_setup
from bridge.runner.config import RunnerConfig, host_name, open_config
from bridge.runner.daemon import Daemon

log = logging.getLogger(__name__)

# Of a lease, so many heartbeats may be late or lost before others take the request over.
BEATS_A_LEASE = 3


@click.group(commands=[policy, signers, peers, key, execute, publish])
def runner() -> None:
    """Commands for the machine that does the work."""


_SETUP_FLAGS = """\b
Flags: --url URL, --remote URL, --service actions|serve|both|none, --prefix DIR, --name NAME, --labels A,B,
--token-file FILE, --runner-token TOKEN, --runner-version V, --runner-sha256 HEX, --sudo, --tailnet,
--dry-run, --json; `--help` explains each.

\b
JSON: command, dry_run, ready, changed, steps [{name, state (done, to do, advice, missing), looked_at,
finding, fix, done, would (of a dry run)}], exit_code.
Exit code: 0 ready; 1 something is missing, each with its fix; 2 wrong flags."""


def _add_setup_command(name: str, summary: str, *examples: str) -> None:
    """Add a command of `bridge.mac.setup`, which has its own flags because it also runs without click."""
    lines = "\n".join(f"  kakeya_mac runner {name} {flags}".rstrip() for flags in examples)

    @runner.command(
        name,
        help=summary,
        epilog=f"\b\nExamples:\n{lines}\n\n{_SETUP_FLAGS}",
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("flags", nargs=-1, type=click.UNPROCESSED)
    def run(flags: tuple[str, ...]) -> int:
        return run_setup([name, *flags])


_URL = "--url https://github.com/me/workload"
_add_setup_command(
    "setup",
    "Set this Mac up: environment, models, policy, GitHub's runner, access to the remote, services.",
    f"--dry-run {_URL}",
    f"{_URL} --sudo",
)
_add_setup_command("check", "Look at everything that `setup` sees to; change nothing.", "", f"{_URL} --json")
_add_setup_command(
    "uninstall",
    "Remove what `setup` made, services first; models, policy, state, logs and results stay.",
    "--sudo",
)


@runner.command(
    epilog="""\b
Examples:
  kakeya_mac runner serve --remote git@example.org:you/workload.git --name studio
  kakeya_mac runner serve --once --idle-timeout 60

SIGTERM or Ctrl-C: finish the running job, then stop; a second one stops the job, too. What this machine
allows is in policy.toml of the configuration folder; the default runs no code of a repository."""
)
@remote_option
@click.option("--name", metavar="NAME", help="The runner's name in claims and results (default: the host's).")
@click.option("--once", is_flag=True, help="Answer one request, then stop.")
@seconds_option("--idle-timeout", least=0, text="With --once: give up after waiting.")
@seconds_option(
    "--idle",
    "idle_s",
    least=0.1,
    most=3600,
    text="Longest pause between two looks at an idle queue (default: 5).",
)
@seconds_option(
    "--lease",
    "lease_s",
    least=2,
    most=900,
    text="After so long without a heartbeat another runner may take the request (default: 120; 300 on public"
    " hosts such as github.com).",
)
@seconds_option(
    "--beat",
    "beat_s",
    least=0.2,
    most=300,
    text="Pause between heartbeats, at most a third of the lease (default: 2 on a local remote, 15 on a"
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
    help="Between jobs, archive results older than 14 days or beyond the newest 500; delete their branches.",
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
    if idle_timeout is not None and not once:
        raise click.UsageError(
            "--idle-timeout needs --once: without it the runner serves until it is stopped."
        )
    own = settings.load(remote=remote)
    bus = resolve_remote(GitRepo(Path.cwd()), own.remote)
    config = open_config(
        name or host_name(),
        bus.address,
        state_dir=own.state_dir,
        config_dir=own.config_dir,
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
            own.state_dir,
        )
    tempfile.tempdir = str(config.temporary)  # made, and cleared of what a killed process left, by `serve`
    log.info("serving %s as %s; %s", bus.shown, config.identity.name, config.rulebook.summary())
    log_key(config)
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
