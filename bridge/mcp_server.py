"""The MCP server of ``kakeya_mac mcp``: each tool runs one command with ``--json`` and returns its document.

No call takes 45 seconds, the limit of many agents: a job is submitted by one call and looked at by others,
under a handle that outlives this server. A cancelled call ends its processes. Text from the bus is
between the lines of `terminal.fenced` in texts, and below the keys listed as ``untrusted`` in documents.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import anyio
import anyio.lowlevel
import anyio.to_thread
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.server.mcpserver.resources import ResourceSecurity
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    RequestParams,
    ResourceLink,
    TextContent,
    ToolAnnotations,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ConfigDict, Field

from bridge import __version__
from bridge.proc import run_program
from bridge.protocol.refs import nonce_moment
from bridge.protocol.sanitize import clean, load_strict
from bridge.render.terminal import NOTICE, fenced
from bridge.render.terminal import document as terminal_document

_LOG = logging.getLogger(__name__)
# Seconds: what an agent allows a call, when a call ends its command, and how long that may then take to end
# git. What is left pays for the answer's way.
CALL_LIMIT_S = 45
_COMMAND_S = 40.0
_GRACE_S = 2.0
# Seconds that are left for the last look at a request.
_LAST_LOOK_S = 5.0
# Seconds between two looks at a request; the last one repeats.
_PAUSES_S = (0.5, 1.0, 2.0, 3.0, 5.0)
_MAX_OUTPUT = 64 * 1024**2
_MAX_REPORT = 2 * 1024**2
_MAX_TEXT = 6000  # characters of one value in a text
_MAX_LOG = 30_000  # characters of all logs in an answer
_PUSHED = re.compile(r"pushing request ([0-9]{8}t[0-9]{6}z[0-9a-f]{12}) ")

INSTRUCTIONS = f"""\
Runs vetted jobs (presets) on Macs that serve a git remote, and judges the evidence they return.
1. mac_presets: what can be asked for. 2. mac_submit: returns a handle at once. 3. mac_status with wait_s=45,
again and again until "terminal" is true: the job takes minutes, each call returns within {CALL_LIMIT_S} s.
4. mac_result or mac_logs. A handle stays valid in later sessions and on other machines. When something
fails, mac_doctor says what is missing. {NOTICE[0].upper()}{NOTICE[1:]}."""


class CommandAnswer(BaseModel):
    """The document of a command; keys that a version adds stay in it."""

    model_config = ConfigDict(extra="allow")
    status: str | None = Field(None, description="What was found; of a request, where it is or how it ended.")
    exit_code: int | None = Field(None, description="The exit code of the command.")
    untrusted: list[str] = Field([], description=f"Keys whose values others wrote: {NOTICE}.")


class RequestAnswer(CommandAnswer):
    """One request: how it was submitted, where it is, or how it ended."""

    handle: str | None = Field(None, description="Names the request in every later call and session.")
    terminal: bool | None = Field(None, description="Whether it has ended; else call mac_status again.")
    preset: str | None = None
    runner: str | None = Field(None, description="Who has it, or ran it.")
    reason: str | None = Field(None, description="Why it ended so; ok when it passed.")
    message: str | None = None
    violations: list[dict[str, Any]] = Field([], description="Broken rules of the gate: code, message, file.")
    evidence: list[dict[str, Any]] | None = Field(
        None, description="Of each report: verdict, claims, broken rules and figures."
    )
    verified: bool | None = Field(None, description="Whether a trusted runner signed the result.")
    ahead: int | None = Field(None, description="Older requests that wait, too.")
    expected_s: float | None = Field(None, description="Seconds it is likely to wait; null: not known.")
    eta_s: float | None = Field(None, description="Seconds until it is likely to end; null: not known.")
    notice: str | None = Field(None, description="Why the last look failed; the document is an older one.")


class PresetsAnswer(CommandAnswer):
    """The list of presets, or one of them with its parameters."""

    presets: list[dict[str, Any]] | None = Field(None, description="The list, without details.")
    name: str | None = None
    params: dict[str, Any] | None = Field(None, description="JSON Schema of the parameters of one preset.")


class LogsAnswer(CommandAnswer):
    """The end of what a job printed."""

    handle: str | None = None
    complete: bool = Field(description="Whether the job has ended.")
    logs: dict[str, str] = Field(description="Texts by file name.")
    truncated: bool = Field(description="Whether more was printed; `kakeya_mac fetch` saves everything.")


class ComparisonAnswer(CommandAnswer):
    """Whether one of two requests is faster, and how sure that is."""

    verdict: str | None = Field(None, description="faster, slower, no_difference or inconclusive.")


class ReportAnswer(CommandAnswer):
    """Finished requests for people to read."""

    handles: list[str] | None = None
    markdown: str | None = Field(None, description="The page without charts: GitHub's Markdown.")
    output: str | None = Field(None, description="Where the HTML page is; null: none was asked for.")


class DoctorAnswer(CommandAnswer):
    """What this machine needs, and whether that is there."""

    role: str
    checks: list[dict[str, Any]]


Handle = Annotated[str, Field(description="From mac_submit; also a branch name or a unique beginning.")]
Remote = Annotated[str | None, Field(description="Git URL of the bus; default: the checkout's origin.")]
Scalar = str | int | float | bool


class CommandFailed(Exception):
    """A command ended with an error document."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__("\n".join(fenced("error", document["message"])))
        self.document = document


