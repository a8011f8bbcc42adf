"""Splicing a folder into a raw tree gives what git itself would have written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.bus import trees
from bridge.bus.git import Git
from bridge.bus.objects import Entry
from tests.worlds import World

NAME = ".mac-bridge"
# Names around ours in git's order, where a folder sorts as if it ended in a slash.
NAMES = [
    ".mac-bridge",
    ".mac-bridge-",
    ".mac-bridge.",
    ".mac-bridge0",
    ".mac-bridg",
    ".a",
    "-",
    "a",
    "é",
    "~",
]


@pytest.fixture(scope="module")
def git(tmp_path_factory: pytest.TempPathFactory) -> Git:
    folder: Path = tmp_path_factory.mktemp("trees")
    git = Git(folder)
    git.run("init", "--quiet", "--bare")
    return git


@given(rows=st.dictionaries(st.sampled_from(NAMES), st.booleans()))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_spliced_tree_is_the_one_git_would_write(git: Git, rows: dict[str, bool]):
    blob, folder = git.write_blob(b"x"), git.write_tree([])
    inner = git.write_tree([Entry("100644", "blob", blob, "f")])
    rows = {**rows, NAME: True} if NAME in rows else rows  # a file of that name is refused before
    entries = [
        Entry("040000", "tree", folder, name) if is_folder else Entry("100644", "blob", blob, name)
        for name, is_folder in rows.items()
    ]
    raw = git.read_tree(git.write_tree(entries))

    found = trees.find(raw, NAME, 20)
    spliced = git.write_raw_tree(trees.with_folder(raw, NAME, inner))

    assert (found is not None) == (NAME in rows)
    kept = [entry for entry in entries if entry.name != NAME]
    assert spliced == git.write_tree([*kept, Entry("040000", "tree", inner, NAME)])


def test_a_file_of_the_folders_name_is_found_as_a_file(git: Git):
    blob = git.write_blob(b"x")
    raw = git.read_tree(git.write_tree([Entry("100644", "blob", blob, NAME)]))
    assert trees.find(raw, NAME, 20) == trees.Row("100644", blob)


def test_what_the_folder_held_before_stays_and_an_old_request_is_replaced(world: World):
    main = world.house.git("rev-parse", "main")
    files = {
        ".mac-bridge/request.json": b"old",
        ".mac-bridge/request.json.sig": b"old",
        ".mac-bridge/notes": b"n",
    }
    world.point("refs/heads/main", world.commit(main, files))
    world.house.git("pull", "--quiet", "--ff-only")
    submitted = world.submit()
    listed = world.house.git("ls-tree", "-r", "--name-only", submitted.commit, cwd=world.house.remote)
    assert set(listed.splitlines()) == {".mac-bridge/notes", ".mac-bridge/request.json", "README.md"}
