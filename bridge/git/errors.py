"""What git said when it failed, turned into one error of the bridge's tree. Pure text in, exception out.

Git has no machine-readable errors beyond ``push --porcelain``, so messages are read in the C locale.
"""

from __future__ import annotations

import re

from bridge.errors import AccessDenied, BusError, LeaseLost, PushRejected, RemoteUnreachable
from bridge.protocol.sanitize import clean, without_credentials

_MAX_READ_BYTES = 64 * 1024
_MAX_MESSAGE = 600

# Reasons of a refused ref update that mean: it does not hold what we thought it held.
_MOVED = re.compile(
    r"stale info|fetch first|non-fast-forward|already exists|incorrect old value|failed to update ref"
    r"|cannot lock ref(?!.*; cannot create)|failed to lock|remote ref does not exist|updated since checkout",
    re.IGNORECASE,
)
# Reasons that only echo the refusal of another ref of the same atomic push.
_ECHO = re.compile(r"atomic push fail|atomic transaction fail|transaction aborted", re.IGNORECASE)
# The connection ended in the middle of the conversation: what the server did is unknown.
_BROKE_OFF = re.compile(
    r"unexpected disconnect|RPC failed|remote failed to report status|pack-objects died of signal",
    re.IGNORECASE,
)
# The server takes no push like this one.
_REFUSED = re.compile(
    r"does not support --atomic|access denied or repository not exported|service not enabled"
    r"|ref updates aborted by hook|(HTTP|error:) (403|413)\b",
    re.IGNORECASE,
)
# Git found its own side broken or full.
_DAMAGED = re.compile(
    r"^(fatal|error): (not a git repository|cannot change to '|bad (config|shallow line|object)"
    r"|Failed to traverse parents|Could not read [0-9a-f]{40}|missing (blob|tree|commit) "
    r"|unable to (read (?!askpass)|unpack |access '(?!\w+://))|unable to create '.*\.lock': File exists"
    r"|object directory .* does not exist|insufficient permission for adding an object"
    r"|(index file|wrong index|non-monotonic index) "
    r"|(loose object|pack(file)?) .* (is corrupt|cannot be|not match)"
    r"|.*(No space left on device|Disk quota exceeded|Input/output error|Read-only file system)"
    r"|.*unable to (create|open|write) .*Permission denied)",
    re.MULTILINE | re.IGNORECASE,
)
# The other side ended: what git printed before may be the server's words, which SSH and files do not mark.
_THEY_ENDED = re.compile(
    r"could not read from remote repository|remote end hung up|unexpected disconnect|early EOF|remote error:"
    r"|not our ref|expected 'acknowledgments'",
    re.IGNORECASE,
)
# Why a remote denies access: how git says it, and what we say.
_DENIED = {
    r"authentication failed for|HTTP 401|error: 401": "refused the user name or password",
    r"could not read (username|password)|terminal prompts disabled": (
        "wants a user name and password, and git knows none"
    ),
    r"permission denied \([a-z,-]+\)|too many authentication failures": "refused the SSH key",
    r"host key verification failed|host key for \S+ has changed": "shows an unknown SSH host key",
    r"(HTTP|error:) 403\b": "is closed to this user (HTTP 403)",
}


class _Said:
    """What git and the server wrote: `own` is git's and SSH's, `words` the server's, `summary` both."""

    def __init__(self, stderr: bytes) -> None:
        if len(stderr) > _MAX_READ_BYTES:  # in whole lines: a part of one might look like other words
            stderr = stderr[-_MAX_READ_BYTES:].partition(b"\n")[2]
        text = without_credentials(clean(stderr.decode("utf-8", "replace")))
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        self.own = "\n".join(line for line in lines if not line.startswith("remote:"))
        words = [line.removeprefix("remote:").strip() for line in lines if line.startswith("remote:")]
        self.words = " ".join(word for word in words if word)
        self.summary = "; ".join(lines)[:_MAX_MESSAGE]


