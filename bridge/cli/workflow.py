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
from typing import Any

import click

from bridge import log as log_setup
from bridge import settings
from bridge.cli import echo_json, on_signals
from bridge.cli.peers import log_key
from bridge.git.cache import GitCache
from bridge.github.execute import WorkflowExecutor, runner_name
from bridge.github.publish import Delivery, WorkflowPublisher
from bridge.github.workflow import WorkflowFormatter, WorkflowRun, annotation, read_workflow_run
from bridge.protocol.result import Verdict
from bridge.protocol.sanitize import clean_line
from bridge.render.evidence import summary
from bridge.runner.config import open_config
from bridge.settings import Settings

log = logging.getLogger(__name__)

_WHICH = """Without flags the request is the one of the workflow run: KAKEYA_REQUEST_COMMIT and
KAKEYA_REQUEST_BRANCH (a dispatched run sets them), else GITHUB_SHA and GITHUB_REF. The remote is
KAKEYA_REMOTE, else the run's repository, with the token in KAKEYA_GITHUB_TOKEN."""


def _request_options(function: Callable[..., Any]) -> Callable[..., Any]:
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
    run, own = _read_run(commit, branch, remote)
    config = open_config(
        name or runner_name(), run.remote, state_dir=own.state_dir, config_dir=own.config_dir
    )
    runner, request, policy = config.identity.name, run.request, config.rulebook.summary()
    log.info("request %s on %s, for %s; %s", request.nonce, request.branch, runner, policy)
    log_key(config)
    tempfile.tempdir = str(config.temporary)  # created, and emptied after a killed run, by the executor
    stop = Event()
    with on_signals(stop.set):  # GitHub sends SIGINT, and soon after SIGTERM
        done = WorkflowExecutor(config, click.echo, stop).execute(request, out, attempt=run.attempt)
    outputs = _outputs(request.nonce, None if done is None else done.verdict) | {
        "digest": "" if done is None else done.digest,
        "signature": "" if done is None else base64.b64encode(done.signature or b"").decode("ascii"),
    }
    run.write_outputs(outputs)
    if as_json:
        echo_json({**outputs, "output": str(out), "exit_code": 0})
    return 0


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
    run, own = _read_run(commit, branch, remote)
    cache = GitCache(own.state_dir / "publisher" / f"{run.tag}.git", run.remote)
    publisher = WorkflowPublisher(cache, trusted=own.trusted_runners)
    delivery = Delivery(results, digest.strip(), run_result or None, run.run_url, run.attempt)
    outcome = publisher.publish(run.request, delivery)
    verdict = outcome.verdict
    outputs = _outputs(outcome.nonce, verdict) | {
        "verdict": "" if verdict is None else f"{verdict.status}/{verdict.reason}",
        "result_commit": outcome.commit or "",
        "result_ref": outcome.ref or "",
        "published": "true" if outcome.is_news else "false",
    }
    run.write_outputs(outputs)
    place = None if outcome.commit is None or outcome.ref is None else (outcome.commit, outcome.ref)
    run.write_summary(summary(outcome.nonce, verdict, outcome.judged, place=place, notes=outcome.notes))
    level = "notice" if outcome.exit_code == 0 else "error"
    title, message = "left alone", f"{outcome.nonce} is for a runner's daemon"
    if verdict is not None:
        title, message = outputs["verdict"], f"{outcome.nonce} {verdict.message}".rstrip()
    click.echo(annotation(level, title, message, is_actions=run.is_actions))
    if as_json:
        message = "" if verdict is None else clean_line(verdict.message, limit=4000)
        echo_json({**outputs, "message": message, "exit_code": outcome.exit_code}, untrusted=("message",))
    return outcome.exit_code


def _outputs(nonce: str, verdict: Verdict | None) -> dict[str, str]:
    status, reason = ("", "") if verdict is None else (verdict.status.value, verdict.reason.value)
    return {"nonce": nonce, "status": status, "reason": reason}


def _read_run(commit: str | None, branch: str | None, remote: str | None) -> tuple[WorkflowRun, Settings]:
    log_setup.configure(stream=sys.stdout, formatter=WorkflowFormatter())
    run = read_workflow_run(os.environ, commit=commit, branch=branch, remote=remote)
    return run, settings.load(remote=run.remote)
