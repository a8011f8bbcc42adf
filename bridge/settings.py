"""The owner's files, and the settings: flag over environment over ``config.toml`` over default.

Files are read within a size limit, checked for who else may write them, and parsed into strict models. Every
reader takes the error class to raise, so that a broken preset is a `PresetError` and a broken policy a
`PolicyError`; messages name file, key and value. What a machine *allows* is in `bridge.runner.policy`.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridge import config_dir, state_dir
from bridge.errors import BridgeError
from bridge.protocol.sanitize import clean_line

__all__ = ["TRANSPORTS", "Settings", "SettingsError", "config_dir", "load", "state_dir"]

MAX_BYTES = 64 * 1024
_ROOT = 0
# How a file's model is set up: unknown keys are errors, and true is not a number.
STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

Model = TypeVar("Model", bound=BaseModel)
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


class SettingsError(BridgeError):
    """The settings file or a setting in the environment is wrong."""

    exit_code = 2


# Files ----------------------------------------------------------------------------------------------------


def read_file(
    path: Path,
    error: type[BridgeError],
    *,
    limit: int = MAX_BYTES,
    owned: bool = False,
    private: bool = False,
) -> bytes | None:
    """The content of a plain file of at most `limit` bytes; None where there is none.

    With `owned` no other user may own or write it, with `private` none may read it either.
    """
    try:
        # Not blocking, because a pipe would be waited for; checked after opening, so that it is this file.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise error(f"cannot read {path}: not a plain file")
            if owned:
                check_owner(path, status, error, private=private)
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from None
    if len(data) > limit:
        raise error(f"{path} has more than {limit} bytes, and at most {limit} are read")
    return data


def read_owned_file(
    path: Path, error: type[BridgeError], *, limit: int = MAX_BYTES, private: bool = False
) -> bytes | None:
    """Like `read_file`, for a file that decides something: no other user may write it or its folder.

    A link to nothing is an error: its owner meant it to decide something.
    """
    data = read_file(path, error, limit=limit, owned=True, private=private)
    if data is None:
        if path.is_symlink():
            raise error(f"{path} is a link to a file that does not exist")
        return None
    for folder in {path.parent, path.resolve().parent}:
        check_owner(folder, folder.stat(), error)
    return data


def check_owner(
    path: Path, status: os.stat_result, error: type[BridgeError], *, private: bool = False
) -> None:
    """Refuse a file or folder that another user owns or may write; with `private`, also one they may read."""
    if status.st_uid not in (os.getuid(), _ROOT):
        message = f"{path} belongs to user {status.st_uid}, not to the user of this process"
        raise error(message, f"chown {os.getuid()} {path}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise error(f"{path} can be written by others", f"chmod go-w {path}")
    if private and status.st_uid == os.getuid() and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise error(f"{path} can be read by others (mode {mode:04o})", f"chmod 600 {path}")


def parse_toml(model: type[Model], data: bytes, *, where: str, error: type[BridgeError]) -> Model:
    """The model of a TOML file; `where` begins every message."""
    try:
        # As JSON, because pydantic then takes a list for a tuple and a text for a path, and is strict else.
        document = json.dumps(tomllib.loads(data.decode("utf-8")))
    except (ValueError, TypeError, RecursionError) as problem:
        raise error(f"{where}: not TOML: {problem}") from None
    try:
        return model.model_validate_json(document, by_alias=True, by_name=False)
    except ValidationError as problem:
        first = problem.errors()[0]
    key = clean_line(".".join(str(part) for part in first["loc"]), limit=200)
    if first["type"] == "extra_forbidden":
        known = ", ".join(field.alias or name for name, field in model.model_fields.items())
        remedy = f"known keys: {known}" if len(first["loc"]) == 1 else None
        raise error(f"{where}: unknown key {key}", remedy)
    if first["type"] == "missing":
        raise error(f"{where}: {key} is missing")
    value = "" if first["type"] == "value_error" else f", got {clean_line(repr(first['input']), limit=120)}"
    raise error(f"{where}: {key + ': ' if key else ''}{_plain(first['msg'])}{value}")


def fault_text(problem: ValueError) -> str:
    """What is wrong, for a message: the first fault of a model, or the error itself."""
    return _plain(problem.errors()[0]["msg"] if isinstance(problem, ValidationError) else str(problem))


def _plain(text: str) -> str:
    text = text.removeprefix("Value error, ").removeprefix("Input ")
    return clean_line(text[:1].lower() + text[1:], limit=400)


# Settings -------------------------------------------------------------------------------------------------


def _login_name() -> str:
    return os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"


class ConfigFile(BaseModel):
    """What ``config.toml`` may say."""

    model_config = STRICT

    remote: str | None = None  # URL or name of the git remote; None: the checkout's ``origin``
    requested_by: str = Field(default_factory=_login_name)  # shown in a manifest; nothing trusts it
    # A file, a public key whose private half the SSH agent holds, or ``none``; None: one is looked for.
    signing_key: str | None = None
    request_lifetime_s: Annotated[int, Field(ge=1, le=30 * 86_400)] = 24 * 3600  # until it expires unclaimed
    transport: Transport = "auto"
    allow_unsigned: bool = False  # whether results count that no trusted key signed


class Settings(ConfigFile):
    """The settings in force, and the folders of state and configuration."""

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
