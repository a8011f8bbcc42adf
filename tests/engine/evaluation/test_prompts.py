"""Reading prompts: shipped sets, own files, refusals that name the line, and sets that prove nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli import run
from engine.errors import ModelError, PromptError
from engine.evaluation.prompts import (
    Prompt,
    encode,
    load_prompts,
    raw_prompt,
    refuse_unsound,
)
from engine.target.loading import load_target
from evidence_format.prompt_sets import IN_ALL

FACT = "The secret code of Maren is 4821."
HAYSTACK = (
    f"The river is wide. {FACT} The hill is green. Question: what is the secret code of Maren? Answer: "
)


def needle_row(**changes: Any) -> dict[str, Any]:
    row = {
        "id": "r-1",
        "kind": "retrieval",
        "prompt": HAYSTACK,
        "answer": "4821",
        "needle": FACT,
        "depth": 0.4,
    }
    return row | changes


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_users_file_is_read_in_order_limited_by_kind(tmp_path: Path):
    rows = [{"id": f"a-{i}", "kind": "a", "prompt": f"x{i}"} for i in range(4)]
    rows += [{"id": f"b-{i}", "kind": "b", "prompt": f"y{i}"} for i in range(4)]
    path = str(write(tmp_path / "own.jsonl", *rows))
    assert [p.id for p in load_prompts(path, limit=2)] == ["a-0", "a-1", "b-0", "b-1"]
    drawn = [p.id for p in load_prompts(path, limit=2, seed=7)]
    assert drawn == [p.id for p in load_prompts(path, limit=2, seed=7)]
    assert len(drawn) == 4
    assert len(load_prompts(path)) == 8


def test_needle_is_removable_and_instruction_has_no_name(tmp_path: Path):
    [prompt] = load_prompts(str(write(tmp_path / "own.jsonl", needle_row())))
    assert prompt.instruction == "Question: what is the secret code of {}? Answer:"
    bare = prompt.without_needle()
    assert bare.text == HAYSTACK.replace(f" {FACT}", "")
    assert bare.instruction == prompt.instruction
    with pytest.raises(PromptError, match="no needle"):
        raw_prompt("x").without_needle()


def test_prompts_for_different_names_carry_the_same_instruction(tmp_path: Path):
    rows = [
        needle_row(),
        needle_row(id="r-2", prompt=HAYSTACK.replace("Maren", "Tolu"), needle=FACT.replace("Maren", "Tolu")),
        needle_row(id="r-3", prompt=HAYSTACK + "Also say why. Be brief: "),
    ]
    one, other, foreign = load_prompts(str(write(tmp_path / "own.jsonl", *rows)))
    assert one.instruction == other.instruction
    assert foreign.instruction != one.instruction


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", 'line 2: Expecting .*; write one JSON object a line: {"id": "…", "prompt": "…"}$'),
        (
            "Tell me a story.",
            'line 2: Expecting value.*; write one JSON object a line: {"id": "…", "prompt": "…"}$',
        ),
        ("[]", 'line 2: not a JSON object; write one JSON object a line: {"id": "…", "prompt": "…"}$'),
        ({"id": "x"}, "either prompt or messages"),
        ({"id": "x", "prompt": "a", "messages": []}, "either prompt or messages"),
        ({"id": "x", "prompt": "a", "promt": 1}, "unknown fields promt"),
        ({"prompt": "a"}, "'id' is missing"),
        ("[" * 50_000, "recursion"),
        ({"id": "x", "messages": "hello"}, "messages must be a list of objects with role and content"),
        ({"id": "x", "messages": [{"role": "user"}]}, "messages must be a list of objects"),
        ({"id": "x", "prompt": 5}, "must be a text"),
        ({"id": "x", "messages": [{"role": "robot", "content": "hi"}]}, "roles out of"),
        (needle_row(needle="The secret code of Maren is 9."), "is not in the prompt"),
        ({"id": "first", "prompt": "again"}, "occurs twice"),
        (needle_row(needle=""), "line 2: needle must have 1 to 400 characters, not 0"),
        (needle_row(needle=" "), "needle must have 1 to 400 characters, not 0"),
        (needle_row(needle="x" * 401), "needle must have 1 to 400 characters, not 401"),
        (
            needle_row(answer=""),
            "line 2: answer must be at least 2 characters that occur in the needle, not ''",
        ),
        (needle_row(answer="4"), "answer must be at least 2 characters"),
        (needle_row(answer="4822"), "answer must be .* occur in the needle, not '4822'"),
        (needle_row(depth=5), "line 2: depth must be a number from 0 to 1, not 5"),
        (needle_row(depth=-1), "depth must be a number from 0 to 1, not -1"),
        (needle_row(depth=float("nan")), "depth must be a number from 0 to 1, not nan"),
        ({"id": "x" * 401, "prompt": "a"}, "line 2: id must have 1 to 400 characters, not 401"),
        ({"id": "", "prompt": "a"}, "id must have 1 to 400 characters, not 0"),
        ({"id": "x\ud800", "prompt": "a"}, r"line 2: '\\ud800' is half of a character"),
        ({"id": "x", "prompt": "a\udc00"}, "half of a character"),
        (needle_row(answer="\ud800"), "half of a character"),
        ({"id": "x", "messages": [{"role": "user", "content": "\ud83d"}]}, "half of a character"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused(tmp_path: Path, row: Any, message: str):
    path = write(tmp_path / "own.jsonl", {"id": "first", "prompt": "a"}, row)
    with pytest.raises(PromptError, match=message):
        load_prompts(str(path))


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085"], ids=["u2028", "u2029", "u0085"])
def test_a_text_may_hold_any_line_break_that_json_allows(tmp_path: Path, mark: str):
    row = json.dumps({"id": "x", "prompt": f"one{mark}two"}, ensure_ascii=False)
    path = tmp_path / "own.jsonl"
    other = row.replace("x", "y").replace("two", "three")
    path.write_text(f"{row}\r\n\n{other}\n", encoding="utf-8", newline="")
    assert [prompt.text for prompt in load_prompts(str(path))] == [f"one{mark}two", f"one{mark}three"]


def test_one_prompt_under_two_ids_is_refused(tmp_path: Path):
    rows = [{"id": name, "prompt": "the same"} for name in ("first", "second")]
    with pytest.raises(PromptError, match="first and second are the same prompt"):
        load_prompts(str(write(tmp_path / "own.jsonl", *rows)))


def test_shipped_prompts_and_ids_are_refused_in_users_files(tmp_path: Path):
    other = {"id": "code-001", "prompt": "something else"}
    with pytest.raises(PromptError, match="a shipped prompt has the id code-001"):
        load_prompts(str(write(tmp_path / "own.jsonl", other)))
    [shipped] = load_prompts("code", 1)
    for name in (shipped.id, "mine"):
        same = {"id": name, "prompt": shipped.text}
        with pytest.raises(PromptError, match=f"prompt {name} belongs to the shipped set code"):
            load_prompts(str(write(tmp_path / "own.jsonl", same)))


def test_an_unknown_set_and_an_empty_file_are_refused(tmp_path: Path):
    with pytest.raises(PromptError, match="neither all"):
        load_prompts("poems")
    with pytest.raises(PromptError, match="holds no prompts"):
        load_prompts(str(write(tmp_path / "own.jsonl")))


def test_the_shipped_sets_are_large_enough_and_well_formed():
    prompts = load_prompts("all")
    for kind in IN_ALL:
        assert sum(prompt.kind == kind for prompt in prompts) >= 20
    assert len({prompt.instruction for prompt in prompts if prompt.kind == "retrieval"}) == 1
    assert {prompt.instruction for prompt in prompts if prompt.kind != "retrieval"} == {""}
    for prompt in prompts:
        if prompt.kind == "retrieval":
            assert prompt.needle is not None
            assert prompt.needle.answer in prompt.needle.sentence
            assert prompt.needle.answer not in (prompt.without_needle().text or "")


def test_tokens_are_those_mlx_lm_would_use(folders: tuple[Path, Path]):
    target = load_target(folders[0])
    tokens = encode(raw_prompt("héllo"), target.tokenizer, target.target.vocab_size, target.context)
    assert target.tokenizer.decode(tokens) == "héllo"
    turns = encode(raw_prompt([("user", "hi")]), target.tokenizer, target.target.vocab_size, target.context)
    assert target.tokenizer.decode(turns) == "<bos><user>hi<end><assistant>"
    with_bos = encode(raw_prompt("<bos>a"), target.tokenizer, target.target.vocab_size, target.context)
    assert target.tokenizer.decode(with_bos) == "<bos>a"


def test_a_prompt_that_cannot_be_used_is_refused_by_id(folders: tuple[Path, Path]):
    target = load_target(folders[0])
    with pytest.raises(PromptError, match="long has 600 tokens; the model's context is 512"):
        encode(raw_prompt("x" * 600, "long"), target.tokenizer, target.target.vocab_size, target.context)
    with pytest.raises(PromptError, match="prompt is empty"):
        encode(raw_prompt(""), target.tokenizer, target.target.vocab_size, target.context)
    with pytest.raises(ModelError, match="the model knows 8"):
        encode(raw_prompt("x"), target.tokenizer, 8, None)


@pytest.mark.parametrize(
    ("row", "identifier", "kind", "text", "asked"),
    [
        ({"question": "How many?", "answer": "#### 12"}, "gsm8k-1", "gsm8k", None, "How many?"),
        (
            {
                "task_id": "HumanEval/3",
                "prompt": "def f():",
                "entry_point": "f",
                "test": "",
                "canonical_solution": "",
            },
            "HumanEval/3",
            "humaneval",
            "def f():",
            None,
        ),
        (
            {"task_id": 11, "text": "Write f.", "code": "", "test_list": []},
            "mbpp-11",
            "mbpp",
            None,
            "Write f.",
        ),
        (
            {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
            "mt-bench-81",
            "writing",
            None,
            "Write.",
        ),
    ],
)
def test_files_of_well_known_sets_are_read_as_they_are(
    tmp_path: Path, row: dict[str, Any], identifier: str, kind: str, text: str | None, asked: str | None
):
    [prompt] = load_prompts(str(write(tmp_path / "set.jsonl", row)))
    assert (prompt.id, prompt.kind, prompt.text) == (identifier, kind, text)
    assert prompt.messages == (None if asked is None else (("user", asked),))
    assert prompt.needle is None


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
