"""The scripts of workflow steps: neither the folder that they are called in nor an earlier call has a say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.houses import BIN, Done, House
from tests.workflows.test_files import ROOT

SCRIPTS = ROOT / "scripts"
_BLOCK = re.compile(r"^(\w+)<<(\S+)\n(.*?)\n\2$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_folder_that_a_client_is_installed_in_has_no_say(tmp_path: Path) -> None:
    """Modules, lock, sources and settings of a workload, with the project even inside of its checkout."""
    workload, canary = tmp_path / "workload", tmp_path / "canary"
    inside = workload / "kakeya-mac"
    for name in ("bridge", "engine", "scripts"):
        shutil.copytree(ROOT / name, inside / name, ignore=shutil.ignore_patterns("__pycache__", "*.npz"))
    for name in ("pyproject.toml", "uv.lock", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy2(ROOT / name, inside / name)
    evil = f"open({str(canary)!r}, 'a').write(__name__)\n"
    for path in (
        "venv.py",
        "pip/__main__.py",
        "pip/__init__.py",
        "ensurepip.py",
        "sitecustomize.py",
        "sys.py",
    ):
        (workload / path).parent.mkdir(exist_ok=True)
        (workload / path).write_text(evil)
    (workload / "pyproject.toml").write_text(
        '[project]\nname = "workload"\nversion = "0"\nrequires-python = ">=3.11"\n'
        '[tool.uv.workspace]\nmembers = ["kakeya-mac"]\n[tool.uv.sources]\nclick = {path = "evil"}\n'
    )
    (workload / "uv.toml").write_text("offline = true\nno-index = true\n")
    (workload / "evil").mkdir()
    (workload / "evil" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "click"\nversion = "8.2.0"\n'
    )
    (workload / "evil" / "backend.py").write_text(evil)
    done = subprocess.run(
        ["sh", str(inside / "scripts" / "install_client.sh"), "../venv"],
        cwd=workload,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert not canary.exists()
    said = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "kakeya_mac"), "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr


def ask(house: House, step: int, preset: str, **inputs: str) -> tuple[Done, dict[str, str]]:
    """One step of a job, and its outputs."""
    temporary, outputs = house.root / "temporary", house.root / f"outputs-{step}"
    temporary.mkdir(exist_ok=True)
    given = {"PARAMS": "", "REF": "", "WAIT": "60", "REMOTE": "", "TRUSTED_RUNNERS": "", **inputs}
    own = {"RUNNER_TEMP": str(temporary), "GITHUB_OUTPUT": str(outputs), "PRESET": preset}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "request_in_workflow.sh"), str(BIN / "kakeya_mac")],
        cwd=house.clone,
        env={**house.env, **own, "TRANSPORT": "embedded", **given},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return Done(done.returncode, done.stdout, done.stderr), {
        name: value for name, _, value in _BLOCK.findall(outputs.read_text())
    }


@pytest.mark.slow
def test_a_job_may_ask_more_than_once_and_each_answer_is_of_its_own_request(house: House) -> None:
    with house.runner("--idle", "0.2"):
        steps = [ask(house, step, "probe") for step in (1, 2)]
        done, broken = ask(house, 3, "probe", PARAMS="no-such=1")
    assert [step.code for step, _ in steps] == [0, 0], [step.err for step, _ in steps]
    for _, outputs in steps:
        assert outputs["verdict"] == "passed/ok"
        result = json.loads((Path(outputs["report"]) / "result.json").read_text())
        assert result["nonce"] == outputs["nonce"]
    assert steps[0][1]["nonce"] != steps[1][1]["nonce"]
    assert (done.code, broken["status"], broken["nonce"], broken["report"]) == (2, "error", "", "")
