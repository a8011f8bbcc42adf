"""``kakeya_mac runner execute | publish``: the two jobs of a workflow run that serves one request."""

from __future__ import annotations

import base64
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bridge.cli import echo_json, on_signals

if TYPE_CHECKING:
    from bridge.github.artifact import Artifact
    from bridge.github.publish import PublishOutcome

log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

_WHICH = """Without flags the request is the one of the workflow run: KAKEYA_REQUEST_COMMIT and
KAKEYA_REQUEST_BRANCH (a dispatched run sets them), else GITHUB_SHA and GITHUB_REF. The remote is
KAKEYA_REMOTE, else the run's repository, with the token in KAKEYA_GITHUB_TOKEN."""


def _request_options(function: Function) -> Function:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON line at the end."),
        click.option("--remote", metavar="URL", help="Git remote that carries the bus."),
        click.option("--branch", metavar="REF", help="The branch it was pushed to."),
        click.option("--commit", metavar="SHA", help="The request commit."),
    ):
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
empty: unsigned). All but nonce are empty for a request that is left to a runner's daemon.

Exit code: 0 when a signed result is in DIR, whatever it says, and for a request that is left alone; anything
else: there is no result. SIGINT or SIGTERM ends the job and writes a result that says cancelled."""
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Where the result is written; must be empty or not exist.",
)
@_request_options
@click.option("--name", metavar="NAME", help="The runner's name in results (default: the host's, -actions).")
def execute(
    out: Path, commit: str | None, branch: str | None, remote: str | None, as_json: bool, name: str | None
) -> int:
    """In a workflow, on the Mac: run one request by this machine's policy and write its result into DIR."""
    from bridge import settings
    from bridge.github.execute import WorkflowExecutor, runner_name
    from bridge.github.workflow import WorkflowLog, read_workflow_run
    from bridge.runner.config import open_config

    _log_to_stdout()
    run = read_workflow_run(os.environ, commit=commit, branch=branch, remote=remote)
    settled = settings.load(remote=run.remote)
    config = open_config(
        name or runner_name(), run.remote, state_dir=settled.state_dir, config_dir=settled.config_dir
    )
    runner, request, policy = config.identity.name, run.request, config.rulebook.rules.summary()
    log.info("request %s on %s, for %s; %s", request.nonce, request.branch, runner, policy)
    if (key := config.public_key) is not None:
        log.info("clients trust this runner with: kakeya_mac runners trust %s --key '%s'", runner, key)
    tempfile.tempdir = str(config.temporary)  # created, and emptied after a killed run, by the executor
    output = WorkflowLog(click.echo, is_actions=run.is_actions)
    stop = Event()
    with on_signals(stop.set):  # GitHub sends SIGINT, and soon after SIGTERM
        done = WorkflowExecutor(config, output, stop).execute(request, out, attempt=run.attempt)
    outputs = _execute_outputs(request.nonce, done)
    run.write_outputs(outputs)
    if as_json:
        echo_json({**outputs, "output": str(out), "exit_code": 0})
    return 0


def _execute_outputs(nonce: str, done: Artifact | None) -> dict[str, str]:
    if done is None:
        return {"nonce": nonce, **dict.fromkeys(("status", "reason", "digest", "signature"), "")}
    return {
        "nonce": nonce,
        "status": done.verdict.status.value,
        "reason": done.verdict.reason.value,
        "digest": done.digest,
        "signature": base64.b64encode(done.signature or b"").decode("ascii"),
    }


def _log_to_stdout() -> None:
    from bridge import log
    from bridge.github.workflow import WorkflowFormatter

    log.configure(stream=sys.stdout, formatter=WorkflowFormatter())


@click.command(
    epilog=f"""\b
Examples:
  kakeya_mac runner publish --results result --digest "$DIGEST" --run-result "$RUN_RESULT"

{_WHICH}

\b
Step outputs and JSON: nonce, status, reason, verdict (status/reason), result_commit, result_ref, published.
All but nonce are empty for a request that is left to a runner's daemon.

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
    """In a workflow, where a token may write: check what the run wrote, judge it again, commit it."""
    from bridge import settings
    from bridge.git.cache import GitCache
    from bridge.github.publish import Delivery, WorkflowPublisher
    from bridge.github.workflow import WorkflowLog, read_workflow_run
    from bridge.protocol.sanitize import clean_line
    from bridge.render.summary import summary

    _log_to_stdout()
    run = read_workflow_run(os.environ, commit=commit, branch=branch, remote=remote)
    settled = settings.load(remote=run.remote)
    cache = GitCache(settled.state_dir / "publisher" / f"{run.tag}.git", run.remote)
    publisher = WorkflowPublisher(cache, trusted=settled.trusted_runners)
    delivery = Delivery(results, digest.strip(), run_result or None, run.run_url, run.attempt)
    outcome = publisher.publish(run.request, delivery)
    outputs, verdict = _publish_outputs(outcome), outcome.verdict
    run.write_outputs(outputs)
    place = None if outcome.commit is None or outcome.ref is None else (outcome.commit, outcome.ref)
    run.write_summary(summary(outcome.nonce, verdict, outcome.judged, place=place, notes=outcome.notes))
    output = WorkflowLog(click.echo, is_actions=run.is_actions)
    if verdict is None:
        output.annotate("notice", "left alone", f"{outcome.nonce} is for a runner's daemon")
    else:
        level = "notice" if outcome.exit_code == 0 else "error"
        output.annotate(level, outputs["verdict"], f"{outcome.nonce} {verdict.message}".rstrip())
    if as_json:
        message = "" if verdict is None else clean_line(verdict.message, limit=4000)
        echo_json({**outputs, "message": message, "exit_code": outcome.exit_code}, untrusted=("message",))
    return outcome.exit_code


def _publish_outputs(outcome: PublishOutcome) -> dict[str, str]:
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
