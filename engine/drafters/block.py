"""The DFlash and DFlash 2 drafters at work: which context the network has seen, and one block at a time.

The network keeps keys and values of committed positions only. Rows that are committed between two drafts
wait here and enter with the next draft, or by themselves when many have gathered (long prompts, phases of
plain decoding), so memory stays bounded. Nothing here waits for the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from engine.cache.policy import NATIVE, KVPolicy
from engine.device import launch
from engine.drafters.base import Draft, NetworkDrafter, Proposal, refuse_mismatch
from engine.errors import DrafterMismatchError
from engine.networks.dflash import Context, DFlash
from engine.networks.dflash2 import Candidates, DFlash2
from engine.sampling import Sampler
from engine.target.model import Target


class BlockDrafter(NetworkDrafter):
    """Drafts a block in one forward of a DFlash or DFlash 2 network."""

    # Waiting rows that enter without a draft: so many that usual prompts do not delay their first token.
    absorb_at = 4096

    def __init__(self, network: DFlash, policy: KVPolicy = NATIVE) -> None:
        config = network.config
        self.network, self.name, self._policy = network, config.kind, policy
        self.target_layers, self.block_size = config.target_layer_ids, config.block_size
        self.forwards = 0
        self._target: Target | None = None
        self._no_rows = mx.zeros((1, 0, len(config.target_layer_ids) * config.hidden_size))
        self.start()

    def bind(self, target: Target) -> None:
        """See `Drafter.bind`; ModelError where the target's embeddings are not known, see `Target.embed`."""
        config = self.network.config
        refuse_mismatch("hidden size", config.hidden_size, target.hidden_size)
        refuse_mismatch("vocabulary", config.vocab_size, target.vocab_size)
        refuse_mismatch("number of target layers", config.num_target_layers, target.layer_count)
        if (deepest := max(config.target_layer_ids)) >= target.layer_count:
            raise DrafterMismatchError(
                f"this drafter is for another target: it reads layer {deepest} "
                f"of a target with {target.layer_count} layers"
            )
        target.embed(mx.array([[config.mask_token_id]]))  # refused here, not in the first round
        self._target = target

    def twin(self) -> "BlockDrafter":
        other = BlockDrafter(self.network, self._policy)
        other._target = self._target
        return other

    def start(self) -> None:
        self._context = Context(self.network.config, self._policy)
        self._waiting: list[mx.array] = []
        self._waits = 0  # rows in there

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        if hidden_states is None or hidden_states.shape[1] != len(tokens):
            raise ValueError("a DFlash drafter needs the hidden states of every committed position")
        self._waiting.append(hidden_states)
        self._waits += len(tokens)
        if self._waits >= self.absorb_at:
            self.network.absorb(self._take_waiting(), self._context)
            launch([layer.buffers for layer in self._context.layers])

    def rewindable(self, count: int) -> bool:
        """See `Drafter.rewindable`; rows a sliding layer has dropped already cannot come back."""
        return self._context.rewindable(max(count - self._waits, 0))

    def rewind(self, count: int) -> bool:
        if not self.rewindable(count):
            return False
        left = max(self._waits - count, 0)
        self._context.rewind(max(count - self._waits, 0))
        rows = self._take_waiting()[:, :left]
        self._waiting, self._waits = ([rows] if left else []), left
        return True

    def fork(self) -> "BlockDrafter":
        other = self.twin()
        other._context.offset = self._context.offset
        other._context.layers = [layer.fork() for layer in self._context.layers]
        other._waiting, other._waits = list(self._waiting), self._waits
        return other

    def state(self) -> dict[str, Any]:
        """See `Drafter.state`; rows that wait enter the context first, where they take less."""
        if self._waits:
            self.network.absorb(self._take_waiting(), self._context)
        layers = [layer.state() for layer in self._context.layers]
        return {"offset": self._context.offset, "layers": layers}

    def restore(self, tokens: Sequence[int], state: Mapping[str, Any]) -> None:  # noqa: ARG002 - it has no text
        self.start()
        self._context.offset = state["offset"]
        for layer, (length, buffers) in zip(self._context.layers, state["layers"], strict=True):
            layer.length, layer.buffers = length, list(buffers)

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        hidden, logits = self._block_rows(bonus, count)
        if isinstance(self.network, DFlash2):
            candidates = self.network.candidate_selector(hidden, logits, mx.array([bonus]))
            if sampler is None:
                return likeliest_path(candidates)
            return drawn_path(candidates, sampler, logits.shape[-1])
        if sampler is None:
            return Draft(mx.argmax(logits, axis=-1).astype(mx.int32))
        q = sampler.distribution(logits)
        return Draft(sampler.draw(q), q)

    def propose_together(self, others: Sequence[Proposal]) -> list[Draft]:
        drafters = [each.drafter for each in others]
        alike = [d for d in drafters if isinstance(d, BlockDrafter) and d.network is self.network]
        if self._target is None or len(alike) < len(drafters) or isinstance(self.network, DFlash2):
            return super().propose_together(others)
        network, target = self.network, self._target
        embedded = [self._embedded(target, each.bonus, each.count) for each in others]
        waiting = [drafter._take_waiting() for drafter in alike]
        for drafter in alike:
            drafter.forwards += 1
        contexts = [drafter._context for drafter in alike]
        hidden = network.together(list(zip(embedded, waiting, contexts, strict=True)))
        logits = network.shape_logits(target.head(hidden))[0]  # of the bonuses too, which are left out
        likeliest = mx.argmax(logits, axis=-1).astype(mx.int32)
        drafts, first = [], 1
        for each in others:
            rows = slice(first, first + each.count)
            first += each.count + 1
            if each.sampler is None:
                drafts.append(Draft(likeliest[rows]))
                continue
            q = each.sampler.distribution(logits[rows])
            drafts.append(Draft(each.sampler.draw(q), q))
        return drafts

    def _embedded(self, target: Target, bonus: int, count: int) -> mx.array:
        """The rows of a bonus and the masks behind it, [1, 1 + count, hidden]."""
        config = self.network.config
        rows = target.embed(mx.array([[bonus] + [config.mask_token_id] * count]))
        return rows if config.input_embedding_scale == 1.0 else rows * config.input_embedding_scale

    def _block_rows(self, bonus: int, count: int) -> tuple[mx.array, mx.array]:
        """Hidden states [count, hidden] and logits [count, V] of the masks behind the bonus."""
        if self._target is None:
            raise ValueError("bind the drafter to a target first")
        network = self.network
        embeddings = self._embedded(self._target, bonus, count)
        self.forwards += 1
        hidden = network(embeddings, self._take_waiting(), self._context)[:, 1:]
        return hidden[0], network.shape_logits(self._target.head(hidden))[0]

    def _take_waiting(self) -> mx.array:
        rows, self._waiting, self._waits = self._waiting, [], 0
        if not rows:
            return self._no_rows
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)

    @property
    def nbytes(self) -> int:
        return self._context.nbytes + sum(rows.nbytes for rows in self._waiting)


