"""The programs that run are the installed ones, whatever a workload puts where Python might look."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bridge.git.repo import GitRepo
from tests.fixtures.runner import RunnerFixture

PLANTED = "import os, sys; os.write(1, b'PLANTED ' + __file__.encode() + b'\\n'); raise SystemExit(0)\n"
SCRIPT = "#!/bin/sh\necho PLANTED $0\n"
# Where Python, a shell, git or pytest look for code, below the job's working directory.
PLACES = {
    **dict.fromkeys(
        (
            *("sitecustomize.py", "usercustomize.py", "conftest.py", "json.py", "os.py", "encodings.py"),
            *("bridge/__init__.py", "bridge/__main__.py", "engine/__init__.py", "engine/__main__.py"),
            *("bridge/runner/__init__.py", "bridge/runner/supervisor.py", "__main__.py", "numpy.py"),
            *(".venv/lib/python3/site-packages/sitecustomize.py", "lib/python3/site-packages/bridge.py"),
            *(".local/lib/python3/site-packages/usercustomize.py", "home/.local/sitecustomize.py"),
        ),
        PLANTED,
    ),
    **dict.fromkeys(
        (".venv/bin/python", "bin/python3", "python", "git", "sh", "g++", "sandbox-exec"), SCRIPT
    ),
    "pyvenv.cfg": "home = /tmp/elsewhere\ninclude-system-site-packages = false\n",
    "evil.pth": "import os; os.write(1, b'PLANTED pth\\n')\n",
    "python311._pth": ".\nimport site\n",
    ".pythonrc.py": PLANTED,
    "setup.cfg": "[tool:pytest]\naddopts = --version\n",
    ".gitconfig": "[alias]\n\trev-parse = !echo PLANTED\n",
    ".git-lookalike/hooks/post-checkout": SCRIPT,
}
ASK = """
import bridge, json, os, sys
print("executable", sys.executable)
print("bridge", os.path.dirname(bridge.__file__))
print("here", [name for name in sys.path if name in ("", ".") or name.startswith(os.getcwd())])
print("flags", sys.flags.isolated, sys.flags.no_user_site, sys.flags.ignore_environment)
print("planted", os.path.exists("sitecustomize.py"))
"""


@pytest.fixture
def hostile(runner: RunnerFixture) -> RunnerFixture:
    """A runner fixture whose workload plants code wherever a program might pick it up."""
    for name, text in PLACES.items():
        path = runner.repo.clone / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    runner.repo.git("add", "-A", "-f")
    who = ("-c", "user.name=Mallory", "-c", "user.email=mallory@example.org")
    runner.repo.git(*who, "commit", "-qm", "planted")
    return runner


@pytest.mark.slow
def test_nothing_of_the_workload_is_picked_up_as_code(
    hostile: RunnerFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also not where the runner itself was started in the workload, with an environment that points there."""
    monkeypatch.chdir(hostile.repo.clone)
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONUSERBASE", "VIRTUAL_ENV", "BASH_ENV"):
        monkeypatch.setenv(name, str(hostile.repo.clone))
    (tmp_path / "asks.py").write_text(ASK)
    asked = {}
    for name, argv in {
        "asks": ["${python}", "-I", str(tmp_path / "asks.py")],
        "engine": ["${engine}", "--version"],
        "bridge": ["${bridge}", "--version"],
    }.items():
        hostile.preset(name, argv, workspace="full")
        asked[name] = hostile.ask(name, workload_sha=GitRepo(hostile.repo.clone).resolve("HEAD"))
    daemon = hostile.daemon()
    assert sum(daemon.serve(once=True, idle_timeout_s=20) for _ in asked) == 3
    for name, manifest in asked.items():
        assert hostile.verdict(manifest.nonce) == ("passed", "ok"), (name, hostile.log(manifest.nonce))
        assert "PLANTED" not in hostile.log(manifest.nonce)
    rows = hostile.log(asked["asks"].nonce).splitlines()
    said = dict(row.split(" ", 1) for row in rows)
    assert said == {
        "executable": sys.executable,
        "bridge": os.path.dirname(__import__("bridge").__file__),
        "here": "[]",
        "flags": "1 1 1",
        "planted": "True",
    }
    assert "kakeya" in hostile.log(asked["bridge"].nonce)
