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
  kakeya_mac runner hook --probe    # without a job: can it read the repository that the policy names?

Compared are, with [actions] in policy.toml: repository, event, workflow file (path, and its bytes at
GITHUB_WORKFLOW_SHA), actor, ref, and the request itself with everything that a runner asks. What cannot be
found out refuses.

\b
Exit code: 0 the job may begin; 2 it may not, and the process named Runner.Worker above this one is ended,
because a failing hook does not stop steps with `if: always()`.
JSON: allowed, found, message, remedy, worker (the process that was ended), exit_code.
With --probe: 0 it can read there, 2 it cannot; JSON: reads, repository, fetch, key, found, message, remedy,
exit_code."""
)
@click.option("--check", is_flag=True, help="Only say it; end nothing.")
@click.option("--probe", is_flag=True, help="Only look whether the policy's repository can be read.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line at the end.")
def hook(check: bool, probe: bool, as_json: bool) -> int:
    """Called by GitHub's runner before each job: end the job unless this machine's policy knows it."""
    if probe:
        return _probe(as_json)
    from bridge.errors import BridgeError
    from bridge.workflow import worker
    from bridge.workflow.log import Log

    log = Log(click.echo, is_actions=True)
    # Found at once: when the shell between is killed, nothing leads from here to the worker any more.
    above = None if check else worker.find()
    if not check:
        _refuse_when_interrupted(log, above)
    found: list[str] = []
    message, remedy = "", None
    try:
        found = _admitted(log)
    except BridgeError as error:
        message, remedy = error.message or "refused", error.remedy
    except Exception as error:  # whatever it is, the job does not begin
        message = f"the hook itself failed: {type(error).__name__}: {error}"
    ended = None
    if message:
        ended = _refuse(log, message, remedy, above, check=check)
    else:
        for line in found:
            log.say(f"kakeya-mac: {line}")
    code = _REFUSED if message else 0
    if as_json:
        answer = {"allowed": not message, "found": found, "message": message, "remedy": remedy}
        echo_json({**answer, "worker": ended, "exit_code": code}, untrusted=("found", "message"))
    if ended is not None:
        _end(ended)
    return code


def _probe(as_json: bool) -> int:
    from bridge import settings
    from bridge.protocol.sanitize import clean_line
    from bridge.workflow.access import probe

    found = probe(state_dir=settings.state_dir(), config_dir=settings.config_dir())
    code = 0 if found.reads else _REFUSED
    if as_json:
        answer = {
            "reads": found.reads,
            "repository": found.repository,
            "fetch": found.fetch,
            "key": None if found.key is None else str(found.key),
            "found": found.said,
            "message": found.message,
            "remedy": found.remedy,
        }
        echo_json({**answer, "exit_code": code}, untrusted=("found", "message"))
        return code
    click.echo(clean_line(found.said, limit=2000))
    if found.remedy is not None:
        click.echo(f"  {clean_line(found.remedy, limit=2000)}")
    return code


def _admitted(log: Log) -> list[str]:
    from bridge import settings
    from bridge.workflow import started
    from bridge.workflow.hook import admit

    job = started.read(os.environ)
    return admit(job, state_dir=settings.state_dir(), config_dir=settings.config_dir(), say=log.say)


def _refuse(log: Log, message: str, remedy: str | None, above: int | None, *, check: bool) -> int | None:
    """Say why; the worker that is to be ended, None: there is none, or it is only a check."""
    from bridge.workflow.worker import NAME

    log.announce("error", "kakeya-mac refused this job", message)
    if remedy:
        log.say(f"  {remedy}")
    if check:
        return None
    if above is None:
        log.say(f"no process named {NAME} of this user is above this one: `always()` steps will run")
    else:
        log.say(f"the runner's worker (process {above}) is ended, so that no step of this job runs")
    return above


def _end(pid: int) -> None:
    from bridge.workflow import worker

    sys.stdout.flush()
    time.sleep(_GRACE_S)
    worker.end(pid)


def _refuse_when_interrupted(log: Log, above: int | None) -> None:
    """A job whose hook is interrupted has steps that would run nevertheless."""

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        _refuse(log, "the hook was interrupted before the job was known", None, above, check=False)
        sys.stdout.flush()
        if above is not None:
            from bridge.workflow import worker

            worker.end(above)
        os._exit(_REFUSED)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
