"""Which GitHub repository a remote's address means, where its API is, and the token to call it with.

No error and no representation shows a token.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlsplit

from bridge.errors import ApiError
from bridge.protocol import refs

HOST = "github.com"
API = "https://api.github.com"
TOKEN_VARIABLES = ("KAKEYA_GITHUB_TOKEN", "GITHUB_TOKEN", "GH_TOKEN")
# GitHub's documented token formats tell a token in a remote's address from a password.
_TOKEN_PREFIXES = ("ghp_", "gho_", "ghu_", "ghs_", "github_pat_")
_TOKEN_USERS = ("x-access-token", "oauth2")
_OWNER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,99})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
# Other names of the same host; the first is for networks that block SSH.
_ALIASES = {"ssh.github.com": HOST, "www.github.com": HOST}


@dataclass(frozen=True)
class Repository:
    """A repository on a GitHub server; `name` has no ``.git``, the base addresses no final slash."""

    owner: str
    name: str
    api: str = API
    web: str = f"https://{HOST}"

    @property
    def slug(self) -> str:
        """``owner/name``."""
        return f"{self.owner}/{self.name}"

    @property
    def url(self) -> str:
        """Its page."""
        return f"{self.web}/{self.slug}"


@dataclass(frozen=True)
class Token:
    """A token and where it was found, for people."""

    value: str = field(repr=False)
    source: str


def repository_of(address: str, environ: Mapping[str, str] | None = None) -> Repository | None:
    """The repository that a remote's address means; None: it is on no known GitHub server.

    Known are ``github.com``, the server of the workflow this runs in (``GITHUB_SERVER_URL``,
    ``GITHUB_API_URL``), and, where ``KAKEYA_GITHUB_API`` names an API, the remote's own host.

    Raises:
        ApiError: The API's address is neither HTTPS nor on this machine.
    """
    environ = os.environ if environ is None else environ
    given = environ.get("KAKEYA_GITHUB_API", "").strip()
    slug = environ.get("KAKEYA_GITHUB_REPOSITORY", "").strip()
    if given and slug:
        # The remote is a mirror of the repository, or a folder on this machine.
        return _made(slug, checked_api(given), f"https://{HOST}")
    if refs.is_local(address):
        return None
    host, _, path = refs.audience_of(address).partition("/")
    server = host.partition(":")[0]
    server = _ALIASES.get(server, server)
    if given:
        return _made(path, checked_api(given), f"https://{server}")
    if server == HOST:
        return _made(path, API, f"https://{HOST}")
    ours = environ.get("GITHUB_SERVER_URL", "").rstrip("/")
    if ours and server == (urlsplit(ours).hostname or "").lower():
        return _made(path, checked_api(environ.get("GITHUB_API_URL") or f"{ours}/api/v3"), ours)
    return None


def checked_api(address: str) -> str:
    """The base address of an API to which a token may be sent: over TLS, or on this machine.

    Raises:
        ApiError: The address is anything else.
    """
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port  # either may raise
        fits = parts.scheme == "https" or (parts.scheme == "http" and _is_this_machine(host))
    except ValueError:
        fits, host = False, None
    if not (fits and host) or set("@?#") & set(address):
        raise ApiError(
            "the API address is not one that a token may be sent to",
            "set KAKEYA_GITHUB_API to an address like https://github.example.org/api/v3, without credentials",
        )
    return address.rstrip("/")


def find_token(environ: Mapping[str, str] | None = None, *, address: str | None = None) -> Token | None:
    """The token to use: that of a variable, else that in a remote's address; None: there is none.

    Raises:
        ApiError: A variable holds characters that no token has.
    """
    environ = os.environ if environ is None else environ
    for name in TOKEN_VARIABLES:
        if value := environ.get(name, "").strip():
            return Token(_checked_token(value, name), name)
    return None if address is None else _token_in(address)


def with_token(address: str, environ: Mapping[str, str]) -> str:
    """A remote's address with the workflow run's token in it, for git alone and never to be shown.

    The token is added only when the address is on the server that issued it and names no user.
    """
    token = environ.get("KAKEYA_GITHUB_TOKEN")
    if not token:
        return address
    try:
        server, own = urlsplit(environ.get("GITHUB_SERVER_URL") or f"https://{HOST}"), urlsplit(address)
    except ValueError:
        return address
    is_served = (own.scheme, own.netloc.lower()) == (server.scheme, server.netloc.lower())
    if not is_served or own.scheme not in ("https", "http") or "@" in own.netloc:
        return address
    return address.replace("://", f"://x-access-token:{quote(token, safe='')}@", 1)


def _token_in(address: str) -> Token | None:
    try:
        parts = urlsplit(address)
    except ValueError:
        return None
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if user.startswith(_TOKEN_PREFIXES):
        password = user
    is_token = password.startswith(_TOKEN_PREFIXES) or (password and user in _TOKEN_USERS)
    if parts.scheme not in ("https", "http") or not is_token:
        return None
    source = "the remote's address"
    return Token(_checked_token(password, source), source)


def _checked_token(value: str, source: str) -> str:
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ApiError(
            f"the value of {source} is not a token: it has blanks or special characters",
            "set it to the token alone, without quotes or line ends",
        )
    return value


def _is_this_machine(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _made(path: str, api: str, web: str) -> Repository | None:
    owner, _, name = path.partition("/")
    fits = _OWNER.fullmatch(owner) and _NAME.fullmatch(name) and name not in (".", "..")
    return Repository(owner, name, api, web) if fits else None
