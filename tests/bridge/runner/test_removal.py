"""Whatever a job leaves is removed, and nothing outside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bridge.runner.workspace import remove_tree


@pytest.mark.slow
def test_a_tree_deeper_than_any_stack_or_path_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for depth in range(3000):
        os.mkdir("d", dir_fd=here)
        os.close(os.open(f"file{depth}", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert remove_tree(top)
    assert list(tmp_path.iterdir()) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "out").symlink_to(outside)
    (top / "loop").symlink_to(top)
    (top / "0").mkdir()  # a name that moving folders up would choose
    os.mkfifo(top / "a" / "pipe")
    assert remove_tree(top)
    assert (outside / "mine").read_text() == "mine"


def test_folders_without_permissions_are_removed(tmp_path: Path) -> None:
    locked = tmp_path / "top" / "locked" / "inner"
    locked.mkdir(parents=True)
    (locked / "file").write_text("x")
    locked.chmod(0)
    locked.parent.chmod(0o500)
    assert remove_tree(tmp_path / "top")


def test_a_file_or_nothing_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert remove_tree(tmp_path / "file")
    assert remove_tree(tmp_path / "file")
