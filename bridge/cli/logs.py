"""``kakeya_mac logs``: what a job printed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import click

from bridge.bus.requests import RequestState
from bridge.cli import show
from bridge.cli.options import allow_unsigned_option
from bridge.cli.output import (
    FOREVER_S,
    Connection,
    Presentation,
    api_warnings,
    request_command,
    watch_request,
)
from bridge.client import fetch, history, watch
from bridge.client.fetch import read_open_request
from bridge.errors import BusError
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import minute_text
from bridge.render.terminal import fenced


@click.command(
    epilog="""\b
Examples:
  kakeya_mac logs 20260301t120000z0123456789ab
  kakeya_mac logs 20260301t12 --follow
  kakeya_mac logs 20260301t12 --json

JSON: handle, nonce, preset, requested_by, requested_at, runner, started_at, finished_at, terminal, complete
(the same), logs ({name: text})."""
)
@request_command
@click.option("--follow", "follows", is_flag=True, help="Show new lines until it ends, then the whole log.")
@allow_unsigned_option
def logs(link: Connection, handle: str, as_json: bool, follows: bool) -> int:
    """What the job of HANDLE printed: its last lines while it runs, everything afterwards.

    Over GitHub Actions it is the log of the Mac's job, once that has ended and where there is a token.

    While it runs these are lines of its runner's heartbeats, so --follow may leave some out; the log that it
    shows at the end is complete.

    It is shown without terminal escapes and invisible characters, between two lines that it cannot have
    written. `fetch` saves logs as they are.
    """
    state, answer = link.look_up(handle)
    if follows and answer is None:
        request, how = link.workflow_request(state), Presentation(as_json, show_log=True)
        update = watch_request(link, state.nonce, how, wait_s=FOREVER_S, state=state, request=request)
        answer = update.result
    about: dict[str, Any] = dict.fromkeys(("requested_by", "runner", "started_at", "finished_at"))
    about["preset"] = state.preset
    if answer is not None:
        believed = fetch.believe_answer(link.config, answer)
        files = [file.path for file in believed.result.files if file.role == "log"]
        texts = {path: believed.files[path].decode("utf-8", "replace") for path in files}
        result, asked = believed.result, believed.expected
        about |= {"preset": result.preset, "requested_by": asked and asked.requested_by}
        about["runner"] = result.runner.name
        about |= {"started_at": result.started_at, "finished_at": result.finished_at}
    else:
        with contextlib.suppress(BusError):  # only said
            open_request = read_open_request(link.git, link.bus, state)
            about["requested_by"] = open_request and open_request.requested_by
        if (heartbeat := watch.snapshot(link.git, link.bus.address, state).status) is not None:
            texts = {"tail": "\n".join(heartbeat.log_tail)}
            about |= {"runner": heartbeat.runner, "started_at": history.started_at(heartbeat)}
        else:
            texts = _run_log(link, state)
    is_complete, requested_at = answer is not None, history.requested_at(state.nonce)
    document = {"nonce": state.nonce, "requested_at": requested_at, **about}
    document |= {"terminal": is_complete, "complete": is_complete, "logs": texts}
    has_text = any(texts.values())
    lines = (line for name, text in texts.items() if has_text for line in fenced(name, text))
    if not as_json:
        click.echo(_heading(document), err=True)
    show(as_json, document, lines, untrusted=("logs", "preset", "requested_by", "runner"))
    if not as_json and not has_text:
        click.echo("nothing was printed" if answer is not None else "nothing was printed yet", err=True)
    return 0


def _heading(document: Mapping[str, Any]) -> str:
    """Whose job it was, where and when, on one line."""
    parts = {
        "asked by": document["requested_by"],
        "at": minute_text(document["requested_at"]),
        "ran on": document["runner"],
        "from": document["started_at"],
        "to": document["finished_at"],
    }
    said = " ".join(f"{word} {clean_line(value)}" for word, value in parts.items() if value)
    return f"{document['nonce']}  {clean_line(document['preset'] or '')}  {said}"


def _run_log(link: Connection, state: RequestState) -> dict[str, str]:
    """What the workflow's log says, which the API gives once the Mac's job has ended."""
    run, github = link.find_run(state).run, link.api()
    if run is not None and run.mac_job is not None and github is not None:
        click.echo(f"from {run.url}", err=True)
        with api_warnings():
            return {"workflow": github.job_log(run.mac_job.id).decode("utf-8", "replace")}
    return {}
