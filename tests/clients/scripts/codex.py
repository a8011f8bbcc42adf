"""OpenAI's Codex CLI: one turn, configured with what `kakeya_engine serve --for codex` prints.

Its own instructions and most of its tools are turned off: with them the first prompt has 20,000 tokens, which
take two minutes on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from features import *

HOME = Path(os.environ["HOME"])
CODEX = Path(GIVEN["npm"]) / ".bin" / "codex"
FEATURES_OFF = ("multi_agent", "goals", "apps", "plugins", "skill_mcp_dependency_install", "shell_snapshot")
package = json.loads((Path(GIVEN["npm"]) / "@openai" / "codex" / "package.json").read_text())
tell(version=package["version"])


@feature("responses", "stream")
def turn():
    own = HOME / ".codex"
    own.mkdir()
    (own / "config.toml").write_text(GIVEN["codex"])
    (HOME / "instructions.md").write_text("Answer in a few words.")
    (HOME / "work").mkdir()
    argv = [CODEX, "exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only"]
    argv += ["-c", f"model_instructions_file={json.dumps(str(HOME / 'instructions.md'))}"]
    argv += ["-c", "skills.include_instructions=false"]
    argv += [part for name in FEATURES_OFF for part in ("--disable", name)]
    done = subprocess.run(
        [*argv, LIST],
        cwd=HOME / "work",
        env=os.environ | {"KAKEYA_API_KEY": KEY},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=140,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    kinds = [event["type"] for event in events]
    if done.returncode or kinds[-1:] != ["turn.completed"]:
        raise AssertionError(f"exit code {done.returncode}, {events[-3:]}: {done.stderr[-1500:]}")
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (said,) = [item["text"] for item in items if item["type"] == "agent_message"]
    if not said.strip():
        raise AssertionError(f"no answer was shown: {events}")
    return f"{events[-1]['usage']} {said}"