def push_error(remote: str, output: bytes, stderr: bytes) -> BusError:
    """The error of a push that failed.

    `LeaseLost`: a ref did not hold what was expected. `PushRejected`: the server said no, in its words.
    `RemoteUnreachable`: nothing was answered at all. A plain `BusError`: git failed on this side.
    """
    said, shown = _Said(stderr), without_credentials(remote)
    rows = [line.split("\t") for line in output.decode("utf-8", "replace").splitlines()]
    refused = [
        (row[1].rpartition(":")[2], without_credentials(clean(row[2])))
        for row in rows
        if len(row) == 3 and row[0] == "!"
    ]
    if not refused:
        return _refused_whole(remote, stderr)
    if "remote unpack failed: eof before pack header" in said.own and _DAMAGED.search(said.own):
        return _damage(remote, said)
    causes = [(ref, why) for ref, why in refused if not _ECHO.search(why)]
    reasons = "; ".join(f"{ref} {why}" for ref, why in causes or refused)
    # Two atomic pushes at once: every ref echoes, and only the server's log line says which one lost.
    echoed_loss = not causes and (not said.words or _MOVED.search(said.words))
    if echoed_loss or (causes and all(_MOVED.search(why) for _, why in causes)):
        return LeaseLost(f"{shown}: {reasons} {said.words}".rstrip()[:_MAX_MESSAGE])
    if _BROKE_OFF.search(reasons) or "pack-objects died of signal" in said.own:
        return unreachable(remote, stderr)
    return _rejected(shown, reasons, said.words)


def unreachable(remote: str, stderr: bytes) -> BusError:
    """The error of a remote that did not answer or refused who asked; a plain `BusError`: git failed here."""
    said, shown = _Said(stderr), without_credentials(remote)
    if _is_ours(remote, said.own):
        return _damage(remote, said)
    for pattern, message in _DENIED.items():
        if re.search(pattern, said.own, re.IGNORECASE):
            words = f"; it says: {said.words}" if said.words else ""
            places = "git's credential helper, the SSH agent, ~/.ssh/known_hosts"
            remedy = f"correct that where git finds it ({places}), then try: git ls-remote {shown}"
            return AccessDenied(f"{shown} {message}{words}"[:_MAX_MESSAGE], remedy)
    why = said.summary.removeprefix("fatal: ") or "no answer"
    return RemoteUnreachable(f"cannot reach {shown}: {why}", "check the address, the network and your access")


def timed_out(remote: str, seconds: float) -> RemoteUnreachable:
    """The error of a remote that did not answer in time."""
    message = f"{without_credentials(remote)} did not answer within {seconds:g} s"
    return RemoteUnreachable(message, "check the network, then try again")


def command_error(verb: str, directory: str, exit_code: int, stderr: bytes) -> BusError:
    """The error of a local git command."""
    said = summary(stderr) or f"exit code {exit_code}"
    trust = f"git config --global --add safe.directory '{directory}'"
    return BusError(f"git {verb} failed in {directory}: {said}", trust if "dubious" in said else None)


def summary(stderr: bytes) -> str:
    """What a failing git said, on one line, without escapes or credentials."""
    return _Said(stderr).summary


def _refused_whole(remote: str, stderr: bytes) -> BusError:
    """The error of a push that ended before the server spoke of single refs."""
    said = _Said(stderr)
    denied = any(re.search(pattern, said.own, re.IGNORECASE) for pattern in _DENIED)
    # Some servers say no and hang up; one that vanishes while it reads or answers is another matter.
    said_no = said.words and not denied and not _BROKE_OFF.search(said.own)
    if not _is_ours(remote, said.own) and (said_no or _REFUSED.search(said.own)):
        return _rejected(without_credentials(remote), "" if said_no else said.summary, said.words)
    return unreachable(remote, stderr)


def _rejected(shown: str, reason: str, words: str) -> PushRejected:
    server = f"the server says: {words}" if words else ""
    message = ": ".join(part for part in (f"{shown} refused the push", reason, server) if part)
    remedy = "ask the server's owner what it takes from you, or name another remote with --remote"
    return PushRejected(message[:_MAX_MESSAGE], remedy)


def _is_ours(remote: str, own: str) -> bool:
    """Whether git failed on this side. Over HTTP no server writes into our git's own words."""
    if not _DAMAGED.search(own):
        return False
    if "did not send all necessary objects" in own:  # the server's fault, unless what is here is broken
        return " is corrupt" in own or "error: index file " in own
    if remote.lower().startswith(("http://", "https://")):
        return "remote error:" not in own
    return _THEY_ENDED.search(own) is None


def _damage(remote: str, said: _Said) -> BusError:
    words = "; ".join(dict.fromkeys(line for line in said.own.splitlines() if _DAMAGED.match(line)))
    message = f"git failed on this machine, before {without_credentials(remote)} could do anything: {words}"
    return BusError(message[:_MAX_MESSAGE], "git fsck says what is broken; the disk may be full, too")
