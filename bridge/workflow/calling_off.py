"""A cancelled run's request called off: whoever has it claimed is asked to stop, and given time to answer.

Only the walled level needs it. There the cancelled job merely waited, and could not have asked: its token
cannot write.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bridge.bus.cancels import draft, wish
from bridge.bus.git import Git
from bridge.bus.handles import Held, state_of
from bridge.errors import BusError
from bridge.protocol import refs
from bridge.workflow.asked import Asked

PATIENCE_S = 60.0
_POLL_S = 1.0


def call_off(
    git: Git,
    remote: str,
    asked: Asked,
    *,
    say: Callable[[str], None],
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Ask a request's holder to stop, and wait until it holds it no more; without a holder, nothing is done.

    Args:
        git: Any repository of this machine.
        remote: Address of the bus.
        asked: The request.
        say: Takes one line for the log.
        patience_s: How long to wait for the holder.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    state = state_of(git.ls_remote(remote), asked.nonce, asked.branch)
    if state.claim is None:
        return
    branch = Held(asked.branch, asked.commit)
    standing = branch if branch in state.branches else Held(refs.inbox_ref(asked.nonce), asked.commit)
    cancel = draft(asked.nonce, asked.commit, requested_by="a workflow", reason="its run was cancelled")
    try:
        wish(git, remote, cancel, standing)
    except BusError as error:
        say(f"its runner was not asked to stop: {error.message}")
        return
    say("its runner was asked to stop")
    deadline = clock() + patience_s
    while clock() < deadline:
        sleep(_POLL_S)
        if not git.ls_remote(remote, *refs.claim_places(asked.nonce)):
            return
