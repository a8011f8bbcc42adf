"""The stored results of the real clients and the program that stores them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients import CLIENTS, FEATURES, HERE, RESULTS, Client
from tests.clients.__main__ import GIVEN

ROWS: list[dict[str, Any]] = json.loads(RESULTS.read_bytes())


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_the_stored_version_is_the_pinned_one(client: Client):
    assert {row["version"] for row in ROWS if row["client"] == client.title} == {client.pinned()}


def test_nothing_that_is_stored_failed():
    told = [each for row in ROWS for each in row["features"].values()]
    assert told
    assert all(each is True or isinstance(each, str) for each in told)
    assert {name for row in ROWS for name in row["features"]} <= set(FEATURES)


def test_the_versions_of_npm_are_those_of_its_lock_file():
    locked = json.loads((HERE / "npm" / "package-lock.json").read_text())["packages"]
    wanted = json.loads((HERE / "npm" / "package.json").read_text())["dependencies"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted


def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.clients", str(folder), *arguments]
    return subprocess.run(argv, cwd=HERE.parents[1], capture_output=True, text=True)


def test_a_feature_that_raises_is_told_as_failed():
    script = 'from features import *\n@feature("chat", "text")\ndef text(): check_listed("no")'
    given = GIVEN | dict.fromkeys(("url", "root", "key"), "x")
    environment = os.environ | {"KAKEYA_CLIENTS": json.dumps(given)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=HERE / "scripts", env=environment, capture_output=True, text=True
    )
    line = json.loads(done.stdout)
    assert (line["ok"], line["feature"]) == (False, "text")
    assert "does not begin with" in line["detail"]


@pytest.mark.slow
def test_a_client_that_is_installed_runs_and_one_that_is_not_fails(tmp_path: Path):
    done = ran(tmp_path, "--only", "anthropic_python")
    assert done.returncode == 0, done.stdout
    (row,) = json.loads(done.stdout.splitlines()[-1])["clients"]
    assert all(row["features"].values())
    absent = ran(tmp_path, "--only", "codex")
    assert absent.returncode == 1
    assert "not installed, not run: codex" in absent.stdout
