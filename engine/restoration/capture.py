"""What chosen modules of a target returned during a forward, each by itself."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from engine.target.model import HiddenStateHooks


class Capture(HiddenStateHooks):
    """Outputs of any modules of a model, in the order they are named; listens as `HiddenStateHooks` does.

    A module that runs several times in a forward is named as often: its outputs come in order.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        """Listen to modules; call `close` when done."""
        super().__init__(modules, range(len(modules)))

    def outputs(self) -> list[mx.array]:
        """What the last collection heard, an array for each module; forgets it.

        Raises:
            ValueError: a module did not run as often as it is named.
        """
        rows, self._rows = self._rows, {}
        heard = [rows.get(id(module), []) for module in self._layers]
        if any(call >= len(found) for call, found in zip(self._calls, heard, strict=True)):
            raise ValueError("a module that is listened to did not run")
        return [found[call] for call, found in zip(self._calls, heard, strict=True)]
