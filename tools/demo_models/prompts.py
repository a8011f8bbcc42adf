"""The shipped prompt sets: code, chat and retrieval, all from held-out words, phrasings and templates."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from engine.haystack_text import HELD_OUT, TRAIN, Lexicon, generator
from tools.demo_models.corpora import chat, code, retrieval
from tools.demo_models.tokenizer import DemoTokenizer

PROMPTS = 24  # in each set
CODE_TAIL = 144  # tokens of the program that a code prompt leaves to write, at least
RETRIEVAL_TOKENS = 400


def code_kind(index: int) -> str:
    """What is held out of the code prompt at this index: its template, its words, or only the draw."""
    return {"t": "template", "d": "draw", "w": "words"}["tdtwdtdtwdtw"[index % 12]]


def code_prompts(tokenizer: DemoTokenizer, seed: int) -> list[dict[str, Any]]:
    """Beginnings of programs that training never saw, for three reasons in turn.

    Of every twelve, five are of held-out templates, four are new draws of training templates, and three are
    training templates with held-out identifiers (the hardest: the drafter must copy words it does not know).
    """
    rng = generator(f"prompts/code/{seed}")
    known = itertools.cycle(code.TRAINING_TEMPLATES.values())
    unknown = itertools.cycle(code.HELD_OUT_TEMPLATES.values())
    prompts = []
    for i in range(PROMPTS):
        template = next(unknown if code_kind(i) == "template" else known)
        text = _beginning(rng, tokenizer, template, HELD_OUT if code_kind(i) == "words" else TRAIN)
        prompts.append({"id": f"code-{i + 1:03d}", "kind": "code", "prompt": text})
    return prompts


def _beginning(rng: random.Random, tokenizer: DemoTokenizer, template: code.Template, words: Lexicon) -> str:
    """The first two fifths of a program, with at least `CODE_TAIL` tokens to go.

    It ends with a line but without its newline: the tokenizer joins a newline to the indentation that
    follows, so a lone one at the end would tell the target that the program is over.
    """
    while True:
        lines = code.program(rng, words, template, fields=(4, 5)).splitlines(keepends=True)
        total = tokenizer.count("".join(lines))
        for end in range(1, len(lines)):
            prompt = "".join(lines[:end]).rstrip("\n")
            used = tokenizer.count(prompt)
            if used >= 0.4 * total:
                if total - used >= CODE_TAIL and total <= 640:
                    return prompt.rstrip("\n")  # a program never has a lone line break before its end
                break


def chat_prompts(seed: int) -> list[dict[str, Any]]:
    """One user message each, in the phrasing that training never saw, and no message twice."""
    rng = generator(f"prompts/chat/{seed}")
    topics = [*chat.TOPICS, "small_class", "description", "listing", "small_class", "description", "recall"]
    prompts: list[dict[str, Any]] = []
    seen: set[str] = set()
    for i in range(PROMPTS):
        topic, _ = chat.TOPICS[topics[i % len(topics)]]
        turn = topic(rng, HELD_OUT)
        while turn.user in seen:
            turn = topic(rng, HELD_OUT)
        seen.add(turn.user)
        messages = [{"role": "user", "content": turn.user}]
        prompts.append({"id": f"chat-{i + 1:03d}", "kind": "chat", "messages": messages})
    return prompts


def retrieval_prompts(tokenizer: DemoTokenizer, seed: int) -> list[dict[str, Any]]:
    """Needles at evenly spread depths in about 400 tokens of held-out filler and facts."""
    rng = generator(f"prompts/retrieval/{seed}")
    prompts = []
    for i in range(PROMPTS):
        depth = round((i + 0.5) / PROMPTS, 3)
        made = retrieval.needle(rng, tokenizer.count, length=RETRIEVAL_TOKENS, depth=depth)
        prompts.append(
            {
                "id": f"retrieval-{i + 1:03d}",
                "kind": "retrieval",
                "prompt": made.prompt,
                "answer": made.fact.code,
                "depth": depth,
                "needle": made.fact.sentence.strip(),
            }
        )
    return prompts


def write(tokenizer: DemoTokenizer, folder: Path, seed: int = 0) -> None:
    """Write `code.jsonl`, `chat.jsonl` and `retrieval.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    sets = {
        "code": code_prompts(tokenizer, seed),
        "chat": chat_prompts(seed),
        "retrieval": retrieval_prompts(tokenizer, seed),
    }
    for name, prompts in sets.items():
        lines = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """The prompts of one `.jsonl` file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
