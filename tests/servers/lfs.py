"""A server of Git LFS for tests: a real HTTP server that speaks the batch API to the real git-lfs.

https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class LfsServer:
    """The server's state.

    Attributes:
        endpoint: What a policy names.
        objects: By hash.
        sent: What is sent in place of an object, by hash: a server that lies.
        password: Of anybody; None: none is asked for.
        calls: Paths, in order.
        host: Where the batch's answer says that objects lie; empty: here.
    """

    endpoint: str
    objects: dict[str, bytes] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    password: str | None = None
    calls: list[str] = field(default_factory=list)
    host: str = ""

    def add(self, data: bytes) -> str:
        """Another object; its pointer."""
        oid = hashlib.sha256(data).hexdigest()
        self.objects[oid] = data
        return pointer(oid, len(data))


def pointer(oid: str, size: int) -> str:
    """The file that git keeps in place of an object."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n"


@contextlib.contextmanager
def lfs_server() -> Iterator[LfsServer]:
    """A server that runs while the context is open."""
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    state = LfsServer(f"http://127.0.0.1:{httpd.server_address[1]}/team/workload.git/info/lfs")
    httpd.state = state  # type: ignore[attr-defined]
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def state(self) -> LfsServer:
        return self.server.state  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is said."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.state.calls.append(self.path)
        if not self._may():
            return
        rows = [self._row(each) for each in body["objects"]]
        self._send(200, json.dumps({"transfer": "basic", "objects": rows}).encode())

    def do_GET(self) -> None:
        self.state.calls.append(self.path)
        oid = self.path.rpartition("/")[2]
        data = self.state.sent.get(oid, self.state.objects.get(oid))
        if data is None:
            self._send(404, b"{}")
        else:
            self._send(200, data, "application/octet-stream")

    def _may(self) -> bool:
        password = self.state.password
        if password is None:
            return True
        given = self.headers.get("authorization", "").removeprefix("Basic ")
        if base64.b64decode(given).decode().partition(":")[2] == password:
            return True
        self._send(401, b"{}", headers={"www-authenticate": 'Basic realm="lfs"'})
        return False

    def _row(self, asked: dict[str, Any]) -> dict[str, Any]:
        oid, size = asked["oid"], asked["size"]
        if oid not in self.state.objects and oid not in self.state.sent:
            return {"oid": oid, "size": size, "error": {"code": 404, "message": "Object does not exist"}}
        href = f"{self.state.host or self.state.endpoint}/objects/{oid}"
        return {"oid": oid, "size": size, "authenticated": True, "actions": {"download": {"href": href}}}

    def _send(
        self,
        status: int,
        body: bytes,
        kind: str = "application/vnd.git-lfs+json",
        headers: dict[str, str] | None = None,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in {
                "content-type": kind,
                "content-length": str(len(body)),
                **(headers or {}),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