async def run_command(*words: str, limit_s: float = _COMMAND_S) -> dict[str, Any]:
    """The JSON document of ``kakeya_mac WORDS --json``, whose processes end with this call.

    Raises:
        CommandFailed: Its document is an error, or it gave none within `limit_s` seconds.
    """
    cancelled = threading.Event()
    command = functools.partial(
        run_program,
        # Without the working directory among the modules: that is a checkout of others.
        [sys.executable, "-P", "-m", "bridge", words[0], "--json", *words[1:]],
        timeout_s=limit_s,
        env=os.environ,
        limit_bytes=_MAX_OUTPUT,
        guard=lambda: "cancelled" if cancelled.is_set() else None,
        grace_s=_GRACE_S,
    )

    async def watch() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        ended = await anyio.to_thread.run_sync(command)  # also when cancelled: its processes are gone then
        group.cancel_scope.cancel()
    said = ended.stderr.decode("utf-8", "replace")
    pushed = _PUSHED.search(said)
    if ended.stopped is not None:
        if pushed is not None:
            with anyio.CancelScope(shield=True):
                await _withdraw(pushed[1], [word for word in words if word.startswith("--remote=")])
        await anyio.lowlevel.checkpoint()
    lines = ended.stdout.decode("utf-8", "replace").splitlines()
    document: dict[str, Any] = json.loads(lines[-1]) if lines and not ended.timed_out else {}
    if not document:
        document = {"status": "error", "error": "InternalError", "exit_code": 70, "untrusted": ["message"]}
        document |= {"message": said[-2000:] or f"kakeya_mac {words[0]} printed nothing", "remedy": None}
        if ended.timed_out:
            message = f"kakeya_mac {words[0]} did not end within {limit_s:.0f} s and was stopped"
            remedy = "see whether the remote answers, and asks for no password"
            document |= {"error": "Timeout", "message": message, "remedy": remedy, "exit_code": 6}
            document |= {"untrusted": []}
    if document.get("status") == "error":
        if pushed is not None:  # it may have arrived
            document["handle"] = pushed[1]
        raise CommandFailed(document)
    return document


async def _withdraw(handle: str, remote: list[str]) -> None:
    try:
        await run_command("cancel", "--reason=the call of mac_submit was cancelled", *remote, "--", handle)
    except CommandFailed as failed:
        if failed.document["error"] != "UnknownHandle":  # else it never arrived
            _LOG.warning("cannot withdraw %s: %s", handle, failed)


def option(name: str, value: object) -> list[str]:
    """The word of an option; none for None."""
    return [] if value is None else [f"--{name}={value}"]


def next_call(tool: str, **arguments: Any) -> str:
    """A call as an agent writes it, without arguments that are None."""
    given = (f"{name}={json.dumps(value)}" for name, value in arguments.items() if value is not None)
    return f"{tool}({', '.join(given)})"


def answer(
    document: dict[str, Any], shown: Sequence[str], following: str, *links: ContentBlock
) -> CallToolResult:
    """A tool's answer: the document, and a self-contained text, with the keys `shown` and the next call."""
    lines = [*_lines(document, shown), f"next: {following}"]
    text = TextContent(type="text", text="\n".join(lines))
    is_error = document.get("status") == "error"
    return CallToolResult(content=[text, *links], structured_content=document, is_error=is_error)


