"""The file that GitHub's runner calls before each job: a few lines of shell that no variable can turn.

A workflow may set variables of its own, so everything but what the platform says is dropped, and the owner's
folders are written down here. Where the program cannot start, or the shell is interrupted, the shell ends the
worker.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

# What the platform says of a job.
PASSED = (
    "GITHUB_ACTIONS",
    "GITHUB_ACTOR",
    "GITHUB_EVENT_NAME",
    "GITHUB_EVENT_PATH",
    "GITHUB_REF",
    "GITHUB_REPOSITORY",
    "GITHUB_SERVER_URL",
    "GITHUB_SHA",
    "GITHUB_TRIGGERING_ACTOR",
    "GITHUB_WORKFLOW_REF",
    "GITHUB_WORKFLOW_SHA",
)
PATH = "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def text(python: str, variables: Mapping[str, str]) -> str:
    """The file's content.

    Args:
        python: The interpreter of the pinned environment.
        variables: Of the hook's whole environment, beside `PATH` and `PASSED`: HOME and where the owner's
            files lie.
    """
    own = {"PATH": PATH, "LC_ALL": "C.UTF-8", **variables}
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(own.items())]
    words += [f'{name}="${{{name}-}}"' for name in PASSED]
    lines = " \\\n  ".join(words)
    return f"""#!/bin/sh
# Written by `kakeya_mac runner setup`; changes are lost. docs/actions.md says what it does.
end() {{
  case "$(PATH=/usr/bin:/bin ps -o comm= -p "$PPID")" in
    Runner.Worker | */Runner.Worker) kill -KILL "$PPID" ;;
  esac
  exit "$1"
}}
interrupted() {{
  echo '::error title=kakeya-mac refused this job::the hook was interrupted before the job was known'
  end 2
}}
trap interrupted HUP INT TERM
code=0
# In the background, because a shell that waits for a program in front hears no signal.
/usr/bin/env -i \\
  {lines} \\
  {shlex.quote(python)} -I -m bridge runner hook &
wait "$!" || code=$?
[ "$code" -ne 0 ] || exit 0
# It has ended the worker itself, unless it could not even start.
end "$code"
"""
