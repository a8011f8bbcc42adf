"""Moves of tests about the archive: answered requests of any age, pruned and read back."""

from __future__ import annotations

import hashlib
import json
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bridge.bus.archive import Pruned, find_archived, prune
from bridge.bus.requests import Submitted, resolve_handle
from bridge.bus.results import TRAILER, ExpectedRequest, FetchedResult, fetch
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo, Scratch
from bridge.protocol import refs
from bridge.protocol.manifest import REQUEST_PATH
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT
from tests.objects import Objects
from tests.worlds import World

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
    data = world.result(world.expected(submitted), files, **changes)
    world.answer(submitted, result=data, signature=signature, files=files)
    return submitted


def pruned(world: World, cache: GitCache | None = None, **options: Any) -> Pruned:
    return prune(cache or world.cache, **{"now": NOW, **options})


def new_cache(world: World) -> GitCache:
    """The empty cache of another machine."""
    return GitCache(world.root / f"cache-{secrets.token_hex(4)}.git", world.remote)


def live(world: World, nonce: str) -> FetchedResult:
    found = fetch(world.git, world.remote, resolve_handle(world.git, world.remote, nonce))
    assert found is not None
    return found


def archived(world: World, handle: str) -> FetchedResult:
    """As a machine finds it that has nothing of it."""
    cache = new_cache(world)
    return find_archived(cache, handle, found=cache.list_remote(refs.ARCHIVE))


def bridge_refs(world: World) -> set[str]:
    """The remote's refs but for main and the archive."""
    return world.house.remote_refs() - {"refs/heads/main", refs.ARCHIVE}


def many_answered(
    world: World, count: int, age: timedelta = timedelta(days=31), *, answers: bool = True
) -> list[str]:
    """Requests on their branches alone, a second between them, the oldest first; with their results."""
    repo, objects = GitRepo(world.house.remote), Objects(world.house.remote)
    scratch = Scratch(repo, objects.folder)
    workload, lines, nonces = world.house.head(), [], []
    for number in range(count):
        nonce = nonce_of_age(age - timedelta(seconds=number))
        manifest = world.manifest(nonce=nonce, workload_sha=workload)
        tip = scratch.commit_files(workload, {REQUEST_PATH: manifest.to_bytes()}, "request\n")
        if answers:
            data = world.result(ExpectedRequest(nonce, tip, workload), {})
            message = f"result\n\n{TRAILER}: {hashlib.sha256(data).hexdigest()}\n"
            tip = scratch.commit_files(tip, {f"{RESULT_ROOT}/{nonce}/{RESULT_NAME}": data}, message)
        lines.append(f"create {manifest.result_ref} {tip}\n")
        nonces.append(nonce)
    repo.run("update-ref", "--stdin", input="".join(lines).encode())
    scratch.close()
    repo.close()
    return nonces


def copy_into_archive(world: World, nonce: str, changes: dict[str, bytes | None] | None = None) -> None:
    """Retire an answered request as the first version did: copies in a folder, refs deleted.

    Args:
        world: The bus.
        nonce: The request.
        changes: Files of its folder that differ from what that version wrote.
    """
    found, git = live(world, nonce), world.house.git
    expected = found.expected
    result = json.loads(found.files[RESULT_NAME])
    record = {
        "schema_version": 1,
        "nonce": nonce,
        "preset": "probe",
        "ref": found.ref,
        "result_commit": found.commit,
        "parents": list(found.parents),
        "message": found.message,
        "request": expected
        and {"commit": expected.commit, "workload_sha": expected.workload_sha, "preset": expected.preset},
        "summary": {
            "preset": result["preset"],
            **{key: result["verdict"][key] for key in ("status", "reason")},
            "runner": result["runner"]["name"],
            **{key: result[key] for key in ("attempt", "started_at", "finished_at")},
        },
    }
    files: dict[str, bytes | None] = {f"result/{path}": data for path, data in found.files.items()}
    files["archived.json"] = (json.dumps(record, indent=2) + "\n").encode()
    if expected is not None:
        text = git("show", f"{expected.commit}:.mac-bridge/request.json", cwd=world.house.remote)
        files["request.json"] = f"{text}\n".encode()
    tip = git("rev-parse", refs.ARCHIVE, cwd=world.house.remote) if _has_archive(world) else None
    folder = f"{nonce[:4]}-{nonce[4:6]}/{nonce[6:8]}/{nonce}"
    placed = {f"{folder}/{path}": data for path, data in {**files, **(changes or {})}.items()}
    world.point(refs.ARCHIVE, Objects(world.house.remote).commit_files(tip, placed))
    git("update-ref", "-d", found.ref, cwd=world.house.remote)


def archive_files(world: World) -> list[str]:
    """The files of the archive's own tree."""
    if not _has_archive(world):
        return []
    return world.house.git("ls-tree", "-r", "--name-only", refs.ARCHIVE, cwd=world.house.remote).splitlines()


def index_lines(world: World) -> list[dict[str, Any]]:
    """Every line of the archive's index."""
    names = [name for name in archive_files(world) if name.startswith("index/")]
    texts = [world.house.git("show", f"{refs.ARCHIVE}:{name}", cwd=world.house.remote) for name in names]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _has_archive(world: World) -> bool:
    return refs.ARCHIVE in world.house.remote_refs()
