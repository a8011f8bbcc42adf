"""Runner registrations for tests: variants of a right one, signed by real keys, put on real remotes."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bridge import signing
from bridge.bus.registry import register
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo
from bridge.protocol.manifest import format_time
from bridge.protocol.runner_info import (
    INFO_NAME,
    INFO_SIGNATURE_NAME,
    Limits,
    Offer,
    Property,
    RunnerInfo,
    State,
)
from tests.objects import Objects

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def offer(name: str = "probe", **changes: Any) -> Offer:
    """A preset with one parameter, available."""
    fields: dict[str, Any] = {
        "name": name,
        "digest": "0" * 64,
        "engine": "installed",
        "timeout_s": 600,
        "parameters": {"limit": Property(type="integer", default=4, minimum=1, maximum=9)},
        "available": True,
    }
    return Offer(**{**fields, **changes})


def info(name: str = "mac", *, age_s: float = 0, now: datetime = NOW, **changes: Any) -> RunnerInfo:
    """A registration of a live, idle runner that offers `probe`, as it was `age_s` ago."""
    fields: dict[str, Any] = {
        "name": name,
        "id": "0123456789abcdef",
        "session": "00000000000000aa",
        "version": "0.1.0",
        "audience": "/bus",
        "public_key": None,
        "started_at": format_time(now - timedelta(seconds=age_s + 3600)),
        "seen_at": format_time(now - timedelta(seconds=age_s)),
        "interval_s": 60.0,
        "state": State.IDLE,
        "presets": (offer(),),
        "limits": Limits(max_timeout_s=7200, require_signature=False),
    }
    return RunnerInfo(**{**fields, **changes})


def altered(base: RunnerInfo, **changes: Any) -> bytes:
    """A registration's bytes with fields that no registration would have."""
    return json.dumps({**json.loads(base.to_bytes()), **changes}).encode()


def public_line(key: Path) -> str:
    """A key as a registration names it."""
    return " ".join(signing.public_key(key).read_text().split()[:2])


def signed(key: Path, base: RunnerInfo) -> tuple[RunnerInfo, bytes]:
    """The registration with the key's public half, and the key's signature of it."""
    whole = base.model_copy(update={"public_key": public_line(key)})
    return whole, signing.sign(key, signing.RUNNER_NAMESPACE, whole.to_bytes())


def put(remote: str | Path, ref: str, data: bytes, signature: bytes | None = None) -> None:
    """Write any bytes into a runner's ref of a bare remote, as anyone with push rights could."""
    files = {INFO_NAME: data, INFO_SIGNATURE_NAME: signature}
    commit = Objects(Path(remote)).commit_files(None, files)
    GitRepo(Path(remote)).run("update-ref", ref, commit)


def publish_info(cache: GitCache, base: RunnerInfo) -> None:
    """Register a runner, as its first registration does."""
    register(cache, base, None, now=NOW)
