"""How tests of results read one: resolved, fetched, judged; and what they forge."""

from __future__ import annotations

import hashlib
from pathlib import Path

from bridge import signing
from bridge.bus.requests import Submitted, resolve_handle
from bridge.bus.results import TRAILER, Believed, believe, fetch
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT
from tests.houses import allowed_line
from tests.objects import Objects
from tests.worlds import FILES, World

NOBODY = Path("/nonexistent")


def read(
    world: World,
    submitted: Submitted,
    trusted: Path = NOBODY,
    *,
    known: bool = True,
    allow_unsigned: bool = False,
) -> Believed:
    expected = world.expected(submitted) if known else None
    state = resolve_handle(world.git, world.remote, submitted.nonce)
    fetched = fetch(world.git, world.remote, state, expected=expected)
    assert fetched is not None
    return believe(fetched, trusted=trusted, expected=expected, allow_unsigned=allow_unsigned)


def trusting(path: Path, key: Path) -> Path:
    """A client's list that trusts one key."""
    path.write_text(allowed_line(signing.public_key(key), "testmac", signing.RESULT_NAMESPACE))
    return path


def by_hand(world: World, submitted: Submitted, files: dict[str, bytes | None], data: bytes) -> None:
    """Replace the answer by a commit of our own with a matching trailer, as anyone with push rights could."""
    folder = f"{RESULT_ROOT}/{submitted.nonce}"
    message = f"forged\n\n{TRAILER}: {hashlib.sha256(data).hexdigest()}\n"
    tree = {f"{folder}/{path}": content for path, content in FILES.items()} | {
        f"{folder}/{RESULT_NAME}": data
    }
    commit = Objects(world.house.remote).commit_files(submitted.commit, {**tree, **files}, message)
    world.point(submitted.ref, commit)
