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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from bridge.errors import MachineError, describe
from bridge.proc import write_atomic
from bridge.weights import file_sha256

NAME = "interpreter.json"
SCHEMA_VERSION = 1
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
    """Versions by distribution name; what is not installed is left out."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def read(path: Path) -> Interpreter | None:
    """The record in a file; None: there is none."""
    remedy = "write it again: kakeya_mac runner setup"
    try:
        document = json.loads(path.read_bytes())
        version = document.pop("schema_version")
        found = Interpreter(**document)
        texts = (found.executable, found.realpath, found.sha256, found.version, *found.packages.values())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise MachineError(f"cannot read the record {path}: {describe(error)}", remedy) from None
    if version != SCHEMA_VERSION or not all(isinstance(text, str) for text in texts):
        raise MachineError(f"cannot read the record {path}: another version, or a value is no text", remedy)
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
    names = sorted(recorded.packages.keys() | seen.packages.keys())
    pairs = [
        ("the interpreter", recorded.realpath, seen.realpath),
        ("Python", recorded.version, seen.version),
        *((name, *(each.packages.get(name, "not there") for each in (recorded, seen))) for name in names),
    ]
    found = [f"{what} was {old}, is {new}" for what, old, new in pairs if old != new]
    same_name = (recorded.realpath, recorded.version) == (seen.realpath, seen.version)
    if recorded.sha256 != seen.sha256 and same_name:
        found.insert(0, f"the program {seen.realpath} was replaced by another one")
    return found


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
