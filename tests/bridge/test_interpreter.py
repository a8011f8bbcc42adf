"""The recorded interpreter: written whole, read strictly, and every difference is named."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bridge import interpreter
from bridge.errors import MachineError


def test_it_says_which_program_and_which_packages() -> None:
    seen = interpreter.observe()
    assert seen.executable == sys.executable
    assert not os.path.islink(seen.realpath)
    assert len(seen.sha256) == 64
    assert {"kakeya-mac", "mlx", "mlx-lm"} <= seen.packages.keys()


def test_it_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    seen = interpreter.observe()
    interpreter.write(tmp_path / "interpreter.json", seen)
    assert interpreter.read(tmp_path / "interpreter.json") == seen
    assert [path.name for path in tmp_path.iterdir()] == ["interpreter.json"]
    assert interpreter.read(tmp_path / "none.json") is None


def test_every_difference_is_named() -> None:
    seen = interpreter.observe()
    packages = {**seen.packages, "mlx": "0.1.0", "gone": "1.0"}
    old = dataclasses.replace(seen, version="3.9.1", packages=packages)
    said = "; ".join(interpreter.differences(old, seen))
    assert f"version was 3.9.1, is {seen.version}" in said
    assert f"mlx was 0.1.0, is {seen.packages['mlx']}" in said
    assert "gone was 1.0, is not there" in said
    replaced = dataclasses.replace(seen, sha256="0" * 64)
    assert interpreter.differences(replaced, seen) == [f"sha256 was {'0' * 64}, is {seen.sha256}"]
    assert interpreter.differences(seen, seen) == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"schema_version": 2}', '{"schema_version": 1, "executable": 3}', "\xff"],
    ids=["empty", "a list", "broken", "another version", "a number", "no text"],
)
def test_what_is_no_record_is_an_error_with_a_remedy(tmp_path: Path, text: str) -> None:
    path = tmp_path / "interpreter.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(MachineError, match=r"interpreter\.json") as error:
        interpreter.read(path)
    assert "runner setup" in (error.value.remedy or "")


def test_it_needs_nothing_but_python(tmp_path: Path) -> None:
    """It is written before anything is installed."""
    root = Path(interpreter.__file__).parents[1]
    program = "import bridge.interpreter as i, pathlib; i.write(pathlib.Path('i.json'), i.observe())"
    bare = shutil.which("python3", path=os.path.dirname(os.path.realpath(sys.executable))) or sys.executable
    env = {"PYTHONPATH": str(root)}
    done = subprocess.run([bare, "-S", "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "i.json").read_text())["schema_version"] == 1
