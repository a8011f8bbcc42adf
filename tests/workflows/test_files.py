"""What the workflow files promise, and no linter knows: no group, pins, permissions, time limits, tokens."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
ACTION = ROOT / "action.yml"
BRIDGE = ROOT / ".github" / "workflows" / "mac-bridge.yaml"
RUN = ROOT / ".github" / "workflows" / "mac-run.yaml"
PIN = re.compile(r"[a-z0-9-]+/[a-z0-9-]+@[0-9a-f]{40}")


def read(path: Path) -> dict[Any, Any]:
    document = yaml.safe_load(path.read_text())
    assert isinstance(document, dict)
    return document


def on(document: dict[Any, Any]) -> dict[str, Any]:
    triggers = document[True]  # YAML 1.1 reads `on` so
    assert isinstance(triggers, dict)
    return triggers


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found = read(path)["jobs"]
    assert isinstance(found, dict)
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    if path == ACTION:
        yield from read(path)["runs"]["steps"]
        return
    for job in jobs(path).values():
        yield from job["steps"]


named = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
named_all = pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.stem)


def test_the_workflows_are_those_that_the_tests_know():
    assert [path.name for path in WORKFLOWS] == ["ci.yaml", "mac-bridge.yaml", "mac-run.yaml"]


@pytest.mark.parametrize("path", [BRIDGE, RUN], ids=lambda path: path.stem)
def test_no_concurrency_group_ends_one_request_for_another(path: Path):
    """In a called workflow a group would be the caller's, which keeps two runs and cancels the others."""
    assert "concurrency" not in read(path)
    assert all("concurrency" not in job for job in jobs(path).values())


def test_both_jobs_know_the_time_limit_of_the_first():
    limit = "vars.KAKEYA_RUN_MINUTES || '180'"
    assert jobs(BRIDGE)["run"]["timeout-minutes"] == f"${{{{ fromJSON({limit}) }}}}"
    for name in ("run", "publish"):
        (step,) = [step for step in jobs(BRIDGE)[name]["steps"] if "kakeya_mac" in step.get("run", "")][-1:]
        assert step["env"]["KAKEYA_RUN_MINUTES"] == f"${{{{ {limit} }}}}"


@named
def test_artifacts_are_kept_where_their_action_works_or_are_needed(path: Path):
    for step in steps(path):
        if "actions/upload-artifact" in step.get("uses", "") and path != BRIDGE:
            assert "github.server_url == 'https://github.com'" in step["if"]
            assert "endsWith(github.server_url, '.ghe.com')" in step["if"]


@named_all
def test_every_action_is_pinned_by_commit_and_names_its_version(path: Path):
    for step in steps(path):
        used = step.get("uses", "")
        if used and not used.startswith("./"):
            assert PIN.fullmatch(used), used
            assert re.search(rf"{re.escape(used)} # v[0-9]+\.[0-9]+\.[0-9]+\n", path.read_text()), used


@named
def test_no_job_has_a_permission_that_it_does_not_name(path: Path):
    assert read(path)["permissions"] == {}
    assert all(isinstance(job["permissions"], dict) for job in jobs(path).values())


def test_only_the_job_that_runs_nothing_of_a_request_may_write():
    assert jobs(BRIDGE)["run"]["permissions"] == {"contents": "read"}
    assert jobs(BRIDGE)["publish"]["permissions"] == {"actions": "read", "contents": "write"}
    assert jobs(RUN)["request"]["permissions"] == {
        "actions": "write",
        "contents": "write",
        "pull-requests": "write",
    }
    for job in jobs(ROOT / ".github" / "workflows" / "ci.yaml").values():
        assert job["permissions"] == {"contents": "read"}


@named
def test_every_job_has_a_time_limit(path: Path):
    for name, job in jobs(path).items():
        limit = job["timeout-minutes"]
        if isinstance(limit, str):
            found = re.fullmatch(r"\$\{\{ fromJSON\(vars\.[A-Z_]+ \|\| '([0-9]+)'\) \}\}", limit)
            assert found, limit
            limit = int(found[1])
        assert 1 <= limit <= 360, name


@named_all
def test_scripts_contain_no_expression(path: Path):
    scripts = [step["run"] for step in steps(path) if "run" in step]
    assert scripts or path == RUN, "it uses the action, whose scripts are looked at"
    assert not [script for script in scripts if "${{" in script]


@named_all
def test_interpreters_take_no_modules_from_their_folder(path: Path):
    """It may be a workload's; installing is done elsewhere, and isolated."""
    for step in steps(path):
        script = step.get("run", "")
        assert re.findall(r"python3?\"? (?!-I )", script) == []
        if "install_client.sh" in script:
            assert step["working-directory"] == "${{ runner.temp }}"


