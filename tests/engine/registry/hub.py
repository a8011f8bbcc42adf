"""A hub of models on this machine: the few addresses that its library asks when it downloads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT_NAME = re.compile("[0-9a-f]{40}")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A running hub.

    Attributes:
        address: of its root.
        repositories: files by name, of each repository.
        asked: every path that was asked for.
        cut: names of files within which it resets the connection.
    """

    address: str
    repositories: Mapping[str, Mapping[str, bytes]]
    asked: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)


@contextlib.contextmanager
def running_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """A hub with these repositories; every commit that is asked for has these files, ``main`` is COMMIT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(self.path)
            found = self._answer(self.path.partition("?")[0])
            status, body, headers = found or (404, b"", {"X-Error-Code": "RepoNotFound"})
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if self.path.rpartition("/")[2] not in hub.cut:
                self.wfile.write(body)
                return
            self.wfile.write(body[: len(body) // 2])
            at_once = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            os.close(self.connection.detach())

        do_HEAD = do_GET

        def _answer(self, path: str) -> tuple[int, bytes, dict[str, str]] | None:
            as_json = {"Content-Type": "application/json"}
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
                files = repositories.get(match[1])
                if files is None:
                    return None
                entries = [
                    {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}  # noqa: S324
                    for name, body in files.items()
                ]
                sha = match[3] if COMMIT_NAME.fullmatch(match[3]) else COMMIT
                commit = {"_id": "1", "id": match[1], "sha": sha, "siblings": []}
                return 200, json.dumps(entries if match[2] == "tree" else commit).encode(), as_json
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
                body = repositories.get(match[1], {}).get(match[3])
                if body is None:
                    return None
                tag = hashlib.sha1(body).hexdigest()  # noqa: S324
                return 200, body, {"ETag": f'"{tag}"', "X-Repo-Commit": match[2]}
            return None

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = Hub(f"http://127.0.0.1:{server.server_port}", repositories)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
