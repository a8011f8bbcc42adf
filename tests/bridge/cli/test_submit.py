"""Submitting touches nothing of the user's, and costs the same in a large clone as in a small one."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.houses import House, build_house

RUN = ("run", "--preset", "probe", "--json")


def snapshot(house: House) -> tuple[str, str, bytes, str, str]:
    """Status, branch, index bytes, HEAD and refs of the clone."""
    return (
        house.git("status", "--porcelain=v2", "--branch"),
        (house.clone / ".git" / "HEAD").read_text(),
        (house.clone / ".git" / "index").read_bytes(),
        house.git("for-each-ref"),
        house.git("stash", "list"),
    )


def request_files(house: House, ref: str) -> set[str]:
    return set(
        house.git("diff-tree", "--no-commit-id", "-r", "--name-only", ref, cwd=house.remote).splitlines()
    )


def test_a_dirty_tree_is_left_alone_and_does_not_leak(house: House):
    (house.clone / "README.md").write_text("uncommitted\n")
    (house.clone / "staged.txt").write_text("staged\n")
    house.git("add", "staged.txt")
    (house.clone / "untracked.txt").write_text("untracked\n")
    before = snapshot(house)
    done = house.kakeya(*RUN)
    assert done.code == 0, done.err
    assert "uncommitted" in done.err
    assert snapshot(house) == before
    ref = done.json["ref"]
    assert request_files(house, ref) <= {".mac-bridge/request.json", ".mac-bridge/request.json.sig"}
    assert house.git("rev-parse", f"{ref}^", cwd=house.remote) == house.head()


def test_a_detached_head_and_a_path_with_spaces_work(tmp_path: Path):
    house = build_house(tmp_path / "a house with spaces")
    house.git("checkout", "--quiet", "--detach")
    before = snapshot(house)
    done = house.kakeya(*RUN)
    assert done.code == 0, done.err
    assert snapshot(house) == before


def test_a_linked_worktree_and_a_subfolder_work(house: House):
    house.git("worktree", "add", "--quiet", "-b", "side", str(house.root / "side"))
    folder = house.root / "side" / "deep"
    folder.mkdir()
    done = house.kakeya(*RUN, cwd=folder)
    assert done.code == 0, done.err


def test_a_shallow_clone_works(house: House):
    shallow = house.root / "shallow"
    house.git("clone", "--quiet", "--depth=1", f"file://{house.remote}", str(shallow), cwd=house.root)
    done = house.kakeya(*RUN, cwd=shallow)
    assert done.code == 0, done.err


def test_hooks_of_the_clone_do_not_run(house: House):
    for name in ("pre-push", "reference-transaction", "post-commit", "pre-commit"):
        hook = house.clone / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch '{house.root}/canary'\n")
        hook.chmod(0o755)
    assert house.kakeya(*RUN).code == 0
    assert not (house.root / "canary").exists()


def test_no_identity_is_needed(house: House):
    done = house.kakeya(*RUN, GIT_AUTHOR_NAME="", EMAIL="")
    assert done.code == 0, done.err


def grow(house: House, files: int) -> None:
    """Commit `files` files in folders of a hundred, quickly, and check them out."""
    lines = ["commit refs/heads/main", "committer T <t@example.org> 1700000000 +0000", "data 4", "many"]
    lines.append(f"from {house.git('rev-parse', 'HEAD')}")
    for number in range(files):
        text = f"file {number}\n"
        lines += [f"M 100644 inline src/{number // 100:04d}/{number:05d}.txt", f"data {len(text)}", text]
    house.git("fast-import", "--quiet", "--force", input="\n".join(lines) + "\n")
    house.git("reset", "--quiet", "--hard", "main")
    house.git("push", "--quiet", "origin", "main")


def submit_seconds(house: House) -> float:
    start = time.perf_counter()
    done = house.program("kakeya_mac", *RUN)
    assert done.code == 0, done.err
    return time.perf_counter() - start


@pytest.mark.e2e
@pytest.mark.quiet
def test_the_cost_of_a_submit_does_not_grow_with_the_checkout(tmp_path: Path):
    small = build_house(tmp_path / "small", {f"f{n}.txt": "x\n" for n in range(10)})
    large = build_house(tmp_path / "large")
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
