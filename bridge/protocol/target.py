"""Which machines a request is for: ``chip=M4*,memory>=64,label=lab``. Pure.

A target is a list of conditions; a runner must meet all of them. A text is compared as a pattern, where
``*`` is any text and case does not count; a chip matches with or without "Apple" before it. ``cores`` is a
number, ``memory`` is in GB as Apple counts them (2**30 bytes).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bridge.protocol.sanitize import quoted

MAX_LENGTH = 500
# What a condition may name, and the fact of the machine that it is compared with.
PROPERTIES = {
    "chip": "chip",
    "cores": "cpu_count",
    "label": "labels",
    "machine": "machine",
    "memory": "memory_bytes",
    "metal": "metal",
    "os": "os_release",
    "runner": "runner",
    "system": "system",
}
_NUMBERS = ("cores", "memory")
_MAKER = "apple "
_MAX_MEMORY = 10**18  # anyone may have written the registration
_CONDITION = re.compile(r"\s*(?P<name>[a-z]+)\s*(?P<operator>>=|<=|!=|=)\s*(?P<value>[^,<>=!]{1,100}?)\s*")

Fact = str | int | float | bool | None


@dataclass(frozen=True)
class Condition:
    """One condition: a property, ``=``, ``!=``, ``>=`` or ``<=``, and a value."""

    name: str
    operator: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.value}"

    def is_met(self, values: Iterable[Fact]) -> bool:
        """Whether a machine with these values of the property meets it."""
        if self.name in _NUMBERS:
            found = [value for value in values if isinstance(value, int | float)]
            return any(_compare(self.operator, each, float(self.value)) for each in found)
        texts = {str(value).lower() for value in values}
        if self.name == "chip":
            texts |= {text.removeprefix(_MAKER) for text in texts}
        matched = any(fnmatchcase(text, self.value.lower()) for text in texts)
        return matched == (self.operator == "=")


def parse_target(text: str) -> tuple[Condition, ...]:
    """The conditions of a target.

    Raises:
        ValueError: A condition is not one; the message says which, and what may be written.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a target has at most {MAX_LENGTH} characters, got {len(text)}")
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None or match["name"] not in PROPERTIES:
            known = ", ".join(sorted(PROPERTIES))
            raise ValueError(f"{quoted(part)} is no condition; write NAME=VALUE with NAME one of {known}")
        condition = Condition(match["name"], match["operator"], match["value"])
        if condition.name in _NUMBERS:
            try:
                is_number = math.isfinite(float(condition.value))
            except ValueError:
                is_number = False
            if not is_number:
                raise ValueError(f"{condition} needs a number, got {quoted(condition.value)}")
        elif condition.operator in (">=", "<="):
            raise ValueError(f"{condition} compares a text; write {condition.name}={condition.value}")
        conditions.append(condition)
    return tuple(conditions)


def properties(facts: Mapping[str, Fact], runner: str) -> dict[str, tuple[Fact, ...]]:
    """What conditions are compared with: every property's values, none where they are not known.

    Args:
        facts: Of the machine, as its registration says; ``labels`` is a text with commas.
        runner: The runner's name.
    """
    known = {name: facts.get(fact) for name, fact in PROPERTIES.items()} | {"runner": runner}
    memory = known["memory"]
    found: dict[str, tuple[Fact, ...]] = {
        name: () if value is None else (value,) for name, value in known.items()
    }
    found["label"] = tuple(label for label in str(known["label"] or "").split(",") if label)
    if isinstance(memory, int | float):
        found["memory"] = (round(memory / 2**30, 1),) if 0 < memory < _MAX_MEMORY else ()
    return found


def unmet(text: str, facts: Mapping[str, Fact], runner: str) -> list[Condition]:
    """The conditions of a target that a machine does not meet.

    Args:
        text: The target.
        facts: As of `properties`.
        runner: The runner's name.

    Raises:
        ValueError: As `parse_target`.
    """
    found = properties(facts, runner)
    return [condition for condition in parse_target(text) if not condition.is_met(found[condition.name])]


def _compare(operator: str, found: float, wanted: float) -> bool:
    if operator == ">=":
        return found >= wanted
    if operator == "<=":
        return found <= wanted
    return (round(found) == round(wanted)) == (operator == "=")
