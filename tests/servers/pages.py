"""A web server for tests that answers with JSON documents by path, and 404 elsewhere."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class PageServer:
    """The server's state; tests set `pages` and read `asked`."""

    url: str
    pages: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # method, headers


@contextlib.contextmanager
def page_server() -> Iterator[PageServer]:
    """A server that runs while the context is open."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def _answer(self, method: str) -> None:
            state.asked.append((method, {name.lower(): value for name, value in self.headers.items()}))
            found = state.pages.get(self.path.partition("?")[0])
            body = json.dumps(found or {"message": "not found"}).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is said."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = PageServer(f"http://127.0.0.1:{httpd.server_address[1]}")
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
