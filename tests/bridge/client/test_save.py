"""A result on disk is whole or not there, and never mixed with anything else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bridge.bus.requests import resolve_handle
from bridge.bus.results import Believed, FetchedResult, believe, fetch
from bridge.client.save import save
from bridge.errors import FolderNotEmpty, MachineError
from tests.fixtures.bus import FILES, BusFixture


@pytest.fixture
def home(bus: BusFixture) -> tuple[Believed, FetchedResult]:
    submitted = bus.submit()
    bus.answer(submitted)
    fetched = fetch(bus.git, bus.remote, resolve_handle(bus.git, bus.remote, submitted.nonce))
    assert fetched is not None
    return believe(fetched, trusted=Path("/nonexistent")), fetched


@pytest.mark.parametrize("there", ["missing", "empty"])
def test_every_published_file_is_written(home: tuple[Believed, FetchedResult], tmp_path: Path, there: str):
    folder = tmp_path / "deep" / "result"
    if there == "empty":
        folder.mkdir(parents=True)
    written = save(*home, folder)
    assert {str(path.relative_to(folder)) for path in written} == {*FILES, "result.json"}
    assert (folder / "logs" / "run.log").read_bytes() == FILES["logs/run.log"]
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("there", ["a file", "a folder with something in it"])
def test_nothing_is_written_over(home: tuple[Believed, FetchedResult], tmp_path: Path, there: str):
    folder = tmp_path / "result"
    if there == "a file":
        folder.write_text("mine")
    else:
        folder.mkdir()
        (folder / "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FolderNotEmpty, match="is not empty; nothing was written"):
        save(*home, folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_cannot_be_written_is_one_clear_error(
    home: tuple[Believed, FetchedResult], tmp_path: Path
):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match="cannot write"):
        save(*home, tmp_path / "file" / "result")


def test_a_file_is_never_written_over_another(home: tuple[Believed, FetchedResult], tmp_path: Path):
    """As on a disk that takes ``Log.txt`` for ``log.txt``: the second of one name finds the first."""
    believed, fetched = home
    twice = dataclasses.replace(fetched, files={**fetched.files, "logs/../result.json": b"{}"})
    with pytest.raises(MachineError, match=r"cannot write .*: File exists"):
        save(believed, twice, tmp_path / "result")
    assert list(tmp_path.glob("result*")) == []


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("link", ["out", "out/inner", "out/inner/result"])
@pytest.mark.parametrize("leads", ["to a folder", "nowhere"])
def test_a_relative_folder_is_not_reached_through_a_link(
    home: tuple[Believed, FetchedResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    link: str,
    leads: str,
):
    elsewhere = tmp_path / "elsewhere"
    if leads == "to a folder":
        elsewhere.mkdir()
    checkout = tmp_path / "checkout"
    (checkout / link).parent.mkdir(parents=True)
    (checkout / link).symlink_to(elsewhere)
    monkeypatch.chdir(checkout)
    with pytest.raises(MachineError, match=f"^{link} is a link to '.*elsewhere'; nothing was written"):
        save(*home, Path("out/inner/result"))
    assert not elsewhere.exists() or not list(elsewhere.iterdir())


def test_an_absolute_folder_may_lie_behind_a_link_but_is_none(
    home: tuple[Believed, FetchedResult], tmp_path: Path
):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert save(*home, tmp_path / "link" / "result")
    with pytest.raises(MachineError, match="is a link to"):
        save(*home, tmp_path / "link")
