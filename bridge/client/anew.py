"""The command that asks for the same anew, for a person to type in a clone that has the workload.

It is made of what a request or a result says, so of anybody's texts: each word is quoted for the shell, and
on one line.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from bridge.protocol.manifest import Manifest, ParamValue
from bridge.protocol.result import Result
from bridge.protocol.sanitize import one_line, without_credentials


@dataclass(frozen=True)
class Changes:
    """What is asked otherwise than it was.

    Attributes:
        words: Parameters as ``key=value``, as typed; the others stay.
        ref: Another workload; None: the same commit.
        timeout_s: Another limit of the job in seconds; None: the same.
        expires: How long the new request may wait; None: the setting.
        remote: The remote as the caller named it; None: not named.
        transport: Who shall take it; None: who was to take the old one.
    """

    words: tuple[str, ...] = ()
    ref: str | None = None
    timeout_s: int | None = None
    expires: timedelta | None = None
    remote: str | None = None
    transport: str | None = None


AS_IT_WAS = Changes()


def asked_anew(manifest: Manifest, changes: Changes) -> str:
    """What to type to ask anew for what a manifest asked, with the changes."""
    return _command(
        manifest.preset,
        manifest.params,
        manifest.workload_sha,
        changes,
        timeout_s=manifest.timeout_s,
    )


def result_anew(result: Result, changes: Changes) -> str | None:
    """What to type to ask anew for what a result says it answers, with the changes; None: it does not say.

    A result names no limit of the job.
    """
    if result.preset is None or result.workload_sha is None:
        return None
    return _command(result.preset, result.params, result.workload_sha, changes)


def _command(
    preset: str,
    params: Mapping[str, ParamValue],
    workload: str,
    changes: Changes,
    *,
    timeout_s: int | None = None,
) -> str:
    typed = {word.partition("=")[0]: word for word in changes.words}
    words = ["kakeya_mac", "run", "--preset", preset]
    for word in ({name: _word(name, value) for name, value in params.items()} | typed).values():
        words += ["-p", word]
    expires_s = None if changes.expires is None else round(changes.expires.total_seconds())
    options = {
        "--ref": changes.ref or workload,
        "--timeout": changes.timeout_s or timeout_s,
        "--expires": expires_s,
        "--transport": changes.transport,
        "--remote": None if changes.remote is None else without_credentials(changes.remote),
    }
    for option, value in options.items():
        words += [] if value is None else [option, str(value)]
    return shlex.join(one_line(word) for word in words)


def _word(name: str, value: ParamValue) -> str:
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"
