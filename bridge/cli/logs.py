"""``kakeya_mac logs``: what a job printed."""

from __future__ import annotations

import click

from bridge.bus.requests import RequestState
from bridge.cli import show
from bridge.cli.options import allow_unsigned_option
from bridge.cli.output import Connection, api_warnings, request_command
from bridge.client import fetch, watch
from bridge.render.terminal import fenced


@click.command(
    epilog="""\b
Examples:
  kakeya_mac logs 20260301t120000z0123456789ab
  kakeya_mac logs 20260301t12 --json"""
)
@request_command
@allow_unsigned_option
def logs(link: Connection, handle: str, as_json: bool) -> int:
    """What the job of HANDLE printed: its last lines while it runs, everything afterwards.

    Over GitHub Actions it is the log of the Mac's job, once that has ended and where there is a token.

    It is shown without terminal escapes and invisible characters, between two lines that it cannot have
    written. `fetch` saves logs as they are.
    """
    state, answer = link.look_up(handle)
    if answer is not None:
        believed = fetch.believe_answer(link.config, answer)
        files = [file.path for file in believed.result.files if file.role == "log"]
        texts = {path: believed.files[path].decode("utf-8", "replace") for path in files}
    elif (heartbeat := watch.snapshot(link.git, link.bus.address, state).status) is not None:
        texts = {"tail": "\n".join(heartbeat.log_tail)}
    else:
        texts = _run_log(link, state)
    document = {"nonce": state.nonce, "complete": answer is not None, "logs": texts}
    has_text = any(texts.values())
    lines = (line for name, text in texts.items() if has_text for line in fenced(name, text))
    show(as_json, document, lines, untrusted=("logs",))
    if not as_json and not has_text:
        click.echo("nothing was printed" if answer is not None else "nothing was printed yet", err=True)
    return 0


def _run_log(link: Connection, state: RequestState) -> dict[str, str]:
    """What the workflow's log says, which the API gives once the Mac's job has ended."""
    run, github = link.find_run(state).run, link.api()
    if run is not None and run.mac_job is not None and github is not None:
        click.echo(f"from {run.url}", err=True)
        with api_warnings():
            return {"workflow": github.job_log(run.mac_job.id).decode("utf-8", "replace")}
    return {}
