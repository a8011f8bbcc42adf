"""Settings of the bridge: a flag wins over the environment, that over ``config.toml``, that over the default.

The file lies in `config_dir()`. What a machine *allows* is not here but in `bridge.runner.policy`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError

from bridge.config_file import STRICT, fault_text, parse_toml, read_file
from bridge.errors import BridgeError
from bridge.folders import config_dir, state_dir

Transport = Literal["auto", "embedded", "actions"]
TRANSPORTS: tuple[str, ...] = get_args(Transport)
# The environment variable of each setting.
_VARIABLES = {
    "remote": "KAKEYA_REMOTE",
    "requested_by": "KAKEYA_REQUESTED_BY",
    "signing_key": "KAKEYA_SIGNING_KEY",
    "request_lifetime_s": "KAKEYA_REQUEST_LIFETIME",
    "transport": "KAKEYA_TRANSPORT",
    "allow_unsigned": "KAKEYA_ALLOW_UNSIGNED",
}


__all__ = ["TRANSPORTS", "Settings", "SettingsError", "config_dir", "load", "state_dir"]


class SettingsError(BridgeError):
    """The settings file or a setting in the environment is wrong."""

    exit_code = 2


def _login_name() -> str:
    return os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"


class ConfigFile(BaseModel):
    """What ``config.toml`` may say.

    Attributes:
        remote: URL or name of the git remote that carries the bus; None: the checkout's ``origin``.
        requested_by: Display name put into a manifest; nothing trusts it.
        signing_key: The key that signs requests, as its user names it: a file, a public key whose private
            half the SSH agent holds, or ``none``; None: `bridge.client.signing_key` looks for one.
        request_lifetime_s: Seconds until an unclaimed request expires.
        transport: Who takes requests: one of `TRANSPORTS`.
        allow_unsigned: Whether results that no trusted key signed count, as with ``--allow-unsigned``.
    """

    model_config = STRICT

    remote: str | None = None
    requested_by: str = Field(default_factory=_login_name)
    signing_key: str | None = None
    request_lifetime_s: Annotated[int, Field(ge=1, le=30 * 86_400)] = 24 * 3600
    transport: Transport = "auto"
    allow_unsigned: bool = False


class Settings(ConfigFile):
    """The settings in force.

    Attributes:
        state_dir: Where caches, runner keys and unpublished results live.
        config_dir: Where ``config.toml``, the policy and the lists of trusted keys live.
    """

    state_dir: Path
    config_dir: Path

    @property
    def trusted_runners(self) -> Path:
        """List of the runner keys whose results this client believes."""
        return self.config_dir / "trusted_runners"

    @property
    def allowed_signers(self) -> Path:
        """List of the requesters that this machine's runner knows."""
        return self.config_dir / "allowed_signers"

    @property
    def own_key(self) -> Path:
        """The key that ``kakeya_mac key --make`` makes for this client's requests."""
        return self.config_dir / "id_ed25519"

    @property
    def revoked_keys(self) -> Path:
        """Keys that no longer count on this machine, whatever the other lists say."""
        return self.config_dir / "revoked_keys"

    @property
    def presets(self) -> Path | None:
        """The owner's folder of presets, used in addition to the installed ones; None: there is none."""
        folder = self.config_dir / "presets"
        return folder if folder.is_dir() else None


def load(
    *, remote: str | None = None, signing_key: str | None = None, transport: str | None = None
) -> Settings:
    """The settings in force; the arguments are the flags given on the command line."""
    path = config_dir() / "config.toml"
    data = read_file(path, SettingsError)
    values: dict[str, Any] = {}
    if data is not None:
        stored = parse_toml(ConfigFile, data, where=str(path), error=SettingsError)
        values = stored.model_dump(exclude_unset=True)
    for name, variable in _VARIABLES.items():
        if text := os.environ.get(variable):
            values[name] = _read_variable(name, variable, text)
    flags = {"remote": remote, "signing_key": signing_key, "transport": transport}
    values |= {name: value for name, value in flags.items() if value}
    try:
        return Settings(**values, state_dir=state_dir(), config_dir=config_dir())
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise SettingsError(
            f"{_VARIABLES.get(name, name)}: {fault_text(error)}, got {values[name]!r}"
        ) from None


def _read_variable(name: str, variable: str, text: str) -> object:
    if name == "allow_unsigned":
        if text not in ("0", "1"):
            raise SettingsError(f"{variable} must be 0 or 1, got {text!r}")
        return text == "1"
    if name == "request_lifetime_s":
        if not text.isdecimal():
            raise SettingsError(f"{variable} must be whole seconds, got {text!r}")
        return int(text)
    return text
