"""A runner's first claim of a request, signed while something else is done: signing starts a program."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from bridge.bus.mirror import Pending
from bridge.protocol.manifest import format_time
from bridge.protocol.result import Phase, RunStatus

# Signs the bytes of a claim; None: it goes unsigned.
Sign = Callable[[bytes], bytes | None]
# Somebody may claim to have made any number of attempts.
MOST_ATTEMPTS = 1001


@dataclass(frozen=True)
class Identity:
    """A runner: its name for people, its random id, and its process's (16 hex digits each)."""

    name: str
    id: str
    session: str


def unsigned(_: bytes) -> None:
    """Let a claim go unsigned."""


@dataclass(frozen=True)
class Draft:
    """What a claim will say.

    Attributes:
        status: That.
        signature: Gives the signature of its bytes, waiting for it if need be; None: it goes unsigned.
        is_made: Whether that would not wait for a thread.
    """

    status: RunStatus
    signature: Callable[[], bytes | None]
    is_made: Callable[[], bool] = lambda: True


def draft(
    pending: Pending, identity: Identity, *, lease_s: float, attempt: int, sign: Sign, beside: bool = False
) -> Draft:
    """A first claim, good for one use: no two may be the same.

    Args:
        pending: The request.
        identity: Who claims.
        lease_s: Seconds without a heartbeat after which others may take over.
        attempt: How often the request will have been claimed.
        sign: Signs it.
        beside: Begin to sign now, in a thread; else it is signed when the signature is asked for.
    """
    status = RunStatus(
        nonce=pending.nonce,
        request_commit=pending.commit,
        runner=identity.name,
        runner_id=identity.id,
        pid=os.getpid(),
        unique=secrets.token_hex(16),
        attempt=min(attempt, MOST_ATTEMPTS),
        beat=0,
        lease_s=lease_s,
        session=identity.session,
        updated_at=format_time(datetime.now(UTC)),
        phase=Phase.CLAIMED,
        elapsed_s=0.0,
    )
    data = status.to_bytes()
    if not beside:
        return Draft(status, lambda: sign(data))
    made: list[bytes | None] = []
    thread = threading.Thread(target=lambda: made.append(sign(data)), name="draft", daemon=True)
    thread.start()

    def signature() -> bytes | None:
        thread.join()
        return made[0] if made else None

    return Draft(status, signature, lambda: not thread.is_alive())
