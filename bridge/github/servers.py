"""Which git server a remote is on, and what of GitHub Actions works there.

``actions/upload-artifact`` and ``download-artifact`` from version 4 on work on github.com and ghe.com, and
refuse every other server (``isGhes`` in @actions/artifact): there requests travel by a runner's daemon. Setup
imports this before anything is installed, so at the top there is only the standard library.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from bridge.protocol import refs
from bridge.protocol.sanitize import clean_line

if TYPE_CHECKING:
    import requests

HOST = "github.com"
_HOSTS = (HOST, f"www.{HOST}", f"ssh.{HOST}")  # the last where networks block SSH
_TENANTS = ".ghe.com"
_MAX_ANSWER = 64 * 1024


class ServerKind(StrEnum):
    """Products that a repository may be on."""

    GITHUB = "github.com"
    GHE = "ghe.com"
    GHES = "GitHub Enterprise Server"
    GITEA = "Gitea"
    FORGEJO = "Forgejo"
    FOLDER = "a folder"
    UNKNOWN = "unknown"


# What servers answer without a token: path, key of the JSON document. Forgejo answers as Gitea, too.
_QUESTIONS = (
    (ServerKind.FORGEJO, "/api/forgejo/v1/version", "version"),
    (ServerKind.GITEA, "/api/v1/version", "version"),
    (ServerKind.GHES, "/api/v3/meta", "installed_version"),
)


@dataclass(frozen=True)
class GitServer:
    """The server that a remote is on."""

    kind: ServerKind
    host: str = ""  # with the port that the address has; empty for a folder
    version: str = ""  # as the server says it

    @property
    def has_artifacts(self) -> bool:
        """Whether the workflow can bring a result back."""
        return self.kind in (ServerKind.GITHUB, ServerKind.GHE)

    @property
    def summary(self) -> str:
        """What works there, in a sentence."""
        if self.has_artifacts:
            return f"{self.host}: requests travel by a runner's daemon or by the workflow"
        if self.kind is ServerKind.FOLDER:
            return "a folder: requests travel by a runner's daemon"
        is_known = self.kind is not ServerKind.UNKNOWN
        name = f"{self.kind} {self.version}" if is_known else "neither github.com nor ghe.com"
        return (
            f"{self.host}, {name}: requests travel by a runner's daemon, those of workflows too (transport:"
            " embedded); mac-bridge.yaml brings no result back, because actions/upload-artifact refuses this"
            " server"
        )


def server_of(address: str, environ: Mapping[str, str] | None = None) -> GitServer:
    """The server of a remote, as far as the address tells it; asks nobody.

    Where ``KAKEYA_GITHUB_API`` and ``KAKEYA_GITHUB_REPOSITORY`` name a repository, the remote is its mirror,
    and the API's server runs the workflows.
    """
    environ = os.environ if environ is None else environ
    api = environ.get("KAKEYA_GITHUB_API", "").strip()
    is_mirror = bool(api and environ.get("KAKEYA_GITHUB_REPOSITORY", "").strip())
    if not is_mirror and refs.is_local(address):
        return GitServer(ServerKind.FOLDER)
    host = _host(api).removeprefix("api.") if is_mirror else _host(address)
    name = _without_port(host)
    if name in _HOSTS:
        return GitServer(ServerKind.GITHUB, HOST)
    return GitServer(ServerKind.GHE if name.endswith(_TENANTS) else ServerKind.UNKNOWN, host)


def public_api(address: str) -> str | None:
    """The address of the API of github.com or ghe.com; None: the remote is on another server."""
    server = server_of(address, {})
    if not server.has_artifacts:
        return None
    return f"https://api.{_without_port(server.host)}"


def is_on(address: str, server_url: str) -> bool:
    """Whether a remote is on the server with this URL; another port of HTTP(S) is another server.

    SSH has a port of its own, so of such a remote only the host is compared.
    """
    if _is_http(address):
        ours, theirs = (refs.audience_of(f"{url}/x").partition("/")[0] for url in (server_url, address))
        return (_split(address)[0], theirs) == (_split(server_url)[0], ours)
    return not refs.is_local(address) and _without_port(_host(address)) == _without_port(_host(server_url))


def identify(address: str, environ: Mapping[str, str] | None = None, *, timeout_s: float) -> GitServer:
    """The server of a remote; one that the address does not tell is asked, without a token."""
    server = server_of(address, environ)
    if server.kind is not ServerKind.UNKNOWN:
        return server
    import requests  # takes 0.2 s

    with requests.Session() as session:
        session.auth = lambda request: request  # no user name from .netrc
        for kind, path, key in _QUESTIONS:
            try:
                found = _ask(session, _base(address, environ) + path, key, timeout_s)
            except OSError:  # every error of `requests`: no connection, no TLS, no answer in time
                break
            if found:
                return replace(server, kind=kind, version=found)
    return server


def _base(address: str, environ: Mapping[str, str] | None) -> str:
    """Where the server's pages are: that of its API, of this workflow, or in front of ``OWNER/NAME``."""
    environ = os.environ if environ is None else environ
    api, ours = environ.get("KAKEYA_GITHUB_API", "").strip(), environ.get("GITHUB_SERVER_URL", "").rstrip("/")
    if api:
        scheme, host, path = _split(api)
        return f"{scheme}://{host}{path.removesuffix('/api/v1').removesuffix('/api/v3')}"
    if ours and is_on(address, ours):
        return ours
    if _is_http(address):
        scheme, host, path = _split(address)
        return f"{scheme}://{host}{path.rpartition('/')[0].rpartition('/')[0]}"
    return f"https://{_without_port(_host(address))}"  # the port is that of SSH


def _host(address: str) -> str:
    """Of a URL, or ``user@host:path``: the host with its port."""
    if "://" in address:
        return _split(address)[1].lower()
    return address.partition(":")[0].rpartition("@")[2].lower()


def _without_port(host: str) -> str:
    return re.sub(r":[0-9]*$", "", host)


def _is_http(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def _split(url: str) -> tuple[str, str, str]:
    """Scheme, host with its port and path of a URL, which need not be a right one; no credentials."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return scheme.lower(), host.rpartition("@")[2], f"{slash}{path}".rstrip("/")


def _ask(session: requests.Session, url: str, key: str, timeout_s: float) -> str:
    """What a JSON document says under a key; empty: it is another document, or none."""
    headers = {"Accept": "application/json"}
    with session.get(url, headers=headers, timeout=timeout_s, allow_redirects=False, stream=True) as answer:
        data = next(answer.iter_content(_MAX_ANSWER), b"")
        is_ok = answer.status_code == 200
    try:
        found = json.loads(data)[key] if is_ok else ""
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return clean_line(found, limit=60) if isinstance(found, str) else ""
