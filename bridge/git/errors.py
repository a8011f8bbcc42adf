"""What git said when it failed, turned into one error of the bridge's tree. Pure text in, exception out.

Git has no machine-readable errors beyond ``push --porcelain``, so messages are read in the C locale. The
words of a server are shown (they often say why), cleaned of terminal escapes and credentials.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
# Lines that say nothing new: boilerplate around the line with the reason.
_BOILERPLATE = re.compile(
    r"^(fatal: )?(Could not read from remote repository\.?|Please make sure you have the correct access"
    r"|and the repository exists\.|error: failed to push some refs|the remote end hung up unexpectedly"
    r"|send-pack: unexpected disconnect|error: error in sideband|Could not chdir to home directory"
    r"|hint:|To |Everything up-to-date)",
    re.IGNORECASE,
)
# What git puts before the reason: the address again.
_ADDRESS = re.compile(r"^fatal: (unable to access '[^']*': )?")
# The connection ended in the middle of the conversation: what the server did is unknown.
_BROKE_OFF = re.compile(
    r"unexpected disconnect|remote end hung up|RPC failed|early EOF|remote failed to report status"
    r"|pack-objects died of signal"
    r"|remote did not send all necessary|closed by remote host|connection reset|broken pipe|empty reply",
    re.IGNORECASE,
)
# Git found its own side broken or full. A server may say the same, see `_is_ours`.
_DAMAGED = re.compile(
    r"^fatal: (not a git repository|cannot change to '|bad config|bad shallow line)"
    r"|^fatal: Failed to traverse parents"
    r"|^(fatal|error): (bad object|Could not read [0-9a-f]{40}|missing (blob|tree|commit) )"
    r"|^(fatal|error): unable to (read (?!askpass)|unpack |access '(?!\w+://))"
    r"|^(fatal|error): unable to create '.*\.lock': File exists"  # left by a git that was killed
    r"|^(fatal|error): (object directory .* does not exist|insufficient permission for adding an object)"
    r"|^(fatal|error): (index file|wrong index|non-monotonic index) "
    r"|^(fatal|error): (loose object|pack(file)?) .* (is corrupt|cannot be|not match)"
    r"|^(fatal|error): .*(No space left on device|Disk quota exceeded|Input/output error)"
    r"|^(fatal|error): .*(Read-only file system|unable to (create|open|write) .*Permission denied)",
    re.MULTILINE | re.IGNORECASE,
)
# The other side ended: what git printed before may be the server's words, which SSH and files do not mark.
_THEY_ENDED = re.compile(
    r"could not read from remote repository|remote end hung up|unexpected disconnect|early EOF|remote error:"
    r"|not our ref|expected 'acknowledgments'",
    re.IGNORECASE,
)
# A fetch that brought less than was asked for: the server's fault, unless what is here is broken.
_INCOMPLETE = re.compile(r"did not send all necessary objects")
_CORRUPT = re.compile(r" is corrupt|^error: index file ", re.MULTILINE)
# The git that was to make the pack here died, so the server refuses what it did not get.
_NO_PACK = re.compile(r"^error: remote unpack failed: eof before pack header", re.MULTILINE)
_KILLED = re.compile(r"^error: pack-objects died of signal", re.MULTILINE)

_FORBIDDEN = r"(HTTP|error:) 403\b"
_READ_ONLY = r"access denied or repository not exported|service not enabled"
_MISSING = r"does not appear to be a git repository|repository \S* ?not found|error: 404"
_CHECK_WITH_GIT = "; then try: git ls-remote {remote}"
# Why a remote denies access: how git says it, the error, what we say, and the remedy. The first that fits
# counts; {remote} is the address as it may be shown.
_CAUSES: tuple[tuple[str, type[RemoteUnreachable], str, str], ...] = (
    (
        r"authentication failed for|HTTP 401|error: 401",
        AccessDenied,
        "{remote} refused the user name or password",
        "correct them where git finds them, its credential helper or the remote's address" + _CHECK_WITH_GIT,
    ),
    (
        r"could not read (username|password)|terminal prompts disabled",
        AccessDenied,
        "{remote} wants a user name and password, and git knows none",
        "give them to git's credential helper, or write them into the remote's address" + _CHECK_WITH_GIT,
    ),
    (
        r"permission denied \([a-z,-]+\)|too many authentication failures",
        AccessDenied,
        "{remote} refused the SSH key",
        "let the server know this machine's public key, or load the right one into the agent (ssh-add -l "
        "lists them); it must work without a prompt",
    ),
    (
        r"host key verification failed|host key for \S+ has changed",
        AccessDenied,
        "the SSH host key of {remote} is not known here, or is another than before",
        "compare it with the server's own fingerprint, then put it into ~/.ssh/known_hosts",
    ),
    (
        _FORBIDDEN,
        AccessDenied,
        "{remote} is closed to this user (HTTP 403)",
        "ask for access to the repository, or correct the credentials",
    ),
    (
        _READ_ONLY,
        RemoteUnreachable,
        "there is no repository at {remote} that its git daemon exports",
        "check the address; on the server, git-daemon-export-ok marks what is exported",
    ),
    (
        _MISSING,
        RemoteUnreachable,
        "there is no repository at {remote}, or none that this user may see",
        "check the address and your access",
    ),
)
# Why a push was refused before the server spoke of single refs: how git says it, what we say, the remedy.
_SHALLOW = ("shallow update not allowed", "it takes none from a shallow clone", "git fetch --unshallow")
_REFUSALS = (
    ("does not support --atomic", "it does not support atomic pushes", None),
    _SHALLOW,
    (
        _READ_ONLY,
        "its git daemon takes none, or does not export this repository",
        "name the repository's HTTPS or SSH address, or another remote, with --remote",
    ),
    ("ref updates aborted by hook", "a hook declined", "ask the server's owner what its hook takes"),
    (_FORBIDDEN, "HTTP 403", "ask for push rights, or correct the credentials"),
    (
        r"(HTTP|error:) 413\b",
        "it is larger than the server takes (HTTP 413)",
        "raise the server's limit for request bodies, or ask for a smaller result",
    ),
)


class _Said:
    """What git and the server wrote: `own` is git's and SSH's, `words` are the server's lines."""

    def __init__(self, stderr: bytes) -> None:
        if len(stderr) > _MAX_READ_BYTES:  # in whole lines: a part of one might look like other words
            stderr = stderr[-_MAX_READ_BYTES:].partition(b"\n")[2]
        text = without_credentials(clean(stderr.decode("utf-8", "replace")))
        self.lines = [line.strip() for line in text.splitlines() if line.strip()]
        self.own = "\n".join(line for line in self.lines if not line.startswith("remote:"))
        said = [line.removeprefix("remote:").strip() for line in self.lines if line.startswith("remote:")]
        self.words = [word for word in said if word]

    @property
    def reason(self) -> str:
        """The lines that tell why, if any do."""
        telling = [line for line in self.lines if not _BOILERPLATE.match(line)]
        chosen = [line for line in telling if line.startswith(("fatal:", "error:", "remote:"))] or telling
        return "; ".join(chosen)[:_MAX_MESSAGE]

    @property
    def summary(self) -> str:
        """What git said, on one line."""
        return (self.reason or "; ".join(self.lines))[:_MAX_MESSAGE]


