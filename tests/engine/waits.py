"""Counts what makes the host wait for the device: mlx's functions, and the engine's wherever imported.

A wait through an array's buffer (`memoryview`, numpy) leaves no trace here; tests/test_architecture.py names
the modules that may read one.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import pytest

from engine import device

HOST_WAITS = ("wait", "wait_for", "read_tail")
WAITS = ("eval", "synchronize", *HOST_WAITS)
TRANSFERS = ("item", "tolist", "__int__", "__float__", "__bool__", "__array__")


class Log:
    """Everything that makes the host wait for the device or starts work on it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        for name in ("eval", "synchronize", "async_eval"):
            self._count(monkeypatch, mx, name)
        for name in TRANSFERS:
            if hasattr(mx.array, name):
                self._count(monkeypatch, mx.array, name)
        for name in HOST_WAITS:
            for module in importers(getattr(device, name)):
                self._count(monkeypatch, module, name)

    def _count(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.events.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    def take(self) -> list[str]:
        """What has happened since the last look."""
        events, self.events = self.events, []
        return events


def importers(function: Any) -> list[Any]:
    """The loaded modules of the engine that have a function by its own name, its home among them."""
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] == "engine" and vars(module).get(function.__name__) is function
    ]


def transfers(events: list[str]) -> int:
    """How many of the events of a round are transfers; none of them may be a wait."""
    waits = sorted(set(events) & set(WAITS))
    assert not waits, f"a round waits beside its transfer: {waits} in {events}"
    return sum(name in TRANSFERS for name in events)
