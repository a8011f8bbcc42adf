"""Wishes to stop that came too late: the request has its answer, the wish stays. They are cleared away.

A wish goes with the result where the runner knew of it; this is for the ones that came in the last moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from bridge.bus.git import Update
from bridge.bus.handles import Held, state_of
from bridge.bus.mirror import Mirror
from bridge.bus.requests import has_result
from bridge.errors import LeaseLost, PushRejected

_AT_ONCE = 16


class Strays:
    """Wishes without a pending request, each looked at once.

    Args:
        mirror: The runner's copy of the queue.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._left: set[Held] = set()

    def clear(self, wishes: Mapping[str, Held]) -> None:
        """Delete wishes whose request is answered or gone; others stay, and are not looked at again.

        Args:
            wishes: By nonce; of requests that are not in the inbox.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        self._left &= set(wishes.values())
        unknown = [nonce for nonce, held in sorted(wishes.items()) if held not in self._left][:_AT_ONCE]
        if not unknown:
            return
        found = self._mirror.git.ls_remote(self._mirror.remote)
        for nonce in unknown:
            held, state = wishes[nonce], state_of(found, nonce)
            answered = state.branch is None or self._is_answered(nonce, state.branch.ref)
            if answered and state.inbox is None and state.claim is None:
                # The server may keep its refs, somebody else may have been first.
                with contextlib.suppress(PushRejected, LeaseLost):
                    self._mirror.git.push(self._mirror.remote, [Update(held.ref, None, held.commit)])
            self._left.add(held)

    def _is_answered(self, nonce: str, branch: str) -> bool:
        tip = self._mirror.standing(nonce, branch).branch
        return tip is None or has_result(self._mirror.git, tip, nonce)
