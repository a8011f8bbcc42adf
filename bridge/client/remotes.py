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
from bridge.github.repository import with_token
from bridge.protocol import refs
from bridge.protocol.sanitize import without_credentials

_KEYS = r"^(remote\..*\.(url|pushurl)|url\..*\.insteadof)$"


@dataclass(frozen=True)
class Remote:
    """A bus.

    Attributes:
        address: What git is given; may hold credentials, so never show it.
        shown: The address without credentials.
        audience: Its one spelling, which manifests name.
    """

    address: str
    shown: str
    audience: str


def resolve_remote(git: GitRepo, named: str | None = None) -> Remote:
    """The remote that a checkout means.

    Args:
        git: The checkout; any folder will do when `named` is an address.
        named: A URL, a folder (relative to the working directory) or the name of a configured remote. None:
            ``origin``, else the only remote there is.

    Raises:
        NoRemote: There is none, several and none named, or none of that name.
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
    address, shown = _authorised(address), without_credentials(address)
    return Remote(address, shown, refs.audience_of(effective))


def open_cache(state_dir: Path, remote: Remote, checkout: GitRepo, *, timeout_s: float = 300.0) -> GitCache:
    """This machine's repository of a remote, for what other clients and runners have there.

    What hangs on a workload that the checkout has is fetched into a scratch of the checkout instead, so that
    the workload does not travel.

    Args:
        state_dir: Where caches live.
        remote: The bus.
        checkout: Its own credentials and proxies count.
        timeout_s: Deadline of one command.

    Raises:
        MachineError: The folder cannot be written.
    """
    name = hashlib.sha256(remote.audience.encode()).hexdigest()[:16]
    directory = state_dir / "caches" / f"{name}.git"
    origin = None if refs.is_local(remote.address) else checkout
    cache = GitCache(directory, remote.address, origin=origin, timeout_s=timeout_s)
    cache.prepare()
    return cache


def _authorised(address: str) -> str:
    """Inside a workflow, whose checkouts keep no credentials: the address with the run's token."""
    return with_token(address, os.environ) if os.environ.get("GITHUB_ACTIONS") == "true" else address


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
