"""docs/agents.md with the agents that npm has, without an account: what each reads, starts and calls.

Each agent is installed at the version that the page names. Claude Code and Copilot CLI need a model before
they start a server: `ModelServer` plays one that calls one tool. Codex is driven over its app server.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_agents import PAGE, blocks, configuration
from tests.fixtures.repo import BIN, Done, RepoFixture

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.unsandboxed,
    pytest.mark.timeout(600),
]
PACKAGES = {
    "Claude Code": "@anthropic-ai/claude-code@2.1.332",
    "Codex": "@openai/codex@0.171.0",
    "Copilot CLI": "@github/copilot@1.0.102",
}
# A developer's settings for these agents, their keys and accounts.
FOREIGN = ("ANTHROPIC_", "CLAUDE", "CODEX_", "COPILOT_", "ENABLE_TOOL_SEARCH", "MCP_", "OPENAI_")
SKILL = "Run a vetted job"
INSTALLATIONS = ((), ("--dir", "~/.agents/skills"))
RULE = "What needs Apple Silicon runs with `kakeya_mac`"  # of the section for AGENTS.md


@contextmanager
def agent(repo: RepoFixture, name: str) -> Iterator[RepoFixture]:
    """The repository with this agent and kakeya_mac on its PATH."""
    assert shutil.which("npm"), "no npm: these agents come from there; install Node.js"
    package = PACKAGES[name]
    assert f"{name} {package.rpartition('@')[2]}" in PAGE
    with tempfile.TemporaryDirectory(prefix="kakeya-agent-") as folder:
        install = [
            "npm",
            "install",
            "--prefix",
            folder,
            "--no-audit",
            "--no-fund",
            package,
        ]
        done = subprocess.run(install, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for key in [key for key in repo.env if key.startswith(FOREIGN)]:
            del repo.env[key]
        repo.env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
        repo.env["PATH"] = f"{folder}/node_modules/.bin:{BIN}:{repo.env['PATH']}"
        yield repo


def call(repo: RepoFixture, line: str, **env: str) -> Done:
    """What a command line says in the clone; it must succeed."""
    own = {**repo.env, **env}
    done = subprocess.run(
        shlex.split(line), cwd=repo.clone, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return Done(done.returncode, done.stdout, done.stderr)


def on_page(start: str) -> str:
    """The command line on the page that begins so."""
    [line] = re.findall(rf"`({re.escape(start)}[^`]*)`", PAGE)
    assert isinstance(line, str)
    return line


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_rules(repo: RepoFixture) -> None:
    [section] = blocks(PAGE, "markdown")
    assert RULE in section
    write(repo.clone / "AGENTS.md", section)


@contextmanager
def skill(repo: RepoFixture, *words: str) -> Iterator[None]:
    """The skill as `kakeya_mac skill install` with these words installs it."""
    done = repo.kakeya("skill", "install", *words)
    assert done.code == 0, done.err
    yield
    (repo.clone / done.out.split()[-1]).unlink()


class ModelServer(ThreadingHTTPServer):
    """A model behind the Messages API that calls `mac_presets` once, and keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Model)
        self.requests: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def asked(self) -> str:
        """All that it was sent, as text."""
        return json.dumps(self.requests)

    @property
    def tool_result(self) -> str:
        """What the tool said."""
        parts = self.requests[-1]["messages"]
        return json.dumps([part for part in parts if "tool_result" in json.dumps(part)])


class _Model(BaseHTTPRequestHandler):
    server: ModelServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(b"", "text/plain")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(asked)
        tool = next(
            (each["name"] for each in asked.get("tools", ()) if each["name"].endswith("mac_presets")), None
        )
        if tool is not None and "tool_result" not in json.dumps(asked["messages"]):
            block = {"type": "tool_use", "id": "call_1", "name": tool, "input": {}}
            delta, reason = {"type": "input_json_delta", "partial_json": '{"name": "probe"}'}, "tool_use"
        else:
            block, reason = {"type": "text", "text": ""}, "end_turn"
            delta = {"type": "text_delta", "text": "done"}
        message = {
            "id": "message_1",
            "type": "message",
            "role": "assistant",
            "model": asked["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 1, "output_tokens": 1},
        }
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 1}},
            {"type": "message_stop"},
        ]
        text = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)
        self.answer(text.encode(), "text/event-stream")

    def answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def model_server() -> Iterator[ModelServer]:
    with ModelServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_claude_code_reads_the_page(repo: RepoFixture):
    written = repo.clone / ".mcp.json"
    with agent(repo, "Claude Code"), model_server() as model:
        call(repo, on_page("claude mcp add"))
        [server] = json.loads(written.read_text())["mcpServers"].values()
        shown = json.loads(configuration(".mcp.json"))["mcpServers"]["kakeya-mac"]
        assert shown == {key: server[key] for key in shown}
        written.write_text(configuration(".mcp.json"))
        assert "Pending approval" in call(repo, on_page("claude mcp list")).out
        # What its dialog writes when a person approves.
        write(repo.clone / ".claude" / "settings.local.json", '{"enabledMcpjsonServers": ["kakeya-mac"]}')
        state = Path(repo.env["HOME"]) / ".claude.json"
        projects = {"projects": {str(repo.clone): {"hasTrustDialogAccepted": True}}}
        state.write_text(json.dumps(json.loads(state.read_text()) | projects))
        assert re.search(
            r"kakeya-mac: kakeya_mac mcp - . Connected", call(repo, on_page("claude mcp list")).out
        )

        repo.kakeya("skill", "install", "--for", "claude")
        write_rules(repo)
        (repo.clone / "CLAUDE.md").write_text("@AGENTS.md\n")
        call(
            repo,
            "claude --print --allowedTools mcp__kakeya-mac__mac_presets -- hello",
            ANTHROPIC_API_KEY="none",
            ANTHROPIC_BASE_URL=model.url,
            # The model plays one turn, so the tools must be there in the first.
            ENABLE_TOOL_SEARCH="false",
            MCP_CONNECTION_NONBLOCKING="false",
        )
        assert "What this machine is" in model.tool_result
        assert SKILL in model.asked
        assert RULE in model.asked


