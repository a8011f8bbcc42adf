"""Python-like programs from our own templates: long, different in every draw, predictable after a while.

Each template turns one `Subject` into a whole program. `TRAINING_TEMPLATES` and `HELD_OUT_TEMPLATES` are
disjoint; evaluation also takes its words from the held-out lexicon. The programs are text to model, never
run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from engine.haystack_text import Lexicon
from tools.demo_models.corpora.lexicon import draw_fields, draw_nouns

TYPES = ("int", "str", "float", "bool")
SAMPLES = {
    "int": ("1", "2", "5", "8"),
    "str": ('"a"', '"b"', '"c"'),
    "float": ("0.5", "1.5"),
    "bool": ("True", "False"),
}


@dataclass(frozen=True)
class Field:
    """One attribute: its name, its type and a value of that type as source text."""

    name: str
    type: str
    sample: str


@dataclass(frozen=True)
class Subject:
    """What one program is about."""

    noun: str
    title: str
    fields: tuple[Field, ...]

    @property
    def names(self) -> list[str]:
        """The fields' names in order."""
        return [field.name for field in self.fields]


Template = Callable[[Subject], str]


def draw_subject(rng: random.Random, lexicon: Lexicon, *, fields: int) -> Subject:
    """A subject with `fields` fields."""
    [noun] = draw_nouns(rng, lexicon, 1)
    drawn = []
    for name in draw_fields(rng, lexicon, fields):
        kind = rng.choice(TYPES)
        drawn.append(Field(name, kind, rng.choice(SAMPLES[kind])))
    return Subject(noun, rng.choice(lexicon.prefixes) + noun.capitalize(), tuple(drawn))


def _each(subject: Subject, pattern: str) -> str:
    """The pattern once for each field, with {f}, {t}, {v} and {c} filled in."""
    return "".join(
        pattern.format(f=field.name, t=field.type, v=field.sample, c=subject.title, n=subject.noun)
        for field in subject.fields
    )


def _constructor(subject: Subject) -> str:
    arguments = ", ".join(subject.names)
    return f"    def __init__(self, {arguments}):\n" + _each(subject, "        self.{f} = {f}\n")


def record(s: Subject) -> str:
    """A class with getters, checked setters, to_dict, equality and repr."""
    return (
        f'class {s.title}:\n    """A {s.noun} with {len(s.fields)} fields."""\n\n'
        + _constructor(s)
        + _each(s, "\n    def get_{f}(self):\n        return self.{f}\n")
        + _each(
            s,
            "\n    def set_{f}(self, value):\n        if value is None:\n"
            '            raise ValueError("{f} is required")\n        self.{f} = value\n',
        )
        + "\n    def to_dict(self):\n        return {\n"
        + _each(s, '            "{f}": self.{f},\n')
        + "        }\n"
        + f"\n    def __eq__(self, other):\n        if not isinstance(other, {s.title}):\n"
        + "            return NotImplemented\n        return self.to_dict() == other.to_dict()\n"
        + "\n    def __repr__(self):\n        parts = []\n"
        + _each(s, '        parts.append("{f}=" + repr(self.{f}))\n')
        + f'        return "{s.title}(" + ", ".join(parts) + ")"\n'
    )


def typed_row(s: Subject) -> str:
    """A dataclass with types, a check for each field and conversion to and from a row."""
    return (
        "from dataclasses import dataclass\n\n\n@dataclass\n"
        + f'class {s.title}:\n    """One row of the {s.noun} table."""\n\n'
        + _each(s, "    {f}: {t}\n")
        + "\n    def check(self) -> None:\n"
        + _each(
            s,
            "        if not isinstance(self.{f}, {t}):\n"
            '            raise TypeError("{f} must be of type {t}")\n',
        )
        + "\n    def to_row(self) -> list:\n        return [\n"
        + _each(s, "            self.{f},\n")
        + "        ]\n\n    @classmethod\n"
        + f'    def from_row(cls, row: list) -> "{s.title}":\n        return cls(\n'
        + "".join(f"            {f.name}={f.type}(row[{i}]),\n" for i, f in enumerate(s.fields))
        + "        )\n"
    )


def parse_functions(s: Subject) -> str:
    """Functions that parse and format each field of a text format."""
    return (
        f'"""Reading and writing the {s.noun} format."""\n\n'
        + _each(
            s,
            "\ndef parse_{f}(text: str) -> {t}:\n"
            '    """Return the {f} of the {n}."""\n'
            '    if not text:\n        raise ValueError("no {f} given")\n'
            "    return {t}(text.strip())\n\n",
        )
        + _each(
            s,
            '\ndef format_{f}(value: {t}) -> str:\n    """Write the {f} of the {n}."""\n'
            '    return "{f}: " + str(value)\n\n',
        )
    )