def test_the_job_that_publishes_is_told_whose_results_count():
    (step,) = [step for step in jobs(BRIDGE)["publish"]["steps"] if "runner publish" in step.get("run", "")]
    assert step["env"]["TRUSTED_RUNNERS"] == "${{ vars.KAKEYA_TRUSTED_RUNNERS }}"
    assert step["env"]["KAKEYA_CONFIG"].startswith("${{ runner.temp }}/"), "not the account's own list"
    assert 'runners trust "$name" --key "$key"' in step["run"]


@named_all
def test_no_checkout_leaves_a_token_behind(path: Path):
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@named_all
def test_every_upload_takes_hidden_files_and_fails_without_any(path: Path):
    for step in steps(path):
        if step.get("uses", "").startswith("actions/upload-artifact@"):
            assert step["with"]["include-hidden-files"] is True, "a result lies in .mac-bridge/"
            assert step["with"]["if-no-files-found"] == "error"


def test_only_request_branches_and_dispatches_start_a_run():
    triggers = on(read(BRIDGE))
    assert set(triggers) == {"push", "workflow_dispatch"}
    assert triggers["push"] == {"branches": ["mac-bridge/**", "AgentMemory/mac-bridge-*"]}
    assert set(triggers["workflow_dispatch"]["inputs"]) == {"branch", "commit"}


def test_the_mac_checks_nothing_out_and_runs_what_is_installed():
    first, second = jobs(BRIDGE)["run"]["steps"]
    assert first["run"].startswith("exec kakeya_mac runner execute ")
    assert "actions/upload-artifact" in second["uses"]
    assert second["if"].startswith("${{ always()")


def test_the_token_that_writes_is_given_to_one_step():
    holders = [step["name"] for step in jobs(BRIDGE)["publish"]["steps"] if "github.token" in str(step)]
    assert holders == ["Compare, judge, commit"]


def test_publish_job_uses_the_default_branch_or_a_commit():
    publish = jobs(BRIDGE)["publish"]
    assert publish["if"].startswith("${{ always()"), "a run that failed is answered, too"
    (checkout,) = [step for step in publish["steps"] if "actions/checkout" in step.get("uses", "")]
    assert checkout["with"]["ref"] == "${{ github.event.repository.default_branch }}"


def test_all_ways_to_start_a_run_have_the_same_inputs():
    triggers = on(read(RUN))
    called, by_hand = triggers["workflow_call"], triggers["workflow_dispatch"]
    assert called["inputs"] == by_hand["inputs"]
    assert set(called["inputs"]) == {"preset", "params", "ref", "wait", "threshold"}
    assert set(called["outputs"]) == {"status", "verdict", "report"}
    action = read(ACTION)
    assert set(called["inputs"]) <= set(action["inputs"])
    assert set(called["outputs"]) <= set(action["outputs"])


# Where something is installed for a job that may write, or by `make setup`.
INSTALLS = [
    *WORKFLOWS,
    ACTION,
    *(ROOT / name for name in ("Makefile", "scripts/install_client.sh", "scripts/request_in_workflow.sh")),
]
# Environments of their own, of tests and benchmarks.
SEPARATE = re.compile(r"\.venv-(fuzz|peers)")
# Programs that install packages, and what each has to be told to take none without a digest.
INSTALLERS = {
    r"\bpip install\b": ("--require-hashes", "--only-binary :all:"),
    r"\buv\"? sync\b": ("--locked", "--no-build-isolation"),
    r"\buv\"? (tool|run|build|pip (?!install))\b|\b(pipx|uvx|conda|npm|easy_install)\b": ("never",),
}


def installing(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Each command of a script that installs packages, whole, with what it has to be told."""
    return [
        (line, told)
        for line in re.sub(r"\\\n\s*", "", text).splitlines()
        for pattern, told in INSTALLERS.items()
        if re.search(pattern, line) and not line.lstrip().startswith("#") and not SEPARATE.search(line)
    ]


@pytest.mark.parametrize("path", INSTALLS, ids=lambda path: path.name)
def test_nothing_is_installed_without_a_digest(path: Path):
    found = installing(path.read_text())
    assert len(found) == {"Makefile": 3, "install_client.sh": 2}.get(path.name, 0)
    for line, told in found:
        assert all(option in line for option in told), line


def test_nothing_is_installed_on_the_mac_without_a_digest(tmp_path: Path):
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    script = ["sh", str(ROOT / "scripts" / "setup_mac.sh"), "--dry-run"]
    found = installing(subprocess.run(script, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 2
    for line, told in found:
        assert all(option in line for option in told), line


def test_the_client_is_installed_without_a_build_backend():
    script = (ROOT / "scripts" / "install_client.sh").read_text()
    assert all("--no-deps" in line for line, _ in installing(script))
    assert "--no-emit-project" in script


def test_what_builds_the_project_is_what_is_installed_by_digest():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (ROOT / "scripts" / "requirements-build.txt").read_text()
    for entry in project["build-system"]["requires"]:
        assert f"\n{entry} " in lines
    pinned = re.split(r"\n(?=\S)", lines.partition("\n")[2].strip())
    assert all(re.match(r"\S+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry, re.DOTALL) for entry in pinned)
