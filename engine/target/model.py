"""The target: an mlx-lm language model with the few operations that decoding and drafters need.

Nothing of mlx-lm is patched. Models of text, and of text within a larger model (``language_model``), look the
same from here: one token table, decoder layers, one head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.device import read_float
from engine.errors import ModelError

PROBES = 8  # tokens the check of embeddings looks at, spread over the vocabulary


class HiddenStateHooks:
    """Outputs of decoder layers (0-based, before the final norm), concatenated along the hidden axis.

    A hooked layer instance gets a class of its own, derived from the layer's, that also hands its output to
    every open hook; the last one to close gives the instance its old class back. Each collects only during
    its own forwards. Inside a compiled function hooks work when the function returns what they collected.
    """

    def __init__(self, layers: Sequence[Any], ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        if odd := [index for index in self.ids if not 0 <= index < len(layers)]:
            raise ModelError(f"layer {odd[0]} cannot be read: the target has layers 0 to {len(layers) - 1}")
        # A model may use one layer instance several times: which of its calls in a forward is meant.
        self._calls = [sum(layers[i] is layers[index] for i in range(index)) for index in self.ids]
        self._layers = [layers[index] for index in self.ids]
        self._rows: dict[int, list[mx.array]] = {}
        self._collecting = False
        self._hooked = {id(layer): layer for layer in self._layers}
        for layer in self._hooked.values():
            _hooks_of(layer).append(self)

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
        """What the last collection recorded, [1, N, len(ids)·hidden]; forgets it."""
        return mx.concatenate(self.outputs(), axis=-1)

    def outputs(self) -> list[mx.array]:
        """The same, an array for each layer; restoration hooks projections in their stead."""
        rows, self._rows = self._rows, {}
        parts = []
        for index, layer, call in zip(self.ids, self._layers, self._calls, strict=True):
            outputs = rows.get(id(layer), [])
            if call >= len(outputs):
                kind = type(layer).__name__
                raise ModelError(f"hooked {kind} {index} did not run, so there is no output of it")
            parts.append(outputs[call])
        return parts

    def close(self) -> None:
        """Restore the layers that no other hook uses. Closing twice does nothing."""
        for layer in self._hooked.values():
            _unhook(layer, self)
        self._hooked, self._layers, self._rows = {}, [], {}

    def record(self, layer: Any, output: Any) -> None:
        """Called by a hooked layer with what it returned: an array, or a tuple that starts with it."""
        if self._collecting:
            row = output[0] if isinstance(output, tuple) else output
            self._rows.setdefault(id(layer), []).append(row)


class Target:
    """A loaded mlx-lm model. Holds no sequence state."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.compiled: dict[Any, Any] = {}  # compiled forwards, kept by `engine.target.compiled`
        self._text = getattr(model, "language_model", model)  # the module that owns the head
        core = getattr(self._text, "model", None)
        if core is None or not hasattr(model, "layers") or not hasattr(core, "embed_tokens"):
            raise ModelError(
                f"{type(model).__module__} keeps its layers or token table where the engine does not look; "
                "targets are decoder models with embed_tokens, layers and lm_head or a tied table"
            )
        self.layer_count = len(model.layers)
        self._core = core  # the module that owns table and layers
        table = core.embed_tokens
        self.hidden_size = _table_shape(table)[1]
        self.vocab_size = _table_shape(self._text.get("lm_head", table))[0]
        self._scales: dict[mx.Dtype, mx.array | None] = {}  # of embeddings, by the table's type; None: 1

    def hook_layers(self, ids: Sequence[int]) -> HiddenStateHooks:
        """Hooks on layers; the caller closes them."""
        return HiddenStateHooks(self.model.layers, ids)

    def forward(
        self, tokens: mx.array, caches: list[Any], hooks: HiddenStateHooks | None
    ) -> tuple[mx.array, mx.array | None]:
        """Logits [1, N, V] and, with hooks, hidden states [1, N, K·hidden] of [1, N] tokens."""
        if hooks is None:
            return self.model(tokens, cache=caches), None
        with hooks.collecting():
            logits = self.model(tokens, cache=caches)
        return logits, hooks.take()

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the token table, [1, N] ids to [1, N, hidden], scaled as by the model, not normalised."""
        rows: mx.array = self._core.embed_tokens(tokens)
        scale = self._scale(rows.dtype)
        return rows if scale is None else rows * scale

    @property
    def embedding_scale(self) -> float:
        """The number that `embed` multiplies rows of the token table with; raises as `embed`."""
        scale = self._scale(self._core.embed_tokens(mx.array([[0]])).dtype)
        return 1.0 if scale is None else read_float(scale)

    def _scale(self, dtype: mx.Dtype) -> mx.array | None:
        """The scale of embeddings in the type they are computed in, measured once; None for 1."""
        if dtype not in self._scales:
            scale = _embedding_scale(self.model, self._core.embed_tokens)
            self._scales[dtype] = None if read_float(scale) == 1 else scale
        return self._scales[dtype]

    def final_norm(self, hidden: mx.array) -> mx.array:
        """What the head takes of the last layer's outputs, [1, N, hidden]."""
        rows: mx.array = self._core.norm(hidden)
        return rows

    def head(self, hidden: mx.array) -> mx.array:
        """The output projection alone (not soft-capped), [1, N, hidden] to [1, N, V]."""
        tied = "lm_head" not in self._text
        logits: mx.array = (self._core.embed_tokens.as_linear if tied else self._text.lm_head)(hidden)
        return logits


