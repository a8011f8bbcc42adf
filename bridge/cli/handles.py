"""``kakeya_mac status | wait | logs | result``: what became of a request, by its handle, from any clone.

A request that `prune` has retired is found in the archive.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json, note_untrusted
from bridge.cli.options import allow_unsigned_option, handle_options, resend_option

if TYPE_CHECKING:
    from bridge.bus.git import Git
    from bridge.bus.results import Believed, FetchedResult
    from bridge.client.lookup import Lookup
    from bridge.client.remotes import Remote
    from bridge.client.verified import Verified
    from bridge.client.watch import Update
    from bridge.settings import Settings


@click.command(
    epilog="""\b
Examples:
  kakeya_mac status 20260301t120000z0123456789ab
  kakeya_mac status 20260301t12 --json

JSON of an unfinished request: status (queued, claimed, workspace, running, gating, publishing), nonce,
preset, ahead (older ones that wait too), expected_s (until it is likely to start), beat_age_s (since its
runner's last sign, by that machine's clock), heartbeat, run (its workflow run over GitHub Actions, where
there is a token: id, url, state, conclusion, attempt, machine, job, step); a key that does not apply, or is
not known, is null.

Exit code: 0 while it waits or runs; afterwards that of `result`."""
)
@handle_options
@allow_unsigned_option
def status(handle: str, remote: str | None, as_json: bool, allow_unsigned: bool) -> int:
    """Where the request HANDLE (nonce, branch name or unique prefix) is."""
    from bridge.cli.attending import look_at_run
    from bridge.cli.follow import present
    from bridge.client.history import beat_age_s, silent_s
    from bridge.client.lookout import Lookout
    from bridge.protocol.result import Phase
    from bridge.render.outcome import run_text, status_line

    config, git, bus, found = _find(handle, remote)
    believed = _believed(config, found, allow_unsigned)
    if believed is not None:
        return present(config, *believed, as_json=as_json, output=None, allow_unsigned=allow_unsigned)
    lookout = Lookout(git, bus.address, config.trusted_runners, count=True)
    update = _look(config, git, bus, found.nonce)
    preset = None if found.state is None else found.state.preset
    expected_s = None
    if update.phase is Phase.QUEUED and preset is not None:
        lookout.result()
        expected_s = lookout.expected_s(preset, update.ahead)
    run = look_at_run(git, bus, found.state)
    beat, now = update.status, datetime.now(UTC)
    if as_json:
        echo_json(
            {
                "status": update.phase,
                "nonce": found.nonce,
                "preset": preset,
                "ahead": update.ahead,
                "expected_s": expected_s,
                "beat_age_s": None if beat is None else round(beat_age_s(beat, now), 1),
                "heartbeat": None if beat is None else beat.model_dump(mode="json"),
                "claim": None if update.claim is None else update.claim.to_json(),
                "run": None if run is None else run.as_json(),
                "exit_code": 0,
            },
            untrusted=("heartbeat", "preset"),
        )
    else:
        silence_s = None if beat is None else silent_s(beat, now)
        line = status_line(beat, update.phase, update.ahead, expected_s, silence_s, claim=update.claim)
        click.echo(f"{found.nonce}  {line}")
        if run is not None:
            click.echo(f"  {run_text(run)}")
        note_untrusted()
    return 0


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
@resend_option
@allow_unsigned_option
def wait(
    handle: str,
    remote: str | None,
    as_json: bool,
    seconds: float,
    output: Path | None,
    resend_after_s: float | None,
    allow_unsigned: bool,
) -> int:
    """Follow the request HANDLE until its result is home."""
    from bridge.cli.attending import attend
    from bridge.cli.follow import follow, present
    from bridge.client.lookout import Lookout
    from bridge.errors import UnknownHandle

    config, git, bus, found = _find(handle, remote)
    believed = _believed(config, found, allow_unsigned)
    if believed is not None:
        return present(config, *believed, as_json=as_json, output=output, allow_unsigned=allow_unsigned)
    lookout = Lookout(git, bus.address, config.trusted_runners, count=True)
    preset = None if found.state is None else found.state.preset
    try:
        return follow(
            config,
            git,
            bus,
            found.nonce,
            wait_s=seconds,
            as_json=as_json,
            output=output,
            allow_unsigned=allow_unsigned,
            expect=lambda ahead: None if preset is None else lookout.expected_s(preset, ahead),
            attending=attend(config, git, bus, found.state, resend_after_s=resend_after_s),
        )
    except UnknownHandle:  # published and retired between two looks?
        *_, found = _find(found.nonce, remote)
        believed = _believed(config, found, allow_unsigned)
        if believed is None:
            raise
        return present(config, *believed, as_json=as_json, output=output, allow_unsigned=allow_unsigned)


@click.command(
    epilog="""\b
