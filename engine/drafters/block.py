"""The DFlash drafter at work: which context the network has seen, and one block of drafts at a time.

The network keeps keys and values of committed positions only. Rows that are committed between two drafts
wait here and enter with the next draft, or by themselves when many have gathered (long prompts, spells of
plain decoding), so memory stays bounded.
"""

from collections.abc import Sequence

import mlx.core as mx

from engine.drafters.base import refuse_mismatch
from engine.errors import DrafterMismatchError
from engine.host import launch
from engine.networks.dflash import Context, DFlash
from engine.target import Target


class BlockDrafter:
    """Drafts a block in one forward of a DFlash network."""

    name = "dflash"
    absorb_at = 512  # waiting rows that are taken in without a draft

    def __init__(self, network: DFlash) -> None:
        self.network = network
        self.tap_layers = network.config.target_layer_ids
        self.block_size = network.config.block_size
        self._target: Target | None = None
        self.start()

    def bind(self, target: Target) -> None:
        """Use this target's embedding and head.

        Raises:
            DrafterMismatchError: the drafter was made for a target of another shape.
        """
        config = self.network.config
        refuse_mismatch("hidden size", config.hidden_size, target.hidden_size)
        refuse_mismatch("vocabulary", config.vocab_size, target.vocab_size)
        refuse_mismatch("number of target layers", config.num_target_layers, target.layer_count)
        if (deepest := max(config.target_layer_ids)) >= target.layer_count:
            raise DrafterMismatchError(
                f"this drafter is for another target: it reads layer {deepest} "
                f"of a target with {target.layer_count} layers"
            )
        self._target = target

    def start(self) -> None:
        """Forget the sequence."""
        self._context = Context(self.network.config)
        self._waiting: list[mx.array] = []

    def observe(self, tokens: Sequence[int], taps: mx.array | None) -> None:
        """Positions were committed.

        Args:
            tokens: the tokens at them (the network reads only the taps).
            taps: target layer outputs there, [1, len(tokens), K·hidden].
        """
        if taps is None or taps.shape[1] != len(tokens):
            raise ValueError("a DFlash drafter needs the taps of every committed position")
        self._waiting.append(taps)
        if sum(rows.shape[1] for rows in self._waiting) >= self.absorb_at:
            self.network.absorb(self._take_waiting(), self._context)
            launch([(layer.keys, layer.values) for layer in self._context.layers])

    def propose(self, bonus: int, count: int) -> mx.array:
        """Draft ``count`` tokens after the bonus token.

        Returns:
            Token ids [count], not evaluated yet.
        """
        if self._target is None:
            raise ValueError("bind the drafter to a target first")
        config = self.network.config
        block = mx.array([[bonus] + [config.mask_token_id] * count])
        embeddings = self._target.embed(block)
        if config.input_embedding_scale != 1.0:
            embeddings = embeddings * config.input_embedding_scale
        hidden = self.network(embeddings, self._take_waiting(), self._context)
        logits = self.network.shape_logits(self._target.head(hidden[:, 1:]))
        return mx.argmax(logits[0], axis=-1)

    def _take_waiting(self) -> mx.array:
        rows, self._waiting = self._waiting, []
        if not rows:
            config = self.network.config
            return mx.zeros((1, 0, len(config.target_layer_ids) * config.hidden_size))
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)

    @property
    def nbytes(self) -> int:
        """Resident bytes of the drafter's own keys and values."""
        return self._context.nbytes
