"""What git said when it failed, turned into one error of the bridge's tree. Pure text in, exception out.

Git has no machine-readable errors beyond ``push --porcelain``, so messages are read in the C locale. The
words of a server are shown (they often say why), cleaned of terminal escapes and credentials.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.errors import AccessDenied, BusError, FetchTooLarge, LeaseLost, PushRejected, RemoteUnreachable
from bridge.protocol.sanitize import clean, without_credentials

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
# The connection ended in the middle of the conversation: what the server did is unknown.
_BROKE_OFF = re.compile(
    r"unexpected disconnect|remote end hung up|RPC failed|early EOF|remote failed to report status"
    r"|pack-objects died of signal"
    r"|remote did not send all necessary|closed by remote host|connection reset|broken pipe|empty reply",
    re.IGNORECASE,
)
_READ_ONLY = re.compile(r"access denied or repository not exported|service not enabled", re.IGNORECASE)
_ABORTED = re.compile(r"ref updates aborted by hook")
_FORBIDDEN = re.compile(r"(HTTP|error:) 403\b")
_TOO_LARGE = re.compile(r"(HTTP|error:) 413\b")
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
# The server got no pack to refuse: the git that was to make it here died.
_NO_PACK = re.compile(r"^error: remote unpack failed: eof before pack header", re.MULTILINE)
# It was killed: the server says no to what it did not get.
_KILLED = re.compile(r"^error: pack-objects died of signal", re.MULTILINE)
# What git puts before the reason: the address again.
_AGAIN = re.compile(r"^fatal: (unable to access '[^']*': )?")
_MOST_READ = 64 * 1024
_MAX_MESSAGE = 600


@dataclass(frozen=True)
class _Cause:
    """Why a remote denies access: how git says it, how we say it, and what to do."""

    pattern: re.Pattern[str]
    message: str
    remedy: str
    error: type[RemoteUnreachable] = AccessDenied


# The first that fits counts. {remote} is the address as it may be shown.
_CAUSES = (
    _Cause(
        re.compile(r"authentication failed for|HTTP 401|error: 401", re.IGNORECASE),
        "{remote} refused the user name or password",
        "correct them where git finds them, its credential helper or the remote's address; "
        "then try: git ls-remote {remote}",
    ),
    _Cause(
        re.compile(r"could not read (username|password)|terminal prompts disabled", re.IGNORECASE),
        "{remote} wants a user name and password, and git knows none",
        "give them to git's credential helper, or write them into the remote's address; "
        "then try: git ls-remote {remote}",
    ),
    _Cause(
        re.compile(r"permission denied \([a-z,-]+\)|too many authentication failures", re.IGNORECASE),
        "{remote} refused the SSH key",
        "let the server know this machine's public key, or load the right one into the agent (ssh-add -l "
        "lists them); it must work without a prompt",
    ),
    _Cause(
        re.compile(r"host key verification failed|host key for \S+ has changed", re.IGNORECASE),
        "the SSH host key of {remote} is not known here, or is another than before",
        "compare it with the server's own fingerprint, then put it into ~/.ssh/known_hosts",
    ),
    _Cause(
        _FORBIDDEN,
        "{remote} is closed to this user (HTTP 403)",
        "ask for access to the repository, or correct the credentials",
    ),
    _Cause(
        _READ_ONLY,
        "there is no repository at {remote} that its git daemon exports",
        "check the address; on the server, git-daemon-export-ok marks what is exported",
        RemoteUnreachable,
    ),
    _Cause(
        re.compile(
            r"does not appear to be a git repository|repository \S* ?not found|error: 404", re.IGNORECASE
        ),
        "there is no repository at {remote}, or none that this user may see",
        "check the address and your access",
        RemoteUnreachable,
    ),
)


def _refused_refs(output: bytes) -> list[tuple[str, str]]:
    """Refs that ``git push --porcelain`` shows as refused, and why."""
    lines = [line.split("\t") for line in output.decode("utf-8", "replace").splitlines()]
    return [(line[1].rpartition(":")[2], line[2]) for line in lines if len(line) == 3 and line[0] == "!"]


def push_error(remote: str, output: bytes, stderr: bytes) -> BusError:
    """The error of a push that failed.

    Returns:
        `LeaseLost` when a ref did not hold what was expected, `PushRejected` with the server's words when it
        said no, `RemoteUnreachable` when nothing was answered at all; a plain `BusError` when git failed on
        this side.
    """
    refused = _refused_refs(output)
    shown = without_credentials(remote)
    if refused and _is_damaged(stderr) and _NO_PACK.search(_own_words(stderr)):
        return _damage(remote, stderr)
    if refused and _KILLED.search(_own_words(stderr)):
        return unreachable(remote, stderr)
    if not refused:
        return _silent_refusal(remote, stderr)
    causes = [(ref, why) for ref, why in refused if not _ECHO.search(why)]
    words = _remote_words(stderr)
    if not causes and (not words or any(_MOVED.search(word) for word in words)):
        # Two atomic pushes at once: every ref echoes, and only the server's log line says which one lost.
        where = ", ".join(ref for ref, _ in refused)
        return LeaseLost(
            f"{shown}: {where} ({' '.join(words) or 'the server took another push first'})"[:_MAX_MESSAGE]
        )
    causes = causes or refused
    if any("shallow update not allowed" in why for _, why in causes):
        return PushRejected(f"{shown} refused the push from a shallow clone", "git fetch --unshallow")
    if all(_MOVED.search(why) for _, why in causes):
        where = ", ".join(f"{ref} ({_shown(why)})" for ref, why in causes)
        return LeaseLost(f"{shown}: {where}")
    if any(_BROKE_OFF.search(why) for _, why in causes):
        return unreachable(remote, stderr)
    return PushRejected(
        _with_words(shown, causes, words),
        "ask for push rights to this ref, or name another remote with --remote",
    )


def unreachable(remote: str, stderr: bytes) -> BusError:
    """The error of a remote that did not answer, broke off, or refused who asked.

    Returns:
        `RemoteUnreachable`; a plain `BusError` when git failed on this side, whatever the remote does.
    """
    if _is_ours(remote, stderr):
        return _damage(remote, stderr)
    said, shown, text = _AGAIN.sub("", summary(stderr)), without_credentials(remote), _own_words(stderr)
    cause = _cause(text)
    if cause is not None:
        words = " ".join(_remote_words(stderr))
        message = cause.message.format(remote=shown) + (f"; it says: {words}" if words else "")
        return cause.error(message[:_MAX_MESSAGE], cause.remedy.format(remote=shown))
    if _BROKE_OFF.search(text):
        why = _reason(stderr)
        return RemoteUnreachable(
            f"{shown} broke off in the middle" + (f": {why}" if why else ""),
            "the server or the network failed; look what arrived, then try again",
        )
    return RemoteUnreachable(
        f"cannot reach {shown}: {said or 'no answer'}", "check the address, the network and your access"
    )


def timed_out(remote: str, seconds: float) -> RemoteUnreachable:
    """The error of a remote that did not answer in time."""
    return RemoteUnreachable(
        f"{without_credentials(remote)} did not answer within {seconds:g} s",
        "check the network, then try again",
    )


def too_large(remote: str, limit_bytes: int) -> FetchTooLarge:
    """The error of a remote that sends too much."""
    return FetchTooLarge(f"{without_credentials(remote)} sends more than {limit_bytes} bytes")


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
    return (_reason(stderr) or "; ".join(_lines(stderr)))[:_MAX_MESSAGE]


def _reason(stderr: bytes) -> str:
    """The lines that tell why, if any do."""
    telling = [line for line in _lines(stderr) if not _BOILERPLATE.match(line)]
    chosen = [line for line in telling if line.startswith(("fatal:", "error:", "remote:"))] or telling
    return "; ".join(chosen)[:_MAX_MESSAGE]


def _lines(stderr: bytes) -> list[str]:
    return [line.strip() for line in _text(stderr).splitlines() if line.strip()]


def _silent_refusal(remote: str, stderr: bytes) -> BusError:
    """The error of a push that ended before the server spoke of single refs."""
    if _is_ours(remote, stderr):
        return _damage(remote, stderr)
    shown, text, words = without_credentials(remote), _own_words(stderr), _remote_words(stderr)
    if "does not support --atomic" in text:
        return PushRejected(f"{shown} does not support atomic pushes")
    if "shallow update not allowed" in _text(stderr):
        return PushRejected(f"{shown} refused the push from a shallow clone", "git fetch --unshallow")
    if _READ_ONLY.search(text):
        return PushRejected(
            f"{shown} refused the push: its git daemon takes none, or does not export this repository",
            "name the repository's HTTPS or SSH address, or another remote, with --remote",
        )
    if _ABORTED.search(text):
        return PushRejected(
            _with_words(shown, (), words or ["a hook declined"]), "ask the server's owner what its hook takes"
        )
    if _FORBIDDEN.search(text):
        return PushRejected(
            _with_words(shown, (), words or ["HTTP 403"]),
            "ask for push rights, or correct the credentials",
        )
    if _TOO_LARGE.search(text):
        return PushRejected(
            f"{shown} refused the push: it is larger than the server takes (HTTP 413)",
            "raise the server's limit for request bodies, or ask for a smaller result",
        )
    # Some servers say no and hang up; one that vanishes while it reads or answers is another matter.
    vanished = "unexpected disconnect" in text or "RPC failed" in text
    if vanished or not words or _cause(text) is not None:
        return unreachable(remote, stderr)
    return PushRejected(_with_words(shown, (), words))


def _is_ours(remote: str, stderr: bytes) -> bool:
    """Whether git failed on this side. Over HTTP no server writes into our git's own words."""
    text = _own_words(stderr)
    if not _is_damaged(stderr) or (_INCOMPLETE.search(text) and not _CORRUPT.search(text)):
        return False
    if remote.lower().startswith(("http://", "https://")):
        return "remote error:" not in text
    return _THEY_ENDED.search(text) is None


