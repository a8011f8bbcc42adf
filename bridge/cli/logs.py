"""``kakeya_mac logs``: what a job printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json
from bridge.cli.options import allow_unsigned_option, handle_options

if TYPE_CHECKING:
    from bridge.bus.state import RequestState
    from bridge.client.remotes import Remote
    from bridge.git.repo import GitRepo


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

    The text was written on the other side of the bus: it is shown without terminal escapes and invisible
    characters, between two lines that it cannot have written. `fetch` saves logs as they are.
    """
    from bridge.cli.output import connect
    from bridge.client.fetch import believe_answer, look_up
    from bridge.client.watch import snapshot
    from bridge.render.terminal import fenced

    config, git, bus = connect(remote)
    found = look_up(git, bus, handle, config.state_dir)
    is_complete = found.answer is not None
    if found.answer is not None:
        believed = believe_answer(config, found.answer, allow_unsigned=allow_unsigned)
        logs = [file.path for file in believed.result.files if file.role == "log"]
        texts = {path: believed.files[path].decode("utf-8", "replace") for path in logs}
    else:
        heartbeat = snapshot(git, bus.address, found.state).status
        if heartbeat is not None:
            texts = {"tail": "\n".join(heartbeat.log_tail)}
        else:
            texts = _run_log(git, bus, found.state)
    if as_json:
        document = {"nonce": found.nonce, "complete": is_complete, "logs": texts}
        echo_json(document, untrusted=("logs",))
        return 0
    if not any(texts.values()):
        click.echo("nothing was printed" if is_complete else "nothing was printed yet", err=True)
        return 0
    for name, text in texts.items():
        for part in fenced(name, text):
            click.echo(part)
    return 0


def _run_log(git: GitRepo, bus: Remote, state: RequestState) -> dict[str, str]:
    """What the workflow's log says, which the API gives once the Mac's job has ended."""
    from bridge.cli.workflow_runs import api_or_none, find_run, warn_api
    from bridge.errors import ApiError, ApiNotFound

    run = find_run(git, bus, state)
    github = api_or_none(bus)
    if run is None or run.mac_job is None or github is None:
        return {}
    try:
        return {"workflow": github.job_log(run.mac_job).decode("utf-8", "replace")}
    except ApiNotFound:
        click.echo(f"the log of the job is there when it has ended; until then: {run.url}", err=True)
    except ApiError as error:
        warn_api(error)
    return {}
