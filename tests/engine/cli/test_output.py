"""Standard output that fails is one line and code 1, not a bug of ours, and told apart from other files."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli import run
from engine.cli.output import Output, guarded_output
from engine.errors import EngineError

ENGINE = [sys.executable, "-I", "-m", "engine"]
TABLE = ["memory", "--table", "article"]


class FullDisk(io.RawIOBase):
    """A file with no space left."""

    def writable(self) -> bool:
        return True

    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(encoding: str = "utf-8") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(FullDisk()), encoding=encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("arguments", [TABLE, [*TABLE, "--json"], ["--help"]], ids=["table", "json", "help"])
def test_a_full_disk_is_one_line_and_code_1(
    capsys, monkeypatch: pytest.MonkeyPatch, arguments: list[str], encoding: str
):
    stream = full_disk(encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    code = run(arguments)
    assert sys.stdout is stream
    monkeypatch.undo()
    assert code == 1
    reason = "standard output cannot be written: No space left on device"
    if encoding == "ascii" and arguments == TABLE:
        reason = r"standard output cannot show '\xd7' in ascii; set PYTHONIOENCODING=utf-8"
    assert capsys.readouterr().err == f"kakeya_engine: {reason}\n"
    stream.buffer.raw.close()  # type: ignore[attr-defined]  # what it still holds has nowhere to go


def test_a_continuation_that_cannot_be_written_is_one_line_and_code_1(
    capsys, monkeypatch: pytest.MonkeyPatch, folders: tuple[Path, Path]
):
    stream = full_disk()
    monkeypatch.setattr(sys, "stdout", stream)
    code = run(["generate", "x", "--max-tokens", "2", "--model", str(folders[0]), "--drafter", "none"])
    monkeypatch.undo()
    assert code == 1
    assert "No space left on device" in capsys.readouterr().err
    stream.buffer.raw.close()  # type: ignore[attr-defined]


def test_a_closed_output_is_refused_before_any_work(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    code = run(["generate", "x", "--model", "/nowhere"])
    monkeypatch.undo()
    assert code == 1
    assert capsys.readouterr().err == (
        "kakeya_engine: standard output is closed; send it to a file, or to /dev/null\n"
    )


def test_a_reader_that_went_away_is_code_1_without_a_word():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*ENGINE, *TABLE, "--json"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_errors_of_other_files_stay_what_they_are():
    with pytest.raises(OSError, match="seven"), guarded_output():
        raise OSError("seven")
    with pytest.raises(UnicodeEncodeError), guarded_output():
        "\u2026".encode("ascii")


def test_the_bytes_below_a_text_fail_in_the_same_way():
    text = full_disk()
    with pytest.raises(EngineError, match="cannot be written"):
        Output(text).buffer.write(b"x" * 100_000)
    assert Output(text).encoding == "utf-8"
    text.buffer.raw.close()  # type: ignore[attr-defined]
