"""Any bytes, and mutants of honest documents: never a traceback, never a hang, never a forbidden accept."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge import signing
from bridge.errors import SignatureError
from tests.adversary.answers import document
from tests.adversary.doors import DOORS
from tests.adversary.mutants import hostile, spliced
from tests.adversary.oracle import ORACLES

HONEST = {kind: door.honest for kind, door in DOORS.items()} | {"result": json.dumps(document()).encode()}


def hold(kind: str, data: bytes) -> None:
    """Check one input: the oracle accepts what the reader accepts; a refusal is the reader's own error."""
    began = time.process_time()
    try:
        DOORS[kind].read(data)
    except DOORS[kind].refusal as refusal:
        message = refusal.message
    else:
        message = ""
        ORACLES[kind](data)
    assert time.process_time() - began < 5
    assert message.isprintable()
    assert len(message) < 8000


@pytest.mark.parametrize("kind", DOORS)
def test_the_oracle_takes_what_is_honest(kind: str):
    ORACLES[kind](HONEST[kind])
    DOORS[kind].read(HONEST[kind])


@pytest.mark.parametrize("kind", DOORS)
@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(60, id="some"),
        pytest.param(300, id="more", marks=pytest.mark.slow),
        pytest.param(5000, id="many", marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)]),
    ],
)
def test_mutants_are_refused_or_harmless(kind: str, examples: int):
    @settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(hostile(HONEST[kind]))
    def run(data: bytes) -> None:
        hold(kind, data)

    run()


@pytest.fixture(scope="module")
def signature(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    key = signing.ensure_key(tmp_path_factory.mktemp("key") / "key", "key")
    return signing.sign(key, signing.REQUEST_NAMESPACE, b"data")


def core(signature: bytes) -> bytes:
    """The blob inside the frame; empty: there is none."""
    try:
        return base64.b64decode(b"".join(signature.split(b"-----")[2].split()), validate=True)
    except (IndexError, ValueError):
        return b""


def test_mutants_of_a_signature_do_not_verify(signature: bytes, tmp_path: Path):
    @settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(st.binary(max_size=100), spliced(signature)))
    def run(data: bytes) -> None:
        try:
            signing.signer_fingerprint(b"data", data, signing.REQUEST_NAMESPACE)
        except SignatureError as error:
            said = error.message
        else:
            said = ""
            assert core(data) == core(signature)
        assert said.isprintable()

    run()