def _lines(document: Mapping[str, Any], shown: Sequence[str]) -> Iterator[str]:
    untrusted = document.get("untrusted", [])
    told = [key for key in shown if document.get(key) not in (None, "", [], {})]
    for key in told:
        if key not in untrusted:
            yield f"{key}: {_text(key, document[key])}"
    words = [f"{key}: {_text(key, document[key])}" for key in told if key in untrusted]
    if words:
        yield from fenced("what others wrote", "\n".join(words))


def _text(key: str, value: Any) -> str:
    match key, value:
        case "markdown", str():
            return f"\n{value[:_MAX_LOG]}"
        case "logs", dict():  # bounded already
            return "".join(f"\n[{name}]\n{text}" for name, text in value.items())
        case "presets", list():
            text = "".join(f"\n- {each['name']}: {each['summary']}" for each in value)
        case "checks", list():
            rows = (f"\n- {each['level']} {each['name']}: {each['finding']}" for each in value)
            fixes = (f"\n  fix: {each['fix']}" if each["fix"] else "" for each in value)
            text = "".join(row + fix for row, fix in zip(rows, fixes, strict=True))
        case "violations", list():
            text = "".join(f"\n- {each['code']}: {each['message']}" for each in value)
        case "evidence", list():
            text = "".join(f"\n- {json.dumps(each, ensure_ascii=False)}" for each in value)
        case _:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} … ({len(text)} characters)"


_COMPARISON = (
    *("status", "exit_code", "handle", "against", "verdict", "ratio", "interval", "smallest_effect"),
    *("prompts", "preset", "runner", "params", "against_params"),
)
# What an answer's text says of a request, in this order.
_REQUEST = (
    *("status", "exit_code", "terminal", "handle", "notice", "reason", "verified", "authenticity"),
    *("ahead", "expected_s", "eta_s", "beat_age_s", "cancelling", "expired", "run_problem", "warnings"),
    *("preset", "params", "workload_sha", "runner", "on", "started_at", "message", "violations"),
    *("paired", "evidence", "tokens_per_s", "heartbeat", "phase_seconds", "runners", "signed"),
    "result_status",
)
_PRESET = ("name", "summary", "description", "evidence", "runs_repo_code", "timeout_s", "params", "models")
_ERROR = ("error", "exit_code", "handle", "message", "remedy")


def _after(document: Mapping[str, Any], remote: str | None) -> str:
    """The call that makes sense once this is known of a request."""
    handle = document.get("handle")
    if not document.get("terminal"):
        return next_call("mac_status", handle=handle, wait_s=CALL_LIMIT_S, remote=remote)
    if document.get("exit_code") == 7:
        return "ask the user: kakeya_mac runners trust --first; until then no trusted key vouches for this"
    if document.get("status") == "passed":
        return f"done; what it printed: {next_call('mac_logs', handle=handle, remote=remote)}"
    return next_call("mac_logs", handle=handle, remote=remote)


def failure(document: dict[str, Any], given: Mapping[str, Any]) -> CallToolResult:
    """The answer for a command that failed, with the call that helps; `given` are the tool's arguments."""
    handle, remote = document.get("handle") or given.get("handle"), given.get("remote")
    match document["error"]:
        case "PresetError":
            following = next_call("mac_presets")
        case "NoRunner":
            following = next_call("mac_presets", live=True, remote=remote)
        case "ParameterError":
            following = next_call("mac_presets", preset=given.get("preset"))
        case "WaitTimeout":
            following = next_call("mac_status", handle=handle, wait_s=CALL_LIMIT_S, remote=remote)
        case "UnknownHandle":
            following = "the call again, with the whole handle of mac_submit and the remote it was sent to"
        case "Timeout" if "handle" in document:  # of mac_submit
            following = next_call("mac_status", handle=handle, remote=remote)
        case _:
            following = next_call("mac_doctor", remote=remote)
    return answer(document, _ERROR, following)


Tool = Callable[..., Awaitable[CallToolResult]]
tools: list[tuple[Tool, str, ToolAnnotations]] = []


