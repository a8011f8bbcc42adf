"""One HTTP request and its answer. Knows nothing of GitHub.

A `Transport` sends a request and gives whatever the server answers; failing to get an answer is one error.
The one that the product uses bounds the time and the size of an answer, follows no redirect (who does decides
what goes along), and takes credentials from nowhere but the request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bridge import __version__

MAX_BYTES = 32 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 20.0
_CHUNK = 1 << 16


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
    """No complete answer came: no connection, a timeout, a body that broke off or is too large."""


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
        clock: Monotonic seconds.
    """

    def __init__(self, *, limit_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        import requests

        self._limit_bytes = limit_bytes
        self._clock = clock
        self._session = requests.Session()
        # Else a .netrc would put credentials of its own in the place of the token.
        self._session.trust_env = False

    def send(self, request: Request, timeout_s: float) -> Response:
        """See `Transport`."""
        import requests

        deadline = self._clock() + timeout_s
        try:
            with self._session.request(
                request.method,
                request.url,
                headers={"User-Agent": f"kakeya-mac/{__version__}", **request.headers},
                data=request.body,
                timeout=(min(CONNECT_TIMEOUT_S, timeout_s), min(READ_TIMEOUT_S, timeout_s)),
                allow_redirects=False,
                stream=True,
                proxies=requests.utils.get_environ_proxies(request.url),
                verify=os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True,
            ) as answer:
                body = self._read(answer.iter_content(_CHUNK), deadline)
                headers = {name.lower(): value for name, value in answer.headers.items()}
                return Response(answer.status_code, headers, body)
        except requests.RequestException as error:
            raise NoAnswer(_why(error)) from None

    def _read(self, chunks: object, deadline: float) -> bytes:
        body = bytearray()
        for chunk in chunks:  # type: ignore[attr-defined]
            body += chunk
            if len(body) > self._limit_bytes:
                raise NoAnswer(f"the answer is longer than {self._limit_bytes} bytes")
            if self._clock() > deadline:
                raise NoAnswer("the answer took too long")
        return bytes(body)


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
    return f"the request could not be made ({type(error).__name__})"
