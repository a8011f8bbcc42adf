"""docs/agents.md and the skill: each configuration starts a server, each command works as it is written."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from mcp import Client, StdioServerParameters

from bridge.cli import skill
from bridge.github.api import with_token
from tests.e2e.test_mcp import write_presets
from tests.fixtures.repo import BIN, RepoFixture, wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.M | re.S)


def commands(text: str) -> list[str]:
    return [line.strip() for block in blocks(text, "sh") for line in block.splitlines()]


def configuration(file: str) -> str:
    """The configuration on the page behind the name of its file."""
    found = re.search(rf"^\*\*[^`]*`{re.escape(file)}`.*?^```(?:json|toml)\n(.*?)^```", PAGE, re.M | re.S)
    assert found is not None, file
    return found[1]


STRINGS = {"type": "array", "items": {"type": "string"}}
VARIABLES = {"type": "object", "additionalProperties": {"type": "string"}}
STDIO = {
    "type": {"const": "stdio"},
    "command": {"const": "kakeya_mac"},
    "args": STRINGS,
    "env": VARIABLES,
    "envFile": {"type": "string"},
}
LOCAL = {
    "type": {"const": "local"},
    "command": {"const": "kakeya_mac"},
    "args": STRINGS,
    "env": VARIABLES,
    "tools": STRINGS,
}
# For each file: the key of its servers, the keys of one as the agent's documentation names them, and how many
# of those it demands. tests/e2e/test_agent_hosts.py runs the agents that npm has.
# Sources: code.visualstudio.com/docs/copilot/reference/mcp-configuration; for Cursor what others say of it;
# docs.github.com/copilot/how-tos/use-copilot-agents/cloud-agent/extend-cloud-agent-with-mcp.
DOCUMENTED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    ".cursor/mcp.json": ("mcpServers", STDIO, ["type", "command"]),
    ".mcp.json": ("mcpServers", STDIO, ["command"]),
    ".vscode/mcp.json": ("servers", STDIO | {"cwd": {"type": "string"}}, ["type", "command"]),
    "~/.copilot/mcp-config.json": (
        "mcpServers",
        LOCAL,
        ["type", "command", "args", "tools"],
    ),
}


def configured() -> list[dict[str, Any]]:
    """What each configuration on the page says of the server."""
    found = [json.loads(configuration(file))[key]["kakeya-mac"] for file, (key, _, _) in DOCUMENTED.items()]
    return [*found, tomllib.loads(configuration(".codex/config.toml"))["mcp_servers"]["kakeya-mac"]]


@pytest.mark.parametrize("file", DOCUMENTED)
def test_a_configuration_has_the_keys_that_its_agent_documents(file: str):
    key, known, required = DOCUMENTED[file]
    schema = {"type": "object", "properties": known, "required": required, "additionalProperties": False}
    written = json.loads(configuration(file))
    assert list(written) == [key]
    jsonschema.validate(written[key]["kakeya-mac"], schema)


def test_the_cloud_agents_token_is_used_for_the_push():
    [snippet] = re.findall(r'^`("env": .*)`\.$', PAGE, re.M)
    env = json.loads(f"{{{snippet}}}")["env"]
    assert env.pop("GITHUB_ACTIONS") == "true"  # as `resolve_remote` wants it
    secret = "$COPILOT_MCP_KAKEYA_TOKEN"
    assert list(env.values()) == [secret]
    address = with_token("https://github.com/team/repo", dict.fromkeys(env, "token"))
    assert address == "https://x-access-token:token@github.com/team/repo"


def test_the_page_has_no_configuration_that_is_not_tested():
    assert len(configured()) == len(blocks(PAGE, "json")) + len(blocks(PAGE, "toml"))


async def list_tools(repo: RepoFixture, args: list[str], path: str) -> set[str]:
    own = [arg.replace("${workspaceFolder}", str(repo.clone)) for arg in args]
    env = {**repo.env, "PATH": path}
    command = StdioServerParameters(command="kakeya_mac", args=own, env=env, cwd=str(repo.clone))
    async with Client(command) as client:
        assert not (await client.call_tool("mac_presets", {"preset": "probe"})).is_error
        return {tool.name for tool in (await client.list_tools()).tools}


def test_each_configuration_starts_the_server(repo: RepoFixture):
    documented = set(re.findall(r"^\| `(mac_\w+)`", PAGE, re.M))
    for args in {tuple(each["args"]) for each in configured()}:
        path = f"{BIN}:{repo.env['PATH']}"
        assert asyncio.run(list_tools(repo, list(args), path)) == documented


@pytest.mark.exhaustive
@pytest.mark.unsandboxed
def test_the_setup_steps_of_the_cloud_agent_install_a_server(repo: RepoFixture):
    [text] = blocks(PAGE, "yaml")
    path = repo.root / "copilot-setup-steps.yml"
    path.write_text(text)
    check = ("--builtin-schema", "vendor.github-workflows", str(path))
    checked = repo.program("check-jsonschema", *check)
    assert checked.code == 0, checked.out
    [(name, job)] = yaml.safe_load(text)["jobs"].items()
    assert name == "copilot-setup-steps"  # no other job is looked for
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    added = repo.root / "path"
    env = {**repo.env, "RUNNER_TEMP": str(repo.root), "GITHUB_PATH": str(added)}
    for step in job["steps"]:
        script = step["run"].replace("https://github.com/OWNER/kakeya-mac", str(ROOT))
        script = script.replace("COMMIT", head.stdout.strip())
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    path_variable = f"{added.read_text().strip()}:{repo.env['PATH']}"
    assert "mac_status" in asyncio.run(list_tools(repo, ["mcp"], path_variable))


@pytest.mark.parametrize(
    "text",
    [pytest.param(PAGE, id="page"), pytest.param(skill.text(), id="skill", marks=pytest.mark.exhaustive)],
)
def test_each_command_works_as_written(repo: RepoFixture, text: str):
    """In order; a preset of the test's own is asked for, because `probe` takes ten seconds."""
    write_presets(repo)
    handle = ""
    lines = commands(text)
    with repo.runner(trusted="kakeya_mac runners trust --first" not in lines):
        wait_for(lambda: repo.kakeya("runners", "--json").json["runners"], what="a registration")
        for line in lines:
            program, *arguments = shlex.split(
                line.replace("HANDLE", handle).replace("preset probe", "preset hello")
            )
            assert program == "kakeya_mac"
            done = repo.kakeya(*arguments)
            while done.code == 4:  # as the text says: the same command again
                done = repo.kakeya(*arguments)
            assert done.code == 0, f"{line}\n{done.out}\n{done.err}"
            if "--json" in arguments:
                handle = done.json.get("nonce", handle)
    assert handle
    if text == PAGE:
        for folder in (repo.clone / ".agents", repo.clone / ".claude", repo.root / "home" / ".agents"):
            assert (folder / "skills" / "kakeya-mac" / "SKILL.md").is_file()