def tool(
    title: str, *, reads: bool = False, destroys: bool = False, idempotent: bool = True
) -> Callable[[Tool], Tool]:
    """Note a tool, whose failed commands become answers, and what it does. All tools talk to a remote."""
    hints = ToolAnnotations(
        title=title,
        read_only_hint=reads,
        destructive_hint=destroys,
        idempotent_hint=idempotent,
        open_world_hint=True,
    )

    def note(function: Tool) -> Tool:
        @functools.wraps(function)
        async def answered(**given: Any) -> CallToolResult:
            try:
                return await function(**given)
            except CommandFailed as failed:
                return failure(failed.document, given)

        tools.append((answered, title, hints))
        return answered

    return note


@tool("Presets: what can be run", reads=True)
async def mac_presets(
    preset: Annotated[str | None, Field(description="One preset, with its parameters; default: all.")] = None,
    live: Annotated[
        bool, Field(description="What live runners offer, in place of what is known here.")
    ] = False,
    remote: Remote = None,
) -> Annotated[CallToolResult, PresetsAnswer]:
    """List what can be asked for, or show one preset with its parameters: types, bounds, defaults."""
    asked_live = option("remote", remote or "") if live or remote else []
    document = await run_command("presets", *asked_live, *(["--", preset] if preset else []))
    if preset is not None:
        return answer(document, (*_PRESET, "presets"), next_call("mac_submit", preset=preset))
    details = {"description", "argv", "digest", "models", "params", "renamed"}
    document["presets"] = [
        {key: value for key, value in each.items() if key not in details} for each in document["presets"]
    ]
    return answer(
        document, ("runners", "presets"), 'mac_presets(preset="…") for its parameters, or mac_submit'
    )


@tool("Submit a job", idempotent=False)
async def mac_submit(  # noqa: PLR0917 - the client names its arguments
    preset: Annotated[str, Field(description="Its name, from mac_presets.")],
    params: Annotated[dict[str, Scalar] | None, Field(description="Its parameters by name.")] = None,
    ref: Annotated[str, Field(description="The commit to run: any git revision of this checkout.")] = "HEAD",
    on: Annotated[str | None, Field(description="Which Macs may run it, e.g. chip=M4*,memory>=64.")] = None,
    timeout_s: Annotated[int | None, Field(description="Limit of the job, seconds.")] = None,
    expires_s: Annotated[int | None, Field(description="Refused when no Mac took it for so long.")] = None,
    transport: Annotated[str | None, Field(description="auto, embedded or actions.")] = None,
    against: Annotated[str | None, Field(description="Paired run: a git revision to compare with.")] = None,
    against_params: Annotated[
        dict[str, Scalar] | None, Field(description="Paired run: other parameters to compare with.")
    ] = None,
    require_runner: Annotated[
        bool, Field(description="Push nothing where no live runner would take it; else it waits for one.")
    ] = False,
    remote: Remote = None,
) -> Annotated[CallToolResult, RequestAnswer]:
    """Push a request for a Mac to run one preset for one commit, and return its handle without waiting.

    With `against` or `against_params` both sides run by turns in one job; the result says which is faster.

    The commit is what is measured; uncommitted changes stay behind. Needs a git checkout. When this call is
    cancelled, the request is withdrawn.
    """
    words = ["--require-runner"] if require_runner else []
    for flag, given in (("param", params), ("against-params", against_params)):
        for name, given_value in (given or {}).items():
            value = str(given_value).lower() if isinstance(given_value, bool) else given_value
            words.append(f"--{flag}={name}={value}")
    options = {"ref": ref, "on": on, "timeout": timeout_s, "expires": expires_s, "transport": transport}
    options["against"] = against
    for name, asked in (options | {"remote": remote}).items():
        words += option(name, asked)
    document = await run_command("run", f"--preset={preset}", *words)
    return answer(document, _REQUEST, _after(document, remote))


