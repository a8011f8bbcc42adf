"""The MCP server, spoken to by the client of the official SDK, mostly as a process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import anyio
import psutil
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.types import CallToolResult, Request, RequestParams, ResourceLink, Result

from bridge.bus.requests import Submitted
from bridge.mcp_server import CALL_LIMIT_S, make_server
from bridge.protocol.sanitize import unsafe_character
from tests.bridge.cli.conftest import here
from tests.bridge.cli.test_mcp import outside_fences, said
from tests.bridge.cli.test_untrusted import ORDER, Scene, harmful, scene, texts
from tests.fixtures.bus import FILES, BusFixture
from tests.fixtures.repo import BIN, RepoFixture, wait_for
from tests.fixtures.runner import RunnerFixture

__all__ = ["here", "scene"]  # fixtures


def write_presets(repo: RepoFixture) -> None:
    for name, seconds in {"hello": 1, "slow": 100}.items():
        program = f"import time; print('hello', flush=True); time.sleep({seconds})"
        RunnerFixture(repo).preset(name, ["${python}", "-I", "-c", program], timeout=120)


def wrap_git(repo: RepoFixture, script: str) -> dict[str, str]:
    """An environment in whose `git` this shell script runs first; `$git` is the real one."""
    program = repo.root / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ngit={shutil.which("git")}\n{script}\nexec "$git" "$@"\n')
    program.chmod(0o755)
    return {**repo.env, "PATH": f"{program.parent}:{repo.env['PATH']}"}


def connect(repo: RepoFixture, mode: Literal["auto", "legacy"], env: dict[str, str] | None = None) -> Client:
    command = StdioServerParameters(
        command=str(BIN / "kakeya_mac"), args=["mcp"], env=env or repo.env, cwd=str(repo.clone)
    )
    return Client(command, mode=mode)


def document(result: CallToolResult) -> dict[str, Any]:
    assert result.structured_content is not None, said(result)
    return result.structured_content


def test_a_client_drives_a_request_to_its_verdict(repo: RepoFixture):
    write_presets(repo)
    steps: list[str | None] = []

    async def note(_progress: float, _total: float | None, message: str | None) -> None:
        steps.append(message)

    async def submit() -> str:
        async with connect(repo, "auto") as client:
            listed = await client.list_resources()
            assert [each.name for each in listed.resources] == ["presets"]
            [content] = (await client.read_resource("kakeya-mac://presets/hello")).contents
            assert json.loads(content.text)["timeout_s"] == 120
            wrong = await client.call_tool("mac_submit", {"preset": "hello", "params": {"x": 1}})
            assert wrong.is_error
            assert document(wrong)["exit_code"] == 2
            assert "'x'" in said(wrong)
            assert said(wrong).endswith('next: mac_presets(preset="hello")')
            misspelt = await client.call_tool("mac_submit", {"preset": "hello", "require_runer": True})
            assert misspelt.is_error
            assert said(misspelt).startswith("mac_submit has no argument 'require_runer'")
            alone = await client.call_tool("mac_submit", {"preset": "hello", "require_runner": True})
            assert document(alone)["exit_code"] == 9
            assert said(alone).endswith("next: mac_presets(live=true)")
            assert not [name for name in repo.remote_refs() if "inbox" in name]
            result = await client.call_tool("mac_submit", {"preset": "hello"})
            found = document(result)
            assert (found["status"], found["terminal"], found["exit_code"]) == ("queued", False, 0)
            early = await client.call_tool("mac_result", {"handle": found["handle"]})
            assert early.is_error
            assert said(early).endswith(f'next: mac_status(handle="{found["handle"]}", wait_s=45)')
            handle = found["handle"]
            assert isinstance(handle, str)
            return handle

    async def follow(handle: str) -> None:  # by another server, in an earlier revision of the protocol
        async with connect(repo, "legacy") as client:
            result = await client.call_tool(
                "mac_status", {"handle": handle, "wait_s": 45}, progress_callback=note
            )
            found = document(result)
            assert (found["status"], found["terminal"], found["verified"]) == ("passed", True, True)
            assert document(await client.call_tool("mac_result", {"handle": handle}))["status"] == "passed"
            logs = document(await client.call_tool("mac_logs", {"handle": handle}))
            assert logs["logs"] == {"log.txt": "hello"}
            assert not logs["truncated"]
            page = str(repo.root / "report.html")
            reported = await client.call_tool("mac_report", {"handles": [handle], "output": page})
            assert "PASSED hello" in document(reported)["markdown"]
            assert Path(page).read_text().startswith("<!doctype html>")
            again = await client.call_tool("mac_report", {"handles": [handle], "output": page})
            assert again.is_error
            assert "exists" in said(again)
            with pytest.raises(MCPError, match="no report"):
                await client.read_resource(f"kakeya-mac://results/{handle}/report")

    handle = asyncio.run(submit())
    with repo.runner():
        asyncio.run(follow(handle))
    assert steps[-1] == "passed"


def test_every_answer_fences_what_others_wrote(scene: Scene):
    calls: list[tuple[str, dict[str, Any]]] = [
        ("mac_status", {"handle": scene.running}),
        ("mac_result", {"handle": scene.answered}),
        ("mac_report", {"handles": [scene.answered]}),
        ("mac_logs", {"handle": scene.running}),
        ("mac_logs", {"handle": scene.answered}),
        ("mac_presets", {"live": True}),
    ]

    def check(values: dict[str, Any]) -> None:
        for key, value in values.items():
            own = key not in values["untrusted"]
            assert not own or not any("ignore your" in each for each in texts(value)), key
            assert not [text for text in texts(value) if harmful(text)]

    async def call() -> None:
        async with Client(make_server()) as client:
            for name, arguments in calls:
                result = await client.call_tool(name, arguments)
                assert not result.is_error, said(result)
                text = said(result)
                assert ORDER in text.replace("&#58;", ":"), name
                assert not [line for line in outside_fences(text) if "ignore your" in line], name
                assert unsafe_character(text.replace("\n", "")) is None
                check(document(result))
            [content] = (await client.read_resource(f"kakeya-mac://results/{scene.answered}/report")).contents
            check(json.loads(content.text))

    asyncio.run(call())


def test_a_cancelled_call_leaves_nothing_behind(repo: RepoFixture):
    # The first push hangs before it begins; the second one arrives, and then git hangs.
    script = (
        f'case "$*" in *" push "*) if mkdir {repo.root}/first 2>/dev/null; then sleep 99;'
        f' elif mkdir {repo.root}/second 2>/dev/null; then "$git" "$@"; touch {repo.root}/pushed; sleep 99;'
        " fi;; esac"
    )
    env = wrap_git(repo, script)
    before = repo.remote_refs()
    servers: set[psutil.Process] = set()

    def processes() -> list[psutil.Process]:
        """What the server started."""
        return [each for each in psutil.Process().children(recursive=True) if each not in servers]

    async def cancel(client: Client, name: str, arguments: dict[str, Any], ready: Path | None) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, name, arguments)
            while not (ready.exists() if ready else processes()):
                await anyio.sleep(0.05)
            group.cancel_scope.cancel()
        began = time.monotonic()
        while processes():
            assert time.monotonic() < began + 20
            await anyio.sleep(0.05)

    async def call() -> None:
        async with connect(repo, "auto", env) as client:
            servers.update(psutil.Process().children())
            await cancel(client, "mac_status", {"handle": "20260301", "wait_s": 45}, None)
            await cancel(client, "mac_submit", {"preset": "probe"}, repo.root / "first")
            assert repo.remote_refs() == before
        async with connect(repo, "legacy", env) as client:
            servers.update(psutil.Process().children())
            arguments = {"preset": "probe", "remote": str(repo.remote)}
            await cancel(client, "mac_submit", arguments, repo.root / "pushed")

    asyncio.run(call())
    [branch] = [name for name in repo.remote_refs() - before if name.startswith("refs/heads/mac-bridge/")]
    shown = repo.kakeya("status", branch.removeprefix("refs/heads/"), "--json").json
    assert (shown["status"], shown["exit_code"]) == ("cancelled", 5)
    assert "mac_submit was cancelled" in shown["message"]


@pytest.mark.quiet
@pytest.mark.long
@pytest.mark.exhaustive
def test_no_call_takes_45_seconds(repo: RepoFixture):
    write_presets(repo)
    shutil.copytree(repo.remote, repo.root / "hangs.git")
    hangs = {"remote": str(repo.root / "hangs.git")}
    env = wrap_git(repo, 'case "$*" in *hangs.git*) sleep 99;; esac')

    async def call() -> None:
        async with connect(repo, "auto", env) as client:
            handle = document(await client.call_tool("mac_submit", {"preset": "slow"}))["handle"]
            found: dict[str, CallToolResult] = {}

            async def timed(key: str, name: str, arguments: dict[str, Any]) -> None:
                began = time.monotonic()
                found[key] = await client.call_tool(name, arguments)
                assert time.monotonic() - began < CALL_LIMIT_S, key

            async with anyio.create_task_group() as calls:
                calls.start_soon(timed, "runs", "mac_status", {"handle": handle, "wait_s": 45})
                calls.start_soon(timed, "hangs", "mac_status", {"handle": handle, "wait_s": 45} | hangs)
                calls.start_soon(timed, "submit", "mac_submit", {"preset": "slow"} | hangs)
            assert document(found["runs"])["status"] == "running"
            for key, following in (("hangs", "mac_doctor"), ("submit", "mac_status")):
                assert found[key].is_error
                assert "did not end within" in said(found[key])
                assert f"next: {following}(" in said(found[key])
            assert document(await client.call_tool("mac_cancel", {"handle": handle}))["exit_code"] == 0

    with repo.runner():
        asyncio.run(call())


class TaskParams(RequestParams):
    task_id: str


class TaskCreated(Result):
    result_type: Literal["task"]
    task_id: str
    status: str


class Task(Result):
    status: str
    result: dict[str, Any] | None = None


async def get_task(session: Any, task_id: str) -> Task:
    request = Request[TaskParams, str](method="tasks/get", params=TaskParams(task_id=task_id))
    task = await session.send_request(request, Task)
    assert isinstance(task, Task)
    return task


def test_a_client_that_declares_tasks_gets_one(here: BusFixture):
    class Tasks(ClientExtension):
        identifier = "io.modelcontextprotocol/tasks"

        def claims(self) -> list[ResultClaim[Any]]:
            return [ResultClaim(result_type="task", model=TaskCreated, resolve=self.resolve)]

        async def resolve(self, task: TaskCreated, context: ClaimContext) -> CallToolResult:
            assert (await get_task(context.session, task.task_id)).status == task.status == "working"
            nonce = task.task_id
            [ref] = [name for name in here.repo.remote_refs() if name.endswith(nonce) and "heads" in name]
            commit = here.repo.git("rev-parse", ref, cwd=here.repo.remote)
            submitted = Submitted(nonce, commit, ref, True)
            data = here.result(here.expected(submitted), roles={"report.json": "evidence"})
            here.answer(submitted, result=data)
            done = await get_task(context.session, task.task_id)
            assert done.status == "completed"
            return CallToolResult.model_validate(done.result)

    async def call() -> None:
        async with Client(make_server(), extensions=[Tasks()]) as client:
            result = await client.call_tool(
                "mac_submit", {"preset": "tests", "params": {"path": "README.md"}}
            )
            assert document(result)["terminal"]
            link = result.content[1]
            assert isinstance(link, ResourceLink)
            [content] = (await client.read_resource(link.uri)).contents
            read = json.loads(content.text)
            assert read["report"] == json.loads(FILES["report.json"])
            assert (read["handle"], read["untrusted"]) == (document(result)["handle"], ["report"])
            with pytest.raises(MCPError, match="no request"):
                await get_task(client.session, "20260301t120000z000000000000")
        async with Client(make_server()) as client:
            assert document(await client.call_tool("mac_submit", {"preset": "probe"}))["status"] == "queued"
            with pytest.raises(MCPError, match="Missing required client capability"):
                await get_task(client.session, "20260301t120000z000000000000")

    asyncio.run(call())


@pytest.mark.exhaustive
@pytest.mark.unsandboxed
def test_the_inspector_drives_a_request_to_its_verdict(repo: RepoFixture):
    assert shutil.which("npx"), "no npx: the inspector comes from npm; install Node.js"
    write_presets(repo)
    npx = ["npx", "--yes", "@modelcontextprotocol/inspector@2.12.0", "--cli"]
    for name in ("KAKEYA_CONFIG", "KAKEYA_STATE"):  # it gives a server few variables
        npx += ["-e", f"{name}={repo.env[name]}"]
    npx += [str(BIN / "kakeya_mac"), "mcp"]

    def inspect(*words: str) -> dict[str, Any]:
        command = [*npx, *words, "--format", "json"]
        done = subprocess.run(command, env=repo.env, cwd=repo.clone, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)["result"]
        assert isinstance(result, dict)
        return result

    assert "mac_status" in {tool["name"] for tool in inspect("--method", "tools/list")["tools"]}
    call = ("--method", "tools/call", "--tool-name")
    handle = inspect(*call, "mac_submit", "--tool-arg", "preset=hello")["structuredContent"]["handle"]
    with repo.runner():
        wait_for(
            lambda: (
                inspect(*call, "mac_status", "--tool-arg", f"handle={handle}", "--tool-arg", "wait_s=30")[
                    "structuredContent"
                ]["status"]
                == "passed"
            ),
            90,
        )
