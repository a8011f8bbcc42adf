"""The owner's files: read within a size limit, checked for who else may write them, parsed into a model.

Every function takes the error class to raise, so that a broken preset is a `PresetError` and a broken policy
a `PolicyError`. Messages name file, key and value.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from bridge.errors import BridgeError
from bridge.protocol.sanitize import clean_line

MAX_BYTES = 64 * 1024
_ROOT = 0
# How a file's model is set up: unknown keys are errors, and true is not a number.
STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

Model = TypeVar("Model", bound=BaseModel)


def read_file(path: Path, error: type[BridgeError], *, limit: int = MAX_BYTES) -> bytes | None:
    """The content of a plain file of at most `limit` bytes; None where there is none."""
    return _read(path, error, limit, owned=False, private=False)


def read_owned_file(
    path: Path, error: type[BridgeError], *, limit: int = MAX_BYTES, private: bool = False
) -> bytes | None:
    """Like `read_file`, for a file that decides something: no other user may write it or its folder.

    Args:
        path: The file. A link to nothing is an error: its owner meant it to decide something.
        error: The class to raise.
        limit: Most bytes to read.
        private: No other user may read it either.
    """
    data = _read(path, error, limit, owned=True, private=private)
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


def parse_toml(
    model: type[Model], data: bytes, *, where: str, error: type[BridgeError], context: Any = None
) -> Model:
    """The model of a TOML file.

    Args:
        model: Its type.
        data: Content of the file.
        where: Begins every message: what kind of file, and its path.
        error: The class to raise.
        context: Passed on to the model's validators.
    """
    try:
        # As JSON, because pydantic then takes a list for a tuple and a text for a path, and is strict else.
        document = json.dumps(tomllib.loads(data.decode("utf-8")))
    except (ValueError, TypeError, RecursionError) as problem:
        raise error(f"{where}: not TOML: {problem}") from None
    try:
        return model.model_validate_json(document, context=context, by_alias=True, by_name=False)
    except ValidationError as problem:
        raise _fault(problem, model, where, error) from None


def fault_text(problem: ValueError) -> str:
    """What is wrong, for a message: the first fault of a model, or the error itself."""
    text = problem.errors()[0]["msg"] if isinstance(problem, ValidationError) else str(problem)
    text = text.removeprefix("Value error, ").removeprefix("Input ")
    return clean_line(text[:1].lower() + text[1:], limit=400)


def _fault(
    problem: ValidationError, model: type[BaseModel], where: str, error: type[BridgeError]
) -> BridgeError:
    first = problem.errors()[0]
    key = clean_line(".".join(str(part) for part in first["loc"]), limit=200)
    if first["type"] == "extra_forbidden":
        known = ", ".join(field.alias or name for name, field in model.model_fields.items())
        return error(
            f"{where}: unknown key {key}", f"known keys: {known}" if len(first["loc"]) == 1 else None
        )
    if first["type"] == "missing":
        return error(f"{where}: {key} is missing")
    value = "" if first["type"] == "value_error" else f", got {clean_line(repr(first['input']), limit=120)}"
    return error(f"{where}: {key + ': ' if key else ''}{fault_text(problem)}{value}")


def _read(path: Path, error: type[BridgeError], limit: int, *, owned: bool, private: bool) -> bytes | None:
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
