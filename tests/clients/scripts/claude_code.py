"""Claude Code: one turn, configured with what `kakeya_engine serve --for claude-code` prints; no account."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

from features import *

HOME = Path(os.environ["HOME"])
PACKAGE = Path(GIVEN["npm"]) / "@anthropic-ai" / "claude-code"
tell(version=json.loads((PACKAGE / "package.json").read_text())["version"])


@feature("messages", "stream")
def turn():
    (HOME / "setup").write_text(GIVEN["claude-code"])
    (HOME / "work").mkdir()
    # Its own instructions and tools are tens of thousands of tokens.
    asked = ["--system-prompt", "Be short.", "--tools", "", "--output-format", "json", "--print", LIST]
    program = shlex.join(["node", str(PACKAGE / "cli-wrapper.cjs"), *asked])
    done = subprocess.run(
        ["sh", "-c", f". {shlex.quote(str(HOME / 'setup'))} && exec {program}"],
        cwd=HOME / "work",
        env=os.environ | {"KAKEYA_API_KEY": KEY},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=140,
    )
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {done.stdout[-1500:]} {done.stderr[-1500:]}")
    result = json.loads(done.stdout)
    if result["is_error"] or not result["result"].strip():
        raise AssertionError(f"no answer was shown: {done.stdout}")
    return result["result"]
