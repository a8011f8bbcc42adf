"""The clients that are run against the server, their pinned versions, and where results are stored."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
FEATURES = ("text", "stream", "tools", "streamed calls", "schema", "reasoning", "n", "logprobs")


@dataclass(frozen=True)
class Client:
    """A client: its title, the package that has its version, its script, and the environment it runs in.

    The environments are `project` (this project's own), those of tests/clients/requirements, and `npm`.
    """

    title: str
    package: str
    script: str
    environment: str

    def is_installed(self, folder: Path) -> bool:
        """Whether scripts/install_clients.sh installed it into the folder."""
        return self.environment == "project" or (folder / self.environment / "installed").exists()

    def interpreter(self, folder: Path) -> str:
        """What runs its script."""
        if self.script.endswith(".mjs"):
            return "node"
        own = self.environment in {"project", "npm"}
        return sys.executable if own else str(folder / self.environment / "bin" / "python")

    def pinned(self) -> str:
        """The version that is pinned."""
        if self.environment == "npm":
            return str(json.loads((HERE / "npm/package.json").read_text())["dependencies"][self.package])
        if self.environment == "project":
            locked = tomllib.loads((HERE.parents[1] / "uv.lock").read_text())["package"]
            return next(str(each["version"]) for each in locked if each["name"] == self.package)
        lines = (HERE / "requirements" / f"{self.environment}.txt").read_text().splitlines()
        return dict(line.split("==") for line in lines)[self.package]


# The slow ones first: two run at once.
CLIENTS = {
    each.script.partition(".")[0]: each
    for each in (
        Client("Codex", "@openai/codex", "codex.py", "npm"),
        Client("Claude Code", "@anthropic-ai/claude-code", "claude_code.py", "npm"),
        Client("lm-eval", "lm-eval", "lm_evaluation.py", "measuring"),
        Client("guidellm", "guidellm", "guidellm_run.py", "measuring"),
        Client("litellm", "litellm", "litellm_sdk.py", "frameworks"),
        Client("langchain-openai", "langchain-openai", "langchain_chat.py", "frameworks"),
        Client("pydantic-ai", "pydantic-ai-slim", "pydantic_ai_agent.py", "frameworks"),
        Client("instructor", "instructor", "instructor_client.py", "frameworks"),
        Client("llm", "llm", "llm_model.py", "frameworks"),
        Client("openai (Python)", "openai", "openai_python.py", "project"),
        Client("anthropic (Python)", "anthropic", "anthropic_python.py", "project"),
        Client("openai (npm)", "openai", "openai_npm.mjs", "npm"),
        Client("@ai-sdk/openai", "@ai-sdk/openai", "ai_sdk_openai.mjs", "npm"),
        Client("@ai-sdk/openai-compatible", "@ai-sdk/openai-compatible", "ai_sdk_compatible.mjs", "npm"),
    )
}
