"""A GitHub server for tests: a real HTTP server on this machine that speaks the JSON GitHub documents.

It keeps runs, jobs and logs, starts runs on dispatch and re-run, stops them on cancel, checks the
token, and misbehaves when it is told to (`Fault`).
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "ghs_0123456789abcdefghijklmnopqrstuvwxyz"
SLUG = "octo/hello"


@dataclass
class Fault:
    """How a call goes wrong, instead of being answered.

    Attributes:
        path: Calls whose path holds this.
        status: The answer's status; 0: the right answer, spoilt by the rest.
        headers: More headers.
        message: What the answer says.
        times: How many calls it spoils.
        cut: The body breaks off after so many bytes, its announced length does not.
        pause_s: Seconds before the answer.
        body: Sent in place of the answer's body.
        silent: The call takes effect, and the connection ends without an answer.
    """

    path: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "no"
    times: int = 1
    cut: int | None = None
    pause_s: float = 0.0
    body: bytes | None = None
    silent: bool = False


@dataclass
class Call:
    """A request as it came."""

    method: str
    path: str
    query: dict[str, str]
    token: str | None
    body: Any


@dataclass
class GitHubServer:
    """The server's state; tests set it and read it.

    Attributes:
        api: Base address.
        runs: By id, as the API writes them.
        jobs: By run id.
        logs: By job id.
        calls: Every request so far, in order.
        faults: What goes wrong next.
        token: The one that counts; None: none is asked for.
        on_dispatch: Is told of each dispatch: workflow, ref, inputs.
        gives_run_id: Whether a dispatch is answered with its run.
        writes_actions: Whether the token may write actions.
        lists_workflows: Whether the runs of one workflow can be listed; not on Gitea.
        comments: On its one pull request, the oldest first.
    """

    api: str
    runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    jobs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    logs: dict[int, bytes] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    token: str | None = TOKEN
    private: bool = True
    default_branch: str = "main"
    permissions: dict[str, bool] | None = field(default_factory=lambda: {"push": True, "pull": True})
    on_dispatch: Callable[[str, str, dict[str, str]], None] = lambda *_: None
    gives_run_id: bool = True
    writes_actions: bool = True
    lists_workflows: bool = True
    comments: list[dict[str, Any]] = field(default_factory=list)
    log_host: str = ""

    @property
    def environ(self) -> dict[str, str]:
        """Variables with which the product finds this server."""
        return {
            "KAKEYA_GITHUB_API": self.api,
            "KAKEYA_GITHUB_REPOSITORY": SLUG,
            "KAKEYA_GITHUB_TOKEN": TOKEN,
        }

    def add_run(self, **changes: Any) -> int:
        """Another run, queued by a push unless it is said otherwise; its id."""
        number = max(self.runs, default=1000) + 1
        self.runs[number] = {
            "id": number,
            "name": "mac-bridge",
            "display_title": "a commit's subject",
            "node_id": "x",
            "status": "queued",
            "conclusion": None,
            "html_url": f"https://github.com/{SLUG}/actions/runs/{number}",
            "head_sha": "0" * 40,
            "head_branch": "main",
            "event": "push",
            "path": ".github/workflows/mac-bridge.yaml",
            "run_attempt": 1,
            "created_at": "2026-03-01T12:00:00Z",
            **changes,
        }
        return number

    def add_job(self, run_id: int, name: str, *steps: tuple[str, str], **changes: Any) -> int:
        """Another job of a run, with steps as (name, status); its id."""
        number = run_id * 100 + len(self.jobs.get(run_id, ())) + 1
        job = {
            "id": number,
            "run_id": run_id,
            "name": name,
            "status": "in_progress" if steps else "queued",
            "conclusion": None,
            "started_at": "2026-03-01T12:00:01Z",
            "html_url": f"https://github.com/{SLUG}/actions/runs/{run_id}/job/{number}",
            "runner_name": "studio" if steps else "",
            "labels": ["self-hosted", "macOS"],
            "steps": [
                {"name": step, "number": i, "status": status, "conclusion": None}
                for i, (step, status) in enumerate(steps, 1)
            ],
            **changes,
        }
        self.jobs.setdefault(run_id, []).append(job)
        return number

    def of(self, method: str, part: str) -> list[Call]:
        """Calls of a method whose path holds `part`."""
        return [call for call in self.calls if call.method == method and part in call.path]


@contextlib.contextmanager
def github_server() -> Iterator[GitHubServer]:
    """A server that runs while the context is open."""
    httpd = _Httpd(("127.0.0.1", 0), _Handler)
    state = GitHubServer(f"http://127.0.0.1:{httpd.server_address[1]}")
    httpd.state = state
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Httpd(ThreadingHTTPServer):
    daemon_threads = True
    state: GitHubServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PATCH(self) -> None:
        self._serve("PATCH")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is said."""

    @property
    def state(self) -> GitHubServer:
        assert isinstance(self.server, _Httpd)
        return self.server.state

    def _serve(self, method: str) -> None:
        state, parts = self.state, urlsplit(self.path)
        length = int(self.headers.get("content-length") or 0)
        data = self.rfile.read(length) if length else b""
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        bearer = self.headers.get("authorization", "").removeprefix("Bearer ") or None
        state.calls.append(Call(method, parts.path, query, bearer, json.loads(data) if data else None))
        fault = next((f for f in state.faults if f.times > 0 and f.path in parts.path), None)
        if fault is not None:
            fault.times -= 1
            time.sleep(fault.pause_s)
            if fault.status:
                body = fault.body if fault.body is not None else _json({"message": fault.message})
                self._send(fault.status, body, fault.headers, fault)
                return
        try:
            if parts.path.startswith("/blob/"):
                self._send(200, state.logs[int(parts.path.rpartition("/")[2])], {}, fault)
                return
            status, document, headers = self._answer(method, parts.path, query, state.calls[-1].body)
        except _Refused as refusal:
            status, document, headers = refusal.status, {"message": str(refusal)}, {}
        body = b"" if document is None else _json(document)
        if fault is not None and fault.body is not None:
            body = fault.body
        self._send(status, body, {**state.headers, **headers}, fault)

    def _send(self, status: int, body: bytes, headers: dict[str, str], fault: Fault | None) -> None:
        if fault is not None and fault.silent:
            self.close_connection = True
            return
        cut = None if fault is None else fault.cut
        lines = {"content-type": "application/json; charset=utf-8", **headers}
        if status != 204:
            lines["content-length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        phrase = self.responses.get(status, ("Said",))[0]
        start = f"{self.protocol_version} {status} {phrase}\r\n{head}\r\n".encode("latin-1")
        with contextlib.suppress(ConnectionError):
            self.wfile.write(start + (body if cut is None else body[:cut]))
        if cut is not None:
            self.close_connection = True

    def _answer(
        self, method: str, path: str, query: dict[str, str], body: Any
    ) -> tuple[int, Any, dict[str, str]]:
        if self.state.token not in (None, self.state.calls[-1].token):
            raise _Refused(401, "Bad credentials")
        root = f"/repos/{SLUG}"
        if not path.startswith(root):
            raise _Refused(404, "Not Found")
        place = path.removeprefix(root)
        if method == "GET":
            return self._read(place, query)
        return self._change(place, body)

    def _read(self, place: str, query: dict[str, str]) -> tuple[int, Any, dict[str, str]]:
        state = self.state
        if place == "":
            document = {
                "full_name": SLUG,
                "private": state.private,
                "visibility": "private" if state.private else "public",
                "default_branch": state.default_branch,
                "fork": False,
            }
            return 200, {**document, **({"permissions": state.permissions} if state.permissions else {})}, {}
        of_workflow = state.lists_workflows and re.fullmatch(r"/actions/workflows/[^/]+/runs", place)
        if place == "/actions/runs" or of_workflow:
            wanted = [run for run in sorted(state.runs.values(), key=lambda r: -r["id"]) if _fits(run, query)]
            rows = wanted[: int(query.get("per_page", 30))]
            return 200, {"total_count": len(wanted), "workflow_runs": rows}, {}
        if found := re.fullmatch(r"/actions/runs/(\d+)(/jobs)?", place):
            number = int(found[1])
            if number not in state.runs:
                raise _Refused(404, "Not Found")
            if found[2] == "/jobs":
                rows = state.jobs.get(number, [])
                return 200, {"total_count": len(rows), "jobs": rows}, {}
            return 200, state.runs[number], {}
        if re.fullmatch(r"/issues/\d+/comments", place):
            size, page = int(query.get("per_page", 30)), int(query.get("page", 1))
            return 200, state.comments[(page - 1) * size : page * size], {}
        if found := re.fullmatch(r"/actions/jobs/(\d+)/logs", place):
            if int(found[1]) not in state.logs:
                raise _Refused(404, "Not Found")
            return 302, None, {"location": f"{state.log_host or state.api}/blob/{found[1]}"}
        raise _Refused(404, "Not Found")

    def _change(self, place: str, body: Any) -> tuple[int, Any, dict[str, str]]:
        state = self.state
        if not state.writes_actions:
            raise _Refused(403, "Resource not accessible by integration")
        if found := re.fullmatch(r"/actions/runs/(\d+)/cancel", place):
            run = state.runs.get(int(found[1]))
            if run is None:
                raise _Refused(404, "Not Found")
            if run["status"] == "completed":
                raise _Refused(409, "Cannot cancel a workflow run that is completed.")
            run.update(status="completed", conclusion="cancelled")
            return 202, {}, {}
        if found := re.fullmatch(r"/issues/(\d+)/comments", place):
            number = len(state.comments) + 1
            url = f"https://github.com/{SLUG}/pull/{found[1]}#issuecomment-{number}"
            author = {"login": "github-actions[bot]", "type": "Bot"}
            comment = {"id": number, "html_url": url, "user": author, "author_association": "NONE"}
            state.comments.append(comment | {"body": body["body"]})
            return 201, state.comments[-1], {}
        if found := re.fullmatch(r"/issues/comments/(\d+)", place):
            state.comments[int(found[1]) - 1]["body"] = body["body"]
            return 200, state.comments[int(found[1]) - 1], {}
        if found := re.fullmatch(r"/actions/workflows/([^/]+)/dispatches", place):
            if not state.gives_run_id and "return_run_details" in body:
                raise _Refused(422, '"return_run_details" is not a permitted key.')
            number = state.add_run(
                event="workflow_dispatch",
                head_branch=body["ref"],
                display_title=body["inputs"].get("branch", "mac-bridge"),
            )
            state.on_dispatch(found[1], body["ref"], body["inputs"])
            if not body.get("return_run_details"):
                return 204, None, {}
            return 200, {"workflow_run_id": number, "run_url": "…", "html_url": "…"}, {}
        raise _Refused(404, "Not Found")


def _fits(run: dict[str, Any], query: dict[str, str]) -> bool:
    names = {"head_sha": "head_sha", "branch": "head_branch", "event": "event"}
    if any(name in query and run[key] != query[name] for name, key in names.items()):
        return False
    return "status" not in query or query["status"] in (run["status"], run["conclusion"])


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()