@tool("Where a request is", reads=True)
async def mac_status(
    handle: Handle,
    context: Context[Any, Any],
    wait_s: Annotated[float, Field(ge=0, le=CALL_LIMIT_S, description="Wait so long for its end.")] = 0,
    remote: Remote = None,
) -> Annotated[CallToolResult, RequestAnswer]:
    """Where a request is, or how it ended; with wait_s this returns as soon as it has ended.

    Returns within 45 seconds whatever happens. Call it again until `terminal` is true.
    """
    began = time.monotonic()
    until = began + min(wait_s, _COMMAND_S - _LAST_LOOK_S)
    document: dict[str, Any] = {}
    for pause_s in itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1])):
        left_s = began + _COMMAND_S - time.monotonic()
        try:
            document = await run_command("status", *option("remote", remote), "--", handle, limit_s=left_s)
        except CommandFailed as failed:
            if not document or failed.document["error"] not in {"Timeout", "RemoteUnreachable"}:
                raise
            document["notice"] = "the remote did not answer the last look"
            break
        elapsed_s = time.monotonic() - began
        await context.report_progress(elapsed_s, max(wait_s, elapsed_s), _progress_text(document))
        if document["terminal"] or time.monotonic() >= until:
            break
        await anyio.sleep(min(pause_s, max(0.0, until - time.monotonic())))
    return answer(document, _REQUEST, _after(document, remote), *_report_link(document, remote))


def _progress_text(document: Mapping[str, Any]) -> str:
    """Where a request is, in words and numbers of ours alone."""
    heartbeat = document.get("heartbeat") or {}
    progress = heartbeat.get("progress") or {}
    steps = f", {progress['done']:d} of {progress['total']:d}" if progress.get("total") else ""
    elapsed = f", {heartbeat['elapsed_s']:.0f} s" if heartbeat.get("elapsed_s") else ""
    return f"{document.get('status')}{steps}{elapsed}"


@tool("The result of a request", reads=True)
async def mac_result(handle: Handle, remote: Remote = None) -> Annotated[CallToolResult, RequestAnswer]:
    """Fetch a finished request's result, check digests and signature, and judge its evidence."""
    document = await run_command("result", *option("remote", remote), "--", handle)
    return answer(document, _REQUEST, _after(document, remote), *_report_link(document, remote))


def _report_link(document: Mapping[str, Any], remote: str | None) -> Sequence[ContentBlock]:
    """The report of a finished request as a resource."""
    query = "" if remote is None else f"?remote={quote(remote, safe='')}"
    return [
        ResourceLink(
            type="resource_link",
            name=f"report of {document['handle']}",
            uri=f"kakeya-mac://results/{document['handle']}/report{query}",
            mime_type="application/json",
        )
        for file in document.get("files") or []
        if file["role"] == "evidence"
    ][:1]


@tool("What a job printed", reads=True)
async def mac_logs(
    handle: Handle,
    lines: Annotated[int, Field(ge=1, le=2000, description="How many of the last lines.")] = 100,
    remote: Remote = None,
) -> Annotated[CallToolResult, LogsAnswer]:
    """The last lines that a job printed: of its heartbeat while it runs, of its log afterwards."""
    document = await run_command("logs", *option("remote", remote), "--", handle)
    logs: dict[str, str] = document["logs"]
    share = _MAX_LOG // max(1, len(logs))
    document["logs"] = {name: "\n".join(text.splitlines()[-lines:])[-share:] for name, text in logs.items()}
    document["truncated"] = any(
        len(document["logs"][name]) < len(text.rstrip("\n")) for name, text in logs.items()
    )
    look = "mac_result" if document["complete"] else "mac_status"
    shown = ("handle", "complete", "truncated", "logs")
    return answer(document, shown, next_call(look, handle=document["handle"], remote=remote))


@tool("Cancel a request", destroys=True)
async def mac_cancel(
    handle: Handle,
    reason: Annotated[str | None, Field(max_length=500, description="Why, for the result.")] = None,
    remote: Remote = None,
) -> Annotated[CallToolResult, RequestAnswer]:
    """Withdraw a request that waits, or have its Mac stop the job."""
    document = await run_command("cancel", *option("reason", reason), *option("remote", remote), "--", handle)
    return answer(document, _REQUEST, next_call("mac_status", handle=document["handle"], remote=remote))


@tool("Compare two requests", reads=True)
async def mac_compare(
    handle: Handle, against: Handle, remote: Remote = None
) -> Annotated[CallToolResult, ComparisonAnswer]:
    """Compare the speed of two finished requests that agree in machine, weights and preset.

    Surer, because in one job: mac_submit with `against` or `against_params`.
    """
    document = await run_command("compare", *option("remote", remote), "--", handle, against)
    return answer(document, _COMPARISON, next_call("mac_result", handle=handle, remote=remote))


