"""What setup calls the things that it makes on a Mac, and where they lie."""

from __future__ import annotations

from pathlib import Path

ACTIONS_LABEL = "org.kakeya-mac.actions-runner"
SERVE_LABEL = "org.kakeya-mac.serve"
LABELS = (ACTIONS_LABEL, SERVE_LABEL)
DAEMONS = Path("/Library/LaunchDaemons")
PREFIX = "kakeya-mac"  # in the home
MODELS = "kakeya-models"  # likewise
ASKED = "setup.json"  # in the prefix, as everything below
ENVIRONMENT = "env"  # leads to one of
ENVIRONMENTS = "envs"
ACTIONS_RUNNER = "actions-runner"
SERVICES = "services"
LOGS = "logs"
HOOK = "hook"
HOOK_VARIABLE = "ACTIONS_RUNNER_HOOK_JOB_STARTED"
# What GitHub's runner gives to its shell as it stands; a path of anything else is cut in pieces.
UNQUOTED = r"[A-Za-z0-9._/-]+"


def prefix_around(environment: Path) -> Path | None:
    """The prefix whose environment this is; None: setup did not make it.

    Args:
        environment: `sys.prefix`: the link in the prefix, or the folder that it leads to.
    """
    if environment.name == ENVIRONMENT:
        prefix = environment.parent
    elif environment.parent.name == ENVIRONMENTS:
        prefix = environment.parent.parent
    else:
        return None
    return prefix if (prefix / ASKED).is_file() else None


def staged(prefix: Path, label: str) -> Path:
    """A service's property list before it is put in place."""
    return prefix / SERVICES / f"{label}.plist"


def due(prefix: Path, label: str) -> Path:
    """Says that a service is to be started again: what it read when it started has changed."""
    return prefix / SERVICES / f"{label}.due"


def installed(label: str) -> Path:
    """Where launchd finds a service's property list when the machine starts."""
    return DAEMONS / f"{label}.plist"


def log(prefix: Path, label: str) -> Path:
    """What a service says."""
    return prefix / LOGS / f"{label}.log"