def test_copilot_cli_reads_the_page(repo: RepoFixture):
    home = Path(repo.env["HOME"])
    with agent(repo, "Copilot CLI"), model_server() as model:
        write(repo.clone / ".mcp.json", configuration(".mcp.json"))
        # What its dialog writes when a person trusts the folder.
        write(home / ".copilot" / "config.json", json.dumps({"trusted_folders": [str(repo.clone)]}))
        listed = json.loads(call(repo, "copilot mcp list --json").out)["mcpServers"]["kakeya-mac"]
        assert (listed["command"], listed["args"]) == ("kakeya_mac", ["mcp"])
        (repo.clone / ".mcp.json").unlink()
        write(home / ".copilot" / "mcp-config.json", configuration("~/.copilot/mcp-config.json"))
        assert "kakeya-mac (local)" in call(repo, on_page("copilot mcp list")).out

        for words in INSTALLATIONS:
            with skill(repo, *words):
                assert f"kakeya-mac - {SKILL}" in call(repo, "copilot skill list").out
        repo.kakeya("skill", "install")
        write_rules(repo)
        call(
            repo,
            "copilot --prompt hello --allow-tool=kakeya-mac",
            COPILOT_OFFLINE="true",
            COPILOT_MODEL="claude-sonnet-4",
            COPILOT_PROVIDER_TYPE="anthropic",
            COPILOT_PROVIDER_BASE_URL=model.url,
            COPILOT_PROVIDER_API_KEY="none",
        )
        assert "What this machine is" in model.tool_result
        assert SKILL in model.asked
        assert RULE in model.asked


def test_codex_reads_the_page(repo: RepoFixture):
    write(repo.clone / ".codex" / "config.toml", configuration(".codex/config.toml"))
    own = Path(repo.env["HOME"]) / ".codex" / "config.toml"
    with agent(repo, "Codex"):
        own.parent.mkdir()
        assert "kakeya-mac" not in call(repo, on_page("codex mcp list")).out  # the project is not trusted yet
        own.write_text(f'[projects."{repo.clone}"]\ntrust_level = "trusted"\n')
        assert re.search(
            r"^kakeya-mac +kakeya_mac +mcp .*enabled", call(repo, on_page("codex mcp list")).out, re.M
        )

        write_rules(repo)
        for words in INSTALLATIONS:
            with skill(repo, *words):
                prompt = call(repo, "codex debug prompt-input").out
                assert SKILL in prompt
                assert RULE in prompt
        assert SKILL not in call(repo, "codex debug prompt-input").out
        assert "What this machine is" in json.dumps(call_tool(repo, "mac_presets", {"preset": "probe"}))


def call_tool(repo: RepoFixture, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a tool answers to Codex."""
    process = subprocess.Popen(
        ["codex", "app-server"],
        cwd=repo.clone,
        env=repo.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def send(method: str, **params: Any) -> dict[str, Any]:
        stdin.write(json.dumps({"id": method, "method": method, "params": params}) + "\n")
        stdin.flush()
        for line in stdout:
            message = json.loads(line)
            if message.get("id") == method:
                found = message["result"]
                assert isinstance(found, dict)
                return found
        raise AssertionError(f"codex ended before it answered {method}")

    try:
        send("initialize", clientInfo={"name": "test", "version": "1"})
        thread = send("thread/start", cwd=str(repo.clone))["thread"]["id"]
        return send(
            "mcpServer/tool/call", threadId=thread, server="kakeya-mac", tool=name, arguments=arguments
        )
    finally:
        stdin.close()
        process.wait(30)
        stdout.close()
