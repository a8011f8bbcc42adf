"""Setup makes the real environment, with every locked package, and the real self-test runs in it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.bridge.mac.conftest import mac
from tests.bridge.mac.tools import FULL, Mac

__all__ = ["mac"]
pytestmark = [pytest.mark.e2e, pytest.mark.unsandboxed]


@pytest.mark.exhaustive
def test_environment_is_locked_and_its_interpreter_recorded(mac: Mac) -> None:
    del mac.env["KAKEYA_PYTHON"]
    done = mac.setup(*FULL)
    assert done.code == 0, done.out + done.err
    states = {step["name"]: step["state"] for step in done.json["steps"]}
    assert states["self-test"] == "done"
    assert not (mac.home / ".local").exists(), "the self-test leaves nothing in the account's state"
    env = mac.prefix / "env"
    record = json.loads((env / "interpreter.json").read_text())
    assert record["packages"]["mlx"]
    assert mac.setup(*FULL).json["changed"] is False

    record["packages"]["mlx"] = "0.0.1"  # as if a package manager had been there
    (env / "interpreter.json").write_text(json.dumps(record))
    program = str(env / "bin" / "kakeya_mac")
    doctor = subprocess.run(
        [program, "doctor", "--json"], cwd=mac.home, env=mac.env, capture_output=True, text=True, timeout=60
    )
    found = json.loads(doctor.stdout.splitlines()[-1])
    assert found["role"] == "runner"
    assert {check["name"]: check["level"] for check in found["checks"]}["interpreter"] == "fail"
    again = mac.setup(*FULL)
    assert again.code == 0, again.err
    assert Path(program).exists()
    assert "mlx was" not in again.out