def push_error(remote: str, output: bytes, stderr: bytes) -> BusError:
    """The error of a push that failed.

    `LeaseLost`: a ref did not hold what was expected. `PushRejected`: the server said no, in its words.
    `RemoteUnreachable`: nothing was answered at all. A plain `BusError`: git failed on this side.
    """
    said, shown = _Said(stderr), without_credentials(remote)
    rows = [line.split("\t") for line in output.decode("utf-8", "replace").splitlines()]
    refused = [(row[1].rpartition(":")[2], row[2]) for row in rows if len(row) == 3 and row[0] == "!"]
    if not refused:
        return _refused_whole(remote, said)
    if _NO_PACK.search(said.own) and _DAMAGED.search(said.own):
        return _damage(remote, said)
    if _KILLED.search(said.own):
        return _unreachable(remote, said)
    causes = [(ref, why) for ref, why in refused if not _ECHO.search(why)]
    if not causes and (not said.words or any(_MOVED.search(word) for word in said.words)):
        # Two atomic pushes at once: every ref echoes, and only the server's log line says which one lost.
        where = ", ".join(ref for ref, _ in refused)
        why = " ".join(said.words) or "the server took another push first"
        return LeaseLost(f"{shown}: {where} ({why})"[:_MAX_MESSAGE])
    causes = [(ref, without_credentials(clean(why))) for ref, why in causes or refused]
    if any(_SHALLOW[0] in why for _, why in causes):
        return _rejected(shown, _SHALLOW[1], (), _SHALLOW[2])
    if all(_MOVED.search(why) for _, why in causes):
        return LeaseLost(f"{shown}: {', '.join(f'{ref} ({why})' for ref, why in causes)}")
    if any(_BROKE_OFF.search(why) for _, why in causes):
        return _unreachable(remote, said)
    remedy = "ask for push rights to this ref, or name another remote with --remote"
    return _rejected(shown, "; ".join(f"{ref} {why}" for ref, why in causes), said.words, remedy)


