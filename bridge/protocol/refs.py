"""Names on the bus: nonces, refs, and the one spelling of a remote. Pure; touches no repository.

    refs/heads/mac-bridge/<preset>-<nonce>                          the request, later its result
    refs/heads/AgentMemory/mac-bridge-<preset>-<nonce>[-<suffix>]   the same, for clients kept to a namespace
    refs/mac-bridge/inbox/<nonce>                                   what is pending
    refs/mac-bridge/claims/<nonce>                                  who runs it, and its heartbeat
    refs/mac-bridge/cancel/<nonce>                                  a request to stop it
    refs/mac-bridge/results/<nonce>                                 a result whose branch moved or vanished
    refs/mac-bridge/runners/<name>                                  which runner is alive, and what it offers
    refs/heads/mac-bridge-{claims,cancel,results,runners}/…         the same where only branches are accepted
    refs/heads/mac-bridge-archive                                   finished results of retired branches

Names read from a remote are hostile until `parse_request_ref` or `nonce_of` has accepted them.
"""

from __future__ import annotations

import contextlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

INBOX = "refs/mac-bridge/inbox/"
CLAIMS = "refs/mac-bridge/claims/"
CANCELS = "refs/mac-bridge/cancel/"
RESULTS = "refs/mac-bridge/results/"
RUNNERS = "refs/mac-bridge/runners/"
BRANCH_CLAIMS = "refs/heads/mac-bridge-claims/"
BRANCH_CANCELS = "refs/heads/mac-bridge-cancel/"
BRANCH_RESULTS = "refs/heads/mac-bridge-results/"
BRANCH_RUNNERS = "refs/heads/mac-bridge-runners/"
ARCHIVE = "refs/heads/mac-bridge-archive"
BRANCHES = "refs/heads/mac-bridge/"
AGENT_BRANCHES = "refs/heads/AgentMemory/mac-bridge-"

_NONCE_PATTERN = r"[0-9]{8}t[0-9]{6}z[0-9a-f]{12}"
_NONCE = re.compile(_NONCE_PATTERN)
_NAME = re.compile(
    rf"(?P<preset>[a-z0-9]+(-[a-z0-9]+)*?)-(?P<nonce>{_NONCE_PATTERN})(-(?P<suffix>[A-Za-z0-9]{{1,64}}))?"
)
_AGENT_BRANCH = re.compile(r"AgentMemory/.*-(?P<suffix>[A-Za-z0-9]+)")
_MAX_PRESET = 64
_PORTS = {"https": 443, "http": 80, "ssh": 22, "git": 9418}


class RequestName(NamedTuple):
    """What a request branch's name says: the preset asked for and the nonce."""

    preset: str
    nonce: str


def new_nonce(now: datetime, entropy: bytes) -> str:
    """A name for one request, e.g. ``20260301t120000z0123456789ab``: sorts by time; takes 6 random bytes."""
    return nonce_time(now) + entropy[:6].hex()


def nonce_time(now: datetime) -> str:
    """How nonces of that moment (aware) begin; sorts before all of them."""
    return now.astimezone(UTC).strftime("%Y%m%dt%H%M%Sz")


def nonce_moment(nonce: str) -> datetime:
    """The moment that a nonce begins with; a ValueError: there is no such moment."""
    try:
        return datetime.strptime(nonce[:16], "%Y%m%dt%H%M%Sz").replace(tzinfo=UTC)
    except ValueError:
        raise ValueError("the nonce does not begin with a time") from None


def is_nonce(text: str) -> bool:
    """Whether the text has the form of a nonce."""
    return _NONCE.fullmatch(text) is not None


def request_ref(preset: str, nonce: str, current_branch: str | None) -> str:
    """The branch a request is pushed to, by the branch that is checked out (None: detached).

    On ``AgentMemory/<name>-<suffix>`` it stays in that namespace and keeps the suffix, because such a client
    may be allowed to push nowhere else.
    """
    branch = (current_branch or "").removeprefix("refs/heads/")
    if not branch.startswith("AgentMemory/"):
        return f"{BRANCHES}{preset}-{nonce}"
    match = _AGENT_BRANCH.fullmatch(branch)
    suffix = f"-{match['suffix'][-64:]}" if match else ""
    return f"{AGENT_BRANCHES}{preset}-{nonce}{suffix}"


def parse_request_ref(ref: str) -> RequestName | None:
    """The preset and nonce in a request branch's full name; None when it is not one."""
    prefix = BRANCHES if ref.startswith(BRANCHES) else AGENT_BRANCHES
    match = _NAME.fullmatch(ref.removeprefix(prefix)) if ref.startswith(prefix) else None
    if match is None or len(match["preset"]) > _MAX_PRESET or (prefix == BRANCHES and match["suffix"]):
        return None
    return RequestName(match["preset"], match["nonce"])


def nonce_of(ref: str, prefix: str) -> str | None:
    """The nonce of a ref under one of the prefixes of this module; None when it is not exactly that."""
    name = ref.removeprefix(prefix)
    return name if name != ref and is_nonce(name) else None


def claim_places(nonce: str) -> tuple[str, str]:
    """Where a claim may be: among the bridge's own refs, or on a branch where those are declined."""
    return CLAIMS + nonce, BRANCH_CLAIMS + nonce


def is_url(remote: str) -> bool:
    """Whether a remote is written as a URL or ``host:path`` rather than as a folder of this machine."""
    if "://" in remote:
        return True
    before, colon, _ = remote.partition(":")
    return bool(colon) and "/" not in before


def is_local(remote: str) -> bool:
    """Whether talking to this remote stays on this machine."""
    return not is_url(remote) or urlsplit(remote).scheme == "file"


def audience_of(remote: str) -> str:
    """The one spelling of a remote, so that a request meant for one bus is not accepted from another.

    Credentials, the scheme, a default port, ``.git`` and trailing slashes go; a host is lower-cased; a folder
    becomes its real absolute path. ``git@Example.org:team/repo.git``, ``ssh://git@example.org/team/repo`` and
    ``https://token@example.org/team/repo.git/`` all give ``example.org/team/repo``.
    """
    if is_local(remote):
        path = unquote(urlsplit(remote).path) if is_url(remote) else remote
        return _without_git_suffix(os.path.realpath(Path(path).expanduser()))
    if "://" in remote:
        parts = urlsplit(remote)
        host, port = (parts.hostname or "").lower(), None
        with contextlib.suppress(ValueError):  # what cannot be a port
            port = parts.port
        if port not in (None, _PORTS.get(parts.scheme)):
            host += f":{port}"
        return _without_git_suffix(f"{host}/{parts.path.strip('/')}")
    address, _, path = remote.partition(":")
    host = address.rpartition("@")[2].lower()
    return _without_git_suffix(f"{host}/{path.strip('/')}")


def _without_git_suffix(text: str) -> str:
    return text.rstrip("/").removesuffix(".git").rstrip("/") or "/"
