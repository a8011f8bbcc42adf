"""The scripts of workflow steps: neither the folder that they are called in nor an earlier call has a say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bridge.signing import ensure_key
from tests.fixtures.repo import BIN, Done, RepoFixture
from tests.workflows.test_files import BRIDGE, ROOT, jobs

SCRIPTS = ROOT / "scripts"
_BLOCK = re.compile(r"^(\w+)<<(\S+)\n(.*?)\n\2$", re.MULTILINE | re.DOTALL)


def copied(root: Path) -> Path:
    """What a client is installed from, without anything that git ignores."""
    for name in ("bridge", "evidence_format", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.npz"))
    for name in ("pyproject.toml", "uv.lock", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy2(ROOT / name, root / name)
    return root


def installed(source: Path, venv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = str(source / "scripts" / "install_client.sh")
    return subprocess.run(["sh", script, venv], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["uv", "click"])
def test_a_package_of_another_digest_is_not_installed(tmp_path: Path, changed: str) -> None:
    """The installer's, a dependency's: neither comes from a cache or an index."""
    source = copied(tmp_path / "source")
    name = "uv.lock" if changed == "click" else "scripts/requirements-build.txt"
    text = (source / name).read_text()
    section = re.search(
        rf'^(name = "{changed}"|{changed}==).*?(?=^\[\[package|^\w\S+==|\Z)', text, re.M | re.S
    )
    assert section is not None
    forged = re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, section[0])
    assert forged != section[0]
    (source / name).write_text(text.replace(section[0], forged))
    done = installed(source, "venv", tmp_path)
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()
    assert not (tmp_path / "venv" / "bin" / "kakeya_mac").exists()


@pytest.mark.slow
def test_publish_installs_the_commit_that_the_variable_names(tmp_path: Path) -> None:
    """The script of the workflow's step, as it is. A branch, a package and half a commit are refused."""
    source = copied(tmp_path / "server" / "someone" / "kakeya-mac")
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=True)
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message=all"], check=True)
    subprocess.run([*git, "config", "uploadpack.allowAnySHA1InWant", "true"], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (step,) = [
        step for step in jobs(BRIDGE)["publish"]["steps"] if "install_client.sh" in step.get("run", "")
    ]
    server = f"file://{tmp_path / 'server'}"

    def install(package: str) -> subprocess.CompletedProcess[str]:
        own = {"RUNNER_TEMP": str(tmp_path), "GITHUB_WORKSPACE": str(tmp_path), "GITHUB_SERVER_URL": server}
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        env = {**os.environ, **own, "PACKAGE": package}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

    for wrong in (
        "kakeya-mac==0.1.0",
        "someone/kakeya-mac@main",
        f"someone/kakeya-mac@{commit[:12]}",
        "a\nb",
    ):
        refused = install(wrong)
        assert refused.returncode == 1
        assert f"KAKEYA_MAC_PACKAGE is '{wrong}'; set it to OWNER/NAME@COMMIT" in refused.stdout
    assert not (tmp_path / "kakeya-mac").exists()
    done = install(f"someone/kakeya-mac@{commit}")
    assert done.returncode == 0, done.stderr
    said = subprocess.run([str(tmp_path / "kakeya-mac" / "bin" / "kakeya_mac"), "--version"], cwd=tmp_path)
    assert said.returncode == 0


@pytest.mark.slow
def test_the_folder_that_a_client_is_installed_in_has_no_say(tmp_path: Path) -> None:
    """Modules, lock, sources and settings of a workload, with the project even inside of its checkout."""
    workload, canary = tmp_path / "workload", tmp_path / "canary"
    inside = copied(workload / "kakeya-mac")
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
    done = installed(inside, "../venv", workload)
    assert done.returncode == 0, done.stderr
    assert not canary.exists()
    said = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "kakeya_mac"), "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    brought = {path.name.partition("-")[0] for path in (tmp_path / "venv").rglob("*.dist-info")}
    assert {"click", "pydantic"} <= brought
    assert not brought & {"mlx", "mlx_lm", "mlx_cpu", "numpy"}, "a client has no arrays"
    assert not brought & {"hatchling", "uv", "pip"}, "nothing that builds or installs"


def ask(repo: RepoFixture, step: int, preset: str, **inputs: str) -> tuple[Done, dict[str, str]]:
    """One step of a job, and its outputs."""
    temporary, outputs = repo.root / "temporary", repo.root / f"outputs-{step}"
    temporary.mkdir(exist_ok=True)
    given = {"PARAMS": "", "REF": "", "WAIT": "60", "REMOTE": "", "TRUSTED_RUNNERS": "", **inputs}
    own = {"RUNNER_TEMP": str(temporary), "GITHUB_OUTPUT": str(outputs), "PRESET": preset}
    own["GITHUB_STEP_SUMMARY"] = str(repo.root / f"summary-{step}.md")
    done = subprocess.run(
        ["bash", str(SCRIPTS / "request_in_workflow.sh"), str(BIN / "kakeya_mac")],
        cwd=repo.clone,
        env={**repo.env, **own, "TRANSPORT": "embedded", **given},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return Done(done.returncode, done.stdout, done.stderr), {
        name: value for name, _, value in _BLOCK.findall(outputs.read_text())
    }


@pytest.mark.slow
def test_each_step_gets_the_answer_of_its_own_request(repo: RepoFixture) -> None:
    with repo.runner("--idle", "0.2"):
        steps = [ask(repo, step, "probe") for step in (1, 2)]
        done, broken = ask(repo, 3, "probe", PARAMS="no-such=1")
        key = ensure_key(repo.root / "ci-key", "ci").read_text()
        missed, signed = ask(repo, 4, "probe", SIGNING_KEY=key, THRESHOLD="ratio>=1.5\n")
    assert [step.code for step, _ in steps] == [0, 0], [step.err for step, _ in steps]
    for _, outputs in steps:
        assert outputs["verdict"] == "passed/ok"
        result = json.loads((Path(outputs["report"]) / "result.json").read_text())
        assert result["nonce"] == outputs["nonce"]
    assert "PASSED probe" in (repo.root / "summary-1.md").read_text()
    assert steps[0][1]["nonce"] != steps[1][1]["nonce"]
    # A probe passes, and has no such figure.
    assert (missed.code, signed["verdict"]) == (1, "passed/ok"), missed.err
    assert "threshold ratio>=1.5: NOT MET" in missed.out
    request = repo.git(
        "show", f"mac-bridge/probe-{signed['nonce']}:.mac-bridge/request.json.sig", cwd=repo.remote
    )
    assert "BEGIN SSH SIGNATURE" in request
    assert not list((repo.root / "temporary").rglob("key*")), "the key outlives its step"
    assert (done.code, broken["status"], broken["nonce"], broken["report"]) == (2, "error", "", "")
