"""KV policies that a request spells out: within the registry's bounds, and refused by name beyond them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from engine.cli.serve import command
from engine.errors import ConfigurationError
from tests.engine.server.conftest import start
from tests.engine.server.raw_server import KEY, RawServer, opened

OPEN = """
default = "demo"
[channels.fine]
kv = "lattice:e8,152@inner:1"
[requests]
kv = [
  "lattice:e8,8..64@inner:0..4", "affine:4..8,32..128", "affine:8,64@0..40", "sink-window:0..8,64..512",
  "full-kv", "auto:3..5",
]
[models.demo]
summary = "the shipped pair"
target = "shipped"
drafter = "shipped"
channels = ["native", "rotated4", "fine"]
[models.coded]
summary = "… whose drafter keeps codes"
target = "shipped"
drafter = { shipped = true, kv = "affine:8,32" }
"""
CLOSED = OPEN[: OPEN.index("[requests]")] + OPEN[OPEN.index("[models.demo]") :]
PROMPT = "class BaseProject:"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawServer]:
    file = tmp_path_factory.mktemp("registry") / "models.toml"
    file.write_text(OPEN)
    with opened(file) as raw_server:
        yield raw_server


def call(raw_server: RawServer, path: str, **fields: Any) -> requests.Response:
    headers, url = {"authorization": f"Bearer {KEY}"}, f"http://127.0.0.1:{raw_server.port}/v1/{path}"
    if not fields:
        return requests.get(url, headers=headers, timeout=60)
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 6} | fields
    return requests.post(url, headers=headers, json=body, timeout=60)


def provenance(raw_server: RawServer, **fields: Any) -> dict[str, Any]:
    reply = call(raw_server, "completions", **fields)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["x_kakeya"])


@pytest.mark.parametrize(
    ("fields", "policy", "coded"),
    [
        ({"kv_channel": "lattice:e8,10"}, "lattice:e8,10@inner:2", 5),
        ({"kv_channel": "lattice:e8,10@inner:1"}, "lattice:e8,10@inner:1", 7),
        ({"kv_channel": "affine:8,32"}, "affine:8,32@all", 9),
        ({"kv_channel": "affine:8,64@3"}, "affine:8,64@3", 1),
        ({"model": "demo@lattice:e8,64@inner:4"}, "lattice:e8,64@inner:4", 1),
        ({"kv_channel": "sink-window:4,512"}, "sink-window:4,512@all", 0),
        ({"kv_channel": "full-kv"}, "full-kv", 0),
        ({"kv_channel": "auto:3"}, "auto:3@inner:2", 5),
        ({"model": "demo@full-kv"}, "full-kv", 0),
    ],
)
def test_a_policy_within_the_bounds_is_used(
    served: RawServer, fields: dict[str, Any], policy: str, coded: int
):
    how = provenance(served, **fields)
    assert (how["kv_channel"], how["kv_policy"]) == (policy, policy)
    assert how["cache_classes"].get("CodedKV", 0) == coded
    assert sum(how["cache_classes"].values()) == 9


def test_a_channel_of_the_registry_file_is_used(served: RawServer):
    how = provenance(served, kv_channel="fine")
    assert (how["kv_channel"], how["kv_policy"]) == ("fine", "lattice:e8,152@inner:1")


@pytest.mark.parametrize(
    ("kv_channel", "says"),
    [
        ("lattice:e8,65", ["lattice:e8,65@inner:2", "lattice:e8,8..64@inner:0..4", "native, rotated4, fine"]),
        ("lattice:e8,10@all", ["lattice:e8,10@all", "lattice:e8,8..64@inner:0..4"]),
        ("lattice:d4,10", ["lattice:d4,10@inner:2"]),
        ("lattice:e9,10", ["lattice:e9,10", "d4"]),
        ("affine:7,64", ["affine:7,64"]),
        ("affine:8/4,64", ["affine:8/4,64@all"]),
        ("auto:6", ["auto:6@inner:2"]),
        ("affine:8,64@20", ["affine:8,64@20"]),  # a layer that the model does not have
        ("restored:exact", ["restored:exact"]),
        ("native:1", ["native:1"]),
        (":", ["':'"]),
        ("lattice:e8," + "9" * 600, ["kv_channel"]),
        ("affine8", ["affine8", "native, rotated4, fine"]),
        ("nothing", ["nothing", "native", "fine"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_other_policies_are_refused_with_those_allowed(
    served: RawServer, kv_channel: str, says: list[str], *, stream: bool
):
    reply = call(served, "completions", kv_channel=kv_channel, stream=stream)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "kv_channel", "invalid_value")
    assert len(error["message"]) < 1000
    for text in says:
        assert text in error["message"]


def test_a_drafters_own_policy_is_that_of_the_registry(served: RawServer):
    plain, coded = provenance(served, max_tokens=24), provenance(served, model="coded", max_tokens=24)
    assert (coded["drafter"], coded["kv_policy"]) == (plain["drafter"], "native")
    assert 0 < coded["drafter_resident_bytes"] < plain["drafter_resident_bytes"]


def test_an_id_and_a_field_that_differ_are_refused(served: RawServer):
    reply = call(served, "completions", model="demo@lattice:e8,10", kv_channel="lattice:e8,11")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "kv_channel")


def test_a_registry_without_bounds_allows_channels_alone(tmp_path: Path):
    (tmp_path / "models.toml").write_text(CLOSED)
    with opened(tmp_path / "models.toml") as raw_server:
        assert provenance(raw_server, kv_channel="fine")["kv_channel"] == "fine"
        reply = call(raw_server, "completions", kv_channel="lattice:e8,10")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "kv_channel")
        assert "of policies, requests may ask for none" in reply.json()["error"]["message"]
        assert call(raw_server, "models").json()["data"][0]["x_kakeya"]["kv_policies"] == []


@pytest.mark.slow
def test_an_option_of_serve_opens_further_policies(tmp_path: Path):
    server = start(tmp_path, "--allow-kv", "lattice:e8,8..64", registry=CLOSED)
    try:
        body = {"prompt": PROMPT, "max_tokens": 4}
        with server.client() as client:
            reply = client.completions.create(model="demo@lattice:e8,10", **body)
            assert reply.x_kakeya["kv_policy"] == "lattice:e8,10@inner:2"
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="demo", extra_body={"kv_channel": "affine:8,64"}, **body)
    finally:
        server.stop()


@pytest.mark.parametrize("text", ["lattice:e8,8..", "native", "restored:exact", "lattice:e8,8..4000"])
def test_an_option_of_serve_that_is_no_range_is_refused(text: str):
    with pytest.raises(ConfigurationError, match=re.escape(text[:6])):
        command.main(["--check", "--allow-kv", text], standalone_mode=False)


def test_sessions_are_kept_for_the_exact_policy(served: RawServer):
    prompt = "def policy_of_sessions(first, second, third):\n    return first"
    cached = [
        provenance(served, prompt=prompt, kv_channel=policy)["cached_tokens"] > 0
        for policy in (
            "lattice:e8,20",
            "lattice:e8,20",
            "lattice:e8,21",
            "lattice:e8,20@inner:3",
            "lattice:e8,20@inner:2",
        )
    ]
    assert cached == [False, True, False, False, True]


def test_an_id_with_a_policy_has_a_card(served: RawServer):
    card = call(served, "models/demo@lattice:e8,10").json()
    assert (card["id"], card["x_kakeya"]["kv_channel"]) == ("demo@lattice:e8,10", "lattice:e8,10@inner:2")
    assert "lattice:e8,8..64@inner:0..4" in card["x_kakeya"]["kv_policies"]
    assert call(served, "models/demo@lattice:e8,65").status_code == 400
    assert call(served, "models/demo@lattice-e8").status_code == 400
    assert call(served, "models/demo@nothing").status_code == 404