@tool("A page for people", idempotent=False)
async def mac_report(
    handles: Annotated[
        list[str],
        Field(min_length=1, max_length=8, description="Of finished requests; several are compared."),
    ],
    output: Annotated[
        str | None, Field(description="A new file, which gets the page as HTML with charts.")
    ] = None,
    remote: Remote = None,
) -> Annotated[CallToolResult, ReportAnswer]:
    """Show finished requests as Markdown for a pull request or an issue, and as one HTML file if asked."""
    if output is not None and os.path.lexists(output):
        message = f"the file {clean(output)[:200]!r} exists"
        refusal = {"status": "error", "error": "FileExists", "exit_code": 2, "message": message}
        again = next_call("mac_report", handles=handles, output="another path", remote=remote)
        return answer(refusal, _ERROR, again)
    words = [*option("output", output), *option("remote", remote)]
    document = await run_command("report", *words, "--", *handles)
    shown = ("status", "handles", "output", "markdown")
    return answer(document, shown, next_call("mac_result", handle=document["handles"][0], remote=remote))


@tool("What is missing here", reads=True)
async def mac_doctor(remote: Remote = None) -> Annotated[CallToolResult, DoctorAnswer]:
    """Check what a client needs: git, the remote, push rights, keys, live runners; with a fix for each."""
    document = await run_command("doctor", "--role=client", *option("remote", remote))
    following = "follow the fixes, then mac_doctor()" if document["exit_code"] else next_call("mac_presets")
    return answer(document, ("status", "role", "checks"), following)


async def read_report(handle: str, remote: str = "") -> str:
    """The report of a finished request below the key `report`: its runner wrote it."""
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
        words = [f"--output={folder}/result", *option("remote", remote or None)]
        try:
            document = await run_command("result", *words, "--", handle)
        except CommandFailed as failed:
            raise ResourceError(f"{failed}\nnext: {next_call('mac_status', handle=handle)}") from None
        for file in document.get("files") or []:
            if file["role"] == "evidence" and file["bytes"] <= _MAX_REPORT:
                return _report_document(document, Path(folder, "result", file["path"]).read_bytes())
    raise ResourceError(
        f"{handle} has no report of at most {_MAX_REPORT} bytes; in a shell: kakeya_mac fetch {handle} -o DIR"
    )


def _report_document(result: Mapping[str, Any], data: bytes) -> str:
    report: object
    try:
        report = load_strict(data, _MAX_REPORT)
    except ValueError:  # that of a rejected result may be anything
        report = data.decode("utf-8", "replace")
    values = {key: result.get(key) for key in ("handle", "status", "verified")} | {"report": report}
    return json.dumps(terminal_document(values, untrusted=("report",)))


class TaskParams(RequestParams):
    """Parameters of ``tasks/get``, ``tasks/update`` and ``tasks/cancel``."""

    task_id: str


