"""The target: an mlx-lm language model, run forward with taps on chosen layers.

Nothing of mlx-lm is patched; `engine.target.hidden_states` reads the layers. Models of text and of
text within a larger model (``language_model``) look the same from here: one token table, decoder layers, one
head.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from engine.device import read_float
from engine.errors import ModelError
from engine.target.embeddings import measure_scale
from engine.target.hidden_states import HiddenStateHooks


class Target:
    """A loaded model with the few operations decoding needs. Holds no sequence state."""

    def __init__(self, model: Any) -> None:
        """Wrap an mlx-lm model.

        Raises:
            ModelError: the model has no layers, token table or head where mlx-lm keeps them.
        """
        self.model = model
        self.stages: dict[Any, Any] = {}  # compiled forwards, kept by `engine.target.compiled`
        self._text = getattr(model, "language_model", model)  # the module that owns the head
        core = getattr(self._text, "model", None)
        if core is None or not hasattr(model, "layers") or not hasattr(core, "embed_tokens"):
            raise ModelError(
                f"{type(model).__module__} keeps its layers or token table where the engine does not look; "
                "targets are decoder models with embed_tokens, layers and lm_head or a tied table"
            )
        self.layer_count = len(model.layers)
        self._core = core  # the one that owns table and layers
        table = core.embed_tokens
        self.hidden_size = _table_shape(table)[1]
        self.vocab_size = _table_shape(self._text.get("lm_head", table))[0]
        self._scales: dict[mx.Dtype, mx.array | None] = {}  # of embeddings, by the table's type; None: 1

    def tap(self, ids: Sequence[int]) -> HiddenStateHooks:
        """Listen to layers; the caller closes what it gets.

        Raises:
            ModelError: there is no such layer.
        """
        return HiddenStateHooks(self.model.layers, ids)

    def forward(
        self, tokens: mx.array, caches: list[Any], taps: HiddenStateHooks | None
    ) -> tuple[mx.array, mx.array | None]:
        """One forward over [1, N] tokens, appending to the caches.

        Args:
            tokens: token ids [1, N].
            caches: as the model makes them; fewer than layers where layers share keys and values.
            taps: what `tap` gave, or None.

        Returns:
            Logits [1, N, V], and the tapped rows [1, N, K·hidden] or None without taps.
        """
        if taps is None:
            return self.model(tokens, cache=caches), None
        with taps.collecting():
            logits = self.model(tokens, cache=caches)
        return logits, taps.take()

    def embed(self, tokens: mx.array) -> mx.array:
        """What the first layer receives: rows of the token table, scaled as this model scales them.

        Args:
            tokens: token ids [1, N].

        Returns:
            Embeddings [1, N, hidden].

        Raises:
            ModelError: the model does more than scale its rows, see `engine.target.embeddings`.
        """
        rows: mx.array = self._core.embed_tokens(tokens)
        scale = self._scale(rows.dtype)
        return rows if scale is None else rows * scale

    @property
    def embedding_scale(self) -> float:
        """The number that `embed` multiplies rows of the token table with.

        Raises:
            ModelError: see `embed`.
        """
        scale = self._scale(self._core.embed_tokens(mx.array([[0]])).dtype)
        return 1.0 if scale is None else read_float(scale)

    def _scale(self, dtype: mx.Dtype) -> mx.array | None:
        """The scale of embeddings in the type they are computed in, measured once; None for 1."""
        if dtype not in self._scales:
            scale = measure_scale(self.model, self._core.embed_tokens)
            self._scales[dtype] = None if read_float(scale) == 1 else scale
        return self._scales[dtype]

    def head(self, hidden: mx.array) -> mx.array:
        """The output projection alone (not soft-capped), [1, N, hidden] to [1, N, V]."""
        tied = "lm_head" not in self._text
        logits: mx.array = (self._core.embed_tokens.as_linear if tied else self._text.lm_head)(hidden)
        return logits


def _table_shape(table: Any) -> tuple[int, int]:
    """Rows and columns of a token table or head, [V, hidden], packed or not."""
    rows, columns = table.weight.shape
    return int(rows), int(table.scales.shape[-1] * table.group_size if "scales" in table else columns)