Examples:
  kakeya_mac logs 20260301t120000z0123456789ab
  kakeya_mac logs 20260301t12 --json"""
)
@handle_options
@allow_unsigned_option
def logs(handle: str, remote: str | None, as_json: bool, allow_unsigned: bool) -> int:
    """What the job of HANDLE printed: its last lines while it runs, everything afterwards.

    Over GitHub Actions it is the log of the Mac's job, once that has ended and where there is a token.

    The text was written on the other side of the bus: it is shown without terminal escapes and characters
    that nobody sees, between two lines that it cannot have written. `fetch` saves logs as they are.
    """
    from bridge.render.marked import fenced

    config, git, bus, found = _find(handle, remote)
    believed = _believed(config, found, allow_unsigned)
    if believed is not None:
        result, files = believed[0].result, believed[0].files
        texts = {
            file.path: files[file.path].decode("utf-8", "replace")
            for file in result.files
            if file.role == "log"
        }
        complete = True
    else:
        update = _look(config, git, bus, found.nonce)
        tail = () if update.status is None else update.status.log_tail
        texts = {"tail": "\n".join(tail)} if update.status is not None else _run_log(git, bus, found)
        complete = False
    if as_json:
        echo_json({"nonce": found.nonce, "complete": complete, "logs": texts}, untrusted=("logs",))
        return 0
    if not any(texts.values()):
        click.echo("nothing was printed" if complete else "nothing was printed yet", err=True)
        return 0
    for name, text in texts.items():
        for part in fenced(name, text):
            click.echo(part)
    return 0


@click.command(
    epilog="""\b
Examples:
  kakeya_mac result 20260301t120000z0123456789ab
  kakeya_mac result mac-bridge/probe-20260301t120000z0123456789ab -o out/ --json
  kakeya_mac result 20260301t12 --verify 6 -o out/

Exit code: that of the result's status; 3 when it cannot be believed, answers something else than was asked,
this client's gate rejects its evidence, or --verify refutes it; 4 when there is none yet; 6 when it cannot be
replayed here; 7 when it passed and no key that is trusted here signed it."""
)
@handle_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Save every published file."
)
@click.option(
    "--verify",
    "sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Replay the report here: draw N rows, and run the models it names over them.",
)
@allow_unsigned_option
def result(
    handle: str,
    remote: str | None,
    as_json: bool,
    output: Path | None,
    sample: int | None,
    allow_unsigned: bool,
) -> int:
    """Fetch the result of HANDLE, check digests and signature, judge its evidence, and show or save it.

    Results are files of git commits; nothing is checked out, nothing is left in this clone. With --verify the
    report of a result that passed is replayed by the engine that is installed here, with the models it names;
    -o then saves verification.json, too, signed with this client's key where there is one.
    """
    from bridge.cli.follow import present
    from bridge.errors import WaitTimeout

    config, git, _, found = _find(handle, remote)
    believed = _believed(config, found, allow_unsigned)
    if believed is None:
        raise WaitTimeout(f"{found.nonce} has no result yet", f"kakeya_mac wait {found.nonce}")
    replay = None if sample is None else partial(_replayed, config, git, sample)
    return present(
        config, *believed, as_json=as_json, output=output, allow_unsigned=allow_unsigned, replay=replay
    )


def _replayed(config: Settings, git: Git, sample: int, believed: Believed) -> Verified:
    """Replay a result's report; the engine's table and progress go to standard error."""
    from bridge.client.keys import Pen, choose
    from bridge.client.verified import verify

    pen = Pen(choose(config, git))
    verified = verify(believed, sample, pen, output=sys.stderr.fileno())
    for warning in pen.warnings:
        click.echo(f"warning: {warning}", err=True)
    return verified


def _find(handle: str, remote: str | None) -> tuple[Settings, Git, Remote, Lookup]:
    from bridge import settings
    from bridge.bus.git import Git
    from bridge.client.lookup import look_up
    from bridge.client.remotes import resolve_remote

    config = settings.load(remote=remote)
    git = Git(Path.cwd())
    bus = resolve_remote(git, config.remote)
    return config, git, bus, look_up(git, bus.address, handle, config.state_dir)


def _believed(config: Settings, found: Lookup, allow_unsigned: bool) -> tuple[Believed, FetchedResult] | None:
    from bridge.bus.results import believe

    if found.answer is None:
        return None
    believed = believe(
        found.answer,
        trusted=config.trusted_runners,
        allow_unsigned=allow_unsigned or config.allow_unsigned,
        bound=False,
    )
    return believed, found.answer


def _run_log(git: Git, bus: Remote, found: Lookup) -> dict[str, str]:
    """What the workflow's log says, which the API gives once the Mac's job has ended."""
    from bridge.cli.attending import look_at_run, usable_api, warn
    from bridge.errors import ApiError, ApiNotFound

    run = look_at_run(git, bus, found.state)
    github = usable_api(bus)
    if run is None or run.mac_job is None or github is None:
        return {}
    try:
        return {"workflow": github.job_log(run.mac_job).decode("utf-8", "replace")}
    except ApiNotFound:
        click.echo(f"the log of the job is there when it has ended; until then: {run.url}", err=True)
    except ApiError as error:
        warn(error)
    return {}


def _look(config: Settings, git: Git, bus: Remote, nonce: str) -> Update:
    """The first thing a watcher sees: one look at the remote."""
    from bridge.client.watch import watch

    deadline = time.monotonic() + 60
    return next(watch(git, bus.address, nonce, deadline=deadline, trusted=config.trusted_runners))
