"""Next-token heads (MTP) and the Gemma 4 assistant at work: one forward for each drafted token.

A head of `engine.networks.mtp` reads pairs, on keys and values of its own:

    (h 0, token 1) … (h n-1, bonus)     h i: the target's last hidden state at committed position i;
                                        those not fed yet in one forward, its last row gives d1
    (h', d1), (h'', d2) …               the head on its own output, one forward for each draft more

The pair with the bonus and those behind it are scratch: they are fed again once the target has confirmed
them, with the target's own hidden states. The assistant of `engine.networks.mtp_assistant` begins with
(h n-1, bonus), too, and attends to keys and values of two target layers. These are computed here from what
the layers got, with their own projections, so that they do not depend on how the target keeps its own.
Nothing here waits for the device.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from engine.cache.saved import fill, state_of
from engine.device import launch
from engine.drafters.base import NOTHING, Draft, NetworkDrafter, refuse_mismatch
from engine.errors import ModelError
from engine.networks.dflash import LayerContext
from engine.networks.mtp import MTPHead
from engine.networks.mtp_assistant import Assistant, KeysValues, keys_values, shared_layers
from engine.sampling import Sampler
from engine.target.model import Target

DEPTH = 4  # the most tokens that are drafted, whatever is asked for
# Waiting rows that are processed without a draft: so many that usual prompts do not delay their first token.
ABSORB_AT = 4096
SPARE = 64  # rows kept behind those processed, so that drafting can go on right behind a rewind


class HiddenStateDrafter(NetworkDrafter):
    """What both have in common: rows of the target's hidden states wait here until they are processed."""

    name = "mtp"
    block_size = DEPTH + 1
    most_drafts: int | None = DEPTH
    pending = 0  # of the observed positions, how many stay out until the next token is known

    def __init__(self) -> None:
        self.forwards = 0
        self.target_layers: tuple[int, ...] = ()  # known once it is bound
        self._target: Target | None = None
        self.start()

    def draft_forwards(self, count: int) -> int:
        return min(count, DEPTH)

    def start(self) -> None:
        self._processed = 0  # positions processed
        self._tokens: list[int] = []  # the newest tokens observed …
        self._rows: list[mx.array] = []  # … and the outputs of `target_layers` at them
        self._length = 0  # all tokens observed

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        if self.note(tokens, hidden_states):
            launch(self._buffers())

    def note(self, tokens: Sequence[int], hidden_states: mx.array | None) -> bool:
        """`observe`, nothing computed yet; whether rows were processed."""
        if hidden_states is None or hidden_states.shape[1] != len(tokens):
            raise ValueError("a next-token head needs the hidden states of every committed position")
        self._tokens.extend(tokens)
        self._rows.append(hidden_states)
        self._length += len(tokens)
        waiting = self._length - self._processed - self.pending
        if waiting < ABSORB_AT:
            return False
        self._process(waiting)
        return True

    def rewind(self, count: int) -> bool:
        """See `Drafter.rewind`; a sliding layer's rows that were dropped already cannot come back.

        Where the hidden state of the last position that stays is gone, after more than `SPARE` tokens, the
        head keeps the pair of it and a forgotten token: drafts right there are a little worse.
        """
        if not self.rewindable(count):
            return False
        left, kept, processed = self._after(count)
        self._forget(self._processed - processed)
        rows = self._joined()
        self._rows = [rows[:, :kept]] if kept else []
        self._tokens = self._tokens[: max(len(self._tokens) - count, 0)]
        self._length, self._processed = left, processed
        return True

    def _after(self, count: int) -> tuple[int, int, int]:
        """Without the last ``count`` tokens: all observed, rows at hand, and positions processed."""
        left = self._length - count
        kept = max(self._joined().shape[1] - count, 0) if self._rows else 0
        return left, kept, min(self._processed, max(left - self.pending, 0) if kept else left)

    def rewindable(self, count: int) -> bool:
        left, _, processed = self._after(count)
        return left >= 0 and self._forgettable(self._processed - processed)

    def fork(self) -> Self:
        other = self.twin()
        other._processed, other._length = self._processed, self._length
        other._tokens, other._rows = list(self._tokens), list(self._rows)
        self._copy_to(other)
        return other

    def state(self) -> dict[str, Any]:
        rows = self._joined() if self._rows else None
        return {"processed": self._processed, "rows": rows, "held": self._held()}

    def restore(self, tokens: Sequence[int], state: Mapping[str, Any]) -> None:
        self.start()
        self._length, self._processed = len(tokens), state["processed"]
        if (rows := state["rows"]) is not None:
            self._rows, self._tokens = [rows], list(tokens[len(tokens) - rows.shape[1] :])
        self._hold(state["held"])

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        """Draft up to ``count`` tokens, at most `DEPTH`, and q where a sampler drew them."""
        self._of_target()
        if not self._rows:
            return NOTHING
        drafts: list[mx.array] = []
        distributions: list[mx.array] = []
        hidden, logits = self._first(bonus)  # [1, 1, hidden], [1, V]
        for _ in range(min(count, DEPTH)):
            if drafts:
                hidden, logits = self._next(hidden, drafts[-1][None])
            if sampler is None:
                drafts.append(mx.argmax(logits, axis=-1).astype(mx.int32))  # [1]
            else:
                distributions.append(sampler.distribution(logits))
                drafts.append(sampler.draw(distributions[-1]))
        self._forget_scratch()
        return Draft(mx.concatenate(drafts), mx.concatenate(distributions) if distributions else None)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self._buffers(), *self._rows))

    @abstractmethod
    def _process(self, count: int) -> None:
        """Process the first ``count`` waiting rows, for good."""

    @abstractmethod
    def twin(self) -> Self: ...

    @abstractmethod
    def _copy_to(self, other: Self) -> None:
        """Give another what was processed, under handles of its own."""

    @abstractmethod
    def _held(self) -> list[Any]:
        """What was processed, as a part of `state`."""

    @abstractmethod
    def _hold(self, held: Sequence[Any]) -> None:
        """Take over what another `_held`."""

    def _forgettable(self, count: int) -> bool:  # noqa: ARG002 - others have windows
        """Whether the newest ``count`` positions processed can be dropped."""
        return True

    @abstractmethod
    def _forget(self, count: int) -> None:
        """Drop the newest ``count`` positions processed."""

    @abstractmethod
    def _first(self, bonus: int) -> tuple[mx.array, mx.array]:
        """Hidden state [1, 1, hidden] and logits [1, V] behind the bonus."""

    @abstractmethod
    def _next(self, hidden: mx.array, token: mx.array) -> tuple[mx.array, mx.array]:
        """Likewise behind a drafted token [1, 1], from the hidden state before it."""

    @abstractmethod
    def _buffers(self) -> list[mx.array]:
        """The arrays that hold what was processed."""

    def _forget_scratch(self) -> None:
        """Drop what the drafts have left."""

    def _of_target(self) -> Target:
        if self._target is None:
            raise ValueError("bind the drafter to a target first")
        return self._target

    def _waiting(self) -> mx.array:
        """The rows that were not processed, [1, N, K·hidden]."""
        rows = self._joined()
        return rows[:, rows.shape[1] - (self._length - self._processed) :]

    def _joined(self) -> mx.array:
        if len(self._rows) > 1:
            self._rows = [mx.concatenate(self._rows, axis=1)]
        return self._rows[0] if self._rows else mx.zeros((1, 0, 1))

    def _mark_processed(self, count: int) -> None:
        """Book rows as processed, and let go of those that are not needed any more."""
        self._processed += count
        rows, kept = self._joined(), max(SPARE, self._length - self._processed)
        if rows.shape[1] > 2 * kept:
            self._rows, self._tokens = [rows[:, -kept:]], self._tokens[-kept:]