def _is_damaged(stderr: bytes) -> bool:
    return _DAMAGED.search(_own_words(stderr)) is not None


def _damage(remote: str, stderr: bytes) -> BusError:
    words = [line for line in _lines(stderr) if _DAMAGED.match(line)]
    said = "; ".join(dict.fromkeys(words))
    message = f"git failed on this machine, before {without_credentials(remote)} could do anything: {said}"
    return BusError(message[:_MAX_MESSAGE], "git fsck says what is broken; the disk may be full, too")


def _cause(text: str) -> _Cause | None:
    return next((cause for cause in _CAUSES if cause.pattern.search(text)), None)


def _own_words(stderr: bytes) -> str:
    """What git and SSH said themselves, without the server's lines, which may say anything."""
    return "\n".join(line for line in _lines(stderr) if not line.startswith("remote:"))


def _remote_words(stderr: bytes) -> list[str]:
    words = [line.removeprefix("remote:").strip() for line in _lines(stderr) if line.startswith("remote:")]
    return [word for word in words if word]


def _with_words(remote: str, causes: Sequence[tuple[str, str]], words: Sequence[str]) -> str:
    reasons = "; ".join(f"{ref} {_shown(why)}" for ref, why in causes)
    said = " ".join(words)
    parts = [f"{remote} refused the push"]
    if reasons:
        parts.append(reasons)
    if said:
        parts.append(f"the server says: {said}")
    return ": ".join(parts)[:_MAX_MESSAGE]


def _shown(words: str) -> str:
    return without_credentials(clean(words))


def _text(stderr: bytes) -> str:
    """The end of what was written, in whole lines: a part of one might look like other words."""
    if len(stderr) > _MOST_READ:
        stderr = stderr[-_MOST_READ:].partition(b"\n")[2]
    return without_credentials(clean(stderr.decode("utf-8", "replace")))
