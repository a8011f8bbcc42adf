"""The engine's one door to other programs: tools of the system, and our own trials."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS = 5.0
ENVIRONMENT = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin:/opt/homebrew/bin", "LC_ALL": "C"}


def run_on_stderr(argv: Sequence[str]) -> tuple[int, str]:
    """Run a program in the caller's environment, its output on stderr: exit code and errors."""
    done = subprocess.run(  # noqa: S603 - the callers give literal commands and checked names
        argv, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stderr


def printed_by(
    argv: Sequence[str],
    folder: Path | None = None,
    added: Mapping[str, str] | None = None,
    given: str = "",
) -> str | None:
    """What a program prints, given this input, with only `ENVIRONMENT` and ``added`` in its environment.

    Read as UTF-8 with a mark for each byte that is none; None where it is not there, failed or took longer
    than five seconds.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the callers give literal commands
            argv,
            cwd=folder,
            env={**ENVIRONMENT, **(added or {})},
            input=given,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
