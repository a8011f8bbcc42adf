"""Bad input gets one clear message and the right exit code; no traceback, nothing left behind."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.repo import Done, RepoFixture

THROUGHPUT = ("run", "--preset", "throughput")


def state_of(repo: RepoFixture) -> tuple[str, str, str, set[str], list[str]]:
    """Everything a refused request must leave as it was."""
    objects = sorted(str(p.relative_to(repo.clone)) for p in (repo.clone / ".git").rglob("*") if p.is_file())
    return (
        repo.git("status", "--porcelain=v2", "--branch"),
        repo.git("for-each-ref"),
        repo.head(),
        repo.remote_refs(),
        [name for name in objects if not name.endswith(("index", "FETCH_HEAD"))],
    )


def assert_clear(done: Done, code: int, *words: str) -> None:
    assert done.code == code, f"exit {done.code}: {done.err}"
    assert "Traceback" not in done.err + done.out
    errors = [line for line in done.err.splitlines() if line.lower().startswith("error")]
    assert len(errors) == 1, f"expected one error line, got: {done.err}"
    for word in words:
        assert word in done.err


BAD_INPUT = {
    "unknown preset": (("run", "--preset", "throughputt"), 2, ("throughputt", "throughput")),
    "unknown parameter": ((*THROUGHPUT, "-p", "promts=code"), 2, ("promts", "prompts")),
    "out of range": ((*THROUGHPUT, "-p", "limit=100000"), 2, ("limit", "100000")),
    "wrong type": ((*THROUGHPUT, "-p", "limit=many"), 2, ("limit", "many")),
    "not key=value": ((*THROUGHPUT, "-p", "limit"), 2, ("limit",)),
    "traversal": (("run", "--preset", "tests", "-p", "path=tests/../../etc/passwd"), 2, ("path",)),
    "absolute path": (("run", "--preset", "tests", "-p", "path=/etc/passwd"), 2, ("path",)),
    "option as a path": (("run", "--preset", "tests", "-p", "path=--collect-only"), 2, ("path",)),
    "unknown ref": ((*THROUGHPUT, "--ref", "no-such-branch"), 2, ("no-such-branch",)),
    "option as a ref": ((*THROUGHPUT, "--ref=--upload-pack=touch canary"), 2, ("--upload-pack",)),
    "no such remote": ((*THROUGHPUT, "--remote", "upstream"), 6, ("upstream",)),
    "missing folder": ((*THROUGHPUT, "--remote", "/no/such/repository.git"), 6, ("/no/such/repository.git",)),
    "closed port": ((*THROUGHPUT, "--remote", "http://127.0.0.1:9/x.git"), 6, ("127.0.0.1",)),
    "unsafe transport": ((*THROUGHPUT, "--remote", "ext::sh -c touch% canary"), 6, ("ext::",)),
    "unknown handle": (("result", "20260101t000000z0123456789ab"), 2, ("20260101t000000z0123456789ab",)),
    "malformed handle": (("status", "../../etc"), 2, ("../../etc",)),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_clearly_and_leaves_nothing(repo: RepoFixture, case: str):
    args, code, words = BAD_INPUT[case]
    before = state_of(repo)
    assert_clear(repo.kakeya(*args), code, *words)
    assert state_of(repo) == before
    assert not (repo.clone / "canary").exists()


def test_a_clone_without_a_remote_is_told_so(repo: RepoFixture):
    repo.git("remote", "remove", "origin")
    assert_clear(repo.kakeya(*THROUGHPUT), 6, "remote")


def test_outside_a_repository_is_told_so(repo: RepoFixture, tmp_path: Path):
    folder = tmp_path / "nowhere"
    folder.mkdir()
    assert_clear(repo.kakeya(*THROUGHPUT, cwd=folder), 6, "repository")


def test_a_folder_with_files_is_refused_before_anything_is_asked(repo: RepoFixture):
    before = state_of(repo)
    assert_clear(repo.kakeya(*THROUGHPUT, "--wait", "-o", str(repo.clone)), 2, "not empty")
    assert state_of(repo) == before


def test_a_remote_that_rejects_the_push_is_quoted(repo: RepoFixture):
    hook = repo.remote / "hooks" / "pre-receive"
    hook.write_text("#!/bin/sh\necho 'no pushes on Sundays' >&2\nexit 1\n")
    hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    before = state_of(repo)
    assert_clear(repo.kakeya(*THROUGHPUT), 6, "no pushes on Sundays")
    assert state_of(repo) == before


def test_an_error_with_json_ends_in_one_json_line(repo: RepoFixture):
    done = repo.kakeya("run", "--preset", "nope", "--json")
    assert done.code == 2
    assert done.json["exit_code"] == 2
    assert "nope" in done.json["message"]


def test_bad_usage_with_json_ends_in_one_json_line(repo: RepoFixture):
    done = repo.kakeya("run", "--json")
    assert done.code == 2
    assert done.json["exit_code"] == 2
    assert "--preset" in done.json["message"]


def test_a_demo_with_a_bad_parameter_makes_nothing(repo: RepoFixture, tmp_path: Path):
    folder = tmp_path / "demo"
    assert_clear(repo.kakeya("demo", "-p", "limit=0", "--folder", str(folder)), 2, "limit")
    assert_clear(repo.kakeya("demo", "-p", "nope=1", "--folder", str(folder)), 2, "nope")
    assert not folder.exists()


def test_an_unknown_command_suggests_the_nearest(repo: RepoFixture):
    done = repo.kakeya("statsu")
    assert done.code == 2
    assert "status" in done.err


START = """
import os, signal, time
import click
from bridge import cli
"""
WITHIN_DEL = """

class Closing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)

@click.command()
def waits():
    Closing()
    time.sleep(30)

cli.cli = waits
cli.main([])
"""


WITHIN_A_LIBRARY = """
@click.command()
def waits():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    except BaseException as error:  # as pydantic does while it builds a model
        raise RuntimeError("cannot build") from error

cli.cli = waits
cli.main([])
"""


@pytest.mark.parametrize("program", [WITHIN_DEL, WITHIN_A_LIBRARY], ids=["__del__", "a library"])
def test_signal_that_comes_within_other_code_is_not_lost(program: str):
    done = subprocess.run([sys.executable, "-c", START + program], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr.strip()) == (143, "terminated")