class Tasks(Extension):
    """A submitted job as a task, for clients that declare the extension; the request is all of its state.

    A task's identifier is the handle, with the remote that the call named; so it outlives this server.
    Source: https://github.com/modelcontextprotocol/ext-tasks, specification/draft/tasks.md.
    """

    identifier = "io.modelcontextprotocol/tasks"

    def methods(self) -> Sequence[MethodBinding]:
        """``tasks/get``, ``tasks/update`` and ``tasks/cancel``, of revisions that know extensions."""
        handlers = {"get": self._get, "update": self._update, "cancel": self._cancel}
        versions = frozenset(MODERN_PROTOCOL_VERSIONS)
        return [MethodBinding(f"tasks/{name}", TaskParams, each, versions) for name, each in handlers.items()]

    def _is_declared(self, context: ServerRequestContext[Any, Any]) -> bool:
        capabilities = context.session.client_capabilities
        declared = (capabilities and capabilities.extensions) or {}
        return context.protocol_version in MODERN_PROTOCOL_VERSIONS and self.identifier in declared

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        """Turn the answer of ``mac_submit`` into a task, and name the next call where arguments are wrong."""
        if unknown := set(params.arguments or {}) - _ARGUMENTS.get(params.name, set(params.arguments or {})):
            said = f"{params.name} has no argument {' or '.join(sorted(map(ascii, unknown)))}"
            text = f"{said}; it takes {', '.join(sorted(_ARGUMENTS[params.name]))}\nnext: the call without it"
            return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)
        result = await call_next(ctx)
        if not isinstance(result, CallToolResult):
            return result
        if result.is_error:
            if result.structured_content is None:
                hint = (
                    "next: the call again with arguments of its schema; mac_presets() lists what can be run"
                )
                result.content.append(TextContent(type="text", text=hint))
        elif params.name == "mac_submit" and self._is_declared(ctx):
            document = result.structured_content or {}
            remote = (params.arguments or {}).get("remote")
            name = document["handle"] if remote is None else f"{document['handle']}@{remote}"
            return _task(name, "working", f"queued as {document['handle']}") | {"resultType": "task"}
        return result

    def _require(self, context: ServerRequestContext[Any, Any]) -> None:
        if not self._is_declared(context):
            needed: dict[str, Any] = {"requiredCapabilities": {"extensions": {self.identifier: {}}}}
            raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, "Missing required client capability", needed)

    async def _command(self, verb: str, task_id: str) -> dict[str, Any]:
        handle, _, remote = task_id.partition("@")
        try:
            return await run_command(verb, *option("remote", remote or None), "--", handle)
        except CommandFailed as failed:
            unknown = failed.document["error"] == "UnknownHandle"
            raise MCPError(INVALID_PARAMS if unknown else INTERNAL_ERROR, str(failed)) from None

    async def _get(self, context: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        self._require(context)
        document = await self._command("status", params.task_id)
        if not document["terminal"]:
            return _task(params.task_id, "working", _progress_text(document))
        if document["status"] == "cancelled":
            return _task(params.task_id, "cancelled", "the request was cancelled")
        remote = params.task_id.partition("@")[2] or None
        links = _report_link(document, remote)
        result = answer(document, _REQUEST, _after(document, remote), *links)
        wire = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        return _task(params.task_id, "completed", f"{document['status']}") | {"result": wire}

    async def _update(self, context: ServerRequestContext[Any, Any], _params: TaskParams) -> HandlerResult:
        self._require(context)  # no task of ours asks for input
        return {}

    async def _cancel(self, context: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        self._require(context)
        await self._command("cancel", params.task_id)
        return {}


# The SDK ignores an argument that a tool does not have, such as a misspelt `remote`.
_ARGUMENTS = {
    function.__name__: set(inspect.signature(function).parameters) - {"context"} for function, _, _ in tools
}


def _task(task_id: str, status: str, message: str) -> dict[str, Any]:
    created = nonce_moment(task_id.partition("@")[0])
    return {
        "taskId": task_id,
        "status": status,
        "statusMessage": message,
        "createdAt": created.isoformat(),
        "lastUpdatedAt": datetime.now(UTC).isoformat(timespec="seconds"),
        "ttlMs": None,
        "pollIntervalMs": 5000,
    }


async def read_presets() -> str:
    """All presets with their parameters, as JSON."""
    return json.dumps(await run_command("presets"))


async def read_preset(name: str) -> str:
    """One preset with its parameters, as JSON."""
    try:
        return json.dumps(await run_command("presets", "--", name))
    except CommandFailed as failed:
        raise ResourceNotFoundError(f"{failed}\nnext: {next_call('mac_presets')}") from None


def make_server() -> MCPServer:
    """The server with all tools and resources."""
    server = MCPServer(
        "kakeya-mac",
        title="kakeya-mac",
        version=__version__,
        instructions=INSTRUCTIONS,
        extensions=[Tasks()],
        log_level="WARNING",
    )
    for function, title, hints in tools:
        server.add_tool(function, title=title, annotations=hints)
    # A remote may be a folder.
    security = ResourceSecurity(exempt_params={"remote"})
    for uri, name, read in (
        ("kakeya-mac://presets", "presets", read_presets),
        ("kakeya-mac://presets/{name}", "preset", read_preset),
        ("kakeya-mac://results/{handle}/report{?remote}", "report", read_report),
    ):
        server.resource(uri, name=name, mime_type="application/json", security=security)(read)
    return server


def serve() -> None:
    """Serve standard input and output until the client closes them."""
    make_server().run("stdio")
