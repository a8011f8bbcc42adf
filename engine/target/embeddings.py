"""By what number a model multiplies the rows of its token table before its first layer.

Many families scale their embeddings inside their own forward, each in its own way: Gemma by sqrt(hidden),
which Gemma 3 rounds to bfloat16, others by a field of their configuration. There is no list of families here.
The model's own forward is run as far as its first layer, once over a table of ones, which leaves the scale,
and once over the real table, to check that nothing but this scale was applied.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.errors import ModelError

PROBES = 8  # tokens the check looks at, spread over the vocabulary


def measure_scale(model: Any, table: Any) -> mx.array:
    """The scale [], in the type the model computes its embeddings in.

    Args:
        model: an mlx-lm model.
        table: its token table, a module.

    Raises:
        ModelError: the first layer receives something other than the rows of the table times one number.
    """
    vocabulary = int(table.weight.shape[0])
    tokens = mx.array([[vocabulary * index // PROBES for index in range(PROBES)]])
    rows = table(tokens)
    with _answering(table, lambda _, ids: mx.ones((*ids.shape, rows.shape[-1]), rows.dtype)):
        scale = _first_layer_input(model, tokens).reshape(-1)[0]
    received = _first_layer_input(model, tokens)
    if received.shape != rows.shape or not mx.array_equal(received, rows * scale).item():
        raise ModelError(
            f"{type(model).__module__} computes its embeddings in a way the engine cannot give to a drafter: "
            "its first layer does not receive rows of embed_tokens times one number; use a drafter that "
            "reads tokens alone (prompt-lookup, autoregressive or masked-diffusion)"
        )
    return scale


class _FirstLayerReached(Exception):
    """Not an error: ends the forward early, with what the first layer was called with."""

    def __init__(self, received: mx.array) -> None:
        super().__init__()
        self.received = received


def _first_layer_input(model: Any, tokens: mx.array) -> mx.array:
    """Run the model's forward of [1, N] tokens up to its first layer."""

    def stop(_: Any, *args: Any, **kwargs: Any) -> None:
        arrays = [value for value in (*args, *kwargs.values()) if isinstance(value, mx.array)]
        raise _FirstLayerReached(arrays[0])

    with _answering(model.layers[0], stop):
        try:
            model(tokens, cache=make_prompt_cache(model))
        except _FirstLayerReached as reached:
            return reached.received
    raise ModelError(f"{type(model).__module__} does not call its first layer")


@contextmanager
def _answering(module: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Let one module instance answer calls with ``call``; nobody's class is patched."""
    plain = type(module)
    body = {"__call__": call, "__module__": plain.__module__}
    object.__setattr__(module, "__class__", type(plain.__name__, (plain,), body))
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", plain)
