"""One HTTP request and its answer. Knows nothing of GitHub.

A `Transport` sends a request and gives whatever the server answers; failing to get an answer is one error.
The one that the product uses bounds the time and the size of an answer, follows no redirect (who does decides
what goes along), and takes credentials from nowhere but the request.

Each byte that comes renews a socket's timeout, so a server that drips would hold a call for ever. So a call
has a thread of its own, which is left behind when its time is up.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from bridge import __version__

if TYPE_CHECKING:
    import requests

MAX_BYTES = 32 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 20.0
_CHUNK = 1 << 16
# Calls left behind that may still be under way; more are not begun beside them.
_MOST_LEFT = 8
_LATE = "no answer came in time"


@dataclass(frozen=True)
class Request:
    """What is sent.

    Attributes:
        method: ``GET``, ``POST``, ….
        url: Absolute.
        headers: By name; they may hold a token, so they are in no representation.
        body: Bytes to send; None: none.
    """

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Response:
    """What came back.

    Attributes:
        status: HTTP status code.
        headers: By lower-case name.
        body: All of it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


class NoAnswer(Exception):
    """No complete answer came: no connection, a timeout, a body that broke off or is too large.

    Args:
        why: One clause.
        status: What the server had answered before; None: nothing.
    """

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


class Transport(Protocol):
    """Sends requests."""

    def send(self, request: Request, timeout_s: float) -> Response:
        """The answer to a request, whatever its status.

        Args:
            request: What to send.
            timeout_s: Seconds for all of it.

        Raises:
            NoAnswer: None came, or not all of one.
        """


class Web:
    """A `Transport` over the network.

    Args:
        limit_bytes: A longer answer is an error.
    """

    def __init__(self, *, limit_bytes: int = MAX_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._session = _session()
        self._left: list[threading.Thread] = []

    def send(self, request: Request, timeout_s: float) -> Response:
        """See `Transport`."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= _MOST_LEFT:
            raise NoAnswer("earlier calls still hang")
        call = _Call(self._session, request, timeout_s, self._limit_bytes)
        thread = threading.Thread(target=call.make, daemon=True)
        thread.start()
        try:
            return call.answer.result(timeout_s)
        except TimeoutError:
            self._left.append(thread)
            self._session = _session()  # the thread has the other one
            raise NoAnswer(_LATE, call.status) from None


class _Call:
    """One request under way.

    Args:
        session: Sends it.
        request: Which.
        timeout_s: After so many seconds nobody waits for its answer any more.
        limit_bytes: A longer answer is an error.
    """

    def __init__(
        self, session: requests.Session, request: Request, timeout_s: float, limit_bytes: int
    ) -> None:
        self.answer: Future[Response] = Future()
        self.status: int | None = None
        self._session = session
        self._request = request
        self._timeout_s = timeout_s
        self._limit_bytes = limit_bytes

    def make(self) -> None:
        """Set `answer`, to a response or to what went wrong."""
        from urllib3.exceptions import HTTPError

        try:
            self.answer.set_result(self._made())
        except (OSError, ValueError, HTTPError) as error:  # the library's own, and those that it lets through
            self.answer.set_exception(NoAnswer(_why(error), self.status))
        except BaseException as error:
            self.answer.set_exception(error)

    def _made(self) -> Response:
        import requests

        deadline, request = time.monotonic() + self._timeout_s, self._request
        with self._session.request(
            request.method,
            request.url,
            headers={"User-Agent": f"kakeya-mac/{__version__}", **request.headers},
            data=request.body,
            timeout=(min(CONNECT_TIMEOUT_S, self._timeout_s), min(READ_TIMEOUT_S, self._timeout_s)),
            allow_redirects=False,
            stream=True,
            proxies=requests.utils.get_environ_proxies(request.url),
            verify=os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True,
        ) as answer:
            self.status = answer.status_code
            headers = {name.lower(): value for name, value in answer.headers.items()}
            body = self._read(answer.iter_content(_CHUNK), deadline)
            return Response(answer.status_code, headers, body)

    def _read(self, chunks: Iterable[bytes], deadline: float) -> bytes:
        body = bytearray()
        for chunk in chunks:
            body += chunk
            if len(body) > self._limit_bytes:
                raise NoAnswer(f"the answer is longer than {self._limit_bytes} bytes", self.status)
            if time.monotonic() > deadline:
                raise NoAnswer(_LATE, self.status)
        return bytes(body)


def _session() -> requests.Session:
    import requests

    session = requests.Session()
    # Else a .netrc would put credentials of its own in the place of the token.
    session.trust_env = False
    return session


def _why(error: Exception) -> str:
    """What went wrong, in words of our own: the library's repeat the address, and with it what is in it."""
    import requests

    if isinstance(error, requests.exceptions.SSLError):
        return "the server's certificate is not trusted here (REQUESTS_CA_BUNDLE names other authorities)"
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy did not let it through"
    if isinstance(error, requests.exceptions.Timeout):
        return "no answer came in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the answer broke off"
    if isinstance(error, requests.exceptions.ConnectionError):
        return "there is no connection, or it broke off"
    if isinstance(error, ValueError):
        return "its address is none that can be asked"
    return f"the request could not be made ({type(error).__name__})"
