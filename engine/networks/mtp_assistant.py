"""The Gemma 4 assistant: a small model that attends to keys and values of its target, and has none itself.

Its first layer gets a projection of [the embedding of the last token, the target's last hidden state h behind
the final norm]. Each of its layers attends to what the target's last layer of the same kind (sliding or full)
that computes keys and values has of the committed positions; the query stays at the position of the bonus
token. Its output gives logits through its own token table and, projected back, h for the next draft. Those of
small targets score a part of the vocabulary alone (``use_ordered_embeddings``): the tokens of the clusters
whose centroids come first. Decoder layers are mlx-lm's, parameters have the published names.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import gemma4_text

from engine.errors import ModelError

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
KeysValues = tuple[mx.array, mx.array]


class _Core(nn.Module):
    def __init__(self, args: gemma4_text.ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [gemma4_text.DecoderLayer(args, index) for index in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class _Clusters(nn.Module):
    def __init__(self, config: Mapping[str, Any], args: gemma4_text.ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        count: int = config["num_centroids"]
        self.centroids = nn.Linear(args.hidden_size, count, bias=False)
        self.token_ordering = mx.zeros((args.vocab_size,), mx.int32)
        self.count, self.chosen = count, config["centroid_intermediate_top_k"]

    def tokens(self, hidden: mx.array) -> mx.array:
        """The tokens to score behind [1, 1, hidden], int32 [T]."""
        best = mx.argpartition(-self.centroids(hidden)[0, 0], self.chosen - 1)[: self.chosen]
        return self.token_ordering.reshape(self.count, -1)[best].reshape(-1)


class Assistant(nn.Module):
    """The network with its table; the embeddings it reads are the target's."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        text = dict(config["text_config"])
        text["num_kv_shared_layers"] = text["num_hidden_layers"]  # none has keys and values of its own
        args = gemma4_text.ModelArgs.from_dict(deepcopy(text))  # type: ignore[no-untyped-call]
        self.hidden_size: int = config["backbone_hidden_size"]
        self.vocab_size: int = args.vocab_size
        self.seen: int = args.sliding_window + 1  # committed positions that sliding layers attend to
        self.kinds = tuple(dict.fromkeys(args.layer_types[: args.num_hidden_layers]))
        self.model = _Core(args)
        self.pre_projection = nn.Linear(2 * self.hidden_size, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, self.hidden_size, bias=False)
        if not config.get("tie_word_embeddings", True):
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        if config.get("use_ordered_embeddings"):
            self.masked_embedding = _Clusters(config, args)

    def __call__(
        self, embedding: mx.array, hidden: mx.array, states: Mapping[str, KeysValues], position: int
    ) -> tuple[mx.array, mx.array]:
        """Draft one token.

        Args:
            embedding: of the last token, [1, 1, hidden] of the target, scaled as its first layer gets it.
            hidden: the target's last hidden state behind its final norm, or what this returned, likewise.
            states: keys and values of each kind of layer, [1, KV heads, positions, head dim].
            position: of the query.

        Returns:
            The hidden state for the next draft, [1, 1, hidden], and logits [1, 1, V].
        """
        rows = self.pre_projection(mx.concatenate([embedding, hidden], axis=-1))
        for layer in self.model.layers:
            rows, _, _ = layer(rows, None, None, shared_kv=states[layer.layer_type], offset=position)
        rows = self.model.norm(rows)
        return self.post_projection(rows), self._logits(rows)

    def _logits(self, rows: mx.array) -> mx.array:
        table = self.model.embed_tokens
        if "masked_embedding" not in self:
            logits: mx.array = (self.lm_head if "lm_head" in self else table.as_linear)(rows)
            return logits
        tokens = self.masked_embedding.tokens(rows)
        scores = rows[0] @ table(tokens).T  # [1, T]
        unscored = mx.full((1, self.vocab_size), -mx.inf, scores.dtype)
        return mx.put_along_axis(unscored, tokens[None], scores, axis=-1)[None]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Leave out what is the table stored again, and what layers without keys have no place for."""
        spare = () if "lm_head" in self else ("lm_head.weight",)
        kept = {}
        for name, value in weights.items():
            keys = any(part in name for part in (".k_proj.", ".v_proj.", ".k_norm.", "rotary_emb"))
            if not keys and name not in spare:
                kept[name] = value.astype(mx.int32) if name.endswith("token_ordering") else value
        return kept


def shared_layers(model: Any) -> dict[str, int]:
    """By kind, the last layers of a Gemma 4 target that compute keys and values; ModelError for another."""
    layers = model.layers
    if type(layers[0]).__module__ != gemma4_text.__name__:
        raise ModelError("a Gemma 4 assistant drafts for Gemma 4 targets alone; give another --drafter")
    return {layer.layer_type: index for index, layer in enumerate(layers) if layer.self_attn.has_kv}


def keys_values(layer: Any, rows: mx.array, offset: int) -> KeysValues:
    """What a target's layer has of the inputs [1, N, hidden] it got from position ``offset`` on."""
    attention, (_, length, _) = layer.self_attn, rows.shape
    rows = layer.input_layernorm(rows)
    shape = (1, length, attention.n_kv_heads, attention.head_dim)
    keys = attention.k_proj(rows).reshape(shape)
    values = keys if attention.use_k_eq_v else attention.v_proj(rows).reshape(shape)
    keys = attention.rope(attention.k_norm(keys).transpose(0, 2, 1, 3), offset=offset)
    return keys, attention.v_norm(values).transpose(0, 2, 1, 3)
