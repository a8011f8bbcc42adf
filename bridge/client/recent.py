"""Requests that this machine asked for or looked at lately, so that a shell can complete their handles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bridge.proc import write_atomic
from bridge.protocol import refs

_FILE, _KEPT = "recent-handles", 200


def remember(state_dir: Path, requests: Iterable[tuple[str, str | None]]) -> None:
    """Note requests by nonce and preset, the last one as the newest."""
    known = recent(state_dir)
    new = {nonce: preset or "" for nonce, preset in requests if nonce not in known}
    if new:
        rows = list({**known, **new}.items())[-_KEPT:]
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(state_dir / _FILE, "".join(f"{nonce} {preset}\n" for nonce, preset in rows).encode())


def recent(state_dir: Path) -> dict[str, str]:
    """The presets of noted requests by nonce, the oldest first; empty where the preset is not known."""
    path = state_dir / _FILE
    rows = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    found = (row.partition(" ") for row in rows)
    return {nonce: preset for nonce, _, preset in found if refs.is_nonce(nonce)}
