"""Which GitHub repository a remote's address means, and where its API answers."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from bridge.errors import ApiError
from bridge.protocol import refs

HOST = "github.com"
API = "https://api.github.com"
_OWNER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,99})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
# Both lead to the same repositories, for networks that let no SSH through.
_ALIASES = {"ssh.github.com": HOST, "www.github.com": HOST}


@dataclass(frozen=True)
class Repository:
    """A repository on a GitHub server.

    Attributes:
        owner: User or organisation.
        name: Without ``.git``.
        api: Base address of the API, without a slash at its end.
        web: Base address of the web pages, likewise.
    """

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


def repository_of(address: str, environ: Mapping[str, str] | None = None) -> Repository | None:
    """The repository that a remote's address means; None: it is on no GitHub server that is known here.

    Known are ``github.com``, the server of the workflow this runs in (``GITHUB_SERVER_URL``,
    ``GITHUB_API_URL``), and, where ``KAKEYA_GITHUB_API`` names an API, the remote's own host.

    Args:
        address: Any address that git takes; credentials in it are ignored.
        environ: Variables; None: the process's own.

    Raises:
        ApiError: The API's address is not one to which a token may be sent.
    """
    environ = os.environ if environ is None else environ
    given = environ.get("KAKEYA_GITHUB_API", "").strip()
    slug = environ.get("KAKEYA_GITHUB_REPOSITORY", "").strip()
    if given and slug:
        # A remote that is only a mirror of the repository, or a folder of this machine.
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
    ours = environ.get("GITHUB_SERVER_URL", "")
    if ours and server == (urlsplit(ours).hostname or "").lower():
        api = environ.get("GITHUB_API_URL") or f"{ours.rstrip('/')}/api/v3"
        return _made(path, checked_api(api), ours.rstrip("/"))
    return None


def checked_api(address: str) -> str:
    """The base address of an API, if a token may be sent there: over TLS, or to this machine.

    Raises:
        ApiError: It may not.
    """
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError:
        parts, host = urlsplit(""), ""
    secure = parts.scheme == "https" or (parts.scheme == "http" and _is_this_machine(host))
    if not host or not secure or parts.username or parts.password or parts.query or parts.fragment:
        raise ApiError(
            "the address of the API is not one that a token may be sent to",
            "KAKEYA_GITHUB_API is written like https://github.example.org/api/v3, without credentials",
        )
    return address.rstrip("/")


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _made(path: str, api: str, web: str) -> Repository | None:
    owner, _, name = path.partition("/")
    fits = _OWNER.fullmatch(owner) and _NAME.fullmatch(name) and name not in (".", "..")
    return Repository(owner, name, api, web) if fits else None