def _table_shape(table: Any) -> tuple[int, int]:
    """Rows and columns of a token table or head, [V, hidden], packed or not."""
    rows, columns = table.weight.shape
    return int(rows), int(table.scales.shape[-1] * table.group_size if "scales" in table else columns)


def _hooks_of(layer: Any) -> list[HiddenStateHooks]:
    """The hooks on a layer instance, which gets a hooked class of its own if it has none."""
    plain = type(layer)
    found: list[HiddenStateHooks] | None = plain.__dict__.get("hidden_state_hooks")
    if found is not None:
        return found
    hooks: list[HiddenStateHooks] = []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain.__call__(self, *args, **kwargs)
        for hook in hooks:
            hook.record(self, output)
        return output

    _set_class(layer, plain, __call__=call, hidden_state_hooks=hooks)
    return hooks


def _unhook(layer: Any, hook: HiddenStateHooks) -> None:
    """Remove a hook from the class it is in, and the hooked class if that was its last hook and is on top."""
    for kind in type(layer).__mro__:
        hooks = kind.__dict__.get("hidden_state_hooks", [])
        if hook in hooks:
            hooks.remove(hook)
            if not hooks and kind is type(layer):
                object.__setattr__(layer, "__class__", kind.__bases__[0])
            return


def _set_class(module: Any, base: type, **body: Any) -> None:
    body["__module__"] = base.__module__
    object.__setattr__(module, "__class__", type(base.__name__, (base,), body))


def _embedding_scale(model: Any, table: Any) -> mx.array:
    """By what number a model multiplies the rows of its token table before its first layer, [].

    Families scale in their own forward, each in its own way: Gemma by sqrt(hidden), which Gemma 3 rounds to
    bfloat16, others by a field of their configuration. There is no list of families here: the model's own
    forward is run as far as its first layer, once over a table of ones, which leaves the scale, and once over
    the real table, to check that nothing but this scale was applied.

    Where the model takes the root mean square out of each row (Muse), the number is 1: DFlash drafters of
    such targets were trained on the rows as they are in the table.
    """
    vocabulary = int(table.weight.shape[0])
    tokens = mx.array([[vocabulary * index // PROBES for index in range(PROBES)]])
    rows = table(tokens)
    with _answering(table, lambda _, ids: mx.ones((*ids.shape, rows.shape[-1]), rows.dtype)):
        scale = _first_layer_input(model, tokens).reshape(-1)[0]
    received = _first_layer_input(model, tokens)
    if received.shape == rows.shape and _is_norm(received, rows):
        return mx.ones((), rows.dtype)
    if received.shape != rows.shape or not mx.array_equal(received, rows * scale).item():
        raise ModelError(
            f"{type(model).__module__} computes its embeddings in a way the engine cannot give to a drafter: "
            "its first layer does not receive rows of embed_tokens times one number, or their norm; use a "
            "drafter that reads tokens alone (prompt-lookup, autoregressive or masked-diffusion)"
        )
    return scale


def _is_norm(received: mx.array, rows: mx.array) -> bool:
    """Whether each row was divided by its root mean square, give or take rounding and an epsilon."""
    received, rows = received.astype(mx.float32), rows.astype(mx.float32)
    factors = (received * rows).sum(-1, keepdims=True) / (rows * rows).sum(-1, keepdims=True)
    size = mx.sqrt((received * received).mean(-1))
    along = mx.abs(received - factors * rows).max() <= 2**-6 * mx.abs(received).max()
    return bool((along & (size > 0.5).all() & (size < 1.01).all() & (factors.max() != factors.min())).item())


class _FirstLayerReached(Exception):
    """Not an error: ends the forward early, with what the first layer was called with."""


def _first_layer_input(model: Any, tokens: mx.array) -> mx.array:
    def stop(_: Any, *args: Any, **kwargs: Any) -> None:
        arrays = [value for value in (*args, *kwargs.values()) if isinstance(value, mx.array)]
        raise _FirstLayerReached(arrays[0])

    with _answering(model.layers[0], stop):
        try:
            model(tokens, cache=make_prompt_cache(model))
        except _FirstLayerReached as reached:
            received: mx.array = reached.args[0]
            return received
    raise ModelError(f"{type(model).__module__} does not call its first layer")


@contextmanager
def _answering(module: Any, call: Callable[..., Any]) -> Iterator[None]:
    plain = type(module)
    _set_class(module, plain, __call__=call)
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", plain)
