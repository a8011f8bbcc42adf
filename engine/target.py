"""The target: an mlx-lm language model, run forward with taps on chosen layers.

Nothing of mlx-lm is patched. A tapped layer instance gets a class of its own, derived from the layer's, whose
call also hands the output to whoever is listening; its parameters, attributes and place in the model stay as
they are, and the last listener to close gives the instance its old class back. Several drafters can listen
to one target: each collects only during its own forwards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from engine.errors import ModelError


class Taps:
    """Outputs of decoder layers (0-based, before the final norm), concatenated along the hidden axis."""

    def __init__(self, layers: Sequence[Any], ids: Sequence[int]) -> None:
        """Listen to ``layers[i]`` for i in ``ids``; call `close` when done."""
        self.ids = tuple(ids)
        self._layers = [layers[index] for index in self.ids]
        self._rows: dict[int, mx.array] = {}
        self._collecting = False
        for layer in self._layers:
            _listeners(layer).append(self)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Record layer outputs inside the block."""
        self._rows, self._collecting = {}, True
        try:
            yield
        finally:
            self._collecting = False

    def take(self) -> mx.array:
        """What the last collection saw, [1, N, len(ids)·hidden]; forgets it."""
        rows, self._rows = self._rows, {}
        return mx.concatenate([rows[id(layer)] for layer in self._layers], axis=-1)

    def close(self) -> None:
        """Stop listening; restores the layers nobody else listens to. Closing twice does nothing."""
        for layer in self._layers:
            _stop_listening(layer, self)
        self._layers = []

    def hear(self, layer: Any, output: Any) -> None:
        """Called by a tapped layer with what it returned: an array, or a tuple that starts with it."""
        if self._collecting:
            self._rows[id(layer)] = output[0] if isinstance(output, tuple) else output


def _listeners(layer: Any) -> list[Taps]:
    """The listeners of a layer instance, giving it a tapped class of its own if it has none."""
    plain = type(layer)
    found = plain.__dict__.get("tap_listeners")
    if found is not None:
        existing: list[Taps] = found
        return existing
    listeners: list[Taps] = []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain.__call__(self, *args, **kwargs)
        for listener in listeners:
            listener.hear(self, output)
        return output

    body = {"__call__": call, "__module__": plain.__module__, "tap_listeners": listeners}
    object.__setattr__(layer, "__class__", type(plain.__name__, (plain,), body))
    return listeners


def _stop_listening(layer: Any, taps: Taps) -> None:
    tapped = type(layer)
    listeners = tapped.__dict__.get("tap_listeners", [])
    if taps in listeners:
        listeners.remove(taps)
        if not listeners:
            object.__setattr__(layer, "__class__", tapped.__bases__[0])


class Target:
    """A loaded model with the few operations decoding needs. Holds no sequence state."""

    def __init__(self, model: Any) -> None:
        """Wrap an mlx-lm model.

        Raises:
            ModelError: the model has no layers, token embedding or head where mlx-lm keeps them.
        """
        self.model = model
        text = getattr(model, "language_model", model)
        core = getattr(text, "model", None)
        if core is None or not hasattr(model, "layers") or not hasattr(core, "embed_tokens"):
            raise ModelError(f"{type(model).__module__} keeps its layers where the engine does not look")
        self._embedding = core.embed_tokens
        self._head = text.get("lm_head", core.embed_tokens.as_linear)
        arguments = getattr(text, "args", None)
        self.layer_count = len(model.layers)
        self.hidden_size = int(arguments.hidden_size)  # type: ignore[union-attr]
        self.vocab_size = int(arguments.vocab_size)  # type: ignore[union-attr]

    def tap(self, ids: Sequence[int]) -> Taps:
        """Listen to layers; the caller closes what it gets."""
        return Taps(self.model.layers, ids)

    def forward(
        self, tokens: mx.array, caches: Sequence[Any], taps: Taps | None
    ) -> tuple[mx.array, mx.array | None]:
        """One forward over [1, N] tokens, appending to the caches.

        Returns:
            Logits [1, N, V], and the tapped rows [1, N, K·hidden] or None without taps.
        """
        if taps is None:
            return self.model(tokens, cache=caches), None
        with taps.collecting():
            logits = self.model(tokens, cache=caches)
        return logits, taps.take()

    def embed(self, tokens: mx.array) -> mx.array:
        """Raw rows of the token table (not scaled as some models do), [1, N] to [1, N, hidden]."""
        rows: mx.array = self._embedding(tokens)
        return rows

    def head(self, hidden: mx.array) -> mx.array:
        """The output projection alone (not soft-capped), [1, N, hidden] to [1, N, V]."""
        logits: mx.array = self._head(hidden)
        return logits
