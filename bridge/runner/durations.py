"""How long the last few jobs of each preset took on this machine: one small file of a runner's own folder."""

from __future__ import annotations

import json
import math
import os
import statistics
import threading
from collections.abc import Collection
from pathlib import Path

from bridge.errors import ManifestError
from bridge.protocol.manifest import load_strict

KEPT = 20
MAX_BYTES = 256 * 1024


class Durations:
    """Seconds by preset, kept across restarts; a damaged file is as good as none.

    Args:
        path: The file.
        presets: Names that are remembered; others are forgotten at the next write.
    """

    def __init__(self, path: Path, presets: Collection[str]) -> None:
        self._path = path
        self._presets = frozenset(presets)
        self._lock = threading.Lock()
        self._seconds = {name: seconds for name, seconds in _load(path).items() if name in self._presets}

    def typical(self, preset: str) -> float | None:
        """The median of a preset's last jobs, in seconds; None: none is known."""
        known = self._seconds.get(preset)
        return round(statistics.median(known), 3) if known else None

    def add(self, preset: str, seconds: float) -> None:
        """Remember one more job, and forget the oldest beyond the last `KEPT`.

        Raises:
            OSError: The file cannot be written.
        """
        if preset not in self._presets or not math.isfinite(seconds) or seconds < 0:
            return
        with self._lock:
            self._seconds[preset] = [*self._seconds.get(preset, ()), round(seconds, 3)][-KEPT:]
            draft = self._path.with_suffix(".new")
            draft.write_text(json.dumps(self._seconds, sort_keys=True) + "\n", encoding="ascii")
            os.replace(draft, self._path)


def _load(path: Path) -> dict[str, list[float]]:
    try:
        with path.open("rb") as file:
            document = load_strict(file.read(MAX_BYTES + 1), what=path.name, limit=MAX_BYTES)
    except (OSError, ManifestError):
        return {}
    return {
        name: [float(value) for value in values if type(value) in (int, float) and 0 <= value < math.inf][
            -KEPT:
        ]
        for name, values in document.items()
        if isinstance(values, list)
    }
