"""The next-token heads of `engine.networks.mtp` at work: one forward for each drafted token.

    pairs (h 0, token 1) … (h n-1, bonus)     h i: the target's last hidden state at committed position i;
                                              those not fed yet in one forward, its last row gives d1
    (h', d1), (h'', d2) …                     the head on its own output, one forward for each draft more

The pair with the bonus and those behind it are scratch: they are fed again once the target has confirmed
them, with the target's own hidden states. Nothing here waits for the device.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from engine.device import launch
from engine.drafters.base import NOTHING, Draft, refuse_mismatch
from engine.networks.mtp import MTPHead
from engine.sampling import Sampler
from engine.target.model import Target

DEPTH = 4  # the most tokens that are drafted, whatever is asked for
ABSORB_AT = 512  # waiting rows that are fed without a draft
SPARE = 64  # rows kept behind those fed, so that the last pairs can be formed again after a rewind


class MTPDrafter:
    """Drafts up to four tokens with the next-token head of the target."""

    name = "mtp"
    block_size = 4

    def __init__(self, network: MTPHead) -> None:
        self.network = network
        self.forwards = 0
        self.target_layers: tuple[int, ...] = ()  # known once it is bound
        self._target: Target | None = None
        self.start()

    def bind(self, target: Target) -> None:
        """See `Drafter.bind`; ModelError where the target's embeddings are not known, see `Target.embed`."""
        refuse_mismatch("hidden size", self.network.hidden_size, target.hidden_size)
        target.embed(mx.array([[0]]))  # refused here, not in the first round
        self.target_layers = (target.layer_count - 1,)
        self._target = target

    def twin(self) -> "MTPDrafter":
        other = MTPDrafter(self.network)
        other._target, other.target_layers = self._target, self.target_layers
        return other

    def start(self) -> None:
        self._caches = self.network.new_caches()
        self._fed = 0  # pairs in the caches
        self._tokens: list[int] = []  # the newest tokens observed …
        self._rows: list[mx.array] = []  # … and the target's last hidden states at them, before its norm
        self._length = 0  # all tokens observed

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        if hidden_states is None or hidden_states.shape[1] != len(tokens):
            raise ValueError("a next-token head needs the hidden states of every committed position")
        self._tokens.extend(tokens)
        self._rows.append(hidden_states)
        self._length += len(tokens)
        if self._length - self._fed > ABSORB_AT:
            count = self._length - self._fed - 1
            self._feed(self._waiting()[:, :-1], mx.array([self._tokens[-count:]], mx.int32))
            self._fed += count
            self._keep_spare()
            launch([cache.state[:2] for cache in self._caches])

    def rewind(self, count: int) -> bool:
        """See `Drafter.rewind`.

        After more than `SPARE` tokens the last pair that stays may be one with a forgotten token, as the
        hidden state to form it again is gone; that makes drafts there a little worse.
        """
        left = self._length - count
        if left < 0:
            return False
        rows = self._joined()
        kept = max(rows.shape[1] - count, 0)
        self._rows = [rows[:, :kept]] if kept else []
        del self._tokens[len(self._tokens) - min(count, len(self._tokens)) :]
        fed = min(self._fed, left - 1 if kept else left) if left else 0
        for cache in self._caches:
            cache.trim(self._fed - fed)
        self._length, self._fed = left, fed
        return True

    def mark(self) -> Callable[[], None]:
        state = (self._fed, list(self._tokens), list(self._rows), self._length)

        def back() -> None:
            fed, tokens, rows, length = state
            for cache in self._caches:  # rows up to there have not changed since
                cache.offset = fed
            self._fed, self._tokens, self._rows, self._length = fed, list(tokens), list(rows), length

        return back

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        """Draft up to ``count`` tokens, at most `DEPTH`, and q where a sampler drew them."""
        if self._target is None:
            raise ValueError("bind the drafter to a target first")
        hidden = self._waiting()
        if not hidden.shape[1]:
            return NOTHING
        following = self._tokens[len(self._tokens) - hidden.shape[1] + 1 :]
        row = self._feed(hidden, mx.array([[*following, bonus]], mx.int32))[:, -1:]
        drafts: list[mx.array] = []
        distributions: list[mx.array] = []
        for place in range(min(count, DEPTH)):
            if place:
                row = self._feed(row, drafts[-1][None], own=True)
            logits = self._target.head(row)[0]  # [1, V]
            if sampler is None:
                drafts.append(mx.argmax(logits, axis=-1).astype(mx.int32))  # [1]
            else:
                distributions.append(sampler.distribution(logits))
                drafts.append(sampler.draw(distributions[-1]))
        self._fed = self._length - 1
        self._keep_spare()
        for cache in self._caches:
            cache.trim(cache.offset - self._fed)
        return Draft(mx.concatenate(drafts), mx.concatenate(distributions) if distributions else None)

    def _feed(self, hidden: mx.array, tokens: mx.array, *, own: bool = False) -> mx.array:
        """Feed pairs of hidden states [1, N, hidden], the head's ``own`` or the target's, and tokens [1, N]."""
        assert self._target is not None
        self.forwards += 1
        if not own:
            hidden = self._target.final_norm(hidden)
        return self.network(self._target.embed(tokens), hidden, self._caches)

    def _joined(self) -> mx.array:
        if not self._rows:
            return mx.zeros((1, 0, self.network.hidden_size))
        if len(self._rows) > 1:
            self._rows = [mx.concatenate(self._rows, axis=1)]
        return self._rows[0]

    def _waiting(self) -> mx.array:
        """The hidden states whose pairs are not fed, [1, N, hidden]."""
        rows = self._joined()
        return rows[:, rows.shape[1] - (self._length - self._fed) :]

    def _keep_spare(self) -> None:
        rows, kept = self._joined(), max(SPARE, self._length - self._fed)
        if rows.shape[1] > 2 * kept:
            self._rows, self._tokens = [rows[:, -kept:]], self._tokens[-kept:]

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self._caches) + self.mark_nbytes

    @property
    def mark_nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows)
