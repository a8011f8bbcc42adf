"""Which Python runs the engine, recorded when a machine is set up and looked at again before each job.

A package manager that replaces the interpreter or a package under an environment changes what every figure
means, and nobody is told. The record lies in the environment itself, as ``interpreter.json``. Only the
standard library is needed, so that setup can write it; nothing is imported to learn its version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from bridge.errors import MachineError, described

NAME = "interpreter.json"
SCHEMA_VERSION = 1
PACKAGES = ("kakeya-mac", "mlx", "mlx-lm", "numpy", "transformers")
_MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and the packages whose versions decide what a figure means.

    Attributes:
        executable: How it is called, in its environment.
        realpath: Where the program really lies.
        sha256: Of that program.
        version: Of Python.
        packages: Versions by distribution name; one that is not there is left out.
    """

    executable: str
    realpath: str
    sha256: str
    version: str
    packages: Mapping[str, str]


def record_path() -> Path:
    """Where the record of this environment lies."""
    return Path(sys.prefix) / NAME


def observe() -> Interpreter:
    """The interpreter that runs this, as it lies on the disk now.

    Raises:
        MachineError: Its program cannot be read.
    """
    real = os.path.realpath(sys.executable)
    try:
        status = os.stat(real)
        digest = _digest(real, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise MachineError(f"cannot read the interpreter {real}: {described(error)}") from None
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return Interpreter(sys.executable, real, digest, platform.python_version(), versions)


def read(path: Path) -> Interpreter | None:
    """The record in a file; None: there is none.

    Raises:
        MachineError: It is not readable as one.
    """
    try:
        with path.open("rb") as handle:
            return _parsed(handle.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = "write it anew: kakeya_mac runner setup"
        raise MachineError(f"cannot read the record {path}: {described(error)}", remedy) from None


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
    """Write a record, whole or not at all.

    Raises:
        MachineError: It cannot be written.
    """
    document = {"schema_version": SCHEMA_VERSION, **asdict(interpreter)}
    name = None
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2, sort_keys=True)
            file.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise MachineError(f"cannot write the record {path}: {described(error)}") from None


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


@functools.lru_cache(maxsize=4)
def _digest(path: str, _mtime_ns: int, _size: int) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
