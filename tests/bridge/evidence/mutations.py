"""Every single-field edit of a report, and what an edit may not do unnoticed.

Every place of a document is edited: values are replaced, nudged and removed, entries dropped and
doubled, keys added. Of long arrays that are alike (tokens, rounds, rows, runs) the first and the last entry
alone are edited.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose
from typing import Any

from bridge.evidence.gate import Judgement, judge
from tests.bridge.evidence.reports import Document, dump

Place = tuple[str | int, ...]
ALIKE = ("tokens", "rounds", "samples", "order", "layers")
WORDS = [
    "x",
    "",
    "native",
    "plain",
    "speculative",
    "noise",
    "sut",
    "baseline",
    "control",
    "oracle",
    "speedup",
]


@dataclass(frozen=True)
class Edit:
    """One change at one place: ``set`` to a value, ``remove``, or ``double`` an entry."""

    place: Place
    how: str
    value: Any = None

    def of(self, document: Document) -> Document:
        """The document with the change made."""
        document = copy.deepcopy(document)
        parent: Any = document
        for step in self.place[:-1]:
            parent = parent[step]
        last: Any = self.place[-1]
        if self.how == "set":
            parent[last] = self.value
        elif self.how == "remove":
            del parent[last]
        else:
            parent.insert(last, copy.deepcopy(parent[last]))
        return document


def places(value: Any, prefix: Place = ()) -> Iterator[Place]:
    """Every place of a document."""
    if prefix:
        yield prefix
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*prefix, key))
    elif isinstance(value, list):
        alike = prefix[-1] in ALIKE
        for index in sorted({0, len(value) - 1}) if alike and value else range(len(value)):
            yield from places(value[index], (*prefix, index))


def edits(document: Document, place: Place) -> Iterator[Edit]:
    """Every edit at one place."""
    parent: Any = document
    for step in place[:-1]:
        parent = parent[step]
    old = parent[place[-1]]
    for value in others(old):
        if json.dumps(value) != json.dumps(old):
            yield Edit(place, "set", value)
    yield Edit(place, "remove")
    if isinstance(old, dict):
        yield Edit((*place, "extra"), "set", 1)
    if isinstance(parent, list):
        yield Edit(place, "double")


def others(old: Any) -> list[Any]:
    """What a value may be replaced by."""
    if isinstance(old, bool):
        return [not old, None, 0]
    if isinstance(old, int):
        return [0, old + 1, max(old - 1, 0), 2 * old + 1, old + 0.5, None, "x"]
    if isinstance(old, float):
        return [0, old * 1.01, old * 0.9, old * 2, 1, None, "x"]
    if isinstance(old, str):
        return [old + "1", old + " 4821", old[:-1], *WORDS, None]
    if isinstance(old, list):
        return [[], old[1:], old + old[:1], old[::-1], None]
    if isinstance(old, dict):
        return [{}, None]
    return [0, 1, 0.5, "x", "exact", True]


def same(found: Any, expected: Any) -> bool:
    """Whether two documents of figures are equal, but for the order in which rows were added up."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, float) and isinstance(expected, float):
        return isclose(found, expected, rel_tol=1e-9)
    return bool(found == expected)


def _by_pair(judgement: Judgement) -> object:
    """The figures of a judgement; comparisons by what they compare, since their order says nothing."""
    figures = judgement.to_document()["figures"]
    if isinstance(figures, dict):
        pairs = {f"{row['arm']} / {row['baseline']}": row for row in figures["comparisons"]}
        return figures | {"comparisons": pairs}
    return figures


def unnoticed(original: Judgement, edited: Document) -> str | None:
    """How an edit changed what a report claims and was accepted all the same, or None."""
    judgement = judge(dump(edited))
    if not judgement.accepted:
        return None if judgement.violations else "rejected without a reason"
    if not same(_by_pair(judgement), _by_pair(original)):
        return "a figure changed"
    for claim in judgement.claims:
        if not claim.met:
            return f"{claim.name} is accepted, but not met"
        before = [other for other in original.claims if other.name == claim.name]
        if before and not any(
            other.arm == claim.arm and same(claim.figure, other.figure) for other in before
        ):
            return f"{claim.name} of {claim.arm} is {claim.figure} now"
    return None
