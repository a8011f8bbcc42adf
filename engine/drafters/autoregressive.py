"""A small language model as drafter: it reads the text as the target does and guesses the next tokens.

    feed the committed tokens it has not seen and the bonus   one forward; its last row gives d1
    feed d1, d2 … d(n-1), one by one                          n - 1 forwards; each gives the next draft

All of it is one graph, on caches with a transaction of their own. Nothing is fed before the first draft is
asked for: a sequence that is decoded plainly costs the drafter nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Self
from weakref import finalize

import mlx.core as mx

from engine.cache.policy import NATIVE, KVPolicy
from engine.cache.saved import fill, state_of
from engine.cache.transaction import Transaction, new_caches, resident
from engine.device import launch, read_tokens, wait_for
from engine.drafters.base import Draft, TextDrafter, refuse_mismatch
from engine.errors import ConfigurationError
from engine.sampling import Sampler
from engine.target.attention import CodedAttention
from engine.target.model import Target

CHUNK = 512  # unseen tokens per forward that drafts nothing
UNSEEN = 32  # unseen tokens that enter with the bonus instead


class Autoregressive(TextDrafter):
    """Drafts token by token with an mlx-lm model that shares the target's vocabulary."""

    name = "autoregressive"
    _fed: int  # observed tokens that were fed for good

    def __init__(self, model: Target, block_size: int = 8, policy: KVPolicy = NATIVE) -> None:
        """Draft with ``model``, blocks of up to twice ``block_size``; ``policy`` is of its own caches."""
        if block_size < 2:
            raise ConfigurationError(f"a drafter's block must be at least 2, not {block_size}")
        self._model, self.block_size, self._policy = model, block_size, policy
        if policy.attended:
            finalize(self, CodedAttention(model.model).close)
        self.forwards = 0
        self._close: Callable[[], object] = lambda: None
        self.start()

    @property
    def backlog(self) -> int:
        return len(self._tokens) - self._fed

    def draft_forwards(self, count: int) -> int:
        return count

    def try_forward(self) -> None:
        self.forwards += 1
        wait_for(self._model.forward(mx.array([[0]]), new_caches(self._model.model, 1, NATIVE), None)[0])

    def bind(self, target: Target) -> None:
        refuse_mismatch("vocabulary", self._model.vocab_size, target.vocab_size)

    def twin(self) -> Self:
        return type(self)(self._model, self.block_size, self._policy)

    def start(self) -> None:
        self._tokens: list[int] = []  # observed
        self._drafts: mx.array | None = None  # last proposal [n], while its transaction is open …
        self._bonus = -1  # … the bonus before it …
        self._before_bonus = 0  # … and the tokens fed before that in the same transaction
        self._forget_caches()

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        if self._drafts is not None:
            self._settle(self._drafts, tokens)
        super().observe(tokens, hidden_states)

    def fork(self) -> Self:
        """See `Drafter.fork`; a proposal that is not settled is not part of it."""
        self._abandon()
        other = super().fork()
        other._use(deepcopy(self._transaction.caches), self._fed)
        other._transaction.uncached = self._transaction.uncached
        return other

    def state(self) -> dict[str, Any]:
        self._abandon()
        held, uncached = state_of(self._transaction.caches), self._transaction.uncached
        return {"caches": held, "uncached": uncached, "fed": self._fed}

    def restore(self, tokens: Sequence[int], state: Mapping[str, Any]) -> None:
        super().restore(tokens, state)
        fill(self._transaction.caches, state["caches"])
        self._transaction.uncached, self._fed = state["uncached"], state["fed"]

    def rewind(self, count: int) -> bool:
        """Forget tokens; where the caches cannot go back, the next proposal reads the rest again."""
        if not self.rewindable(count):
            return False
        self._abandon()
        surplus = self._fed - (len(self._tokens) - count)
        if surplus > 0:
            if self._transaction.rewind(surplus):
                self._fed -= surplus
            else:
                self._forget_caches()
        return super().rewind(count)

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        """Draft up to ``count`` tokens, each given those before it, and q where a sampler drew them."""
        self._abandon()
        count = min(count, 2 * self.block_size - 1)
        fed = [*self._catch_up(), bonus]
        self._transaction.begin(len(fed) - 1 + count)
        self._bonus, self._before_bonus = bonus, len(fed) - 1
        row = self._forward(mx.array([fed], mx.int32))  # [1, V]
        drafts: list[mx.array] = []
        distributions: list[mx.array] = []
        for _ in range(count):
            if drafts:
                row = self._forward(drafts[-1][None])
            if sampler is None:
                drafts.append(mx.argmax(row, axis=-1).astype(mx.int32))  # [1]
            else:
                distributions.append(sampler.distribution(row))
                drafts.append(sampler.draw(distributions[-1]))
        self._drafts = mx.concatenate(drafts)  # [n]
        return Draft(self._drafts, mx.concatenate(distributions) if distributions else None)

    @property
    def nbytes(self) -> int:
        return resident(self._transaction.caches)[1]

    def _forward(self, tokens: mx.array) -> mx.array:
        """Feed tokens [1, N]; logits after the last one, [1, V]."""
        self.forwards += 1
        return self._model.forward(tokens, self._transaction.caches, None)[0][:, -1]

    def _catch_up(self) -> list[int]:
        """Feed what was observed without a proposal; the few tokens to be fed with the bonus remain."""
        # Unseen by the caches: never fed, or uncached by the transaction.
        while len(unseen := self._tokens[self._fed - self._transaction.uncached :]) > UNSEEN:
            part = unseen[:CHUNK]
            self._forward(mx.array([part], mx.int32))
            launch([cache.state for cache in self._transaction.caches])
            self._transaction.settle()
            self._fed = len(self._tokens) - len(unseen) + len(part)
        return unseen

    def _settle(self, drafts: mx.array, tokens: Sequence[int]) -> None:
        # Where more than the bonus is committed, the drafts were verified, so they are known by now.
        guessed = read_tokens(drafts)[:-1] if len(tokens) > 1 else []
        same = 0
        for ours, theirs in zip([self._bonus, *guessed], tokens, strict=False):
            if ours != theirs:
                break
            same += 1
        self._transaction.commit(self._before_bonus + same)
        self._fed = len(self._tokens) + same
        self._drafts = None

    def _abandon(self) -> None:
        self._transaction.abort()
        self._drafts = None

    def _forget_caches(self) -> None:
        self._use(new_caches(self._model.model, UNSEEN + 2 * self.block_size, self._policy), 0)

    def _use(self, caches: list[Any], fed: int) -> None:
        """Go on with caches that hold ``fed`` of the observed tokens, the uncached ones included."""
        self._close()
        self._transaction = Transaction(self._model.model, caches)
        self._close = finalize(self, self._transaction.close)  # model and caches know each other until then
        self._fed = fed
