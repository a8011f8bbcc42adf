"""What a reader may take at most, judged without its code: the published schemas, and rules of our own.

Stricter than needed nowhere: a document that breaks a rule here must never be read.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
import unicodedata
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator, ValidationError, validators

from tests.adversary import honest

ROOT = Path(__file__).resolve().parents[2]
# Written by models and prompts: a report may hold any character in them.
_FREE = {"text", "answer_text", "needle", "answer"}
_STEERING = re.compile(r"(PYTHON|LD_|DYLD_|GIT_|SSH_).*|HOME|PATH|.*(TOKEN|SECRET|PASSWORD).*", re.IGNORECASE)
_ELEMENT = re.compile(
    r"\{[a-z0-9_]+(\?--[a-z0-9-]+)?\}|(--[a-z0-9-]+=)?(\{[a-z0-9_]+\}|\$\{[a-z]+(:[\w.-]+)?\})"
)


def strict_json(data: bytes) -> dict[str, Any]:
    """The document, if the bytes are one; an `AssertionError` if a strict reader must not take them."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in items}) == len(items), "a key twice"
        return dict(items)

    def constant(name: str) -> NoReturn:
        raise AssertionError(name)

    document = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    assert isinstance(document, dict)
    assert all(math.isfinite(value) for _, value in walk(document) if isinstance(value, float))
    return document


def walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar and every key of a document, each with the key it lies under."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield "", name
            yield from walk(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item, key)
    else:
        yield key, value


def plain(document: dict[str, Any], free: Collection[str] = frozenset()) -> None:
    """No text drives a terminal, turns the line, or hides something."""
    for key, value in walk(document):
        if isinstance(value, str) and key not in free:
            bad = [
                c for c in value if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in "\u202e\u2066"
            ]
            assert not bad, (key, value)


@cache
def _schema(name: str) -> Any:
    """A published schema, read to the letter: patterns end where the text ends, true is no number."""

    def pattern(_: Any, wanted: str, value: Any, __: Any) -> Iterator[ValidationError]:
        if isinstance(value, str) and not re.search(wanted.replace("$", r"\Z"), value):
            yield ValidationError(f"{value!r} does not match {wanted}")

    whole = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    kind = validators.extend(Draft202012Validator, {"pattern": pattern}, type_checker=whole)
    return kind(json.loads((ROOT / "docs" / "schema" / name).read_text()))


def _by_schema(name: str, data: bytes) -> dict[str, Any]:
    document = strict_json(data)
    _schema(name).validate(document)
    return document


def manifest(data: bytes) -> None:
    """Exactly the keys of a manifest, and nothing that runs."""
    document = _by_schema("manifest.json", data)
    plain(document)
    assert document["nonce"][:8] in {document["created_at"][:10].replace("-", "")} | {document["nonce"][:8]}
    assert document["created_at"] < document["expires_at"]
    assert all(isinstance(value, bool | int | float | str) for value in document.get("params", {}).values())
    assert len(data) <= 64 * 1024


def claim(data: bytes) -> None:
    """Of this request."""
    assert _by_schema("status.json", data)["nonce"] == honest.NONCE


def registration(data: bytes) -> None:
    """One plain line each."""
    plain(_by_schema("runner.json", data))


def result(data: bytes) -> None:
    """A status and a reason of the closed sets, and plain lines except in the argv of commands."""
    document = _by_schema("result.json", data)
    plain({key: value for key, value in document.items() if key != "commands"})


def cancel(data: bytes) -> None:
    """Of a request, by a commit."""
    document = strict_json(data)
    plain(document)
    assert set(document) <= {
        "schema_version",
        "nonce",
        "request_commit",
        "requested_by",
        "reason",
        "created_at",
    }
    assert re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", document["request_commit"])
    assert re.fullmatch(r"\d{8}t\d{6}z[0-9a-f]{12}", document["nonce"], re.ASCII)


def report(data: bytes) -> None:
    """A probe claims nothing but the machine."""
    document = _by_schema("evidence.json", data)
    plain(document, _FREE)
    assert document["kind"] == "probe"
    assert [found["name"] for found in document["claims"]] == ["machine"] * len(document["claims"])


def preset(data: bytes) -> None:
    """Placeholders are whole elements or values of a flag, bounds are numbers, defaults lie within."""
    document = tomllib.loads(data.decode("utf-8"))
    _schema("preset.json").validate(document)
    for _, value in walk(document):
        assert not isinstance(value, float) or math.isfinite(value)
    for element in document["argv"]:
        assert "\0" not in element
        assert _ELEMENT.fullmatch(element) or not {"{", "}"} & set(element), element
    for parameter in document.get("params", {}).values():
        default = parameter.get("default")
        if parameter["type"] in ("integer", "number") and default is not None and "minimum" in parameter:
            assert parameter["minimum"] <= default <= parameter["maximum"]
    assert document["engine"] == "installed" or document["workspace"] == "full"


def policy(data: bytes) -> None:
    """Switches are true or false, jobs get nothing that steers a program, and numbers are numbers."""
    document = tomllib.loads(data.decode("utf-8"))
    for key in ("allow_repo_code", "require_signature"):
        assert type(document.get(key, False)) is bool
    assert not [name for name in document.get("environment", ()) if _STEERING.fullmatch(name)]
    for _, value in walk(document):
        assert not isinstance(value, float) or math.isfinite(value)
    assert 1 <= document.get("max_timeout_s", 1) <= 86_400
    for rule in document.get("presets", {}).values():
        assert type(rule.get("network", False)) is bool


ORACLES: dict[str, Callable[[bytes], None]] = {
    "manifest": manifest,
    "claim": claim,
    "registration": registration,
    "result": result,
    "cancel": cancel,
    "report": report,
    "preset": preset,
    "policy": policy,
}
