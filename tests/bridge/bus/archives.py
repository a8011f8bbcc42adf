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
from tests.fixtures.bus import BusFixture
from tests.objects import Objects

NOW = datetime(2026, 4, 1, 12, 0, 0, tzinfo=UTC)
NO_TRUSTED_KEYS = Path("/nonexistent")


def nonce_of_age(age: timedelta = timedelta(days=31)) -> str:
    return refs.new_nonce(NOW - age, secrets.token_bytes(6))


def answered(
    bus: BusFixture,
    age: timedelta = timedelta(days=31),
    *,
    files: dict[str, bytes] | None = None,
    signature: bytes | None = None,
    **changes: object,
) -> Submitted:
    """A request of that age with its result on its branch."""
    submitted = bus.submit(nonce=nonce_of_age(age))
    data = bus.result(bus.expected(submitted), files, **changes)
    bus.answer(submitted, result=data, signature=signature, files=files)
    return submitted


def pruned(bus: BusFixture, cache: GitCache | None = None, **options: Any) -> Pruned:
    return prune(cache or bus.cache, **{"now": NOW, **options})


def new_cache(bus: BusFixture) -> GitCache:
    """The empty cache of another machine."""
    return GitCache(bus.root / f"cache-{secrets.token_hex(4)}.git", bus.remote)


def live(bus: BusFixture, nonce: str) -> FetchedResult:
    found = fetch(bus.git, bus.remote, resolve_handle(bus.git, bus.remote, nonce))
    assert found is not None
    return found


def archived(bus: BusFixture, handle: str) -> FetchedResult:
    """As a machine finds it that has nothing of it."""
    cache = new_cache(bus)
    return find_archived(cache, handle, found=cache.list_remote(refs.ARCHIVE))


def bridge_refs(bus: BusFixture) -> set[str]:
    """The remote's refs but for main and the archive."""
    return bus.repo.remote_refs() - {"refs/heads/main", refs.ARCHIVE}


def many_answered(
    bus: BusFixture, count: int, age: timedelta = timedelta(days=31), *, answers: bool = True
) -> list[str]:
    """Requests on their branches alone, a second between them, the oldest first; with their results."""
    git_repo, objects = GitRepo(bus.repo.remote), Objects(bus.repo.remote)
    scratch = Scratch(git_repo, objects.folder)
    workload, lines, nonces = bus.repo.head(), [], []
    for number in range(count):
        nonce = nonce_of_age(age - timedelta(seconds=number))
        manifest = bus.manifest(nonce=nonce, workload_sha=workload)
        tip = scratch.commit_files(workload, {REQUEST_PATH: manifest.to_bytes()}, "request\n")
        if answers:
            data = bus.result(ExpectedRequest(nonce, tip, workload), {})
            message = f"result\n\n{TRAILER}: {hashlib.sha256(data).hexdigest()}\n"
            tip = scratch.commit_files(tip, {f"{RESULT_ROOT}/{nonce}/{RESULT_NAME}": data}, message)
        lines.append(f"create {manifest.result_ref} {tip}\n")
        nonces.append(nonce)
    git_repo.run("update-ref", "--stdin", input="".join(lines).encode())
    scratch.close()
    git_repo.close()
    return nonces


def copy_into_archive(bus: BusFixture, nonce: str, changes: dict[str, bytes | None] | None = None) -> None:
    """Retire an answered request as the first version did: copies in a folder, refs deleted.

    Args:
        bus: The bus.
        nonce: The request.
        changes: Files of its folder that differ from what that version wrote.
    """
    found, git = live(bus, nonce), bus.repo.git
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
        text = git("show", f"{expected.commit}:.mac-bridge/request.json", cwd=bus.repo.remote)
        files["request.json"] = f"{text}\n".encode()
    tip = git("rev-parse", refs.ARCHIVE, cwd=bus.repo.remote) if _has_archive(bus) else None
    folder = f"{nonce[:4]}-{nonce[4:6]}/{nonce[6:8]}/{nonce}"
    placed = {f"{folder}/{path}": data for path, data in {**files, **(changes or {})}.items()}
    bus.point(refs.ARCHIVE, Objects(bus.repo.remote).commit_files(tip, placed))
    git("update-ref", "-d", found.ref, cwd=bus.repo.remote)


def archive_files(bus: BusFixture) -> list[str]:
    """The files of the archive's own tree."""
    if not _has_archive(bus):
        return []
    return bus.repo.git("ls-tree", "-r", "--name-only", refs.ARCHIVE, cwd=bus.repo.remote).splitlines()


def index_lines(bus: BusFixture) -> list[dict[str, Any]]:
    """Every line of the archive's index."""
    names = [name for name in archive_files(bus) if name.startswith("index/")]
    texts = [bus.repo.git("show", f"{refs.ARCHIVE}:{name}", cwd=bus.repo.remote) for name in names]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _has_archive(bus: BusFixture) -> bool:
    return refs.ARCHIVE in bus.repo.remote_refs()
