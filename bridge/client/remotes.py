"""Which remote is the bus: a URL, a folder, a configured name, or the checkout's own.

The address is used instead of the name, because git writes tracking refs into the checkout when it pushes
to a name. What is kept of a remote on this machine is one bare repository (`open_cache`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
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
    if named is None:
        address = _absolute(_own(urls), git.top)
    elif named in urls:
        address = _absolute(urls[named], git.top)
    elif _is_address(named):
        address = _absolute(named, Path.cwd)
    else:
        known = ", ".join(sorted(urls)) or "none"
        raise NoRemote(
            f"there is no remote {without_credentials(named)!r}",
            f"configured remotes: {known}; a URL works too",
        )
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


def _own(urls: dict[str, str]) -> str:
    if "origin" in urls:
        return urls["origin"]
    if len(urls) == 1:
        return next(iter(urls.values()))
    if urls:
        raise NoRemote(f"which of the remotes {', '.join(sorted(urls))}?", "name one with --remote")
    raise NoRemote("this checkout has no remote", "git remote add origin URL, or give one with --remote")


def _is_address(named: str) -> bool:
    plain = bool(named) and named.isprintable() and not named.startswith("-")
    return plain and (refs.is_url(named) or os.sep in named or Path(named).exists())


def _absolute(address: str, base: Callable[[], Path]) -> str:
    if refs.is_url(address):
        return address
    path = Path(address).expanduser()
    return str(path if path.is_absolute() else base() / path)
