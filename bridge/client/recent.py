"""What this machine saw lately, so that a shell can complete it offline: requests, and runners' presets."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from bridge.proc import write_atomic
from bridge.protocol import refs
from bridge.protocol.runner_info import Offer, Property

_FILE, _KEPT = "recent-handles", 200
_OFFERS = "recent-presets"
# A runner's word is completed on a command line, so it must be nothing that a shell interprets.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


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


def remember_presets(state_dir: Path, offers: Iterable[Offer]) -> None:
    """Note the presets of the runners that were read last, and what their parameters may be."""
    words = defaultdict[str, dict[str, None]](dict)
    for offer in offers:
        params = [word for key, each in offer.parameters.items() for word in _words(key, each)]
        for name in (offer.name, *offer.aliases):
            words[name] |= dict.fromkeys(params)
    text = "".join(f"{' '.join((name, *known))}\n" for name, known in sorted(words.items()))
    path = state_dir / _OFFERS
    if text != (path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""):
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, text.encode())


def recent_presets(state_dir: Path) -> dict[str, list[str]]:
    """Noted presets of runners by name, and ``name=`` or ``name=value`` of each parameter."""
    path = state_dir / _OFFERS
    rows = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return {words[0]: words[1:] for row in rows if (words := row.split())}


def _words(name: str, parameter: Property) -> list[str]:
    values = ("true", "false") if parameter.type == "boolean" else map(str, parameter.enum or ("",))
    return [f"{name}={value}" for value in values if not value or _WORD.fullmatch(value)]
