"""Which remote is the bus. Its address is used, because git writes tracking refs when it pushes to a name."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import NoRemote
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo
from bridge.github.api import with_token
from bridge.protocol import refs
from bridge.protocol.sanitize import without_credentials

_KEYS = r"^(remote\..*\.(url|pushurl)|url\..*\.insteadof)$"


@dataclass(frozen=True)
class Remote:
    """A bus."""

    address: str  # what git is given; may hold credentials, so never show it
    shown: str  # the address without credentials
    audience: str  # its one spelling, which manifests name


def resolve_remote(git: GitRepo, named: str | None = None) -> Remote:
    """Find the remote that a checkout means: `named`, else ``origin``, else the only one there is.

    A name is a URL, a folder (relative to the working directory), or that of a configured remote.
    """
    urls: dict[str, str] = {}
    rewritten = False
    for key, value in git.settings(_KEYS):
        name, _, kind = key.partition(".")[2].rpartition(".")
        if key.startswith("url."):
            rewritten = True
        elif kind == "pushurl" or name not in urls:
            urls[name] = value
    name = named or ("origin" if "origin" in urls or len(urls) != 1 else next(iter(urls)))
    address, base = urls.get(name), git.top
    if address is None and named is not None and _is_address(named):
        address, base = named, Path.cwd
    if address is None:
        known = ", ".join(sorted(urls)) or "none"
        raise NoRemote(
            f"this checkout has no remote {without_credentials(name)!r}",
            f"configured remotes: {known}; name one with --remote, or a URL",
        )
    if not refs.is_url(address):
        address = str(base() / Path(address).expanduser())
    effective = git.remote_url(address) if rewritten else address
    shown = without_credentials(address)
    if os.environ.get("GITHUB_ACTIONS") == "true":  # checkouts there keep no credentials
        address = with_token(address, os.environ)
    return Remote(address, shown, refs.audience_of(effective))


def open_cache(state_dir: Path, remote: Remote, checkout: GitRepo, *, timeout_s: float = 300.0) -> GitCache:
    """Open this machine's repository of a remote, reached with the credentials and proxies of `checkout`.

    What hangs on a workload that the checkout has is fetched into a scratch of the checkout instead, so that
    the workload does not travel.
    """
    name = hashlib.sha256(remote.audience.encode()).hexdigest()[:16]
    directory = state_dir / "caches" / f"{name}.git"
    origin = None if refs.is_local(remote.address) else checkout
    cache = GitCache(directory, remote.address, origin=origin, timeout_s=timeout_s)
    cache.prepare()
    return cache


def _is_address(named: str) -> bool:
    plain = bool(named) and named.isprintable() and not named.startswith("-")
    return plain and (refs.is_url(named) or os.sep in named or Path(named).exists())
