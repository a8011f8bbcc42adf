"""Lines of well-known prompt sets, told by their fields, as prompts of ours. None of the sets is shipped.

Only what is asked is taken. How the answers are scored is the business of those sets, so answers, tests and
solutions are left alone.
"""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def _gsm8k(row: Row, number: int) -> Row:
    return {"id": f"gsm8k-{number}", "kind": "gsm8k", "messages": _turn(row["question"])}


def _humaneval(row: Row, _: int) -> Row:
    return {"id": row["task_id"], "kind": "humaneval", "prompt": row["prompt"]}


def _mbpp(row: Row, _: int) -> Row:
    return {"id": f"mbpp-{row['task_id']}", "kind": "mbpp", "messages": _turn(row["text"])}


def _mt_bench(row: Row, _: int) -> Row:
    return {
        "id": f"mt-bench-{row['question_id']}",
        "kind": str(row["category"]),
        "messages": _turn(row["turns"][0]),
    }


def _turn(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


# (fields a line must have, fields it may have) -> how it is read
LAYOUTS: tuple[tuple[set[str], set[str], Callable[[Row, int], Row]], ...] = (
    ({"question", "answer"}, set(), _gsm8k),
    ({"task_id", "prompt", "entry_point"}, {"canonical_solution", "test"}, _humaneval),
    ({"task_id", "text", "code", "test_list"}, {"test_setup_code", "challenge_test_list"}, _mbpp),
    ({"question_id", "category", "turns"}, {"reference"}, _mt_bench),
)


def translated(row: Row, number: int) -> Row:
    """The line in our fields; one that is in none of these layouts as it is.

    Args:
        row: one JSON object.
        number: of its line, from 1.
    """
    for needed, optional, read in LAYOUTS:
        if needed <= set(row) <= needed | optional:
            return read(row, number)
    return row
