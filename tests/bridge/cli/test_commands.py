"""The smaller commands: doctor, presets, gate, runners; and how our own bug looks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.repo import RepoFixture, isolated_env


def test_doctor_accepts_a_working_clone_and_lists_its_checks(repo: RepoFixture):
    done = repo.kakeya("doctor", "--json")
    assert done.code == 0, done.out
    checks = {check["name"]: check for check in done.json["checks"]}
    assert {"git", "repository", "remote", "push", "trusted runners"} <= set(checks)
    assert all(check["looked_at"] and check["finding"] for check in checks.values())
    assert checks["trusted runners"]["level"] == "warn"
    assert checks["trusted runners"]["fix"]


def test_doctor_leaves_the_remote_as_it_was(repo: RepoFixture):
    before = repo.remote_refs()
    repo.kakeya("doctor")
    assert repo.remote_refs() == before


def test_gate_explains_every_code_alone_and_all_of_them_together(repo: RepoFixture):
    rules = repo.kakeya("gate", "--explain", "all", "--json").json["rules"]
    text = repo.kakeya("gate", "--explain", "all").out
    assert len(rules) == len({rule["code"] for rule in rules}) > 40
    for rule in rules:
        assert f"{rule['code']}: rejected when {rule['rejected_when']}" in text
    one = repo.kakeya("gate", "--explain", "parity-self", "--json").json
    assert one in rules


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIO2hFPxuv2uvMyGPxuv2uvMyGPxuv2uvMyGPxuv2uvMy"


def test_a_key_with_a_line_break_or_options_is_not_a_key(repo: RepoFixture):
    for bad in (f"{KEY}\n* {KEY}", f'namespaces="x" {KEY}', "ssh-ed25519", "/no/such/file.pub"):
        done = repo.kakeya("runners", "trust", "studio", "--key", bad)
        assert done.code == 2, bad
    assert repo.kakeya("runners", "trust", "bad name*", "--key", KEY).code == 2


def test_a_bug_of_ours_ends_in_70_and_says_how_to_report_it(tmp_path: Path):
    script = (
        "import click, sys\n"
        "from bridge.cli import run_edge\n"
        "@click.command()\n"
        "def broken(): raise KeyError('lost')\n"
        "sys.exit(run_edge(broken, []))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=isolated_env(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 70
    assert "Traceback" not in done.stderr
    assert "bug in kakeya-mac" in done.stderr
    [kept] = (tmp_path / "state" / "crashes").iterdir()
    assert "KeyError" in kept.read_text()


@pytest.mark.slow
def test_output_into_a_closed_pipe_is_no_error(repo: RepoFixture):
    command = f"'{Path(sys.executable).parent / 'kakeya_mac'}' presets --json | head -c 1"
    done = subprocess.run(
        ["sh", "-c", command], env={**os.environ, **repo.env}, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    assert "rror" not in done.stderr
