"""``kakeya_mac status``: where a request is, by its handle, from any clone."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import click

from bridge.bus.registry import Registry
from bridge.bus.requests import RequestState
from bridge.cli import show
from bridge.cli.options import allow_unsigned_option, handle_options
from bridge.cli.output import Connection, Presentation, connect, find_run, present
from bridge.client.fetch import read_open_request
from bridge.client.history import heartbeat_age_s, silence_s
from bridge.client.runners import check_availability, expected_wait_s, read_runners
from bridge.client.watch import snapshot
from bridge.errors import BridgeError
from bridge.protocol.manifest import Manifest
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import run_text, status_line


@click.command(
    epilog="""\b
Examples:
  kakeya_mac status 20260301t120000z0123456789ab
  kakeya_mac status 20260301t12 --json

JSON of an unfinished request: status (queued, claimed, workspace, running, gating, publishing), nonce,
preset, ahead (older ones that wait too), expected_s (the preset's median duration times those), beat_age_s
(since its runner's last heartbeat, by that machine's clock), heartbeat, on (which machines it waits for), run
(its workflow run over GitHub Actions, where there is a token: id, url, state, conclusion, attempt, machine,
job, step); a key that does not apply, or is not known, is null.

Exit code: 0 while it waits or runs; afterwards that of `result`."""
)
@handle_options
@allow_unsigned_option
def status(handle: str, remote: str | None, as_json: bool, allow_unsigned: bool) -> int:
    """Where the request HANDLE (nonce, branch name or unique prefix) is."""
    link = connect(remote)
    found, config = link.look_up(handle), link.config
    if found.answer is not None:
        return present(config, found.answer, Presentation(as_json, allow_unsigned=allow_unsigned))
    state = found.state
    update = snapshot(link.git, link.bus.address, state, config.trusted_runners)
    run = find_run(link, state)
    beat, now = update.status, datetime.now(UTC)
    asked, registry = _waits_for(link, state)
    target = None if asked is None else asked.on
    expected_s = None
    if registry is not None and state.preset is not None:
        expected_s = expected_wait_s(registry.live(now), state.preset, update.ahead)
    document = {
        "status": update.phase,
        "nonce": found.nonce,
        "preset": state.preset,
        "ahead": update.ahead,
        "expected_s": expected_s,
        "beat_age_s": None if beat is None else round(heartbeat_age_s(beat, now), 1),
        "heartbeat": None if beat is None else beat.model_dump(mode="json"),
        "claim": None if update.claim is None else update.claim.to_json(),
        "on": target,
        "run": None if run is None else run.as_json(),
        "exit_code": 0,
    }
    silent_s = None if beat is None else silence_s(beat, now)
    line = status_line(beat, update.phase, update.ahead, silent_s=silent_s, claim=update.claim)
    lines = [f"{found.nonce}  {line}"]
    if asked is not None and target is not None and registry is not None:
        runners = check_availability(registry, asked, signed=True, settings=config, now=now)
        said = "; ".join(runners.warnings) or runners.sentence
        lines.append(f"  for machines with {clean_line(target)}: {said}")
    if run is not None:
        lines.append(f"  {run_text(run)}")
    return show(as_json, document, lines, untrusted=("heartbeat", "on", "preset"), note=True)


def _waits_for(link: Connection, state: RequestState) -> tuple[Manifest | None, Registry | None]:
    """What a request that waits asks, and the runners that are there; None: not known, or it runs."""
    if state.claim is not None:
        return None, None
    asked = registry = None
    with contextlib.suppress(BridgeError):  # only hints
        registry = read_runners(link.config, link.git, link.bus)
        asked = read_open_request(link.git, link.bus, state)
    return asked, registry
