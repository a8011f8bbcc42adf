"""The key with which the hook reads a private repository, and which server it believes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bridge.mac.action import Action, Folder, Run, Write
from bridge.mac.options import Options
from bridge.mac.step import Look, State

_KNOWN_HOSTS = "known_hosts"
_GITHUB = "github.com"
# As GitHub's page "GitHub's SSH key fingerprints" says.
_GITHUBS = f"{_GITHUB} ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl\n"


@dataclass(frozen=True)
class DeployKey:
    """A key of its own, told to GitHub as one that can only read; one that is there is never touched."""

    options: Options
    name: str = "deploy key"
    stops: bool = False

    @property
    def _known(self) -> Write | None:
        """GitHub's own key; None: it is another server, whose key is believed when it is first seen."""
        if urlsplit(self.options.url or "").hostname != _GITHUB:
            return None
        return Write(self.options.deploy_key.with_name(_KNOWN_HOSTS), _GITHUBS)

    def look(self) -> Look:
        """Whether it is there."""
        key = self.options.deploy_key
        if not key.exists():
            return Look(State.TODO, str(key), "there is none")
        if self._known is not None and not self._known.path.exists():
            return Look(State.TODO, str(self._known.path), "the server's key is not listed")
        return Look(State.DONE, str(key), "there")

    def actions(self) -> tuple[Action, ...]:
        """Make it, without a passphrase: nobody is there to type one."""
        key = self.options.deploy_key
        about = ("-C", f"kakeya-mac {self.options.name}")
        make = Run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", *about, "-f", str(key)))
        known = () if self._known is None or self._known.path.exists() else (self._known,)
        return (Folder(key.parent, 0o700), *(() if key.exists() else (make,)), *known)


def public(key: Path) -> str | None:
    """The public half of a key, in one line; None: it does not lie beside it."""
    try:
        return key.with_name(f"{key.name}.pub").read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def advice(page: str, key: Path | None) -> str:
    """How a person has GitHub take the key.

    Args:
        page: Of the repository.
        key: Its private half; None: there is none.
    """
    half = None if key is None else public(key)
    what = "the hook's public key" if half is None else half
    return f"add it at {page}/settings/keys as a read-only deploy key (no write access): {what}"