def unreachable(remote: str, stderr: bytes) -> BusError:
    """The error of a remote that did not answer or refused who asked; a plain `BusError`: git failed here."""
    return _unreachable(remote, _Said(stderr))


def timed_out(remote: str, seconds: float) -> RemoteUnreachable:
    """The error of a remote that did not answer in time."""
    message = f"{without_credentials(remote)} did not answer within {seconds:g} s"
    return RemoteUnreachable(message, "check the network, then try again")


def command_error(verb: str, directory: str, exit_code: int, stderr: bytes) -> BusError:
    """The error of a local git command."""
    said = summary(stderr) or f"exit code {exit_code}"
    if "not a git repository" in said:
        return BusError(f"{directory} is not a git repository", "run this inside a checkout")
    if "dubious ownership" in said:
        return BusError(
            f"git refuses {directory}: it belongs to another user",
            f"git config --global --add safe.directory '{directory}'",
        )
    return BusError(f"git {verb} failed in {directory}: {said}")


def summary(stderr: bytes) -> str:
    """What a failing git said, on one line, without boilerplate, escapes or credentials."""
    return _Said(stderr).summary


def _unreachable(remote: str, said: _Said) -> BusError:
    if _is_ours(remote, said):
        return _damage(remote, said)
    shown = without_credentials(remote)
    for pattern, error, message, remedy in _CAUSES:
        if re.search(pattern, said.own, re.IGNORECASE):
            words = f"; it says: {' '.join(said.words)}" if said.words else ""
            shown_message = (message.format(remote=shown) + words)[:_MAX_MESSAGE]
            return error(shown_message, remedy.format(remote=shown))
    if _BROKE_OFF.search(said.own):
        why = f": {said.reason}" if said.reason else ""
        remedy = "the server or the network failed; look what arrived, then try again"
        return RemoteUnreachable(f"{shown} broke off in the middle{why}", remedy)
    why = _ADDRESS.sub("", said.summary) or "no answer"
    return RemoteUnreachable(f"cannot reach {shown}: {why}", "check the address, the network and your access")


def _refused_whole(remote: str, said: _Said) -> BusError:
    """The error of a push that ended before the server spoke of single refs."""
    if _is_ours(remote, said):
        return _damage(remote, said)
    shown = without_credentials(remote)
    for pattern, reason, remedy in _REFUSALS:
        if re.search(pattern, said.own, re.IGNORECASE):
            return _rejected(shown, reason, said.words, remedy)
    # Some servers say no and hang up; one that vanishes while it reads or answers is another matter.
    vanished = "unexpected disconnect" in said.own or "RPC failed" in said.own
    denied = any(re.search(pattern, said.own, re.IGNORECASE) for pattern, *_ in _CAUSES)
    if vanished or denied or not said.words:
        return _unreachable(remote, said)
    return _rejected(shown, "", said.words, None)


def _rejected(shown: str, reason: str, words: Sequence[str], remedy: str | None) -> PushRejected:
    server = f"the server says: {' '.join(words)}" if words else ""
    parts = [part for part in (f"{shown} refused the push", reason, server) if part]
    return PushRejected(": ".join(parts)[:_MAX_MESSAGE], remedy)


def _is_ours(remote: str, said: _Said) -> bool:
    """Whether git failed on this side. Over HTTP no server writes into our git's own words."""
    incomplete = _INCOMPLETE.search(said.own) and not _CORRUPT.search(said.own)
    if incomplete or not _DAMAGED.search(said.own):
        return False
    if remote.lower().startswith(("http://", "https://")):
        return "remote error:" not in said.own
    return _THEY_ENDED.search(said.own) is None


def _damage(remote: str, said: _Said) -> BusError:
    words = "; ".join(dict.fromkeys(line for line in said.lines if _DAMAGED.match(line)))
    message = f"git failed on this machine, before {without_credentials(remote)} could do anything: {words}"
    return BusError(message[:_MAX_MESSAGE], "git fsck says what is broken; the disk may be full, too")
