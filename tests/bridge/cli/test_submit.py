"""Submitting touches nothing of the user's, and costs the same in a large clone as in a small one."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fixtures.repo import RepoFixture, build_repo

RUN = ("run", "--preset", "probe", "--json")


def snapshot(repo: RepoFixture) -> tuple[str, str, bytes, str, str]:
    """Status, branch, index bytes, HEAD and refs of the clone."""
    return (
        repo.git("status", "--porcelain=v2", "--branch"),
        (repo.clone / ".git" / "HEAD").read_text(),
        (repo.clone / ".git" / "index").read_bytes(),
        repo.git("for-each-ref"),
        repo.git("stash", "list"),
    )


def request_files(repo: RepoFixture, ref: str) -> set[str]:
    return set(
        repo.git("diff-tree", "--no-commit-id", "-r", "--name-only", ref, cwd=repo.remote).splitlines()
    )


def test_a_dirty_tree_is_left_alone_and_does_not_leak(repo: RepoFixture):
    (repo.clone / "README.md").write_text("uncommitted\n")
    (repo.clone / "staged.txt").write_text("staged\n")
    repo.git("add", "staged.txt")
    (repo.clone / "untracked.txt").write_text("untracked\n")
    before = snapshot(repo)
    done = repo.kakeya(*RUN)
    assert done.code == 0, done.err
    assert "uncommitted" in done.err
    assert snapshot(repo) == before
    ref = done.json["ref"]
    assert request_files(repo, ref) <= {".mac-bridge/request.json", ".mac-bridge/request.json.sig"}
    assert repo.git("rev-parse", f"{ref}^", cwd=repo.remote) == repo.head()


def test_a_detached_head_and_a_path_with_spaces_work(tmp_path: Path):
    repo = build_repo(tmp_path / "a folder with spaces")
    repo.git("checkout", "--quiet", "--detach")
    before = snapshot(repo)
    done = repo.kakeya(*RUN)
    assert done.code == 0, done.err
    assert snapshot(repo) == before


def test_a_linked_worktree_and_a_subfolder_work(repo: RepoFixture):
    repo.git("worktree", "add", "--quiet", "-b", "side", str(repo.root / "side"))
    folder = repo.root / "side" / "deep"
    folder.mkdir()
    done = repo.kakeya(*RUN, cwd=folder)
    assert done.code == 0, done.err


def test_a_shallow_clone_works(repo: RepoFixture):
    shallow = repo.root / "shallow"
    repo.git("clone", "--quiet", "--depth=1", f"file://{repo.remote}", str(shallow), cwd=repo.root)
    done = repo.kakeya(*RUN, cwd=shallow)
    assert done.code == 0, done.err


def test_hooks_of_the_clone_do_not_run(repo: RepoFixture):
    for name in ("pre-push", "reference-transaction", "post-commit", "pre-commit"):
        hook = repo.clone / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch '{repo.root}/canary'\n")
        hook.chmod(0o755)
    assert repo.kakeya(*RUN).code == 0
    assert not (repo.root / "canary").exists()


def test_no_identity_is_needed(repo: RepoFixture):
    done = repo.kakeya(*RUN, GIT_AUTHOR_NAME="", EMAIL="")
    assert done.code == 0, done.err


def grow(repo: RepoFixture, files: int) -> None:
    """Commit `files` files in folders of a hundred, quickly, and check them out."""
    lines = ["commit refs/heads/main", "committer T <t@example.org> 1700000000 +0000", "data 4", "many"]
    lines.append(f"from {repo.git('rev-parse', 'HEAD')}")
    for number in range(files):
        text = f"file {number}\n"
        lines += [f"M 100644 inline src/{number // 100:04d}/{number:05d}.txt", f"data {len(text)}", text]
    repo.git("fast-import", "--quiet", "--force", input="\n".join(lines) + "\n")
    repo.git("reset", "--quiet", "--hard", "main")
    repo.git("push", "--quiet", "origin", "main")


def submit_seconds(repo: RepoFixture) -> float:
    start = time.perf_counter()
    done = repo.program("kakeya_mac", *RUN)
    assert done.code == 0, done.err
    return time.perf_counter() - start


@pytest.mark.e2e
@pytest.mark.quiet
def test_the_cost_of_a_submit_does_not_grow_with_the_checkout(tmp_path: Path):
    small = build_repo(tmp_path / "small", {f"f{n}.txt": "x\n" for n in range(10)})
    large = build_repo(tmp_path / "large")
    grow(large, 50_000)
    (large.clone / "README.md").write_text("uncommitted\n")
    before = snapshot(large)
    pairs = [(submit_seconds(small), submit_seconds(large)) for _ in range(5)]
    assert snapshot(large) == before
    ratio = statistics.median(b / a for a, b in pairs)
    assert ratio < 1.5, f"a submit in 50,000 files takes {ratio:.2f} times one in 10: {pairs}"


def test_help_imports_no_command_and_no_library():
    code = (
        "import sys; from bridge.cli import cli, run_edge; run_edge(cli, ['--help']);"
        "libraries = {'git', 'jsonschema', 'mlx', 'psutil', 'pydantic', 'requests', 'rich'};"
        "sys.exit(repr(libraries & sys.modules.keys() or 'none'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Commands:" in done.stdout
    assert done.stderr == "'none'\n"
