"""HiddenStateHooks: what chosen decoder layers return during a forward, without patching anybody's class.

A tapped layer instance gets a class of its own, derived from the layer's, whose call also hands the output to
whoever is listening; its parameters, attributes and place in the model stay as they are, and the last
listener to close gives the instance its old class back. Several drafters can listen to one model: each
collects only during its own forwards. Inside a compiled function taps work when the function returns them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from engine.errors import ModelError


class HiddenStateHooks:
    """Outputs of decoder layers (0-based, before the final norm), concatenated along the hidden axis."""

    def __init__(self, layers: Sequence[Any], ids: Sequence[int]) -> None:
        """Listen to ``layers[i]`` for i in ``ids``; call `close` when done.

        Raises:
            ModelError: there is no such layer.
        """
        self.ids = tuple(ids)
        if odd := [index for index in self.ids if not 0 <= index < len(layers)]:
            raise ModelError(f"layer {odd[0]} cannot be tapped: the target has layers 0 to {len(layers) - 1}")
        # A model may use one layer instance several times: the how-manieth call of a forward is meant.
        self._calls = [sum(layers[i] is layers[index] for i in range(index)) for index in self.ids]
        self._layers = [layers[index] for index in self.ids]
        self._rows: dict[int, list[mx.array]] = {}
        self._collecting = False
        for layer in _distinct(self._layers):
            _listeners(layer).append(self)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Record layer outputs inside the block; an exception in it forgets them."""
        self._rows, self._collecting = {}, True
        try:
            yield
        except BaseException:
            self._rows = {}
            raise
        finally:
            self._collecting = False

    def take(self) -> mx.array:
        """What the last collection saw, [1, N, len(ids)·hidden]; forgets it.

        Raises:
            ModelError: a tapped layer did not run.
        """
        rows, self._rows = self._rows, {}
        parts = []
        for index, layer, call in zip(self.ids, self._layers, self._calls, strict=True):
            heard = rows.get(id(layer), [])
            if call >= len(heard):
                raise ModelError(f"layer {index} of the target did not run, so there is nothing to tap")
            parts.append(heard[call])
        return mx.concatenate(parts, axis=-1)

    def close(self) -> None:
        """Stop listening; restores the layers nobody else listens to. Closing twice does nothing."""
        for layer in _distinct(self._layers):
            _stop_listening(layer, self)
        self._layers, self._rows = [], {}

    def hear(self, layer: Any, output: Any) -> None:
        """Called by a tapped layer with what it returned: an array, or a tuple that starts with it."""
        if self._collecting:
            row = output[0] if isinstance(output, tuple) else output
            self._rows.setdefault(id(layer), []).append(row)


def _distinct(layers: Sequence[Any]) -> list[Any]:
    return list({id(layer): layer for layer in layers}.values())


def _listeners(layer: Any) -> list[HiddenStateHooks]:
    """The listeners of a layer instance, giving it a tapped class of its own if it has none."""
    plain = type(layer)
    found = plain.__dict__.get("tap_listeners")
    if found is not None:
        existing: list[HiddenStateHooks] = found
        return existing
    listeners: list[HiddenStateHooks] = []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain.__call__(self, *args, **kwargs)
        for listener in listeners:
            listener.hear(self, output)
        return output

    body = {"__call__": call, "__module__": plain.__module__, "tap_listeners": listeners}
    object.__setattr__(layer, "__class__", type(plain.__name__, (plain,), body))
    return listeners


def _stop_listening(layer: Any, taps: HiddenStateHooks) -> None:
    """Remove a listener wherever it listens, and the tapped class if it was the last one on top."""
    for kind in type(layer).__mro__:
        listeners = kind.__dict__.get("tap_listeners", [])
        if taps in listeners:
            listeners.remove(taps)
            if not listeners and kind is type(layer):
                object.__setattr__(layer, "__class__", kind.__bases__[0])
            return
