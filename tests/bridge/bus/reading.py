"""How tests of results read one: resolved, fetched, judged; and what they forge."""

from __future__ import annotations

import hashlib
from pathlib import Path

from bridge import signing
from bridge.bus.requests import Submitted, resolve_handle
from bridge.bus.results import TRAILER, Believed, believe, fetch
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT
from tests.fixtures.bus import FILES, BusFixture
from tests.fixtures.repo import allowed_line
from tests.objects import Objects

NO_TRUSTED_KEYS = Path("/nonexistent")


def read(
    bus: BusFixture,
    submitted: Submitted,
    trusted: Path = NO_TRUSTED_KEYS,
    *,
    known: bool = True,
    allow_unsigned: bool = False,
) -> Believed:
    expected = bus.expected(submitted) if known else None
    state = resolve_handle(bus.git, bus.remote, submitted.nonce)
    fetched = fetch(bus.git, bus.remote, state, expected=expected)
    assert fetched is not None
    return believe(fetched, trusted=trusted, expected=expected, allow_unsigned=allow_unsigned)


def trusting(path: Path, key: Path) -> Path:
    """A client's list that trusts one key."""
    path.write_text(allowed_line(signing.public_key(key), "testmac", signing.RESULT_NAMESPACE))
    return path


def by_hand(bus: BusFixture, submitted: Submitted, files: dict[str, bytes | None], data: bytes) -> None:
    """Replace the answer by a commit of our own with a matching trailer, as anyone with push rights could."""
    folder = f"{RESULT_ROOT}/{submitted.nonce}"
    message = f"forged\n\n{TRAILER}: {hashlib.sha256(data).hexdigest()}\n"
    tree = {f"{folder}/{path}": content for path, content in FILES.items()} | {
        f"{folder}/{RESULT_NAME}": data
    }
    commit = Objects(bus.repo.remote).commit_files(submitted.commit, {**tree, **files}, message)
    bus.point(submitted.ref, commit)