def likeliest_path(candidates: Candidates) -> Draft:
    """At each position the candidate with the highest score behind the one before."""
    return Draft(_at(candidates.tokens, _walk(mx.argmax(candidates.scores, axis=-1))))


def drawn_path(candidates: Candidates, sampler: Sampler, vocabulary: int) -> Draft:
    """Each candidate drawn given the one before, q [n, vocabulary] being zero outside the candidates.

    The step behind every candidate, chosen or not, is drawn at once: it depends on that candidate alone.
    """
    tokens, scores = candidates
    n, k, _ = scores.shape
    chances = sampler.distribution(scores.reshape(n * k, k))
    chosen = _walk(sampler.draw(chances).reshape(n, k))
    before = mx.concatenate([mx.zeros((1,), mx.int32), chosen[:-1]])
    rows = chances.reshape(n, k, k)[mx.arange(n), before]  # [n, k]
    q = mx.put_along_axis(mx.zeros((n, vocabulary), mx.float32), tokens, rows, axis=-1)
    return Draft(_at(tokens, chosen), q)


def _walk(following: mx.array) -> mx.array:
    """The indices chosen, int32 [n]; ``following[i, j]`` is the one at i behind j at i - 1 (0 at first)."""
    n, k = following.shape
    # one table of pointers into itself: entry i * k + j leads to the entries of position i + 1
    table = (following.astype(mx.int32) + mx.arange(k, (n + 1) * k, k, dtype=mx.int32)[:, None]).reshape(-1)
    pointer, path = mx.array(0, mx.int32), []
    for _ in range(n):
        pointer = table[pointer]
        path.append(pointer)
    return mx.stack(path) % k


def _at(tokens: mx.array, chosen: mx.array) -> mx.array:
    return mx.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0]