class MTPDrafter(HiddenStateDrafter):
    """Drafts with the next-token head of the target."""

    pending = 1  # the last position's pair lacks its token
    _caches: list[KVCache]

    def __init__(self, network: MTPHead) -> None:
        self.network = network
        super().__init__()

    def bind(self, target: Target) -> None:
        """See `Drafter.bind`; ModelError where the target's embeddings are not known, see `Target.embed`."""
        refuse_mismatch("hidden size", self.network.hidden_size, target.hidden_size)
        target.embed(mx.array([[0]]))  # refused here, not in the first round
        self.target_layers, self._target = (target.layer_count - 1,), target

    def twin(self) -> Self:
        other = type(self)(self.network)
        other.target_layers, other._target = self.target_layers, self._target
        return other

    def start(self) -> None:
        super().start()
        self._caches = self.network.new_caches()

    def _process(self, count: int) -> None:
        behind = len(self._tokens) - (self._length - self._processed) + 1
        self._pairs(self._waiting()[:, :count], self._tokens[behind : behind + count])
        self._mark_processed(count)

    def _pairs(self, rows: mx.array, tokens: Sequence[int]) -> mx.array:
        hidden = self._of_target().final_norm(rows)
        return self._forward(hidden, mx.array([tokens], mx.int32))

    def _forward(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        self.forwards += 1
        return self.network(self._of_target().embed(tokens), hidden, self._caches)

    def _first(self, bonus: int) -> tuple[mx.array, mx.array]:
        waiting = self._waiting()
        behind = len(self._tokens) - waiting.shape[1] + 1
        hidden = self._pairs(waiting, [*self._tokens[behind:], bonus])[:, -1:]
        self._mark_processed(waiting.shape[1] - 1)
        return hidden, self._of_target().head(hidden)[0]

    def _next(self, hidden: mx.array, token: mx.array) -> tuple[mx.array, mx.array]:
        hidden = self._forward(hidden, token)
        return hidden, self._of_target().head(hidden)[0]

    def _forget_scratch(self) -> None:
        for cache in self._caches:
            cache.offset = self._processed

    def _forget(self, count: int) -> None:
        for cache in self._caches:
            cache.offset -= count

    def _copy_to(self, other: Self) -> None:
        other._caches = deepcopy(self._caches)

    def _held(self) -> list[Any]:
        return state_of(self._caches)

    def _hold(self, held: Sequence[Any]) -> None:
        fill(self._caches, held)

    def _buffers(self) -> list[mx.array]:
        return [array for cache in self._caches for array in (cache.keys, cache.values) if array is not None]


class AssistantDrafter(HiddenStateDrafter):
    """Drafts with the Gemma 4 assistant of the target."""

    def __init__(self, network: Assistant) -> None:
        self.network = network
        super().__init__()

    def bind(self, target: Target) -> None:
        """See `Drafter.bind`; ModelError for a target of another family."""
        refuse_mismatch("hidden size", self.network.hidden_size, target.hidden_size)
        refuse_mismatch("vocabulary", self.network.vocab_size, target.vocab_size)
        found = shared_layers(target.model)
        if missing := [kind for kind in self.network.kinds if not found.get(kind)]:  # 0: the very first, too
            raise ModelError(
                f"this assistant is for another target: it attends to {missing[0]}, and no layer of the "
                "target but its first has such keys and values"
            )
        self._sources = {kind: found[kind] for kind in self.network.kinds}
        layers = (*(source - 1 for source in self._sources.values()), target.layer_count - 1)
        self.target_layers, self._target = tuple(dict.fromkeys(layers)), target

    def twin(self) -> Self:
        other = type(self)(self.network)
        if self._target is not None:
            other.bind(self._target)
        return other

    def start(self) -> None:
        super().start()
        seen = {"sliding_attention": self.network.seen}
        self._contexts = {kind: LayerContext(seen.get(kind)) for kind in self.network.kinds}

    def _process(self, count: int) -> None:
        self._keys_values(count)

    def _keys_values(self, count: int) -> dict[str, KeysValues]:
        """Process the first ``count`` waiting rows; keys and values of all that is visible."""
        rows, states = self._waiting()[:, :count], {}
        for kind, source in self._sources.items():
            layer = self._of_target().model.layers[source]
            pair = keys_values(layer, self._of_layer(rows, source - 1), self._processed)
            keys, values, _ = self._contexts[kind].extend(*pair, count)
            states[kind] = keys, values
        self._mark_processed(count)
        return states

    def _of_layer(self, rows: mx.array, layer: int) -> mx.array:
        place, size = self.target_layers.index(layer), self.network.hidden_size
        return rows[..., place * size : (place + 1) * size]

    def _first(self, bonus: int) -> tuple[mx.array, mx.array]:
        target = self._of_target()
        last = self._of_layer(self._joined()[:, -1:], target.layer_count - 1)
        self._states = self._keys_values(self._length - self._processed)
        return self._next(target.final_norm(last), mx.array([[bonus]], mx.int32))

    def _next(self, hidden: mx.array, token: mx.array) -> tuple[mx.array, mx.array]:
        self.forwards += 1
        hidden, logits = self.network(self._of_target().embed(token), hidden, self._states, self._length)
        return hidden, logits[0]

    def _forget_scratch(self) -> None:
        self._states = {}

    def _forgettable(self, count: int) -> bool:
        left = self._processed - count
        return all(context.can_forget(count, left) for context in self._contexts.values())

    def _forget(self, count: int) -> None:
        for context in self._contexts.values():
            context.length -= count

    def _copy_to(self, other: Self) -> None:
        other._contexts = {kind: context.fork() for kind, context in self._contexts.items()}

    def _held(self) -> list[Any]:
        return [context.state() for context in self._contexts.values()]

    def _hold(self, held: Sequence[Any]) -> None:
        for context, (length, buffers) in zip(self._contexts.values(), held, strict=True):
            context.length, context.buffers = length, list(buffers)

    def _buffers(self) -> list[mx.array]:
        return [array for context in self._contexts.values() for array in context.buffers]
