"""``kakeya_mac status``: where a request is, by its handle, from any clone."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from bridge.cli import show
from bridge.cli.options import allow_unsigned_option
from bridge.cli.output import (
    FOREVER_S,
    Connection,
    Presentation,
    follow,
    open_document,
    present,
    read_hints,
    request_command,
)
from bridge.client import history, runners, watch
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import FROM_BUS, status_line


@click.command(
    epilog="""\b
Examples:
  kakeya_mac status 20260301t120000z0123456789ab
  kakeya_mac status 20260301t12 --watch
  kakeya_mac status 20260301t12 --json --remote https://example.org/team/repo.git

JSON of an unfinished request: status (queued, claimed, workspace, running, gating, publishing), terminal
(false), handle, nonce (the same), preset, commit_measured (false: its preset reads nothing of the commit;
null: that is not installed here), requested_by, requested_at, expired (no runner may take it any more),
cancelling, on (which machines it waits for), ahead (older ones that wait too), expected_s (until it
starts), eta_s (until it ends: by its progress, or by how long the preset usually takes), runner, attempt,
started_at, tokens_per_s, beat_age_s (since its runner's last heartbeat), heartbeat, claim, run (its workflow
run: id, url, state, conclusion, attempt, machine, job, step), run_problem (why that run gives no result, and
what to do); null where it does not apply or is not known. Of a finished one: terminal is true, and the keys
of `result`.

Exit code: 0 while it waits or runs; afterwards that of `result`."""
)
@request_command
@click.option(
    "--watch", "watches", is_flag=True, help="Follow it to its end, as `wait` does without a limit."
)
@allow_unsigned_option
def status(link: Connection, handle: str, as_json: bool, watches: bool) -> int:
    """Where the request HANDLE (nonce, branch name or unique prefix) is."""
    (state, answer), config, now = link.look_up(handle), link.config, datetime.now(UTC)
    if answer is not None:
        return present(link, answer, Presentation(as_json))
    if watches:
        request, how = link.workflow_request(state), Presentation(as_json)
        return follow(link, state.nonce, how, wait_s=FOREVER_S, state=state, request=request)
    found = link.find_run(state)
    problem = found.problem(state.nonce)
    if problem is not None:  # the run may have published its result after the first look
        state, answer = link.look_up(state.nonce)
        if answer is not None:
            return present(link, answer, Presentation(as_json))
    update = watch.snapshot(link.git, link.bus.address, state, config.trusted_runners)
    beat, run, known = update.status, found.run, read_hints(link, state)
    lines = [f"{state.nonce}  {status_line(update, history.silence_s(beat, now) if beat else None)}"]
    asked = known.asked
    if state.claim is None and asked is not None and asked.on is not None:
        said = f"  for machines with {clean_line(asked.on)}"
        if known.registry is not None:
            able = runners.check_availability(known.registry, asked, signed=True, settings=config, now=now)
            said += f": {'; '.join(able.warnings) or able.sentence}"
        lines.append(said)
    document = open_document(config, state.nonce, state.preset, update, known)
    if document["expired"]:
        lines.append("  expired: no runner may take it any more; the next one that sees it refuses it")
    lines += [f"  {text}" for text in (run and run.sentence, problem) if text]
    document |= {"run": run and run.as_json(), "run_problem": problem, "exit_code": 0}
    return show(as_json, document, lines, untrusted=FROM_BUS, note=True)
