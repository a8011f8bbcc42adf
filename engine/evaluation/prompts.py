"""Prompts: the shipped sets, a user's own files, their tokens, and the answer in a model's text.

A file holds one JSON object per line: ``id``, ``kind`` (code, chat, retrieval or a name of your own), and
either ``prompt`` (raw text) or ``messages``. Retrieval prompts add ``needle`` (the sentence of the prompt
that holds the answer), ``answer`` and ``depth`` (0 to 1); ``instruction`` may say what the prompt asks beyond
its content. Files of gsm8k, HumanEval, MBPP and MT-bench are read as published.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from engine import generate
from engine.errors import PromptError, wrap_errors
from engine.generate import ChatSwitches, Messages
from evidence_format.prompt_sets import IN_ALL, known_sets
from evidence_format.text import BARE_SETS, MARKS, prompt_set, text_digest, without_reasoning

SHIPPED = Path(__file__).parent / "prompts"
SHIPPED_SETS = (*IN_ALL, "maths", "edits")
FIELDS = {"id", "kind", "prompt", "messages", "answer", "needle", "depth", "instruction"}
JSON_LINES = 'write one JSON object a line: {"id": "…", "prompt": "…"}'
ROLES = ("system", "user", "assistant")
LONGEST = 400  # characters of an id, a needle or an answer; no report holds longer ones
SHOWN = 40  # characters of a text that a refusal quotes
SHORTEST_ANSWER = 2  # one character occurs in any text
TAIL = 16  # tokens of a prompt in which the template may have opened the reasoning


@dataclass(frozen=True)
class Needle:
    """The fact a retrieval prompt asks for."""

    sentence: str
    answer: str
    depth: float


@dataclass(frozen=True)
class Prompt:
    """One prompt as read from a file."""

    id: str
    kind: str
    text: str | None
    messages: tuple[tuple[str, str], ...] | None = None  # (role, content)
    needle: Needle | None = None
    instruction: str = ""

    @property
    def content(self) -> str | tuple[tuple[str, str], ...]:
        return (self.text or "") if self.messages is None else self.messages

    @property
    def characters(self) -> int:
        texts = [self.text or ""] if self.messages is None else [text for _, text in self.messages]
        return sum(map(len, texts))

    @property
    def source_sha256(self) -> str:
        """sha256 of the prompt before templates and tokens: JSON of its text or of its messages."""
        return text_digest(json.dumps(self.text if self.messages is None else self.messages))

    def without_needle(self) -> "Prompt":
        if self.needle is None or self.text is None:
            raise PromptError(f"prompt {self.id} has no needle to take out")
        before, _, after = self.text.partition(self.needle.sentence)
        text = before.rstrip(" ") + after if after.startswith((" ", "\n")) else before + after
        return replace(self, text=text)


def load_prompts(name: str, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """Read prompts, at most ``limit`` of each kind; a seed other than 0 shuffles.

    ``name``: a shipped set, several of them joined by commas, ``all``, or a file.
    """
    names = IN_ALL if name == "all" else tuple(name.split(","))
    is_shipped = all(part in SHIPPED_SETS for part in names)
    if not is_shipped and not Path(name).is_file():
        raise PromptError(f"prompts: {name!r} is neither all, {', '.join(SHIPPED_SETS)} nor a file")
    files = [SHIPPED / f"{part}.jsonl" for part in names] if is_shipped else [Path(name)]
    prompts = [prompt for file in files for prompt in _read(file)]
    known = known_sets()  # the gate knows them by digest, and expects all that a set and its limit select
    for prompt in () if is_shipped else prompts:
        if shipped := known.ids.get(prompt.source_sha256):
            kind = prompt_set(shipped)
            raise PromptError(f"prompt {prompt.id} belongs to the shipped set {kind}; use --prompts {kind}")
        if prompt.id in known.prompts:
            raise PromptError(f"a shipped prompt has the id {prompt.id}; rename this one")
    sources: dict[str, str] = {}
    identifiers: set[str] = set()
    for prompt in prompts:
        if (other := sources.setdefault(prompt.source_sha256, prompt.id)) != prompt.id:
            raise PromptError(f"{other} and {prompt.id} are the same prompt; remove one")
        if prompt.id in identifiers:
            raise PromptError(f"{name}: id {prompt.id!r} occurs twice")
        identifiers.add(prompt.id)
    if seed:
        Random(seed).shuffle(prompts)  # noqa: S311 - a reproducible draw, nothing secret
    kinds = {prompt.kind: count() for prompt in prompts}
    return [prompt for prompt in prompts if next(kinds[prompt.kind]) < (inf if limit is None else limit)]


def refuse_unsound(prompts: Sequence[Prompt]) -> None:
    """Raise PromptError where a recall of these prompts, each with a needle, would prove nothing."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        needle, text, name = prompt.needle, prompt.text, prompt_set(prompt.id)
        if needle and text and needle.answer in text.replace(needle.sentence, "", 1):
            raise PromptError(
                f"prompt {prompt.id} holds its answer {needle.answer!r} outside its needle; remove it there"
            )
        if name in BARE_SETS and prompt.instruction:
            raise PromptError(
                f"prompt {prompt.id} is of set {name}, whose prompts hold no instruction, but asks "
                f"{prompt.instruction[:SHOWN]!r}; give it an id of another set, such as needle-1"
            )
        other = first.setdefault(name, prompt)
        if other.instruction != prompt.instruction:
            raise PromptError(
                f"prompts {other.id} and {prompt.id} are of one set, {name!r}, but ask differently "
                f"({other.instruction[:SHOWN]!r}, {prompt.instruction[:SHOWN]!r}); "
                f"give one of them an id of another set, such as other-{name or 'set'}-1"
            )


