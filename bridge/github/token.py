"""The token with which the API is asked. Nothing prints it: not its representation, not an error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from bridge.errors import ApiError

NAMES = ("KAKEYA_GITHUB_TOKEN", "GITHUB_TOKEN", "GH_TOKEN")
# How a token in a remote's address is told from a password: by its form, which GitHub documents.
_PREFIXES = ("ghp_", "gho_", "ghu_", "ghs_", "github_pat_")
_USERS = ("x-access-token", "oauth2", "")


@dataclass(frozen=True)
class Token:
    """A token and where it was found.

    Attributes:
        value: The secret itself.
        source: A variable's name, or where else it stood; for people.
    """

    value: str = field(repr=False)
    source: str


def find_token(environ: Mapping[str, str] | None = None, *, address: str | None = None) -> Token | None:
    """The token to use; None: there is none.

    Args:
        environ: Variables to look in; None: the process's own.
        address: Of the remote; a token in it is used where no variable holds one.

    Raises:
        ApiError: A variable holds what can be no token.
    """
    environ = os.environ if environ is None else environ
    for name in NAMES:
        if value := environ.get(name, "").strip():
            return Token(_checked(value, name), name)
    return None if address is None else _in_address(address)


def _in_address(address: str) -> Token | None:
    if not address.lower().startswith(("https://", "http://")):
        return None
    try:
        parts = urlsplit(address)
    except ValueError:
        return None
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    where = "the remote's address"
    if user.startswith(_PREFIXES):
        return Token(_checked(user, where), where)
    if password.startswith(_PREFIXES) or (password and user in _USERS[:2]):
        return Token(_checked(password, where), where)
    return None


def _checked(value: str, source: str) -> str:
    """The value, if it can stand in a header."""
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ApiError(
            f"what stands in {source} is no token: it has characters that none has",
            "set it to the token alone, without quotes or a line's end inside",
        )
    return value
