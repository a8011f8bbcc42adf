"""What a foreign engine leaves on a target: there while it runs, gone while anybody else has the word.

Engines put hooks in place of layers, keep tapped rows on the model, replace methods of its classes, and leave
another default stream behind when they hand over a token. Here all of that is taken off between two tokens
and put back before the next, so generations of several engines, and our own, may take turns on one target.

Looked after are: attributes, and lists in attributes, of the model and of the text model and the body inside
it; attributes of the classes of all its parts. Not looked after: parts of single layers, which no engine here
touches, and anything outside the target.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from engine.external_engines.strategies import models_of


class ModelState:
    """Those of one generation."""

    def __init__(self, model: Any) -> None:
        """Nothing yet.

        Args:
            model: the target's model, with nothing on it that is not its own.
        """
        roots = models_of(model)
        body = getattr(roots[-1], "model", None)
        self._roots = [*roots, body] if isinstance(body, nn.Module) else roots
        self._classes = sorted({type(part) for part in model.modules()}, key=lambda kind: kind.__qualname__)
        self._held: _State | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the engine find what it left; afterwards all is as it was before."""
        outside = _State(self._roots, self._classes)
        if self._held is not None:
            self._held.restore()
        try:
            yield
        finally:
            self._held = _State(self._roots, self._classes)
            outside.restore()


class _State:
    """How the places look at one moment."""

    def __init__(self, roots: list[Any], classes: list[type]) -> None:
        self._stream = mx.default_stream(mx.default_device())
        self._modules = [(root, dict(root), dict(vars(root))) for root in roots]
        self._lists = [
            (inner, list(inner)) for root in roots for inner in root.values() if isinstance(inner, list)
        ]
        self._classes = [(kind, dict(vars(kind))) for kind in classes]

    def restore(self) -> None:
        """Make them look so again."""
        for kind, attributes in self._classes:
            now = vars(kind)
            for name in [name for name in now if name not in attributes]:
                delattr(kind, name)
            for name, value in attributes.items():
                if now.get(name) is not value:
                    setattr(kind, name, value)
        for module, parts, attributes in self._modules:
            _fill(cast("dict[str, Any]", module), parts)
            _fill(vars(module), attributes)
        for inner, items in self._lists:
            inner[:] = items
        mx.set_default_stream(self._stream)


def _fill(mapping: dict[str, Any], items: dict[str, Any]) -> None:
    """Let a dictionary, which may be a module with an `update` of another meaning, hold just these."""
    for name in [name for name in mapping if name not in items]:
        del mapping[name]
    for name, value in items.items():
        mapping[name] = value