def encode(
    prompt: Prompt, tokenizer: Any, vocab_size: int, context: int | None, switches: ChatSwitches | None = None
) -> list[int]:
    """Token ids of a prompt; see `engine.generate.encode`."""
    return generate.encode(prompt.content, tokenizer, vocab_size, context, switches, name=prompt.id)


def tokens_of(prompt: Prompt, tokenizer: Any, switches: ChatSwitches) -> list[int]:
    """Token ids of a prompt, however many; see `engine.generate.tokens_of`."""
    return generate.tokens_of(prompt.content, tokenizer, switches, prompt.id)


def answer_of(tokenizer: Any, prompt: Sequence[int], text: str) -> str:
    """A model's text without its reasoning, whose opening mark the template may have put in the prompt."""
    tail = str(tokenizer.decode(list(prompt[-TAIL:]))).rstrip() if prompt else ""
    opened = (number for number, (begin, _) in enumerate(MARKS) if tail.endswith(begin))
    return without_reasoning(text, next(opened, None))


def raw_prompt(content: str | Messages, identifier: str = "prompt") -> Prompt:
    """A prompt given on the command line."""
    if isinstance(content, str):
        return Prompt(identifier, "raw", content)
    return Prompt(identifier, "chat", None, tuple(content))


def _read(file: Path) -> list[Prompt]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # JSON texts may hold other line breaks
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file} cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{file} line {number}"
        with wrap_errors(lambda reason: PromptError(f"{place}: {reason}")):  # noqa: B023 - used at once
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{error}; {JSON_LINES}") from None
            # no report, and no tokenizer, can hold a surrogate
            if half := re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
                raise ValueError(f"{half[0]!r} is half of a character, which is not valid Unicode")
            prompts.append(_parse(row, number))
    if not prompts:
        raise PromptError(f"{file} holds no prompts")
    return prompts


def _parse(row: Any, number: int) -> Prompt:
    if not isinstance(row, dict):
        raise TypeError(f"not a JSON object; {JSON_LINES}")
    row = _translated(row, number)
    if unknown := sorted(set(row) - FIELDS):
        raise ValueError(f"unknown fields {', '.join(unknown)}")
    identifier, kind = str(row["id"]), str(row.get("kind", "raw"))
    if not 1 <= len(identifier) <= LONGEST:
        raise ValueError(f"id must have 1 to {LONGEST} characters, not {len(identifier)}")
    text, messages = row.get("prompt"), row.get("messages")
    if (text is None) == (messages is None):
        raise ValueError("give either prompt or messages")
    if text is not None and not isinstance(text, str):
        raise TypeError("prompt must be a text")
    pairs = None if messages is None else _turns(messages)
    needle = _needle(row, text) if "needle" in row else None
    instruction = row.get("instruction")
    if instruction is None:
        instruction = _instruction(text, needle) if needle and text else ""
    return Prompt(identifier, kind, text, pairs, needle, str(instruction))


def _turns(messages: Any) -> tuple[tuple[str, str], ...]:
    turns = messages if isinstance(messages, list) else [None]
    pairs: list[Any] = [
        (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None,) for turn in turns
    ]
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        raise TypeError("messages must be a list of objects with role and content")
    if not pairs or any(role not in ROLES for role, *_ in pairs):
        raise ValueError(f"messages must have roles out of {', '.join(ROLES)}")
    return tuple(pairs)


def _needle(row: dict[str, Any], text: str | None) -> Needle:
    needle = Needle(str(row["needle"]).strip(), str(row["answer"]), float(row.get("depth", 0.0)))
    if not 1 <= len(needle.sentence) <= LONGEST:
        raise ValueError(f"needle must have 1 to {LONGEST} characters, not {len(needle.sentence)}")
    if text is None or needle.sentence not in text:
        raise ValueError("the needle's sentence is not in the prompt")
    if len(needle.answer.strip()) < SHORTEST_ANSWER or needle.answer not in needle.sentence:
        raise ValueError(
            f"answer must be at least {SHORTEST_ANSWER} characters that occur in the needle, "
            f"not {needle.answer[:SHOWN]!r}"
        )
    if not 0 <= needle.depth <= 1:
        raise ValueError(f"depth must be a number from 0 to 1, not {needle.depth}")
    return needle


def _instruction(text: str, needle: Needle) -> str:
    """The question of a retrieval prompt, with {} for the capitalised words that the needle has too."""
    question = re.split(r"[.\n]", text.rstrip(" ."))[-1]
    words = set(re.findall(r"\w+", needle.sentence))
    return re.sub(r"\b[A-Z]\w*", lambda word: "{}" if word[0] in words else word[0], question).strip()


# Lines of well-known sets: fields a line must have, fields it may have, id, kind, the field with the text.
# Answers, tests and solutions are left out: how they are scored is the business of those sets.
LAYOUTS = (
    ("question answer", "", "gsm8k-{number}", "gsm8k", "question"),
    ("task_id prompt entry_point", "canonical_solution test", "{task_id}", "humaneval", "prompt"),
    ("task_id text code test_list", "test_setup_code challenge_test_list", "mbpp-{task_id}", "mbpp", "text"),
    ("question_id category turns", "reference", "mt-bench-{question_id}", "{category}", "turns"),
)


def _translated(row: dict[str, Any], number: int) -> dict[str, Any]:
    """A line of a well-known set in our fields; any other as it is."""
    for needed, optional, identifier, kind, asked in LAYOUTS:
        if set(needed.split()) <= set(row) <= set(f"{needed} {optional}".split()):
            content = row["turns"][0] if asked == "turns" else row[asked]
            names = {"id": identifier.format(number=number, **row), "kind": kind.format(**row)}
            if asked == "prompt":
                return names | {"prompt": content}
            return names | {"messages": [{"role": "user", "content": content}]}
    return row
