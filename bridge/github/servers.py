"""Which git server a remote is on, as its address tells, and what of GitHub Actions works there.

Setup imports this before anything is installed, so it needs only the standard library (unlike ``api.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bridge.protocol import refs

HOST = "github.com"
_HOSTS = (HOST, f"www.{HOST}", f"ssh.{HOST}")  # the last where networks block SSH
_TENANTS = ".ghe.com"


@dataclass(frozen=True)
class GitServer:
    """The server that a remote is on."""

    host: str = ""  # with the port that the address has; empty for a folder

    @property
    def has_artifacts(self) -> bool:
        """Whether the workflow can bring a result back.

        The artifact actions refuse every server but github.com and ghe.com (``isGhes`` in @actions/artifact).
        """
        return self.host == HOST or _without_port(self.host).endswith(_TENANTS)

    @property
    def summary(self) -> str:
        """What works there, in a sentence."""
        if self.has_artifacts:
            return f"{self.host}: requests travel by a runner's daemon or by the workflow"
        if not self.host:
            return "a folder: requests travel by a runner's daemon"
        return (
            f"{self.host}, neither github.com nor ghe.com: requests travel by a runner's daemon, those of"
            " mac-run.yaml and action.yml too; mac-bridge.yaml brings no result back"
        )


def server_of(address: str, environ: Mapping[str, str] | None = None) -> GitServer:
    """The server of a remote.

    Where ``KAKEYA_GITHUB_API`` and ``KAKEYA_GITHUB_REPOSITORY`` name a repository, the remote is its mirror,
    and the API's server runs the workflows.
    """
    environ = os.environ if environ is None else environ
    api = environ.get("KAKEYA_GITHUB_API", "").strip()
    is_mirror = bool(api and environ.get("KAKEYA_GITHUB_REPOSITORY", "").strip())
    if not is_mirror and refs.is_local(address):
        return GitServer()
    host = _host(api).removeprefix("api.") if is_mirror else _host(address)
    return GitServer(HOST if _without_port(host) in _HOSTS else host)


def public_api(address: str) -> str | None:
    """The address of the API of github.com or ghe.com; None: the remote is on another server."""
    server = server_of(address, {})
    return f"https://api.{_without_port(server.host)}" if server.has_artifacts else None


def is_on(address: str, server_url: str) -> bool:
    """Whether a remote is on the server with this URL; another port of HTTP(S) is another server.

    SSH has a port of its own, so of such a remote only the host is compared.
    """
    if _is_http(address):
        ours, theirs = (refs.audience_of(f"{url}/x").partition("/")[0] for url in (server_url, address))
        return (_scheme(address), theirs) == (_scheme(server_url), ours)
    return not refs.is_local(address) and _without_port(_host(address)) == _without_port(_host(server_url))


def _host(address: str) -> str:
    """Of a URL, which need not be a right one, or of ``user@host:path``: the host with its port."""
    _, is_url, rest = address.partition("://")
    host = rest.partition("/")[0] if is_url else address.partition(":")[0]
    return host.rpartition("@")[2].lower()


def _without_port(host: str) -> str:
    return re.sub(r":[0-9]*$", "", host)


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def _is_http(url: str) -> bool:
    return _scheme(url) in ("http", "https")
