"""The prompts that ship with the engine, as a report names them: by id, digest and set."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

IN_ALL = ("code", "chat", "retrieval")  # the sets that ``--prompts all`` means


class KnownPrompt(NamedTuple):
    """A shipped prompt: digests of its source and of its tokens for the shipped target, and its needle."""

    source_sha256: str
    tokens_sha256: str
    needle: list[str | float] | None  # sentence, answer, depth


class KnownSets(NamedTuple):
    """All shipped prompts by id, the ids of each set in their order, ids by source, the target's weights."""

    prompts: dict[str, KnownPrompt]
    sets: dict[str, tuple[str, ...]]
    ids: dict[str, str]
    target_sha256: str


@lru_cache(maxsize=1)
def known_sets() -> KnownSets:
    """The shipped sets, from ``prompt_sets.json``, which ``make docs`` generates from the engine's files."""
    document = json.loads(files("evidence_format").joinpath("prompt_sets.json").read_text(encoding="utf-8"))
    sets = document["sets"]
    prompts = {prompt: KnownPrompt(*row) for rows in sets.values() for prompt, row in rows.items()}
    ids = {known.source_sha256: prompt for prompt, known in prompts.items()}
    return KnownSets(prompts, {name: tuple(sets[name]) for name in sets}, ids, document["target_sha256"])
