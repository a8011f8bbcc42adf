"""``kakeya_mac logs``: what a job printed."""

from __future__ import annotations

import click

from bridge.bus.requests import RequestState
from bridge.cli import show
from bridge.cli.options import allow_unsigned_option, handle_options
from bridge.cli.output import Connection, api_or_none, api_warnings, connect, find_run
from bridge.client.fetch import believe_answer
from bridge.client.watch import snapshot
from bridge.errors import ApiNotFound
from bridge.render.terminal import fenced


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
    link = connect(remote)
    found = link.look_up(handle)
    is_complete = found.answer is not None
    if found.answer is not None:
        believed = believe_answer(link.config, found.answer, allow_unsigned=allow_unsigned)
        files = [file.path for file in believed.result.files if file.role == "log"]
        texts = {path: believed.files[path].decode("utf-8", "replace") for path in files}
    elif (heartbeat := snapshot(link.git, link.bus.address, found.state).status) is not None:
        texts = {"tail": "\n".join(heartbeat.log_tail)}
    else:
        texts = _run_log(link, found.state)
    document = {"nonce": found.nonce, "complete": is_complete, "logs": texts}
    has_text = any(texts.values())
    lines = (line for name, text in texts.items() if has_text for line in fenced(name, text))
    show(as_json, document, lines, untrusted=("logs",))
    if not as_json and not has_text:
        click.echo("nothing was printed" if is_complete else "nothing was printed yet", err=True)
    return 0


def _run_log(link: Connection, state: RequestState) -> dict[str, str]:
    """What the workflow's log says, which the API gives once the Mac's job has ended."""
    run, github = find_run(link, state), api_or_none(link.bus)
    if run is not None and run.mac_job is not None and github is not None:
        with api_warnings():
            try:
                return {"workflow": github.job_log(run.mac_job).decode("utf-8", "replace")}
            except ApiNotFound:
                click.echo(f"the log of the job is there when it has ended; until then: {run.url}", err=True)
    return {}
