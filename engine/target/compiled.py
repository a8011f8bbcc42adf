"""The target's forward over a short block as one compiled graph.

Most of a small forward's time goes into starting kernels and building the graph. A compiled graph is built
once for each block length and buffer size; what changes from round to round enters as arrays: the tokens, the
position, the buffers. Models are compiled by name (`FAMILIES`): their code must not look at the position as a
number. Layers other than plain and sliding ones are not compiled; neither are prompts.
"""

from contextlib import closing, nullcontext
from typing import Any

import mlx.core as mx

from engine.cache.coded import CodedKV
from engine.cache.ring import layout
from engine.cache.traced import STAND_INS, Entry, appended, entry, reserve, stood_in, stores_of, traceable
from engine.target.model import Target

FAMILIES = (
    "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gpt_oss", "llama", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
# On a CPU a fused kernel works element by element, without vector instructions: from so many elements in a
# block (its length × hidden size) it costs more than it saves. Measured at 1024 columns: 5 % less time with
# blocks of 1 and 4, the same with 8, 5 % more with 16.
LARGEST_ON_CPU = 8192


class CompiledForward:
    """The compiled forwards of a target on caches of some kinds, for one thread.

    Weights are constants of a graph: those of its first run are used, and kept in memory, as long as the
    target lives. After a change of a model's weights, make a new `Target`.
    """

    def __init__(self, target: Target, layers: tuple[int, ...]) -> None:
        """Return the hidden states of these layers, too; each length is compiled at its first block."""
        self._target, self._layers = target, layers
        self._graph = mx.compile(self._trace)
        self._caches: list[Any] = []  # of the forward under way

    @staticmethod
    def of(target: Target, layers: tuple[int, ...], caches: list[Any]) -> "CompiledForward | None":
        """The one for caches of these kinds, shared by all sequences; None where the model allows none."""
        if type(target.model).__module__.rsplit(".", 1)[-1] not in FAMILIES or not traceable(caches):
            return None
        codes = tuple(cache.code if type(cache) is CodedKV else None for cache in caches)
        key = (layers, codes, tuple(layout(store) for store in stores_of(caches)))
        if key not in target.compiled:
            target.compiled[key] = CompiledForward(target, layers)
        compiled: CompiledForward = target.compiled[key]
        return compiled

    def forward(
        self, tokens: mx.array, caches: list[Any], most: int
    ) -> tuple[mx.array, mx.array | None] | None:
        """Logits [1, N, V] and hidden states of [1, N] tokens, appended to caches of these kinds.

        At most ``most`` positions may be written behind those held. None for caches that are still empty, and
        for a block so long that compiling it would not pay.
        """
        count = tokens.shape[1]
        size = graph_length(self._target, count, most)
        stores = stores_of(caches)
        if size is None or not all(reserve(store, size) for store in stores):
            return None
        if size > count:  # few lengths, few graphs: the surplus rows are computed and forgotten
            tokens = mx.concatenate([tokens, mx.broadcast_to(tokens[:, -1:], (1, size - count))], axis=1)
        self._caches, self._layouts = caches, [layout(store) for store in stores]
        by_layout = dict(zip(self._layouts, stores, strict=True))
        entries = {key: entry(store, size) for key, store in by_layout.items()}
        self._kinds = [STAND_INS[type(store)] for store in stores]
        buffers = [(store.keys, store.values) for store in stores]
        for store in stores:  # a buffer without another reference is written in place
            store.keys = store.values = None
        try:
            logits, rows, buffers = self._graph(tokens, entries, buffers)
        finally:
            self._caches = []
            for store, (keys, values) in zip(stores, buffers, strict=True):
                store.keys, store.values = keys, values
        for store in stores:
            appended(store, count, size)
        if size > count:
            logits, rows = logits[:, :count], rows[:, :count]
        return logits, rows if self._layers else None

    def _trace(
        self,
        tokens: mx.array,
        entries: dict[tuple[int, ...], Entry],
        buffers: list[tuple[mx.array, mx.array]],
    ) -> tuple[mx.array, mx.array, list[tuple[mx.array, mx.array]]]:
        """The graph: runs only when there is none yet for the shapes given."""
        parts = zip(self._kinds, buffers, self._layouts, strict=True)
        stand_ins = [kind(*both, entries[key]) for kind, both, key in parts]
        with closing(self._target.hook_layers(self._layers)) if self._layers else nullcontext() as hooks:
            logits, rows = self._target.forward(tokens, stood_in(self._caches, stand_ins), hooks)
        return logits, logits if rows is None else rows, [(each.keys, each.values) for each in stand_ins]


def graph_length(target: Target, count: int, most: int) -> int | None:
    """The length of the graph that serves a block: 1, 2 or a multiple of 4; None: too long to pay here."""
    size = count if count <= 2 else max(count, min(-(-count // 4) * 4, most))
    pays = mx.metal.is_available() or size <= LARGEST_ON_CPU // target.hidden_size
    return size if pays else None
