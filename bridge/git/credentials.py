"""A remote's address as git may be given it: without the credentials in it, and with a way for git to ask.

Arguments of a process can be read by everyone on the machine, and git hands the address it is given on to the
processes it starts. So user name and password of an http(s) address go through the environment, where git's
own mechanism for credentials finds them; nothing is written to disk. Credentials that are configured
elsewhere (helpers, agents, keys) are none of this module's business.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote_to_bytes

from bridge.errors import BusError
from bridge.protocol.sanitize import without_credentials

_USERNAME = "KAKEYA_REMOTE_USERNAME"
_PASSWORD = "KAKEYA_REMOTE_PASSWORD"  # noqa: S105 - the name of a variable
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<rest>.*)", re.DOTALL)
_HOST = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]*))?")
_UNENCODED = re.compile(r"[\x00-\x20\x7f]")

# Git asks a helper with the argument `get`. The first answers for itself. The second knows a user name only:
# it asks the user's own helpers, as if this one were not there, and falls back on an empty password, which is
# what curl sends for such an address.
_KNOWN = (
    f'!f() {{ test "$1" = get && printf "username=%s\\npassword=%s\\n" "${_USERNAME}" "${_PASSWORD}"; }}; f'
)
_ASKED = (
    "!f() {{ export GIT_CONFIG_COUNT={count}; case $1 in"
    " get) git credential fill 2>/dev/null || echo password=;;"
    " erase) git credential reject;; esac; }}; f"
)


def for_git(remote: str, environ: Mapping[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """What git's arguments may hold, and the environment variables that bring the credentials.

    ``https://user:password@host/path`` becomes ``https://host/path`` and a credential helper for that host
    alone, before which no other is asked. ``https://user@host/path`` becomes the same address and a
    user name; the user's own helpers are asked for the password, and without an answer it is empty. From
    ``ssh://user:password@host`` the password goes, which SSH would not use. Everything else is unchanged.

    The variables go on counting where those of `environ` (None: our environment) end.
    """
    match = _URL.fullmatch(remote)
    scheme = match["scheme"].lower() if match else ""
    if match is None or scheme not in ("http", "https", "ssh", "git+ssh", "ssh+git"):
        return remote, {}
    parts = _parts(scheme, match["authority"], match["rest"], remote)
    if parts is None:
        return remote, {}
    host, plain, username, password = parts
    if scheme in ("http", "https"):
        given = os.environ if environ is None else environ
        return plain, _variables(f"{scheme}://{host}", plain, username, password, given)
    return (remote if password is None else plain), {}


def _parts(scheme: str, authority: str, rest: str, remote: str) -> tuple[str, str, str, str | None] | None:
    """Host, address without credentials, user name and password; None: the address holds none."""
    # A raw @ belongs to the password: the host begins after the last one.
    userinfo, at, host = authority.rpartition("@")
    if not at:
        if "@" in rest and not _HOST.fullmatch(host):
            raise _unencoded(remote)
        return None
    if not _HOST.fullmatch(host) or _UNENCODED.search(userinfo):
        raise _unencoded(remote)
    name, colon, word = userinfo.partition(":")
    kept = "" if scheme in ("http", "https") else f"{name}@"
    plain = f"{scheme}://{kept}{host}{rest}"
    return host, plain, _decoded(name, remote), _decoded(word, remote) if colon else None


def _variables(
    site: str, plain: str, username: str, password: str | None, environ: Mapping[str, str]
) -> dict[str, str]:
    if not username and password is None:
        return {}
    # What the user's insteadOf makes of the address without credentials is not what was asked for; of all
    # rules git takes the longest.
    settings = [(f"url.{plain}.{rule}", plain) for rule in ("insteadOf", "pushInsteadOf")]
    settings += [(f"credential.{site}.helper", "")]
    if password is None:
        settings += [(f"credential.{site}.username", username)]
        settings += [(f"credential.{site}.helper", _ASKED.format(count=_count(environ)))]
        return config_variables(settings, environ)
    settings += [(f"credential.{site}.helper", _KNOWN)]
    return {**config_variables(settings, environ), _USERNAME: username, _PASSWORD: password}


def config_variables(settings: Sequence[tuple[str, str]], environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of git as environment variables, after those that the environment brings already."""
    first = _count(environ)
    variables = {"GIT_CONFIG_COUNT": str(first + len(settings))}
    for index, (key, value) in enumerate(settings, start=first):
        variables[f"GIT_CONFIG_KEY_{index}"] = key
        variables[f"GIT_CONFIG_VALUE_{index}"] = value
    return variables


def _count(environ: Mapping[str, str]) -> int:
    text = environ.get("GIT_CONFIG_COUNT") or "0"
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise BusError(
            f"GIT_CONFIG_COUNT is {text!r}, and git wants a number there", "unset GIT_CONFIG_COUNT"
        )
    return int(text)


def _decoded(text: str, remote: str) -> str:
    data = unquote_to_bytes(text.encode("utf-8", "surrogateescape"))
    if any(byte in data for byte in b"\n\r\0"):
        raise BusError(
            f"the credentials of {without_credentials(remote)} hold a line break or a NUL: git takes neither",
            "check the address for %0A, %0D and %00",
        )
    return os.fsdecode(data)


def _unencoded(remote: str) -> BusError:
    scheme = remote.partition("://")[0]
    return BusError(
        f"the user name or password in the {scheme} address of the remote is not percent-encoded",
        "in it, write / as %2F, ? as %3F, # as %23, a blank as %20 and % as %25",
    )
