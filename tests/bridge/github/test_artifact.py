"""The artifact between the two jobs is read as hostile."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.bus.publish import ResultFiles
from bridge.bus.results import MAX_RESULT_BYTES, MAX_RESULT_FILES
from bridge.errors import MachineError, ResultError
from bridge.github.workflow import (
    read_artifact,
    require_empty,
    write_artifact,
)
from bridge.protocol.result import RESULT_ROOT

NONCE = "20260301t120000z0123456789ab"
OTHER = "20260301t120000zba9876543210"
ENTRY = ResultFiles(
    nonce=NONCE,
    request_commit="a" * 40,
    result_ref=None,
    result=b"{}\n",
    signature=b"signed\n",
    files={"log.txt": b"hello\n", "deep/er/report.json": b"[1]\n"},
)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    require_empty(folder)
    write_artifact(ENTRY, folder)
    return folder


def root(folder: Path) -> Path:
    return folder / RESULT_ROOT / NONCE


def test_artifact_is_read_back_with_the_same_digest(packed: Path, tmp_path: Path) -> None:
    digest = write_artifact(ENTRY, tmp_path / "again").digest
    found = read_artifact(packed, NONCE, digest)
    assert found is not None
    assert found.digest == digest
    assert found.files == {
        "result.json": b"{}\n",
        "result.json.sig": b"signed\n",
        "log.txt": b"hello\n",
        "deep/er/report.json": b"[1]\n",
    }


@pytest.mark.parametrize("expected", ["", "0" * 64, "A" * 64, "no digest", "0" * 63])
def test_another_digest_or_none_is_refused(packed: Path, expected: str) -> None:
    with pytest.raises(ResultError):
        read_artifact(packed, NONCE, expected)


def add(folder: Path, name: str, data: bytes = b"") -> None:
    path = root(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def swap(folder: Path) -> None:
    one, two = root(folder) / "log.txt", root(folder) / "deep/er/report.json"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


CHANGES: dict[str, Callable[[Path], object]] = {
    "changed": lambda folder: add(folder, "log.txt", b"hullo\n"),
    "grown": lambda folder: add(folder, "log.txt", b"hello\n\n"),
    "added": lambda folder: add(folder, "more.txt"),
    "removed": lambda folder: (root(folder) / "log.txt").unlink(),
    "renamed": lambda folder: (root(folder) / "log.txt").rename(root(folder) / "log2.txt"),
    "moved": lambda folder: root(folder).rename(root(folder).with_name(OTHER)),
    "swapped": swap,
}


@pytest.mark.parametrize("tamper", CHANGES.values(), ids=CHANGES)
def test_the_digest_shows_every_change(
    packed: Path, tmp_path: Path, tamper: Callable[[Path], object]
) -> None:
    digest = write_artifact(ENTRY, tmp_path / "again").digest
    tamper(packed)
    with pytest.raises(ResultError, match="changed after the run wrote it"):
        read_artifact(packed, NONCE, digest)


def link_to_a_file(folder: Path) -> None:
    secret = folder.parent / "secret"
    secret.write_text("not yours")
    (root(folder) / "log.txt").unlink()
    (root(folder) / "log.txt").symlink_to(secret)


def link_to_a_folder(folder: Path) -> None:
    away = folder.parent / "away"
    root(folder).rename(away)
    root(folder).symlink_to(away)


def listening(folder: Path) -> None:
    at, before = socket.socket(socket.AF_UNIX), Path.cwd()
    os.chdir(root(folder))  # a socket's path must be short
    try:
        at.bind("s")
    finally:
        os.chdir(before)
        at.close()


def huge(folder: Path) -> None:
    """No more than a hole on the disk; were it read, it would show."""
    with (root(folder) / "hole").open("wb") as file:
        file.truncate(MAX_RESULT_BYTES + 1)


SHAPES: dict[str, Callable[[Path], object]] = {
    "link to a file": link_to_a_file,
    "link to a folder": link_to_a_folder,
    "link within": lambda folder: (root(folder) / "copy.txt").symlink_to("log.txt"),
    "pipe": lambda folder: os.mkfifo(root(folder) / "pipe"),
    "socket": listening,
    "other folder": lambda folder: add(folder, "../../../.github/workflow.yaml", b"on: push\n"),
    "file outside": lambda folder: add(folder, "../result.json", b"{}"),
    "two requests": lambda folder: add(folder, f"../{OTHER}/result.json", b"{}"),
    "no nonce": lambda folder: root(folder).rename(root(folder).with_name("latest")),
    "no result": lambda folder: (root(folder) / "result.json").unlink(),
    "newline": lambda folder: add(folder, "a\nb"),
    "odd name": lambda folder: add(folder, "-rf"),
    "many files": lambda folder: [add(folder, f"f{number}") for number in range(MAX_RESULT_FILES)],
    "many folders": lambda folder: [
        (root(folder) / f"d{number}").mkdir() for number in range(4 * MAX_RESULT_FILES)
    ],
    "huge": huge,
}


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("tamper", SHAPES.values(), ids=SHAPES)
def test_folder_of_another_shape_is_refused_unread(
    packed: Path, tmp_path: Path, tamper: Callable[[Path], object]
) -> None:
    digest = write_artifact(ENTRY, tmp_path / "again").digest
    tamper(packed)
    with pytest.raises(ResultError) as refusal:
        read_artifact(packed, NONCE, digest)
    assert "not yours" not in refusal.value.message


def test_a_link_in_the_place_of_the_folder_is_refused(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(packed)
    with pytest.raises(ResultError):
        read_artifact(tmp_path / "link", NONCE, "0" * 64)


@pytest.mark.parametrize("made", [False, True])
def test_no_folder_and_an_empty_one_are_no_parcel(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "out" / ".mac-bridge").mkdir(parents=True)
    assert read_artifact(tmp_path / "out", NONCE, "") is None


def test_folder_that_is_not_empty_is_refused(packed: Path) -> None:
    with pytest.raises(MachineError, match=r"is not empty: it holds '\.mac-bridge'"):
        require_empty(packed)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    folder, away = tmp_path / "out", tmp_path / "away"
    away.mkdir()
    root(folder).parent.mkdir(parents=True)
    root(folder).symlink_to(away)
    (away / "log.txt").write_text("mine")
    with pytest.raises(MachineError):
        write_artifact(ENTRY, folder)
    assert (away / "log.txt").read_text() == "mine"
