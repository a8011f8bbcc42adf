"""The engine's one door to other programs: small tools of the system, asked what they know."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

SECONDS = 5.0
ENVIRONMENT = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin:/opt/homebrew/bin", "LC_ALL": "C"}


def printed_by(argv: Sequence[str], folder: Path | None = None) -> str | None:
    """Run a program without input and with an environment of its own.

    Args:
        argv: literal words of ours; the first is looked for in the system's folders.
        folder: where it runs.

    Returns:
        What it printed; None where it is not there, failed or took longer than five seconds.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the callers give literal commands
            argv,
            cwd=folder,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
