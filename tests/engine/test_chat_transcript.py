"""Transcripts: changes that leave the one before alone, and files of messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.chat import Transcript
from engine.errors import ConfigurationError, PromptError

SAID = Transcript("Be brief.").asked("one").answered("1", "").asked("two").answered("2", "two it is")


def roles(transcript: Transcript) -> list[str]:
    return [message.role for message in transcript.messages]


def test_every_change_is_a_new_transcript():
    assert roles(SAID) == ["system", "user", "assistant", "user", "assistant"]
    assert roles(SAID.undone()) == ["system", "user", "assistant"]
    assert roles(SAID.unanswered()) == ["system", "user", "assistant", "user"]
    assert SAID.undone().undone() == Transcript("Be brief.")
    assert len(SAID.messages) == 5


@pytest.mark.parametrize("change", [Transcript.undone, Transcript.unanswered])
def test_there_must_be_something_to_take_back(change):
    with pytest.raises(ConfigurationError, match="nothing has been said yet"):
        change(Transcript("Be brief."))


def test_half_a_character_is_refused_before_it_is_part_of_anything():
    with pytest.raises(PromptError, match="the text cannot be sent: content"):
        Transcript().asked("a\ud800")
    with pytest.raises(PromptError, match="the text cannot be sent: content"):
        _ = Transcript("a\ud800").messages


def test_a_file_brings_back_what_was_saved_and_is_never_overwritten(tmp_path: Path):
    file = tmp_path / "said.jsonl"
    odd = SAID.asked("three\u2028\r\n\x1b ünï").answered('"3"', "")
    odd.save(file)
    assert Transcript.load(file) == odd
    assert len(file.read_text(encoding="utf-8").split("\n")) == 8
    before = file.read_bytes()
    with pytest.raises(ConfigurationError, match="exists already"):
        SAID.save(file)
    assert file.read_bytes() == before
    with pytest.raises(ConfigurationError, match="cannot be written"):
        SAID.save(tmp_path / "nowhere" / "said.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no message"),
        ("\n\n", "holds no message"),
        ('{"role":"user","content":"a"}\nnot json\n', "line 2: Invalid JSON"),
        ('{"role":"user","content":"a","colour":1}', "line 1: colour: Extra inputs"),
        ('{"role":"king","content":"a"}', "line 1: role: Input should be"),
        ('{"role":"user","content":"a"}\n{"role":"system","content":"b"}', "system turn must come first"),
        ('{"role":"system","content":null}', "the system turn is no text"),
    ],
)
def test_a_file_that_is_none_is_refused_by_line(tmp_path: Path, text: str, message: str):
    file = tmp_path / "said.jsonl"
    file.write_text(text)
    with pytest.raises(PromptError, match=message):
        Transcript.load(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(PromptError, match="cannot be read"):
        Transcript.load(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(PromptError, match="cannot be read"):
        Transcript.load(tmp_path / "bytes")
