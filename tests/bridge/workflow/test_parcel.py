"""What lies between the two jobs is read as if somebody hostile had packed it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.bus.answers import MAX_RESULT_BYTES, MAX_RESULT_FILES
from bridge.errors import MachineError
from bridge.protocol.result import RESULT_ROOT
from bridge.runner.spool import Entry
from bridge.workflow import parcel
from bridge.workflow.parcel import TamperedParcel

NONCE = "20260301t120000z0123456789ab"
OTHER = "20260301t120000zba9876543210"
ENTRY = Entry(
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
    parcel.require_free(folder)
    parcel.write(ENTRY, folder)
    return folder


def root(folder: Path) -> Path:
    return folder / RESULT_ROOT / NONCE


def test_what_was_written_is_read_back_whole_under_the_same_digest(packed: Path, tmp_path: Path) -> None:
    found = parcel.read(packed)
    assert found is not None
    assert found.nonce == NONCE
    assert found.files == {
        "result.json": b"{}\n",
        "result.json.sig": b"signed\n",
        "log.txt": b"hello\n",
        "deep/er/report.json": b"[1]\n",
    }
    again = tmp_path / "again"
    assert parcel.write(ENTRY, again).digest == found.digest
    parcel.require_digest(found, found.digest)


@pytest.mark.parametrize("expected", ["", "0" * 64, "A" * 64, "no digest", "0" * 63])
def test_another_digest_or_none_is_refused(packed: Path, expected: str) -> None:
    found = parcel.read(packed)
    assert found is not None
    with pytest.raises(TamperedParcel):
        parcel.require_digest(found, expected)


def change(folder: Path) -> None:
    (root(folder) / "log.txt").write_bytes(b"hullo\n")


def grow(folder: Path) -> None:
    with (root(folder) / "log.txt").open("ab") as file:
        file.write(b"\n")


def add(folder: Path) -> None:
    (root(folder) / "more.txt").write_bytes(b"")


def remove(folder: Path) -> None:
    (root(folder) / "log.txt").unlink()


def rename(folder: Path) -> None:
    (root(folder) / "log.txt").rename(root(folder) / "log2.txt")


def move(folder: Path) -> None:
    root(folder).rename(root(folder).with_name(OTHER))


def swap(folder: Path) -> None:
    one, two = root(folder) / "log.txt", root(folder) / "deep/er/report.json"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


@pytest.mark.parametrize("tamper", [change, grow, add, remove, rename, move, swap])
def test_the_digest_shows_every_change(packed: Path, tamper: Callable[[Path], None]) -> None:
    sealed = parcel.read(packed)
    assert sealed is not None
    tamper(packed)
    found = parcel.read(packed)
    assert found is not None
    with pytest.raises(TamperedParcel, match="changed after the run sealed it"):
        parcel.require_digest(found, sealed.digest)


def link_to_a_file(folder: Path) -> None:
    secret = folder.parent / "secret"
    secret.write_text("not yours")
    (root(folder) / "log.txt").unlink()
    (root(folder) / "log.txt").symlink_to(secret)


def link_to_a_folder(folder: Path) -> None:
    away = folder.parent / "away"
    root(folder).rename(away)
    root(folder).symlink_to(away)


def link_within(folder: Path) -> None:
    (root(folder) / "copy.txt").symlink_to("log.txt")


def pipe(folder: Path) -> None:
    (root(folder) / "log.txt").unlink()
    os.mkfifo(root(folder) / "log.txt")


def listening(folder: Path) -> None:
    at, before = socket.socket(socket.AF_UNIX), Path.cwd()
    os.chdir(root(folder))  # a socket's path must be short
    try:
        at.bind("s")
    finally:
        os.chdir(before)
        at.close()


def other_folder(folder: Path) -> None:
    (folder / ".github").mkdir()
    (folder / ".github" / "workflow.yaml").write_text("on: push\n")


def beside(folder: Path) -> None:
    (folder / RESULT_ROOT / "result.json").write_text("{}")


def two_requests(folder: Path) -> None:
    (folder / RESULT_ROOT / OTHER).mkdir()
    (folder / RESULT_ROOT / OTHER / "result.json").write_text("{}")


def no_nonce(folder: Path) -> None:
    root(folder).rename(root(folder).with_name("latest"))


def no_result(folder: Path) -> None:
    (root(folder) / "result.json").unlink()


def newline(folder: Path) -> None:
    (root(folder) / "a\nb").write_bytes(b"")


def odd_name(folder: Path) -> None:
    (root(folder) / "-rf").write_bytes(b"")


def deep(folder: Path) -> None:
    root(folder).joinpath(*["d"] * 20).mkdir(parents=True)


def many_files(folder: Path) -> None:
    for number in range(MAX_RESULT_FILES):
        (root(folder) / f"f{number}").write_bytes(b"")


def many_folders(folder: Path) -> None:
    for number in range(4 * MAX_RESULT_FILES):
        (root(folder) / f"d{number}").mkdir()


def huge(folder: Path) -> None:
    """No more than a hole on the disk; were it read, it would show."""
    with (root(folder) / "hole").open("wb") as file:
        file.truncate(MAX_RESULT_BYTES + 1)


@pytest.mark.parametrize(
    "tamper",
    [
        *(link_to_a_file, link_to_a_folder, link_within, pipe, listening),
        *(other_folder, beside, two_requests, no_nonce, no_result, newline, odd_name),
        *(deep, many_files, many_folders, huge),
    ],
)
def test_what_nobody_seals_is_refused_before_it_is_opened(
    packed: Path, tamper: Callable[[Path], None]
) -> None:
    tamper(packed)
    with pytest.raises(TamperedParcel) as refusal:
        parcel.read(packed)
    assert "not yours" not in refusal.value.message


def test_a_link_in_the_place_of_the_folder_is_refused(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(packed)
    with pytest.raises(TamperedParcel):
        parcel.read(tmp_path / "link")


@pytest.mark.parametrize("made", [False, True])
def test_no_folder_and_an_empty_one_are_no_parcel(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "out" / ".mac-bridge").mkdir(parents=True)
    assert parcel.read(tmp_path / "out") is None


def test_a_folder_that_holds_something_is_refused_before_a_job_runs(packed: Path) -> None:
    with pytest.raises(MachineError, match=r"is not empty: it holds '\.mac-bridge'"):
        parcel.require_free(packed)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    folder, away = tmp_path / "out", tmp_path / "away"
    away.mkdir()
    root(folder).parent.mkdir(parents=True)
    root(folder).symlink_to(away)
    (away / "log.txt").write_text("mine")
    with pytest.raises(MachineError):
        parcel.write(ENTRY, folder)
    assert (away / "log.txt").read_text() == "mine"
