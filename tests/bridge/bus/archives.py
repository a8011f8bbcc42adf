"""Moves of tests about the archive: answered requests of any age, pruned and read back."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bridge.bus import trees
from bridge.bus.answers import Asked, FetchedResult
from bridge.bus.archive import Pruned, prune
from bridge.bus.archived import find_archived
from bridge.bus.git import Git
from bridge.bus.handles import resolve_handle
from bridge.bus.objects import Entry
from bridge.bus.publish import TRAILER, publish
from bridge.bus.requests import FOLDER, Submitted, build
from bridge.bus.results import fetch
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME
from tests.worlds import FILES, World

NOW = datetime(2026, 4, 1, 12, 0, 0, tzinfo=UTC)
NOBODY = Path("/nonexistent")


def nonce_of_age(age: timedelta = timedelta(days=31)) -> str:
    return refs.new_nonce(NOW - age, secrets.token_bytes(6))


def answered(
    world: World,
    age: timedelta = timedelta(days=31),
    *,
    files: dict[str, bytes] | None = None,
    signature: bytes | None = None,
    **changes: object,
) -> Submitted:
    """A request of that age with its result on its branch."""
    submitted = world.submit(nonce=nonce_of_age(age))
    listed = FILES if files is None else files
    publish(
        world.git,
        world.remote,
        request_commit=submitted.commit,
        nonce=submitted.nonce,
        result_ref=submitted.ref,
        files=listed,
        result=world.result(world.asked(submitted), listed, **changes),
        signature=signature,
        claim=None,
    )
    return submitted


def pruned(world: World, **changes: Any) -> Pruned:
    """One prune as a command of `world`'s client makes it."""
    options: dict[str, Any] = {"now": NOW, "origin": world.git, **changes}
    folder = options.pop("folder", world.root / "state")
    return prune(folder, world.remote, **options)


def live(world: World, nonce: str) -> FetchedResult:
    found = fetch(world.git, world.remote, resolve_handle(world.git, world.remote, nonce))
    assert found is not None
    return found


def archived(world: World, handle: str, folder: Path | None = None) -> FetchedResult:
    return find_archived(folder or world.root / "state", world.remote, handle, origin=world.git)


def bridge_refs(world: World) -> set[str]:
    """The remote's refs but for main and the archive."""
    return world.house.remote_refs() - {"refs/heads/main", refs.ARCHIVE}


def many_answered(world: World, count: int, age: timedelta = timedelta(days=31)) -> list[str]:
    """Answered requests written straight into the remote, a second between them; the oldest first."""
    git, workload, lines, nonces = Git(world.house.remote), world.house.git("rev-parse", "HEAD"), [], []
    for number in range(count):
        nonce = nonce_of_age(age - timedelta(seconds=number))
        manifest = world.manifest(nonce=nonce, workload_sha=workload)
        request = build(git, manifest, None)
        data = world.result(Asked(nonce, request, workload), {})
        rows = [Entry("100644", "blob", git.write_blob(data), RESULT_NAME)]
        results = git.write_tree([Entry("040000", "tree", git.write_tree(rows), nonce)])
        root = git.read_tree(request)
        kept = git.entries(f"{request}:{FOLDER}")
        folder = git.write_tree([*kept, Entry("040000", "tree", results, "results")])
        message = f"result\n\n{TRAILER}: {hashlib.sha256(data).hexdigest()}\n"
        tip = git.commit_tree(git.write_raw_tree(trees.with_folder(root, FOLDER, folder)), [request], message)
        lines.append(f"create {manifest.result_ref} {tip}\n")
        nonces.append(nonce)
    git.run("update-ref", "--stdin", input="".join(lines).encode())
    git.close()
    return nonces


def archive_listing(world: World) -> list[str]:
    """The files of the archive."""
    if refs.ARCHIVE not in world.house.remote_refs():
        return []
    return world.house.git("ls-tree", "-r", "--name-only", refs.ARCHIVE, cwd=world.house.remote).splitlines()
