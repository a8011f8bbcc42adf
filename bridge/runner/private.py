"""What this machine must not publish: secrets of its environment, its remote, its keys, its user's programs.

Jobs are kept from most of it (`bridge.runner.isolation`); where a machine cannot hide a file, or a preset
names a variable, redaction is what is left. Read anew for each job: a changed password counts at once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from bridge.bus.address import for_git
from bridge.evidence.redact import Secrets, secrets_of

if TYPE_CHECKING:
    from bridge.runner.station import Station

# Where the user's programs keep what lets them in, relative to the home.
CREDENTIAL_FILES = (
    ".netrc",
    ".git-credentials",
    ".config/git/credentials",
    ".config/gh/hosts.yml",
    ".aws/credentials",
    ".docker/config.json",
    ".npmrc",
    ".pypirc",
    ".cache/huggingface/stored_tokens",
)
# Files that hold one token and nothing else.
TOKEN_FILES = (".cache/huggingface/token", ".huggingface/token")
_MOST_BYTES = 256 * 1024
# A user name in an address is a token when it is as long as one: ``https://ghp_…@example.org``.
_TOKEN_LENGTH = 20

# ``_authToken=…``, ``oauth_token: …``, ``"auth": "…"``, ``aws_secret_access_key = …``, netrc's ``password …``
_ASSIGNED = re.compile(
    r"""(?:token|secret|passw(?:or)?d|passphrase|auth|key)[\w-]*["']?[ \t]*[ \t:=][ \t]*["']?"""
    r"""([^\s"',{}\[\]]+)""",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"://([^\s/@:]*)(?::([^\s/@]*))?@")


def secrets(station: Station) -> Secrets:
    """What may not be published from this machine, as it is now.

    Values of variables that the policy lets jobs have are cut from logs, too, and may stand in evidence: by
    their names they are no secrets, and they may be folders that a report rightly names.
    """
    values: dict[str, str] = {}
    for path, name in _files(station):
        with contextlib.suppress(OSError):  # what the runner cannot read, a job of its user cannot either
            values |= _in_file(path, name)
    values |= secrets_of(for_git(station.remote, {})[1])
    values |= {f"{name} of the remote": word for name, word in _in_urls(station.remote)}
    values |= secrets_of(station.environment)
    lent = {
        name: station.environment[name] for name in station.policy.environment if name in station.environment
    }
    return Secrets({**lent, **values}, mild=lent.keys() - values.keys())


def _files(station: Station) -> Iterator[tuple[Path, str]]:
    for name in (*CREDENTIAL_FILES, *TOKEN_FILES):
        yield station.home / name, f"~/{name}"
    yield station.allowed_signers.parent / "config.toml", "config.toml"
    if station.key is not None:
        yield station.key, "the runner's key"


def _in_file(path: Path, name: str) -> Mapping[str, str]:
    """The secrets of one file under names that tell it, and not what it holds."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES).decode("utf-8", "surrogateescape")
    if name.endswith(("/token", "key")):
        return {name: text}
    found = [word for _, word in _in_urls(text)]
    if name != "config.toml":  # whose keys are names of files
        found += [match[1] for match in _ASSIGNED.finditer(text)]
    return {f"{name} ({number})": value for number, value in enumerate(dict.fromkeys(found), 1)}


def _in_urls(text: str) -> Iterator[tuple[str, str]]:
    """Passwords, and names that are tokens, of the addresses in a text: as written and decoded."""
    for match in _IN_URL.finditer(text):
        name, word = match[1], match[2]
        if word:
            yield "password", word
            yield "decoded password", unquote(word)
        elif len(name) >= _TOKEN_LENGTH:
            yield "token", name
