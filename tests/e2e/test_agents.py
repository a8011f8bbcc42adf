"""docs/agents.md and the skill: each configuration starts a server, each command works as it is written."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from bridge.cli import skill
from tests.e2e.test_mcp import write_presets
from tests.fixtures.repo import BIN, RepoFixture, wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.M | re.S)


def commands(text: str) -> list[str]:
    return [line.strip() for block in blocks(text, "sh") for line in block.splitlines()]


def configured() -> list[dict[str, Any]]:
    """What each configuration on the page says of the server."""
    files = [json.loads(block) for block in blocks(PAGE, "json")]
    files += [tomllib.loads(block) for block in blocks(PAGE, "toml")]
    [keys] = {len(file) for file in files}
    assert keys == 1
    return [file[key]["kakeya-mac"] for file in files for key in file]


def test_the_page_has_the_configuration_of_each_agent():
    files = (".cursor/mcp.json", "`.mcp.json`", ".codex/config.toml", ".vscode/mcp.json", "mcp-config.json")
    assert all(name in PAGE for name in files)
    assert len(configured()) == len(files)
    for each in configured():
        assert each["command"] == "kakeya_mac"
        assert each["args"][0] == "mcp"


async def list_tools(repo: RepoFixture, args: list[str], path: str) -> set[str]:
    own = [arg.replace("${workspaceFolder}", str(repo.clone)) for arg in args]
    env = {**repo.env, "PATH": path}
    command = StdioServerParameters(command="kakeya_mac", args=own, env=env, cwd=str(repo.clone))
    async with Client(command) as client:
        assert not (await client.call_tool("mac_presets", {"name": "probe"})).is_error
        return {tool.name for tool in (await client.list_tools()).tools}


def test_each_configuration_starts_the_server(repo: RepoFixture):
    documented = set(re.findall(r"^\| `(mac_\w+)`", PAGE, re.M))
    for args in {tuple(each["args"]) for each in configured()}:
        path = f"{BIN}:{repo.env['PATH']}"
        assert asyncio.run(list_tools(repo, list(args), path)) == documented


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
