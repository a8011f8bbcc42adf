"""The workspace: exactly the commit's files, from objects alone, and never a byte outside its folder."""

import os
import subprocess
from pathlib import Path

import pytest

from bridge.errors import BusError
from bridge.git.repo import GitRepo
from bridge.runner import workspace
from bridge.runner.workspace import WorkloadRefused, lay_out
from tests.fixtures.repo import build_repo


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    files = {"README.md": "hello\n", "data/a.json": "{}\n", "data/b/c.txt": "c\n", "tests/test_x.py": "x\n"}
    return build_repo(tmp_path / "repo", files).clone


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "outer" / "workspace"
    path.mkdir(parents=True)
    return path


def git(repository: Path, *args: str, input: bytes | None = None) -> str:
    command = ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *args]
    done = subprocess.run(command, cwd=repository, input=input, capture_output=True, check=True)
    return done.stdout.decode().strip()


def tree(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()
    }


def commit_of(repository: Path, rows: list[tuple[str, str, str]]) -> str:
    """A commit of a tree with these rows (mode, name, content), however unreasonable."""
    raw = b""
    for mode, name, content in rows:
        kind = "tree" if mode == "40000" else "blob"
        sha = content
        if kind == "blob":
            sha = git(repository, "hash-object", "-w", "--stdin", input=content.encode())
        raw += f"{mode} {name}".encode() + b"\0" + bytes.fromhex(sha)
    made = git(repository, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", input=raw)
    return git(repository, "commit-tree", "-m", "hostile", made)


def test_a_full_workspace_holds_exactly_the_files(repository: Path, folder: Path) -> None:
    (repository / "run.sh").write_text("#!/bin/sh\n")
    (repository / "run.sh").chmod(0o755)
    (repository / "data" / "link").symlink_to("b/c.txt")
    git(repository, "add", "--all")
    git(repository, "commit", "-qm", "more")
    lay_out(GitRepo(repository), git(repository, "rev-parse", "HEAD"), folder)
    expected = {"README.md", "data/a.json", "data/b/c.txt", "tests/test_x.py", "run.sh", "data/link"}
    assert tree(folder) == expected
    assert (folder / "data/link").read_text() == "c\n"
    assert os.access(folder / "run.sh", os.X_OK)
    assert not os.access(folder / "README.md", os.X_OK)
    assert not (folder / ".git").exists()


def test_only_the_named_paths_are_laid_out(repository: Path, folder: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    lay_out(GitRepo(repository), head, folder, ["data/a.json", "tests/"])
    assert tree(folder) == {"data/a.json", "tests/test_x.py"}


@pytest.mark.parametrize("path", ["data/none.json", "dat", "data/*.json", "data/b/c.txt/x"])
def test_a_path_the_commit_lacks_is_refused(repository: Path, folder: Path, path: str) -> None:
    with pytest.raises(WorkloadRefused, match="has no file"):
        lay_out(GitRepo(repository), git(repository, "rev-parse", "HEAD"), folder, [path])
    assert tree(folder) == set()


def test_pointers_stay_pointers_and_are_counted(repository: Path, folder: Path) -> None:
    (repository / "data" / "big.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    git(repository, "add", "--all")
    git(repository, "commit", "-qm", "pointer")
    pointers = lay_out(GitRepo(repository), git(repository, "rev-parse", "HEAD"), folder)
    assert pointers == {"data/big.bin"}


def test_a_hostile_tree_writes_nothing_outside(repository: Path, folder: Path) -> None:
    inner = git(
        repository,
        "mktree",
        input=f"120000 blob {git(repository, 'hash-object', '-w', '--stdin', input=b'x')}\tb\n".encode(),
    )
    file = git(repository, "hash-object", "-w", "--stdin", input=b"x")
    plain = git(repository, "mktree", input=f"100644 blob {file}\tb\n".encode())
    deep = git(repository, "mktree", input=f"040000 tree {inner}\td\n".encode())
    deeper = git(repository, "mktree", input=f"040000 tree {deep}\te\n".encode())
    hostile = [
        [("100644", "..", "x")],
        [("40000", "..", plain)],
        [("100644", ".git", "x")],
        [("40000", ".GIT", plain)],
        [("40000", ".git.", plain)],
        [("100644", "a\\b", "x")],
        [("100644", "a", "x"), ("100644", "a", "y")],
        [("120000", "a", ".."), ("40000", "a", inner)],
        [("120000", "a", ".."), ("40000", "a", plain)],
        [("120000", "a", ".."), ("40000", "a", deeper)],
        [("100644", "a", "x"), ("40000", "a", plain)],
        [("120000", "a", "x" * 5000)],
        [("100644", "x" * 300, "x")],
    ]
    for number, rows in enumerate(hostile):
        target = folder / str(number)
        target.mkdir()
        with pytest.raises(WorkloadRefused):
            lay_out(GitRepo(repository), commit_of(repository, rows), target)
        assert set(os.listdir(folder.parent)) == {"workspace"}, rows
        assert set(os.listdir(folder)) == {str(index) for index in range(number + 1)}, rows


def test_too_many_files_or_bytes_are_refused(
    repository: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = git(repository, "rev-parse", "HEAD")
    monkeypatch.setattr(workspace, "MAX_FILES", 3)
    with pytest.raises(WorkloadRefused, match="at most 3 files"):
        lay_out(GitRepo(repository), head, folder)
    monkeypatch.setattr(workspace, "MAX_FILES", 10)
    monkeypatch.setattr(workspace, "MAX_BYTES", 5)
    with pytest.raises(WorkloadRefused, match="5 bytes are laid out"):
        lay_out(GitRepo(repository), head, folder)
    assert tree(folder) == set()


def test_few_objects_that_name_many_folders_are_refused(
    repository: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "MAX_FILES", 50)
    file = git(repository, "hash-object", "-w", "--stdin", input=b"x")
    chain = git(repository, "mktree", input=f"100644 blob {file}\tf\n".encode())
    for _ in range(9):
        chain = git(repository, "mktree", input=f"040000 tree {chain}\td\n".encode())
    wide = commit_of(repository, [("40000", str(number), chain) for number in range(6)])
    with pytest.raises(WorkloadRefused, match="more than 50 folders"):
        lay_out(GitRepo(repository), wide, folder)
    assert list(folder.iterdir()) == []


def test_a_file_whose_object_is_missing_is_the_repositorys_fault(repository: Path, folder: Path) -> None:
    raw = b"100644 gone\0" + bytes.fromhex("5" * 40)
    made = git(repository, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", input=raw)
    with pytest.raises(BusError, match="is missing"):
        lay_out(GitRepo(repository), git(repository, "commit-tree", "-m", "hostile", made), folder)
