"""Grammars that cannot be used are refused with a reason; hostile ones in seconds, and without harm."""

from __future__ import annotations

import json
import resource
import socket
from typing import Any

import pytest

from engine.errors import ConfigurationError
from engine.grammar import LONGEST, Grammar, Vocabulary, nameless
from engine.target.loading import load_target


@pytest.fixture(scope="module")
def vocabulary(folders: Any) -> Vocabulary:
    loaded = load_target(folders[0])
    return Vocabulary(loaded.tokenizer, loaded.target.vocab_size)


def refused(vocabulary: Vocabulary, schema: Any) -> str:
    with pytest.raises(ConfigurationError, match="the grammar cannot be used: ") as caught:
        Grammar.json_schema(vocabulary, schema)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def nested(depth: int, schema: Any = None) -> Any:
    schema = schema or {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int) -> dict[str, Any]:
    """References from one definition to the next."""
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "string"}}}


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nope"}, "Invalid type: nope"),
        ([], "Expecting object schema"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "string", "not": {}, "x-guidance": {"lenient": True}}, 'Unimplemented keys: ["not"]'),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf"),
        ({"type": "string", "format": "junk"}, "Unknown format: junk"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "#/$defs/absent"}, "'/$defs/absent' does not exist"),
        ({"$ref": "#"}, "no text satisfies it"),
        ({"minimum": float("nan")}, "Out of range float values are not JSON compliant"),
        ({"enum": [{1, 2}]}, "not JSON serializable"),
        ({"enum": ["x" * LONGEST]}, f"more than {LONGEST}"),
        (nested(100_000), "recursion"),
        (nested(300), "recursion limit"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_cannot_be_enforced_is_said_in_one_line(vocabulary: Vocabulary, schema: Any, reason: str):
    assert reason in refused(vocabulary, schema)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Empty grammar"),
        ("start: (", "Expected token"),
        ("start: " + "(" * 1000 + '"a"' + ")" * 1000, "too deeply nested"),
        ('start: start "a"', "no text satisfies it"),
        ("start: \ud800", "surrogates"),
        ("x" * (LONGEST + 1), f"more than {LONGEST}"),
    ],
)
def test_so_is_what_is_wrong_with_a_lark_grammar(vocabulary: Vocabulary, text: str, reason: str):
    with pytest.raises(ConfigurationError, match="the grammar cannot be used: ") as caught:
        Grammar.lark(vocabulary, text)
    assert reason in str(caught.value)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(
    "schema",
    [
        chain(1500),  # longer ones would end the process
        {"anyOf": [{"type": "integer", "multipleOf": 200_009 + 2 * i} for i in range(6)]},
        {"allOf": [{"type": "string", "pattern": f"(a|b)*{x}(a|b){{30}}"} for x in map(chr, range(97, 123))]},
    ],
    ids=["references", "multiples", "patterns"],
)
def test_hostile_schemas_are_refused_and_take_no_memory_of_ours(
    vocabulary: Vocabulary, schema: dict[str, Any]
):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "too much time or memory" in refused(vocabulary, schema)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_what_looks_like_the_names_of_tokens_hides_nothing_from_the_trial(vocabulary: Vocabulary):
    """Keys that differ in such names alone stay apart, in schemas and in schemas inside of other grammars."""
    links = chain(1500)["$defs"]
    definitions = {"<[257]>": {"$ref": "#/$defs/d0"}, **links, "<[9]>": {"type": "string"}}
    schema = {"$ref": "#/$defs/%3C%5B257%5D%3E", "$defs": definitions}
    assert "too much time or memory" in refused(vocabulary, schema)
    with pytest.raises(ConfigurationError, match="too much time or memory"):
        Grammar.lark(vocabulary, f"start: %json {nameless(json.dumps(schema))}")
    Grammar.json_schema(vocabulary, schema | {"$defs": definitions | {"<[257]>": {"enum": ["<[9]>"]}}})


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
        {"type": "string", "pattern": "(a|b)*a(a|b){30}"},
        chain(30),
        nested(40),
    ],
    ids=["minItems", "maxLength", "repetitions", "exponential", "references", "depth"],
)
def test_what_is_large_but_simple_is_compiled(vocabulary: Vocabulary, schema: dict[str, Any]):
    Grammar.json_schema(vocabulary, schema)


@pytest.mark.slow
def test_nothing_is_fetched(vocabulary: Vocabulary):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        here = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        assert "does not fetch" in refused(vocabulary, {"$ref": here})
        assert "does not fetch" in refused(vocabulary, {"$schema": here, "type": "string"})
        assert "does not fetch" in refused(vocabulary, {"$ref": "file:///etc/hostname"})
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_grammar_is_compiled_once(vocabulary: Vocabulary):
    schema = {"enum": ["once"]}
    Grammar.json_schema(vocabulary, schema)
    before = vocabulary.compiled.cache_info()
    Grammar.json_schema(vocabulary, dict(schema))
    after = vocabulary.compiled.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)
