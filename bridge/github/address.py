"""A remote's address with the token of the workflow that this runs in: for git alone, never to show."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from bridge.github.repository import HOST


def with_token(address: str, environ: Mapping[str, str]) -> str:
    """The address with the run's token in it, where it is one of the server that gave the token.

    Args:
        address: Of a remote.
        environ: Variables; the server is ``GITHUB_SERVER_URL``, the token ``KAKEYA_GITHUB_TOKEN``.
    """
    server = (environ.get("GITHUB_SERVER_URL") or f"https://{HOST}").rstrip("/")
    token = environ.get("KAKEYA_GITHUB_TOKEN")
    if not token or not is_served_by(address, server):
        return address
    scheme, _, rest = address.partition("://")
    return f"{scheme}://x-access-token:{quote(token, safe='')}@{rest}"


def is_served_by(address: str, server: str) -> bool:
    """Whether an address is one of a GitHub server, by its scheme and host, and names no user."""
    ours, theirs = urlsplit(address), urlsplit(server)
    if ours.scheme not in ("https", "http") or "@" in ours.netloc:
        return False
    return (ours.scheme, ours.netloc.lower()) == (theirs.scheme, theirs.netloc.lower())
