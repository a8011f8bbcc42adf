"""``kakeya_mac status``: where a request is, by its handle, from any clone."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import click

from bridge.cli import show
from bridge.cli.options import allow_unsigned_option
from bridge.cli.output import Connection, Presentation, present, request_command
from bridge.client import fetch, history, runners, watch
from bridge.errors import BridgeError
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import status_line


@click.command(
    epilog="""\b
Examples:
  kakeya_mac status 20260301t120000z0123456789ab
  kakeya_mac status 20260301t12 --json

JSON of an unfinished request: status (queued, claimed, workspace, running, gating, publishing), nonce,
preset, ahead (older ones that wait too), expected_s (the preset's median duration times those), beat_age_s
(since its runner's last heartbeat), heartbeat, on (which machines it waits for), run (its workflow run: id,
url, state, conclusion, attempt, machine, job, step), run_problem (why that run gives no result, and what to
do); null where it does not apply or is not known.

Exit code: 0 while it waits or runs; afterwards that of `result`."""
)
@request_command
@allow_unsigned_option
def status(link: Connection, handle: str, as_json: bool) -> int:
    """Where the request HANDLE (nonce, branch name or unique prefix) is."""
    (state, answer), config, now = link.look_up(handle), link.config, datetime.now(UTC)
    if answer is not None:
        return present(link, answer, Presentation(as_json))
    found = link.find_run(state)
    problem = found.problem(state.nonce)
    if problem is not None:  # the run may have published its result after the first look
        state, answer = link.look_up(state.nonce)
        if answer is not None:
            return present(link, answer, Presentation(as_json))
    update = watch.snapshot(link.git, link.bus.address, state, config.trusted_runners)
    beat, run = update.status, found.run
    lines = [f"{state.nonce}  {status_line(update, history.silence_s(beat, now) if beat else None)}"]
    target = expected_s = None
    if state.claim is None:
        with contextlib.suppress(BridgeError):  # only hints
            asked = fetch.read_open_request(link.git, link.bus, state)
            target = asked.on if asked else None
            said = "" if target is None else f"  for machines with {clean_line(target)}"
            if asked is None or asked.transport == "embedded":  # no daemon registers for the other
                registry = runners.read_runners(config, link.git, link.bus)
                if state.preset is not None:
                    expected_s = runners.expected_wait_s(registry.live(now), state.preset, update.ahead)
                if asked is not None and target is not None:
                    able = runners.check_availability(registry, asked, signed=True, settings=config, now=now)
                    said += f": {'; '.join(able.warnings) or able.sentence}"
            lines += [said] if said else []
    lines += [f"  {text}" for text in (run and run.sentence, problem) if text]
    document = {
        "status": update.phase,
        "nonce": state.nonce,
        "preset": state.preset,
        "ahead": update.ahead,
        "expected_s": expected_s,
        "beat_age_s": beat and round(history.heartbeat_age_s(beat, now), 1),
        "heartbeat": beat and beat.model_dump(mode="json"),
        "claim": update.claim and update.claim.to_json(),
        "on": target,
        "run": run and run.as_json(),
        "run_problem": problem,
        "exit_code": 0,
    }
    return show(as_json, document, lines, untrusted=("heartbeat", "on", "preset"), note=True)