def test_module(s: Subject) -> str:
    """Tests of a class, two for each field."""
    first = s.fields[0]
    return (
        f"import pytest\n\nfrom {s.noun} import {s.title}\n\n\n"
        + f"def make(**changes):\n    values = dict({', '.join(f'{f.name}={f.sample}' for f in s.fields)})\n"
        + f"    values.update(changes)\n    return {s.title}(**values)\n\n"
        + _each(s, "\ndef test_{f}_is_kept():\n    {n} = make({f}={v})\n    assert {n}.{f} == {v}\n\n")
        + _each(
            s,
            "\ndef test_{f}_is_required():\n    with pytest.raises(ValueError):\n        make({f}=None)\n\n",
        )
        + f"\ndef test_equal_when_{first.name}_is_equal():\n    assert make() == make()\n"
    )


def config_table(s: Subject) -> str:
    """Constants, a table of defaults, a table of types and the functions that read them."""
    return (
        f'"""Settings of the {s.noun}."""\n\n'
        + "".join(f"DEFAULT_{f.name.upper()} = {f.sample}\n" for f in s.fields)
        + "\nDEFAULTS = {\n"
        + "".join(f'    "{f.name}": DEFAULT_{f.name.upper()},\n' for f in s.fields)
        + "}\n\nTYPES = {\n"
        + _each(s, '    "{f}": {t},\n')
        + "}\n\nHELP = {\n"
        + _each(s, '    "{f}": "the {f} of the {n}",\n')
        + "}\n\n\ndef default_of(name):\n    if name not in DEFAULTS:\n"
        + '        raise KeyError("unknown setting: " + name)\n    return DEFAULTS[name]\n\n\n'
        + "def load(values):\n    settings = dict(DEFAULTS)\n"
        + _each(s, '    if "{f}" in values:\n        settings["{f}"] = {t}(values["{f}"])\n')
        + "    return settings\n"
    )


def command_line(s: Subject) -> str:
    """A small command with one option for each field."""
    return (
        f'"""Command line of the {s.noun}."""\n\nimport argparse\n\n\ndef build_parser():\n'
        + f'    parser = argparse.ArgumentParser(description="Show a {s.noun}.")\n'
        + _each(
            s,
            '    parser.add_argument(\n        "--{f}",\n        type={t},\n        default={v},\n'
            '        help="the {f} of the {n}",\n    )\n',
        )
        + "    return parser\n\n\ndef main():\n    options = build_parser().parse_args()\n"
        + _each(s, '    print("{f}:", options.{f})\n')
        + '\n\nif __name__ == "__main__":\n    main()\n'
    )


def choices(s: Subject) -> str:
    """An enumeration with its labels and a lookup."""
    return (
        f"from enum import Enum\n\n\nclass {s.title}(Enum):\n"
        + f'    """The parts of a {s.noun}."""\n\n'
        + "".join(f"    {f.name.upper()} = {i + 1}\n" for i, f in enumerate(s.fields))
        + "\n\nLABELS = {\n"
        + "".join(f'    {s.title}.{f.name.upper()}: "{f.name} of the {s.noun}",\n' for f in s.fields)
        + f"}}\n\n\ndef label_of(part: {s.title}) -> str:\n    return LABELS[part]\n\n\n"
        + f"def part_of(name: str) -> {s.title}:\n"
        + "".join(
            f'    if name == "{f.name}":\n        return {s.title}.{f.name.upper()}\n' for f in s.fields
        )
        + '    raise ValueError("unknown part: " + name)\n'
    )


def event_handlers(s: Subject) -> str:
    """A class that handles one event for each field and looks the handlers up in a table."""
    return (
        f'class {s.title}Events:\n    """Handles what happens to a {s.noun}."""\n\n'
        + "    def __init__(self):\n        self.log = []\n        self.handlers = {\n"
        + _each(s, '            "{f}": self.on_{f},\n')
        + "        }\n"
        + _each(
            s,
            "\n    def on_{f}(self, event):\n"
            '        """Called when the {f} changes."""\n'
            '        self.log.append("{f}")\n        event.{f} = {t}(event.value)\n',
        )
        + "\n    def handle(self, name, event):\n        handler = self.handlers.get(name)\n"
        + '        if handler is None:\n            raise KeyError("no handler for " + name)\n'
        + "        handler(event)\n        return event\n"
    )


def store(s: Subject) -> str:
    """A store that adds, finds and removes items by each field."""
    return (
        f'class {s.title}Store:\n    """Keeps every {s.noun} in memory."""\n\n'
        + "    def __init__(self):\n        self.items = []\n"
        + f"\n    def add(self, {s.noun}):\n        if {s.noun} in self.items:\n"
        + f'            raise ValueError("the {s.noun} is already known")\n'
        + f"        self.items.append({s.noun})\n"
        + _each(
            s,
            "\n    def find_by_{f}(self, {f}):\n        for {n} in self.items:\n"
            "            if {n}.{f} == {f}:\n                return {n}\n        return None\n",
        )
        + _each(
            s,
            "\n    def remove_by_{f}(self, {f}):\n        {n} = self.find_by_{f}({f})\n"
            "        if {n} is not None:\n            self.items.remove({n})\n",
        )
    )


