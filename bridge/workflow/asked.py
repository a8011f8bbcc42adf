"""Which request a workflow run is about, as the event names it: unread, and not yet believed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """A request commit and the branch it was pushed to.

    Attributes:
        nonce: From the branch's name; whether the manifest agrees is not yet known.
        commit: The request commit.
        branch: Full name, ``refs/heads/…``.
    """

    nonce: str
    commit: str
    branch: str
