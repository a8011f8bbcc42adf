"""Which Python runs the engine, recorded when a machine is set up and compared before each job.

A package manager that replaces the interpreter or a package of an environment silently changes what every
figure means. The record is ``interpreter.json`` in the environment. Only the standard library is needed,
because setup imports this before anything is installed; no package is imported to learn its version.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from bridge.errors import MachineError, describe
from bridge.proc import write_atomic
from bridge.weights import file_sha256

NAME = "interpreter.json"
SCHEMA_VERSION = 1
REMEDY = "its owner checks it with `kakeya_mac runner check` and mends it with `kakeya_mac runner setup`"
PACKAGES = ("kakeya-mac", "mlx", "mlx-lm", "numpy", "transformers")
_MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and the packages whose versions decide what a figure means."""

    executable: str  # how it is called, in its environment
    realpath: str  # where the program really lies
    sha256: str  # of that program
    version: str  # of Python
    packages: Mapping[str, str]  # versions by distribution name; one that is not there is left out


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
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return Interpreter(sys.executable, real, digest, platform.python_version(), versions)


def read(path: Path) -> Interpreter | None:
    """The record in a file; None: there is none."""
    try:
        with path.open("rb") as handle:
            return _parsed(handle.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = "write it again: kakeya_mac runner setup"
        raise MachineError(f"cannot read the record {path}: {describe(error)}", remedy) from None


def _parsed(data: bytes) -> Interpreter:
    document = json.loads(data)
    if document.pop("schema_version") != SCHEMA_VERSION:
        raise ValueError("another schema_version")
    found = Interpreter(**document)
    texts = (found.executable, found.realpath, found.sha256, found.version, *found.packages.values())
    if not isinstance(found.packages, dict) or not all(isinstance(text, str) for text in texts):
        raise ValueError("a value is no text")
    return found


def write(path: Path, interpreter: Interpreter) -> None:
    """Write a record, whole or not at all."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(interpreter)}
    try:
        write_atomic(path, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode(), mode=0o644)
    except OSError as error:
        raise MachineError(f"cannot write the record {path}: {describe(error)}") from None


def differences(recorded: Interpreter, seen: Interpreter) -> list[str]:
    """What differs between a record and what is there now, one part each; nothing: they are the same."""
    found = [
        f"{what} was {getattr(recorded, name)}, is {getattr(seen, name)}"
        for name, what in (("realpath", "the interpreter"), ("version", "Python"))
        if getattr(recorded, name) != getattr(seen, name)
    ]
    if recorded.sha256 != seen.sha256 and not found:
        found.append(f"the program {seen.realpath} was replaced by another one")
    for name in sorted(recorded.packages.keys() | seen.packages.keys()):
        old, new = (each.packages.get(name, "not there") for each in (recorded, seen))
        if old != new:
            found.append(f"{name} was {old}, is {new}")
    return found


def objection() -> str | None:
    """Why no job may run in this environment; None if it is as recorded, or nothing was recorded."""
    try:
        recorded = read(record_path())
        found = [] if recorded is None else differences(recorded, observe())
    except MachineError as error:
        return error.message
    return (
        f"this machine's environment has changed since it was set up: {'; '.join(found)}" if found else None
    )
