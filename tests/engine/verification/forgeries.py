"""Genuine reports, and forgeries that the gate accepts: one thing changed, the rest settled."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from bridge.evidence.gate import judge
from engine.cli import run
from engine.detokenize import text_of
from engine.stops import Stops
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, tokenizer_of
from tests.bridge.evidence.derived import Document, settle

PROMPTS = ("def add(a, b):\n    return", "class Stack:\n    def push(self", "for name in names:\n    print")
PAIR = ("--model", str(SHIPPED_TARGET), "--drafter", str(SHIPPED_DRAFTER))


def measure(path: Path, *words: str) -> Document:
    """The report that an evaluation writes."""
    assert run(["eval", *words, "--report", str(path), "--journal", f"{path}.journal", "--json"]) == 0
    document: Document = json.loads(path.read_text())
    return document


def write_prompts(path: Path) -> Path:
    """A file of short prompts, ``own-001`` and so on."""
    lines = [
        {"id": f"own-{number:03d}", "kind": "own", "prompt": text} for number, text in enumerate(PROMPTS, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write(path: Path, document: Document) -> Path:
    """A forged report, which the gate accepts."""
    data = json.dumps(document).encode()
    judgement = judge(data)
    assert judgement.accepted, judgement.violations
    path.write_bytes(data)
    return path


def forged(document: Document, change: Callable[[Document], None]) -> Document:
    """A copy with a change made and everything derived again."""
    order = document["order"]
    document = copy.deepcopy(document)
    change(document)
    return settle(document) | {"order": order}


def rows(document: Document, identifier: str) -> list[Document]:
    """The rows of a prompt in all arms."""
    return [row for arm in document["arms"] for row in arm["samples"] if row["prompt_id"] == identifier]


def swap_token(document: Document, identifier: str, position: int = 5) -> None:
    """Another token in every arm, with the text and the digest that it has."""
    tokenizer = tokenizer_of(SHIPPED_TARGET, None)
    for row in rows(document, identifier):
        row["tokens"][position] = 300 if row["tokens"][position] != 300 else 301
        row["text"] = text_of(tokenizer, row["tokens"], Stops(tokenizer.eos_token_ids))


def swap_prompt(document: Document, identifier: str) -> None:
    """Another prompt under the id, in every arm."""
    for row in rows(document, identifier):
        row["prompt_sha256"] = hashlib.sha256(b"1 2 3").hexdigest()


def swap_model(document: Document) -> None:
    """Another target."""
    document["environment"]["models"]["target"]["weights_sha256"] = "ab" * 32


def inflate(document: Document, arm: str) -> None:
    """Every draft of fewer, whole blocks is confirmed; counters, times and summary follow."""
    [system] = [each for each in document["arms"] if each["name"] == arm]
    for row in system["samples"]:
        spent = sum(turn["draft_s"] + turn["verify_s"] for turn in row["rounds"])
        left, rounds = len(row["tokens"]) - 1, []
        while left:
            block = min(4, left)
            rounds.append({"block": block, "accepted": block - 1})
            left -= block
        share = round(spent / 2 / len(rounds) * 0.99, 7)
        row["rounds"] = [turn | {"draft_s": share, "verify_s": share} for turn in rounds]


def merge_rounds(document: Document, arm: str, longest: int) -> None:
    """In each row the most rounds that fit into one block of so many become one; their time is saved."""
    [system] = [each for each in document["arms"] if each["name"] == arm]
    for row in system["samples"]:
        begin, end = _most_rounds(row["rounds"][:-1], longest)
        merged = row["rounds"][begin:end]
        gone = sum(turn["draft_s"] + turn["verify_s"] for turn in merged[1:])
        tokens = sum(turn["accepted"] + 1 for turn in merged)
        row["rounds"][begin:end] = [merged[0] | {"block": longest, "accepted": tokens - 1}]
        row["decode_s"] = round(row["decode_s"] - gone, 7)


def _most_rounds(rounds: list[Document], tokens: int) -> tuple[int, int]:
    """Where the most rounds lie that gave at most so many tokens, the first of them with drafts."""
    spans = [
        (begin, end)
        for begin in range(len(rounds))
        for end in range(begin + 1, len(rounds) + 1)
        if rounds[begin]["block"] > 1 and sum(turn["accepted"] + 1 for turn in rounds[begin:end]) <= tokens
    ]
    return max(spans, key=lambda span: span[1] - span[0])
