"""Prompts that prove nothing about recall are refused before anything is run, by their ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.cli import run
from engine.errors import PromptError
from engine.evaluation.prompts import Prompt, load_prompts, refuse_unsound
from tests.engine.evaluation.test_prompts import FACT, HAYSTACK, needle_row, write


def row(identifier: str, code: str = "4821", prompt: str = HAYSTACK, **more: Any) -> dict[str, Any]:
    prompt, needle = prompt.replace("4821", code), FACT.replace("4821", code)
    return needle_row(id=identifier, prompt=prompt, needle=needle, answer=code, **more)


def read(folder: Path, *rows: dict[str, Any]) -> list[Prompt]:
    return load_prompts(str(write(folder / "own.jsonl", *rows)))


OTHER = HAYSTACK + "Also say why. Be brief: "
UNSOUND = {
    "answer elsewhere": ([row("r-1", prompt=f"Not 4821. {HAYSTACK}")], "r-1 holds its answer '4821' outside"),
    "instructions": (
        [row("r-1"), row("r-2", "4822", prompt=OTHER)],
        "r-1 and r-2 are of one set, 'r', but ask differently .*id of another set, such as other-r-1",
    ),
    "said instructions": (
        [row("1", instruction="a"), row("2", "4822", instruction="b")],
        r"1 and 2 are of one set, '', but ask differently \('a', 'b'\)",
    ),
    "a bare set": (
        [row("code-1")],
        "code-1 is of set code, whose prompts hold no instruction, .*such as needle-1",
    ),
    "one prompt": ([row("r-1"), row("r-2", "4822"), row("r-3")], "r-1 and r-3 are the same prompt"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_prompts_that_prove_nothing_are_refused(tmp_path: Path, name: str):
    rows, message = UNSOUND[name]
    with pytest.raises(PromptError, match=message):
        refuse_unsound(read(tmp_path, *rows))


def test_sets_that_ask_differently_need_different_ids(tmp_path: Path):
    rows = [row("r-1"), row("r-2", "4822"), row("other-r-1", "4823", prompt=OTHER)]
    refuse_unsound(read(tmp_path, *rows))


def test_the_shipped_set_is_sound():
    refuse_unsound(load_prompts("retrieval"))


def test_recall_refuses_them_before_it_begins(capsys, tmp_path: Path, folders: tuple[Path, Path]):
    own = str(write(tmp_path / "own.jsonl", row("r-1"), row("r-2")))
    models = ["--model", str(folders[0]), "--drafter", str(folders[1])]
    journal = tmp_path / "j.jsonl"
    code = run(["eval", "recall", "--prompts", own, "--journal", str(journal), *models])
    err = capsys.readouterr().err
    assert code == 2
    assert "r-1 and r-2 are the same prompt" in err
    assert "progress" not in err
    assert not journal.exists()
