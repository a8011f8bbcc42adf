"""What git said when it failed, turned into one error of the bridge's tree. Pure text in, exception out.

Git has no machine-readable errors beyond ``push --porcelain``, so messages are read in the C locale. The
words of a server are shown (they often say why), cleaned of terminal escapes and credentials.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.bus.untrusted import clean, without_credentials
from bridge.errors import BusError, LeaseLost, PushRejected, RemoteUnreachable

# Reasons of a refused ref update that mean: it does not hold what we thought it held.
_MOVED = re.compile(
    r"stale info|fetch first|non-fast-forward|already exists|incorrect old value|failed to update ref"
    r"|cannot lock ref(?!.*; cannot create)|failed to lock|remote ref does not exist|updated since checkout",
    re.IGNORECASE,
)
# Reasons that only echo the refusal of another ref of the same atomic push.
_ECHO = re.compile(r"atomic push fail|atomic transaction fail|transaction aborted", re.IGNORECASE)
_CREDENTIALS = re.compile(
    r"authentication failed|could not read (username|password)|terminal prompts disabled|permission denied"
    r"|access denied|HTTP (401|403)|error: (401|403)|host key verification failed",
    re.IGNORECASE,
)
# Lines that say nothing new: boilerplate that follows the line with the reason.
_BOILERPLATE = re.compile(
    r"^(fatal: )?(Could not read from remote repository\.?|Please make sure you have the correct access"
    r"|and the repository exists\.|error: failed to push some refs|the remote end hung up unexpectedly"
    r"|hint:|To |Everything up-to-date)",
    re.IGNORECASE,
)
_MAX_MESSAGE = 600


@dataclass(frozen=True)
class RefUpdate:
    """One line of ``git push --porcelain``: the flag (``!`` refused), the remote ref, and why."""

    flag: str
    ref: str
    summary: str


def parse_push(output: bytes) -> list[RefUpdate]:
    """The per-ref lines of ``git push --porcelain``."""
    updates = []
    for line in output.decode("utf-8", "replace").splitlines():
        parts = line.split("\t")
        if len(parts) == 3 and len(parts[0]) == 1:
            updates.append(RefUpdate(parts[0], parts[1].rpartition(":")[2], parts[2]))
    return updates


def push_error(remote: str, output: bytes, stderr: bytes) -> BusError:
    """The error of a push that failed.

    Returns:
        `LeaseLost` when a ref did not hold what was expected, `PushRejected` with the server's words when it
        said no, `RemoteUnreachable` when nothing was answered at all.
    """
    refused = [update for update in parse_push(output) if update.flag == "!"]
    shown = without_credentials(remote)
    if not refused:
        if b"does not support --atomic" in stderr:
            return PushRejected(f"{shown} does not support atomic pushes")
        said = _remote_words(stderr)
        if b"shallow update not allowed" in stderr:
            return PushRejected(f"{shown} refused the push from a shallow clone", "git fetch --unshallow")
        return unreachable(remote, stderr) if not said else PushRejected(_with_words(shown, (), said))
    causes = [update for update in refused if not _ECHO.search(update.summary)] or refused
    if any("shallow update not allowed" in update.summary for update in causes):
        return PushRejected(f"{shown} refused the push from a shallow clone", "git fetch --unshallow")
    if all(_MOVED.search(update.summary) for update in causes):
        where = ", ".join(f"{update.ref} ({clean(update.summary)})" for update in causes)
        return LeaseLost(f"{shown}: {where}")
    return PushRejected(
        _with_words(shown, causes, _remote_words(stderr)),
        "ask for push rights to this ref, or name another remote with --remote",
    )


def unreachable(remote: str, stderr: bytes) -> RemoteUnreachable:
    """The error of a remote that did not answer, or refused who asked."""
    said = summary(stderr) or "no answer"
    shown = without_credentials(remote)
    if _CREDENTIALS.search(said):
        return RemoteUnreachable(
            f"{shown} refused the credentials: {said}",
            "git's own credential helper, SSH agent or key must work without a prompt: try `git ls-remote`",
        )
    return RemoteUnreachable(
        f"cannot reach {shown}: {said}", "check the address, the network and your access"
    )


def timed_out(remote: str, seconds: float) -> RemoteUnreachable:
    """The error of a remote that did not answer in time."""
    return RemoteUnreachable(
        f"{without_credentials(remote)} did not answer within {seconds:g} s",
        "check the network, then try again",
    )


def command_error(verb: str, directory: str, exit_code: int, stderr: bytes) -> BusError:
    """The error of a local git command."""
    said = summary(stderr) or f"exit code {exit_code}"
    if "not a git repository" in said:
        return BusError(f"{directory} is not a git repository", "run this inside a checkout")
    if "dubious ownership" in said:
        return BusError(
            f"git refuses {directory}: it belongs to somebody else",
            f"git config --global --add safe.directory '{directory}'",
        )
    return BusError(f"git {verb} failed in {directory}: {said}")


def summary(stderr: bytes) -> str:
    """What a failing git said, on one line, without boilerplate, escapes or credentials."""
    lines = [line.strip() for line in _text(stderr).splitlines()]
    telling = [line for line in lines if line and not _BOILERPLATE.match(line)]
    chosen = (
        [line for line in telling if line.startswith(("fatal:", "error:", "remote:"))] or telling or lines
    )
    return "; ".join(line for line in chosen if line)[:_MAX_MESSAGE]


def _remote_words(stderr: bytes) -> list[str]:
    lines = [line.strip() for line in _text(stderr).splitlines()]
    words = [line.removeprefix("remote:").strip() for line in lines if line.startswith("remote:")]
    return [word for word in words if word]


def _with_words(remote: str, causes: Sequence[RefUpdate], words: Sequence[str]) -> str:
    reasons = "; ".join(f"{update.ref} {clean(update.summary)}" for update in causes)
    said = " ".join(words)
    parts = [f"{remote} refused the push"]
    if reasons:
        parts.append(reasons)
    if said:
        parts.append(f"the server says: {said}")
    return ": ".join(parts)[:_MAX_MESSAGE]


def _text(stderr: bytes) -> str:
    return without_credentials(clean(stderr.decode("utf-8", "replace")))