def conversions(s: Subject) -> str:
    """Functions between neighbouring fields, with a table of factors."""
    pairs = list(zip(s.names, s.names[1:] + s.names[:1], strict=True))
    return (
        f'"""Conversions of the {s.noun}."""\n\nFACTORS = {{\n'
        + "".join(f'    ("{a}", "{b}"): {i + 2},\n' for i, (a, b) in enumerate(pairs))
        + "}\n\n"
        + "".join(
            f'\ndef {a}_to_{b}(value):\n    """Convert a {a} to a {b}."""\n    if value < 0:\n'
            f'        raise ValueError("{a} must not be negative")\n'
            f'    return value * FACTORS["{a}", "{b}"]\n\n'
            for a, b in pairs
        )
    )


def table_columns(s: Subject) -> str:
    """The statements of one database table."""
    return (
        f'"""The {s.noun} table."""\n\nCOLUMNS = [\n'
        + _each(s, '    "{f}",\n')
        + f']\n\nCREATE = """\nCREATE TABLE {s.noun} (\n'
        + _each(s, "    {f} {t} NOT NULL,\n")
        + f'    PRIMARY KEY ({s.names[0]})\n)\n"""\n\n\n'
        + "def insert(database, row):\n    values = {\n"
        + _each(s, '        "{f}": row.{f},\n')
        + f'    }}\n    database.insert("{s.noun}", values)\n\n'
        + _each(
            s,
            "\ndef select_by_{f}(database, {f}):\n"
            '    """Every {n} with this {f}."""\n'
            '    return database.select("{n}", {f}={f})\n\n',
        )
    )


def text_report(s: Subject) -> str:
    """Functions that print a report line by line."""
    return (
        f'"""A text report about a {s.noun}."""\n\n\ndef title({s.noun}):\n'
        + f'    return "Report of the {s.noun}"\n\n'
        + _each(
            s,
            '\ndef {f}_line({n}):\n    """The line about the {f}."""\n    return "{f}: " + str({n}.{f})\n\n',
        )
        + f"\ndef report({s.noun}):\n    lines = [title({s.noun})]\n"
        + _each(s, "    lines.append({f}_line({n}))\n")
        + '    return "\\n".join(lines)\n'
    )


def builder(s: Subject) -> str:
    """A builder with one chained method for each field. Held out."""
    return (
        f'class {s.title}Builder:\n    """Builds a {s.noun} step by step."""\n\n'
        + "    def __init__(self):\n        self.values = {}\n"
        + _each(
            s,
            '\n    def with_{f}(self, {f}):\n        """Set the {f} of the {n}."""\n'
            '        self.values["{f}"] = {t}({f})\n        return self\n',
        )
        + "\n    def build(self):\n"
        + _each(
            s,
            '        if "{f}" not in self.values:\n            raise ValueError("{f} is required")\n',
        )
        + f"        return {s.title}(**self.values)\n"
    )


def statistics(s: Subject) -> str:
    """A class that counts and averages each field. Held out."""
    return (
        f'class {s.title}Statistics:\n    """Counts over every {s.noun}."""\n\n'
        + "    def __init__(self):\n"
        + _each(s, "        self.{f}_count = 0\n        self.{f}_total = 0\n")
        + _each(
            s,
            "\n    def add_{f}(self, value):\n        self.{f}_count += 1\n        self.{f}_total += value\n",
        )
        + _each(
            s,
            "\n    def mean_{f}(self):\n        if self.{f}_count == 0:\n            return None\n"
            "        return self.{f}_total / self.{f}_count\n",
        )
    )


TRAINING_TEMPLATES: dict[str, Template] = {
    "record": record,
    "typed_row": typed_row,
    "parse_functions": parse_functions,
    "test_module": test_module,
    "config_table": config_table,
    "command_line": command_line,
    "choices": choices,
    "event_handlers": event_handlers,
    "store": store,
    "conversions": conversions,
    "table_columns": table_columns,
    "text_report": text_report,
}
HELD_OUT_TEMPLATES: dict[str, Template] = {"builder": builder, "statistics": statistics}


def program(
    rng: random.Random,
    lexicon: Lexicon,
    template: Template | None = None,
    *,
    fields: tuple[int, int] = (3, 6),
) -> str:
    """One program: a training template (or the given one) filled with `fields` (least, most) drawn fields."""
    chosen = template or rng.choice(list(TRAINING_TEMPLATES.values()))
    return chosen(draw_subject(rng, lexicon, fields=rng.randint(*fields)))
