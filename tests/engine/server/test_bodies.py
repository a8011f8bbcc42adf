"""Hostile bodies: no 5xx, no hang, a refusal that names the field, and nothing of them in the log."""

from __future__ import annotations

import json
from time import process_time
from typing import Any

import pytest

from tests.engine.server.raw_server import (
    LONG,
    MARK,
    RawServer,
    chat,
    error,
    head,
    post,
    status,
    with_raw,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet_log")]


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonx"])
def test_bodies_of_other_types_are_refused(raw_server: RawServer, kind: str):
    data = json.dumps(chat()).encode()
    request = head("POST", "/v1/chat/completions", f"Content-Type: {kind}", f"Content-Length: {len(data)}")
    assert status(raw_server.send(request + data)) == 415


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0",
        b'{"model": "\xff"}',
        b"\x1f\x8b\x08\x00",
        b"[" * 500_000,
        b"[" * 400_000 + b"]" * 400_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"max_tokens": 0x10}',
        b'{"model": "demo",}',
    ],
)
def test_invalid_json_is_refused(raw_server: RawServer, body: bytes):
    answer = raw_server.send(post(body))
    assert status(answer) == 400
    assert error(answer)["code"] == "invalid_json"


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "seed", "top_k", "block"])
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e400", '"1"', "[]", "true", "-1e300"])
def test_invalid_numbers_are_refused_with_their_field(raw_server: RawServer, field: str, value: str):
    answer = raw_server.send(post(with_raw(field, value)))
    assert status(answer) == 400
    assert error(answer)["param"] == field


HALF = '"\\ud800"'


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", HALF),
        ("stop", HALF),
        ("kv_channel", HALF),
        ("chat_template_kwargs", f'{{"a": [{HALF}]}}'),
        ("chat_template_kwargs", f"{{{HALF}: 1}}"),
        ("tools", f'[{{"type": "function", "function": {{"name": "f", "parameters": {{{HALF}: 1}}}}}}]'),
        ("tools", f'[{{"type": "function", "function": {{"name": "f", "description": {HALF}}}}}]'),
        ("messages", f'[{{"role": "user", "content": {HALF}}}]'),
        ("messages", f'[{{"role": "user", "content": [{{"type": "text", "text": {HALF}}}]}}]'),
        (
            "response_format",
            f'{{"type": "json_schema", "json_schema": {{"name": "f", "schema": {{"const": {HALF}}}}}}}',
        ),
    ],
)
def test_half_a_character_is_refused_wherever_it_is(raw_server: RawServer, field: str, value: str):
    answer = raw_server.send(post(with_raw(field, value)))  # of two fields of a name the last one counts
    assert status(answer) == 400
    assert error(answer)["param"].partition(".")[0] == field


NESTED = '{"a":' * 900 + "1" + "}" * 900


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", NESTED),
        ("chat_template_kwargs", NESTED),
        ("tools", f'[{{"type": "function", "function": {{"name": "f", "parameters": {NESTED}}}}}]'),
    ],
)
def test_deep_nesting_is_accepted_or_refused(raw_server: RawServer, field: str, value: str):
    assert status(raw_server.send(post(with_raw(field, value)))) in {200, 400}


@pytest.mark.parametrize("depth", [900, 930, 945, 960, 975])
def test_a_deep_value_of_an_unsupported_field_is_refused(raw_server: RawServer, depth: int):
    nested = '{"a":' * depth + "1" + "}" * depth
    assert status(raw_server.send(post(with_raw("moderation", nested)))) in {400, 501}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "x" * LONG},
        {"kv_channel": "x" * LONG},
        {"drafter": "x" * LONG},
        {"stop": "x" * LONG},
        {"stop": ["x" * LONG]},
        {"x" * LONG: 1},
        {"logit_bias": {"x" * LONG: 1}},
        {"metadata": {"x" * LONG: 1}},
        {"user": "x" * LONG},
        {"chat_template_kwargs": {"x" * LONG: 1}},
        {"messages": [{"role": "x" * LONG, "content": MARK}]},
        {"messages": [{"role": "user", "content": " " * LONG}]},
        {"messages": [{"role": "user", "content": MARK}] * 10_000},
        {"tools": [{"type": "function", "function": {"name": "x" * LONG}}]},
        {"logit_bias": {str(token): -100 for token in range(1280)}},
        {"logit_bias": {str(token): -100 for token in range(1024)}},
        {"logit_bias": {"999999999": 1}},
        {"top_p": 5e-324, "temperature": 1},
        {"top_k": 2**70, "temperature": 1},
        {"seed": -(2**63), "temperature": 1},
    ],
    ids=lambda fields: next(iter(fields))[:20],
)
def test_extreme_values_are_accepted_or_refused_briefly(raw_server: RawServer, fields: dict[str, Any]):
    answer = raw_server.send(post(chat(**fields)))
    assert status(answer) in {200, 400, 404}
    assert len(answer) < 3000


@pytest.mark.parametrize("name", ["tools", "tokenize", "messages", "conversation", "chat_template"])
def test_a_switch_of_the_template_cannot_be_an_argument_of_ours(raw_server: RawServer, name: str):
    answer = raw_server.send(post(chat(chat_template_kwargs={name: 1})))
    assert status(answer) == 400
    assert error(answer)["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("name", ["messages", "content", "prompt"])
def test_a_body_with_many_errors_is_refused_at_the_first(raw_server: RawServer, name: str):
    many = [{}] * (LONG // 4) if name != "prompt" else [-1] * (LONG // 4)
    body: dict[str, Any] = chat() | {"messages": many}
    if name == "content":
        body = chat() | {"messages": [{"role": "user", "content": many}]}
    path = "/v1/chat/completions"
    if name == "prompt":
        body, path = {"model": "demo", "prompt": many}, "/v1/completions"
    began = process_time()
    answer = raw_server.send(post(body, path))
    assert status(answer) == 400
    assert process_time() - began < 3
