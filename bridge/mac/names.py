"""What setup calls the things that it makes on a Mac, and where they lie."""

from __future__ import annotations

from pathlib import Path

ACTIONS_LABEL = "org.kakeya-mac.actions-runner"
SERVE_LABEL = "org.kakeya-mac.serve"
DAEMONS = Path("/Library/LaunchDaemons")
PREFIX = "kakeya-mac"  # in the home
MODELS = "kakeya-models"  # likewise
ENVIRONMENT = "env"
ACTIONS_RUNNER = "actions-runner"
HOOK_VARIABLE = "ACTIONS_RUNNER_HOOK_JOB_STARTED"
