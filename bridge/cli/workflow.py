"""``kakeya_mac runner execute | publish``: the two jobs of a workflow run that serves one request."""

from __future__ import annotations

import _thread
import base64
import contextlib
import dataclasses
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bridge.cli import echo_json

if TYPE_CHECKING:
    from bridge.runner.station import Station
    from bridge.workflow.environment import Environment
    from bridge.workflow.execute import Executed
    from bridge.workflow.log import Log
    from bridge.workflow.publish import Outcome

LOOK_S = 10.0
Function = TypeVar("Function", bound=Callable[..., Any])

_WHICH = """Without flags the request is the one of the workflow run: KAKEYA_REQUEST_COMMIT and
KAKEYA_REQUEST_BRANCH (a dispatched run sets them), else GITHUB_SHA and GITHUB_REF. The remote is
KAKEYA_REMOTE, else the run's repository, with the token in KAKEYA_GITHUB_TOKEN."""


def _request_options(function: Function) -> Function:
    options = (
        click.option("--commit", metavar="SHA", help="The request commit."),
        click.option("--branch", metavar="REF", help="The branch it was pushed to."),
        click.option("--remote", metavar="URL", help="Git remote that carries the bus."),
        click.option("--json", "as_json", is_flag=True, help="One JSON line at the end."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@click.command(
    epilog=f"""\b
Examples:
  kakeya_mac runner execute --out "$RUNNER_TEMP/result"
  kakeya_mac runner execute --out out --commit SHA --branch mac-bridge/probe-20260301t120000z0123456789ab

{_WHICH}

\b
Step outputs and JSON: nonce, status, reason, digest (of the folder), signature (base64 of result.json.sig;
empty: unsigned). All but nonce are empty for a request that is left to an embedded runner.

Where policy.toml says [actions] execute = "daemon", nothing is run: this waits for the answer of a daemon
under another account (runner serve --transport actions), and digest and signature stay empty.

Exit code: 0 when a sealed result lies in DIR, whatever it says, when the daemon answered, and for a request
that is left alone; anything else: there is no result. SIGINT or SIGTERM ends the job and seals it as
cancelled."""
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Where the result is laid out; must be empty or not exist.",
)
@_request_options
@click.option("--name", metavar="NAME", help="The runner's name in results (default: the host's, -actions).")
def execute(
    out: Path, commit: str | None, branch: str | None, remote: str | None, as_json: bool, name: str | None
) -> int:
    """In a workflow, on the Mac: run one request by this machine's policy and seal its result into DIR."""
    from bridge import settings
    from bridge.protocol.refs import is_local
    from bridge.runner.station import open_station
    from bridge.workflow import environment
    from bridge.workflow.execute import Executor
    from bridge.workflow.log import Log
    from bridge.workflow.naming import runner_name

    run = environment.read(os.environ, commit=commit, branch=branch, remote=remote)
    config = settings.load(remote=run.remote)
    log = Log(click.echo, is_actions=run.is_actions)
    station = open_station(
        name or runner_name(), run.remote, state_dir=config.state_dir, config_dir=config.config_dir
    )
    if not is_local(run.remote):  # a cancelled run ends its job at once; wishes come by git, too, but seldom
        station = dataclasses.replace(station, look_s=LOOK_S)
    log.say(
        f"request {run.asked.nonce} on {run.asked.branch}, for {station.identity.name};"
        f" {station.rulebook.rules.summary()}"
    )
    if (key := station.public_key) is not None:
        log.say(
            f"clients trust this runner with: kakeya_mac runners trust {station.identity.name} --key '{key}'"
        )
    with _cancellable() as stop:
        if station.policy.actions.execute == "daemon":
            outputs = _waited(station, run, log, stop)
        else:
            tempfile.tempdir = str(station.temporary)  # made, and cleared of what a killed run left, by it
            done = Executor(station, log, stop).execute(run.asked, out, attempt=run.attempt)
            outputs = _outputs(run.asked.nonce, done)
    run.write_outputs(outputs)
    if as_json:
        echo_json({**outputs, "output": str(out), "exit_code": 0})
    return 0


def _waited(station: Station, run: Environment, log: Log, stop: Event) -> dict[str, str]:
    """The outputs of a run that left its request to the daemon of another account."""
    from bridge.workflow.local import Copy
    from bridge.workflow.waiting import wait

    copy = Copy(station.folder / f"asked-{station.tag}.git", run.remote, say=log.say)
    longest_s = station.policy.max_timeout_s
    verdict = wait(copy, run.remote, run.asked, stop, longest_job_s=longest_s, say=log.say)
    outputs = _outputs(run.asked.nonce, None)
    if verdict is not None:
        log.say(f"answered: {verdict.status}/{verdict.reason} {verdict.message}".rstrip())
        outputs |= {"status": verdict.status.value, "reason": verdict.reason.value}
    return outputs


def _outputs(nonce: str, done: Executed | None) -> dict[str, str]:
    empty = dict.fromkeys(("status", "reason", "digest", "signature"), "")
    if done is None:
        return {"nonce": nonce, **empty}
    signature = b"" if done.signature is None else done.signature
    return {
        "nonce": nonce,
        "status": done.verdict.status.value,
        "reason": done.verdict.reason.value,
        "digest": done.parcel.digest,
        "signature": base64.b64encode(signature).decode("ascii"),
    }


@contextlib.contextmanager
def _cancellable() -> Iterator[Event]:
    """An event that SIGINT and SIGTERM set: GitHub sends the one, and soon after the other."""
    stop = Event()

    def handle(_number: int, _frame: Any) -> None:
        # Beside what the signal interrupted, which may hold the event's lock.
        _thread.start_new_thread(stop.set, ())

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.command(
    epilog=f"""\b
Examples:
  kakeya_mac runner publish --results result --digest "$DIGEST" --run-result "$RUN_RESULT"

{_WHICH}

\b
Step outputs and JSON: nonce, status, reason, verdict (status/reason), result_commit, result_ref, published.
All but nonce are empty for a request that is left to an embedded runner.

Exit code: that of the request's status: 0 passed, 1 failed, 2 refused, 3 rejected, 5 cancelled or lost; 0 for
a request that is left alone; 6 when the result could not be published."""
)
@click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Where the run's artifact was unpacked; need not exist.",
)
@click.option("--digest", default="", metavar="HEX", help="What the run gave as its result's digest.")
@click.option(
    "--run-result",
    type=click.Choice(("success", "failure", "cancelled", "skipped", "")),
    help="How the run's job ended.",
)
@_request_options
def publish(
    results: Path,
    digest: str,
    run_result: str | None,
    commit: str | None,
    branch: str | None,
    remote: str | None,
    as_json: bool,
) -> int:
    """In a workflow, where a token may write: check what the run sealed, judge it once more, commit it."""
    from bridge import settings
    from bridge.render.summary import summary
    from bridge.workflow import environment
    from bridge.workflow.log import Log
    from bridge.workflow.publish import Delivery, Publisher

    run = environment.read(os.environ, commit=commit, branch=branch, remote=remote)
    config = settings.load(remote=run.remote)
    log = Log(click.echo, is_actions=run.is_actions)
    publisher = Publisher(
        config.state_dir / "publisher" / f"{run.tag}.git",
        run.remote,
        trusted=config.trusted_runners,
        say=log.say,
    )
    delivery = Delivery(results, digest.strip(), run_result or None, run.run_url, run.attempt)
    outcome = publisher.publish(run.asked, delivery)
    outputs = _published(outcome)
    run.write_outputs(outputs)
    place = None if outcome.commit is None or outcome.ref is None else (outcome.commit, outcome.ref)
    run.write_summary(
        summary(outcome.nonce, outcome.verdict, outcome.judged, place=place, notes=outcome.notes)
    )
    _announce(log.announce, outcome)
    if as_json:
        echo_json(
            {**outputs, "message": _message(outcome), "exit_code": outcome.exit_code}, untrusted=("message",)
        )
    return outcome.exit_code


def _published(outcome: Outcome) -> dict[str, str]:
    verdict = outcome.verdict
    return {
        "nonce": outcome.nonce,
        "status": "" if verdict is None else verdict.status.value,
        "reason": "" if verdict is None else verdict.reason.value,
        "verdict": "" if verdict is None else f"{verdict.status}/{verdict.reason}",
        "result_commit": outcome.commit or "",
        "result_ref": outcome.ref or "",
        "published": "true" if outcome.is_news else "false",
    }


def _message(outcome: Outcome) -> str:
    from bridge.protocol.sanitize import clean_line

    return "" if outcome.verdict is None else clean_line(outcome.verdict.message, limit=4000)


def _announce(announce: Callable[[str, str, str], None], outcome: Outcome) -> None:
    verdict = outcome.verdict
    if verdict is None:
        announce("notice", "left alone", f"{outcome.nonce} is for an embedded runner")
        return
    level = "notice" if outcome.exit_code == 0 else "error"
    announce(level, f"{verdict.status}/{verdict.reason}", f"{outcome.nonce} {verdict.message}".rstrip())
