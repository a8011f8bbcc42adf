"""``kakeya_mac runner hook``: called before the first step of a self-hosted job, which it may refuse."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json

if TYPE_CHECKING:
    from bridge.workflow.log import Log

# So long the runner has to send the reason to the run's page, before it is ended.
_GRACE_S = 3.0
_REFUSED = 2


@click.command(
    epilog="""\b
Examples:
  kakeya_mac runner hook            # in ACTIONS_RUNNER_HOOK_JOB_STARTED, set by `runner setup`
  kakeya_mac runner hook --check    # in the environment of a job: only say what would become of it

Compared are, with [actions] in policy.toml: repository, event, workflow file (path, and its bytes at
GITHUB_WORKFLOW_SHA), actor, ref, and the request itself with everything that a runner asks. What cannot be
found out refuses.

\b
Exit code: 0 the job may begin; 2 it may not, and the process named Runner.Worker above this one is ended,
because a failing hook does not stop steps with `if: always()`.
JSON: allowed, found, message, remedy, worker (the process that was ended), exit_code."""
)
@click.option("--check", is_flag=True, help="Only say it; end nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line at the end.")
def hook(check: bool, as_json: bool) -> int:
    """Called by GitHub's runner before each job: end the job unless this machine's policy knows it."""
    from bridge.errors import BridgeError
    from bridge.workflow.log import Log

    log = Log(click.echo, is_actions=True)
    if not check:
        _refuse_when_cancelled(log)
    found: list[str] = []
    message, remedy = "", None
    try:
        found = _admitted(log)
    except BridgeError as error:
        message, remedy = error.message or "refused", error.remedy
    except Exception as error:  # whatever it is, the job does not begin
        message = f"the hook itself failed: {type(error).__name__}: {error}"
    worker = None
    if message:
        worker = _refuse(log, message, remedy, check=check)
    else:
        for line in found:
            log.say(f"kakeya-mac: {line}")
    code = _REFUSED if message else 0
    if as_json:
        answer = {"allowed": not message, "found": found, "message": message, "remedy": remedy}
        echo_json({**answer, "worker": worker, "exit_code": code}, untrusted=("found", "message"))
    if worker is not None:
        _end(worker)
    return code


def _admitted(log: Log) -> list[str]:
    from bridge import settings
    from bridge.workflow import started
    from bridge.workflow.hook import admit

    job = started.read(os.environ)
    return admit(job, state_dir=settings.state_dir(), config_dir=settings.config_dir(), say=log.say)


def _refuse(log: Log, message: str, remedy: str | None, *, check: bool) -> int | None:
    """Say why; the worker that is to be ended, None: there is none, or it is only a check."""
    from bridge.workflow import worker

    log.announce("error", "kakeya-mac refused this job", message)
    if remedy:
        log.say(f"  {remedy}")
    if check:
        return None
    pid = worker.find()
    if pid is None:
        log.say(f"no process named {worker.NAME} of this user is above this one: `always()` steps will run")
    else:
        log.say(f"the runner's worker (process {pid}) is ended, so that no step of this job runs")
    return pid


def _end(pid: int) -> None:
    from bridge.workflow import worker

    sys.stdout.flush()
    time.sleep(_GRACE_S)
    worker.end(pid)


def _refuse_when_cancelled(log: Log) -> None:
    """A run that is cancelled while it is looked at has steps that would run nevertheless."""

    def cancelled(_number: int, _frame: FrameType | None) -> None:
        pid = _refuse(
            log, "the run was cancelled before it was known whether it may begin", None, check=False
        )
        sys.stdout.flush()
        if pid is not None:
            from bridge.workflow import worker

            worker.end(pid)
        os._exit(_REFUSED)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, cancelled)
