"""The owner's files, and the settings: flag over environment over ``config.toml`` over default.

Every reader takes the error class to raise; messages name file, key and value.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridge import config_dir, state_dir
from bridge.errors import BridgeError
from bridge.protocol.sanitize import clean_line

__all__ = ["Settings", "SettingsError", "config_dir", "load", "state_dir"]

MAX_BYTES = 64 * 1024
_ROOT = 0
# How a file's model is set up: unknown keys are errors, and true is not a number.
STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

Model = TypeVar("Model", bound=BaseModel)


class SettingsError(BridgeError):
    """The settings file or a setting in the environment is wrong."""

    exit_code = 2


def read_file(path: Path, error: type[BridgeError], *, limit: int = MAX_BYTES) -> bytes | None:
    """The content of a plain file of at most `limit` bytes; None where there is none."""
    try:
        # Not blocking, because a pipe would be waited for; checked after opening, so that it is this file.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise error(f"cannot read {path}: not a plain file")
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

    With `private` none may read it either. A link to nothing is an error: it was meant to decide something.
    """
    data = read_file(path, error, limit=limit)
    if data is not None:
        check_owner(path, error, private=private)
        for folder in {path.parent, path.resolve().parent}:
            check_owner(folder, error)
    elif path.is_symlink():
        raise error(f"{path} is a link to a file that does not exist")
    return data


def check_owner(path: Path, error: type[BridgeError], *, private: bool = False) -> None:
    """Refuse a file or folder that another user owns or may write; with `private`, also one they may read."""
    status = path.stat()
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


class ConfigFile(BaseModel):
    """What ``config.toml`` may say."""

    model_config = STRICT

    remote: str | None = None  # URL or name of the git remote; None: the checkout's ``origin``
    # Shown in a manifest; nothing trusts it.
    requested_by: str = Field(
        default_factory=lambda: os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"
    )
    # A file, a public key whose private half the SSH agent holds, or ``none``; None: one is looked for.
    signing_key: str | None = None
    request_lifetime_s: Annotated[int, Field(ge=1, le=30 * 86_400)] = 24 * 3600  # until it expires unclaimed
    transport: Literal["auto", "embedded", "actions"] = "auto"
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
    def own_key(self) -> Path:
        """The key that ``kakeya_mac key --make`` makes for this client's requests."""
        return self.config_dir / "id_ed25519"

    @property
    def presets(self) -> Path | None:
        """The owner's folder of presets, used in addition to the installed ones; None: there is none."""
        folder = self.config_dir / "presets"
        return folder if folder.is_dir() else None


def load(**flags: str | bool | None) -> Settings:
    """The settings in force; `flags` are those of the command line, by the setting's name."""
    path = config_dir() / "config.toml"
    data = read_file(path, SettingsError)
    values: dict[str, Any] = {}
    if data is not None:
        stored = parse_toml(ConfigFile, data, where=str(path), error=SettingsError)
        values = stored.model_dump(exclude_unset=True)
    given = {name: os.environ.get(_variable(name)) for name in ConfigFile.model_fields}
    values |= {name: _from_text(name, text) for name, text in given.items() if text}
    values |= {name: value for name, value in flags.items() if value}
    try:
        return Settings(**values, state_dir=state_dir(), config_dir=config_dir())
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        message = f"{_variable(name)}: {fault_text(error)}, got {values[name]!r}"
        raise SettingsError(message, "correct or unset it") from None


def _variable(setting: str) -> str:
    return f"KAKEYA_{setting.removesuffix('_s').upper()}"  # such as KAKEYA_REQUEST_LIFETIME


def _from_text(name: str, text: str) -> object:
    """What a variable says; text of the wrong type is left to the model."""
    if name == "allow_unsigned":
        return {"0": False, "1": True}.get(text, text)
    return int(text) if name == "request_lifetime_s" and text.isdecimal() else text
