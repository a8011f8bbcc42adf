"""mlx-lm's own tests, fetched with its source distribution from the package index.

The version and the digest are those of uv.lock. The unpacked tests are kept in `.mlx-lm-tests/`.
"""

from __future__ import annotations

import importlib.util
import os
import tarfile
import tempfile
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from tests.engine.upstream.fetch import download

ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / ".mlx-lm-tests"


@cache
def load(name: str) -> ModuleType:
    """A file of the tests as a module, for example ``test_models``."""
    path = folder() / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"mlx_lm_tests.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folder() -> Path:
    """Where the tests of the locked version are; fetched when they are missing."""
    locked = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    [mlx_lm] = [package for package in locked if package["name"] == "mlx-lm"]
    version, digest = mlx_lm["version"], mlx_lm["sdist"]["hash"]
    kept = KEPT / version
    if not kept.is_dir():
        KEPT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as place:
            requirement = f"mlx-lm=={version} --hash={digest}"
            download(requirement, Path(place), KEPT, "--no-binary", ":all:")
            with tarfile.open(next(Path(place).glob("*.tar.gz"))) as packed:
                members = [each for each in packed.getmembers() if Path(each.name).parts[1:2] == ("tests",)]
                packed.extractall(place, members, filter="data")
            with suppress(OSError):  # another worker was faster
                os.replace(next(Path(place).glob("*/tests")), kept)
    return kept
