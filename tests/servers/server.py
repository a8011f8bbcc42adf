"""A git server that runs on 127.0.0.1, as git is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        scheme: `http`, `ssh` or `git`.
        port: Where it listens on 127.0.0.1.
        path: The repository's path in an address.
        user: Who to ask as; empty: no user.
        password: The password; empty: none.
        env: What git needs to reach it, apart from the address.
        folder: Its configuration and logs.
    """

    scheme: str
    port: int
    path: str
    user: str
    password: str
    env: dict[str, str]
    folder: Path

    def address(
        self, *, port: int | None = None, user: str | None = None, password: str | None = None
    ) -> str:
        """The address as a user writes it, credentials in it; another port is that of a proxy."""
        name, word = self.user if user is None else user, self.password if password is None else password
        login = quote(name, safe="") + (":" + quote(word, safe="") if word else "")
        return f"{self.scheme}://{login + '@' if login else ''}127.0.0.1:{port or self.port}{self.path}"

    def log(self) -> str:
        """Everything the server wrote so far."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))
