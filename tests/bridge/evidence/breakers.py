"""Ways to break a report, shared by the tests of the rules: each takes a valid document and changes it.

A `Rules` table holds what `test_rules` runs of one family: for every code one way to break it and nothing
else, other ways to break it, and variations that must pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from bridge.evidence.gate import Binding, judge
from tests.bridge.evidence import reports
from tests.bridge.evidence.reports import Document, dump, settle

Breaker = Callable[[Document], None]
Case = tuple[str, Breaker]  # the kind of report to start from, and what to do to it

BINDING = Binding(
    nonce=reports.NONCE,
    workload_sha=reports.WORKLOAD,
    preset_digest="56" * 32,
    engine_source="installed",
    started_at=datetime(2026, 3, 1, 12, 0, 4, tzinfo=UTC),
    finished_at=datetime(2026, 3, 1, 12, 1, 6, tzinfo=UTC),
)
BUILDERS = {
    "throughput": reports.throughput,
    "recall": reports.recall,
    "restoration": reports.restoration,
    "kv": reports.kv,
    "quality": reports.quality,
    "parity": reports.parity,
    "perplexity": reports.perplexity,
    "probe": reports.probe,
}


@dataclass(frozen=True)
class Rules:
    """The cases of one family of rules.

    Attributes:
        alone: For each code a report that breaks it and nothing else.
        variants: Other ways to break a code, perhaps with others.
        honest: Variations that break nothing.
    """

    alone: dict[str, Case]
    variants: list[tuple[str, str, Breaker]] = field(default_factory=list)
    honest: list[Case] = field(default_factory=list)


def codes(document: Document, binding: Binding | None = BINDING) -> set[str]:
    return {violation.code for violation in judge(dump(document), binding=binding).violations}


def broken(kind: str, *breakers: Breaker) -> Document:
    """A valid report of the kind, changed."""
    document = BUILDERS[kind]()
    chain(*breakers)(document)
    return document


def rows(document: Document, arm: str) -> list[Document]:
    found: list[Document] = next(one for one in document["arms"] if one["name"] == arm)["samples"]
    return found


def both(document: Document) -> list[Document]:
    return rows(document, "plain") + rows(document, "speculative")


def claims(document: Document, *names: str) -> None:
    document["claims"] = [claim for claim in document["claims"] if claim["name"] in names]


def put(document: Document, row: Document, tokens: list[int], seconds: float) -> None:
    """Give a row other tokens, and the rounds that explain them."""
    row["tokens"], row["decode_s"] = tokens, seconds
    row["text"] = " ".join(f"w{token}" for token in tokens)
    if row["rounds"]:
        row["rounds"] = reports.rounds_for(len(tokens) - 1, seconds)


def own_prompts(document: Document) -> None:
    """The prompts come from a file of one's own."""
    document["configuration"]["prompts"] = "my.jsonl"
    for one in document["arms"]:
        for row in one["samples"]:
            row["prompt_id"] = f"my-{row['prompt_id']}"
            row["source_sha256"] = reports.source_of(row["prompt_id"])
    settle(document)


def change(*path: str | int, to: object) -> Breaker:
    def apply(document: Document) -> None:
        place = document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return apply


def env(*path: str | int, to: object) -> Breaker:
    return change("environment", *path, to=to)


def chain(*breakers: Breaker) -> Breaker:
    def apply(document: Document) -> None:
        for breaker in breakers:
            breaker(document)

    return apply


def only(*names: str) -> Breaker:
    return lambda document: claims(document, *names)


def resettle(document: Document) -> None:
    settle(document)


def claim(**fields: object) -> Breaker:
    return lambda document: document["claims"].append(fields)


def drop_baseline(document: Document) -> None:
    del document["arms"][0]
    settle(document)
