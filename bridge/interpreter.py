"""Which Python runs the engine: recorded by setup, compared before each job; standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from bridge.errors import MachineError, describe
from bridge.proc import write_atomic
from evidence_format.weights import file_sha256

NAME = "interpreter.json"
PACKAGES = ("kakeya-mac", "mlx", "mlx-lm", "numpy", "transformers")
REMEDY = "its owner checks it with `kakeya_mac runner check` and mends it with `kakeya_mac runner setup`"


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and the packages whose versions decide what a figure means."""

    executable: str  # how it is called, in its environment
    realpath: str  # where the program really lies
    sha256: str  # of that program
    version: str  # of Python
    packages: Mapping[str, str]  # versions by distribution name; one that is not there is left out
    schema_version: int = 1


def record_path() -> Path:
    """Where the record of this environment lies."""
    return Path(sys.prefix) / NAME


def observe() -> Interpreter:
    """The interpreter that runs this, as it is on the disk now."""
    real = os.path.realpath(sys.executable)
    try:
        digest = file_sha256(real)
    except OSError as error:
        raise MachineError(f"cannot read the interpreter {real}: {describe(error)}") from None
    return Interpreter(sys.executable, real, digest, platform.python_version(), versions(PACKAGES))


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions by distribution name, found without importing; what is not installed is left out."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def read(path: Path) -> Interpreter | None:
    """The record in a file; None: there is none."""
    try:
        return Interpreter(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        remedy = "write it again: kakeya_mac runner setup"
        raise MachineError(f"cannot read the record {path}: {error}", remedy) from None


def write(path: Path, interpreter: Interpreter) -> None:
    """Write a record, whole or not at all."""
    text = json.dumps(asdict(interpreter), indent=2, sort_keys=True) + "\n"
    write_atomic(path, text.encode(), mode=0o644)


def differences(recorded: Interpreter, seen: Interpreter) -> list[str]:
    """What differs between a record and what is there now, one part each; nothing: they are the same."""
    old, new = ({**asdict(each), **each.packages} for each in (recorded, seen))
    names = sorted((old.keys() | new.keys()) - {"executable", "packages", "schema_version"})
    pairs = [(name, old.get(name, "not there"), new.get(name, "not there")) for name in names]
    return [f"{name} was {before}, is {now}" for name, before, now in pairs if before != now]


def objection() -> str | None:
    """Why no job may run in this environment; None if it is as recorded, or nothing was recorded."""
    try:
        recorded = read(record_path())
        found = [] if recorded is None else differences(recorded, observe())
    except MachineError as error:
        return error.message
    if not found:
        return None
    return f"this machine's environment has changed since it was set up: {'; '.join(found)}"
