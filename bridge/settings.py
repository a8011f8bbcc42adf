"""Settings of the bridge, read once: flag, then environment, then file, then default.

The file is ``config.toml`` in `config_dir()`. Unknown keys are errors, so a typing mistake is not silently a
default. What a machine *allows* is not here but in `bridge.runner.policy`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge import toml
from bridge.errors import BridgeError


class SettingsError(BridgeError):
    """The settings file or a setting in the environment is wrong."""

    exit_code = 2


@dataclass(frozen=True)
class Settings:
    """What the client and the runner need to know beside their arguments.

    Attributes:
        remote: URL or name of the git remote that carries the bus; None: the checkout's ``origin``.
        requested_by: Display name put into a manifest; never trusted by anyone.
        signing_key: The key that signs requests, as its user names it: a file, a public key whose private
            half the SSH agent holds, or ``none``; None: `bridge.client.keys` looks for one.
        state_dir: Where mirrors, runner keys and unpublished results live.
        config_dir: Where this file, the policy and the lists of trusted keys live.
        request_lifetime_s: Seconds until an unclaimed request expires.
        transport: Who takes requests: one of `TRANSPORTS`.
        allow_unsigned: Whether results that no trusted key signed count, as with ``--allow-unsigned``.
    """

    remote: str | None
    requested_by: str
    signing_key: str | None
    state_dir: Path
    config_dir: Path
    request_lifetime_s: int
    transport: str = "auto"
    allow_unsigned: bool = False

    @property
    def trusted_runners(self) -> Path:
        """Allowed-signers file of the runner keys whose results this client believes."""
        return self.config_dir / "trusted_runners"

    @property
    def allowed_signers(self) -> Path:
        """Allowed-signers file of the requesters that this machine's runner knows."""
        return self.config_dir / "allowed_signers"

    @property
    def own_key(self) -> Path:
        """The key that ``kakeya_mac key --make`` makes for this client's requests."""
        return self.config_dir / "id_ed25519"

    @property
    def revoked_keys(self) -> Path:
        """Keys of requesters that count no longer on this machine, whatever `allowed_signers` says."""
        return self.config_dir / "revoked_keys"

    @property
    def presets(self) -> Path | None:
        """Folder of preset files beside the installed ones: what an owner adds, and who asks for it, too."""
        folder = self.config_dir / "presets"
        return folder if folder.is_dir() else None


MAX_BYTES = 64 * 1024
DEFAULT_LIFETIME_S = 24 * 3600
TRANSPORTS = ("auto", "embedded", "actions")
_FILE_KEYS = {
    "remote": str,
    "requested_by": str,
    "signing_key": str,
    "request_lifetime_s": int,
    "transport": str,
    "allow_unsigned": bool,
}


def load(
    *, remote: str | None = None, signing_key: str | None = None, transport: str | None = None
) -> Settings:
    """The settings in force; the arguments are the flags given on the command line.

    Raises:
        SettingsError: The file is not TOML, has an unknown key, or a value of the wrong type.
    """
    config = config_dir()
    stored = _read_file(config / "config.toml")
    key = signing_key or os.environ.get("KAKEYA_SIGNING_KEY") or stored.get("signing_key")
    lifetime = os.environ.get("KAKEYA_REQUEST_LIFETIME") or stored.get(
        "request_lifetime_s", DEFAULT_LIFETIME_S
    )
    try:
        lifetime_s = int(lifetime)
    except ValueError:
        raise SettingsError(f"KAKEYA_REQUEST_LIFETIME must be whole seconds, got {lifetime!r}") from None
    if not 1 <= lifetime_s <= 30 * 86_400:
        raise SettingsError(f"request lifetime must be 1 second to 30 days, got {lifetime_s} s")
    chosen = transport or os.environ.get("KAKEYA_TRANSPORT") or stored.get("transport", "auto")
    if chosen not in TRANSPORTS:
        raise SettingsError(f"transport must be one of {', '.join(TRANSPORTS)}, got {chosen!r}")
    return Settings(
        remote=remote or os.environ.get("KAKEYA_REMOTE") or stored.get("remote"),
        requested_by=os.environ.get("KAKEYA_REQUESTED_BY") or stored.get("requested_by") or _login_name(),
        signing_key=key or None,
        state_dir=state_dir(),
        config_dir=config,
        request_lifetime_s=lifetime_s,
        transport=chosen,
        allow_unsigned=_switch("KAKEYA_ALLOW_UNSIGNED", stored.get("allow_unsigned", False)),
    )


def state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder for mirrors, keys and spooled results (`KAKEYA_STATE`, else the platform's usual place).

    Args:
        environ: Variables; None: the process's own.
    """
    environ = os.environ if environ is None else environ
    if given := environ.get("KAKEYA_STATE"):
        return Path(given).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "kakeya-mac"
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kakeya-mac"


def config_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder for settings, policy and trusted keys (`KAKEYA_CONFIG`, else ``~/.config/kakeya-mac``).

    Args:
        environ: Variables; None: the process's own.
    """
    environ = os.environ if environ is None else environ
    if given := environ.get("KAKEYA_CONFIG"):
        return Path(given).expanduser().absolute()
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "kakeya-mac"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = toml.parse(toml.read(path, MAX_BYTES), MAX_BYTES)
    except FileNotFoundError:
        return {}
    except (OSError, toml.TomlError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from None
    for key, value in document.items():
        kind = _FILE_KEYS.get(key)
        if kind is None:
            raise SettingsError(
                f"{path}: unknown setting {key!r}", f"known settings: {', '.join(sorted(_FILE_KEYS))}"
            )
        if type(value) is not kind:
            raise SettingsError(f"{path}: {key} must be {kind.__name__}, got {value!r}")
    return document


def _switch(name: str, stored: bool) -> bool:
    given = os.environ.get(name, "")
    if given not in ("", "0", "1"):
        raise SettingsError(f"{name} must be 0 or 1, got {given!r}")
    return stored if given == "" else given == "1"


def _login_name() -> str:
    return os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"
