"""Whether a request that was just pushed meets a runner that can take it: for people, and for a JSON line."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from bridge.bus.results import pins_keys
from bridge.client.availability import who_can
from bridge.client.lookout import Lookout

if TYPE_CHECKING:
    from bridge.client.submit import Submission
    from bridge.settings import Settings


def outlook(config: Settings, lookout: Lookout, submission: Submission) -> dict[str, Any]:
    """Warn on standard error when no live runner can take the request, and why.

    Args:
        config: Whose trusted runners count.
        lookout: Begun before the push, so that it costs no time of its own.
        submission: What was pushed.

    Returns:
        Keys of the JSON line: ``runners``, ``ahead`` (None: not known) and ``warnings`` (all there were).
    """
    catalogue, failure = lookout.result()
    ahead = lookout.ahead(submission.nonce)
    runners: dict[str, Any] | None = None
    said: tuple[str, ...] = () if failure is None else (failure,)
    if catalogue is not None:
        manifest = submission.manifest
        found = who_can(
            catalogue.seen,
            preset=manifest.preset,
            params=manifest.params,
            now=datetime.now(UTC),
            signed=submission.signed,
            audience=manifest.audience,
            timeout_s=manifest.timeout_s,
            ahead=ahead,
            running=lookout.running(besides=submission.nonce),
            pinned=pins_keys(config.trusted_runners),
        )
        runners, said = found.as_json(), (*said, *found.sentences)
    for sentence in said:
        click.echo(f"warning: {sentence}", err=True)
    return {"runners": runners, "ahead": ahead, "warnings": [*submission.warnings, *said]}
