"""Runner cards for tests: made of changes to one that is right, signed by real keys, put on real remotes."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bridge import signing
from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.protocol.manifest import format_time
from bridge.protocol.runner_info import (
    CARD_NAME,
    CARD_SIGNATURE_NAME,
    Limits,
    Offer,
    Property,
    RunnerCard,
    State,
)

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


def card(name: str = "mac", *, age_s: float = 0, now: datetime = NOW, **changes: Any) -> RunnerCard:
    """A card of a live, idle runner that offers `probe`, as it was `age_s` ago."""
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
    return RunnerCard(**{**fields, **changes})


def altered(base: RunnerCard, **changes: Any) -> bytes:
    """A card's bytes with fields that no card would have."""
    return json.dumps({**json.loads(base.to_bytes()), **changes}).encode()


def public_line(key: Path) -> str:
    """A key as a card names it."""
    return " ".join(signing.public_key(key).read_text().split()[:2])


def signed(key: Path, base: RunnerCard) -> tuple[RunnerCard, bytes]:
    """The card with the key's public half, and the key's signature of it."""
    whole = base.model_copy(update={"public_key": public_line(key)})
    return whole, signing.sign(key, signing.RUNNER_NAMESPACE, whole.to_bytes())


def put(remote: str | Path, ref: str, data: bytes, signature: bytes | None = None) -> None:
    """Write whatever bytes into a runner's ref of a bare remote, as anybody with push rights could."""
    files = {CARD_NAME: data} if signature is None else {CARD_NAME: data, CARD_SIGNATURE_NAME: signature}
    there = Git(Path(remote))
    rows = [Entry("100644", "blob", there.write_blob(data), name) for name, data in files.items()]
    commit = there.commit_tree(there.write_tree(rows), [], "by hand\n")
    there.run("update-ref", ref, commit)
