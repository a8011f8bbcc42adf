"""A hub of models on this machine: the few addresses that its library asks when it downloads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A running hub.

    Attributes:
        address: of its root.
        repositories: files by name, of each repository.
        asked: every path that was asked for.
    """

    address: str
    repositories: Mapping[str, Mapping[str, bytes]]
    asked: list[str] = field(default_factory=list)


@contextlib.contextmanager
def running_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """A hub with these repositories, each with one commit."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(self.path)
            found = self._answer(self.path.partition("?")[0])
            status, body, headers = found or (404, b"", {"X-Error-Code": "RepoNotFound"})
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def _answer(self, path: str) -> tuple[int, bytes, dict[str, str]] | None:
            as_json = {"Content-Type": "application/json"}
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/[^/]+", path):
                files = repositories.get(match[1])
                if files is None:
                    return None
                entries = [
                    {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}  # noqa: S324
                    for name, body in files.items()
                ]
                commit = {"_id": "1", "id": match[1], "sha": COMMIT, "siblings": []}
                return 200, json.dumps(entries if match[2] == "tree" else commit).encode(), as_json
            if match := re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path):
                body = repositories.get(match[1], {}).get(match[2])
                if body is None:
                    return None
                tag = hashlib.sha1(body).hexdigest()  # noqa: S324
                return 200, body, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
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
