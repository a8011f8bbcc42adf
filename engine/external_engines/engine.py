"""An external engine on one of our targets, with the caches of a KV policy in it.

Opening one finds out, with a few real tokens, how it can be given caches: the first strategy after which
every layer's cache has received prompt and text is kept for good. Every token of a later generation is held
to the same count before it is yielded.

    policy          strategy found          caches
    native          any but native          ours, where the engine can take positions back on them
    native          otherwise               the engine's own; nothing is counted
    another one     any but native          the policy's
    another one     native                  none: `obstacle` says why

Decoding is greedy. Several generations may take turns, on one thread.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.cache.policy import NATIVE, KVPolicy
from engine.errors import ConfigurationError, EngineError, GenerationError, wrap_errors
from engine.external_engines import strategies
from engine.external_engines.loops import ENGINES
from engine.external_engines.strategies import (
    STRATEGIES,
    DraftCounts,
    ExternalLoop,
    LoopEntry,
    ModelState,
    handed_over,
    verify_use,
)
from engine.target.attention import CodedAttention, refuse_policy
from engine.target.loading import LoadedTarget

TRIAL_PROMPT, TRIAL_TOKENS = 6, 4
MOST_POLICIES = 256  # whose obstacles are kept, because requests may spell out any number of policies


class ExternalEngine:
    """An open engine. It leaves nothing on the target while none of its generations is running.

    Attributes:
        strategy: how it is given caches, one of `STRATEGIES`; ``native``: it has no hook.
        why: what kept the strategies before from working.
    """

    def __init__(self, name: str, entry: LoopEntry, target: LoadedTarget, loop: ExternalLoop) -> None:
        """Find the strategy.

        Raises:
            ConfigurationError: the engine cannot decode with this target at all.
        """
        self.name, self._entry, self._target = name, entry, target
        self._model, self._loop = target.target.model, loop
        self._obstacles: dict[str, str | None] = {NATIVE.spec: None}
        unfit = self._unfit(NATIVE)
        failed = [unfit] if unfit else []
        for strategy in [strategies.NATIVE] if unfit else STRATEGIES:
            try:
                self._try(NATIVE, strategy)
            except GenerationError as error:
                failed.append(f"{strategy}: {error}")
            else:
                self.strategy, self.why = strategy, "; ".join(failed)
                return
        raise ConfigurationError(f"engine {name} does not decode with this target: {failed[-1]}")

    def obstacle(self, policy: KVPolicy) -> str | None:
        """Say why the engine cannot decode under a policy, after a trial of a few tokens; None if it can.

        Raises:
            ModelError, ConfigurationError: the target cannot, with any engine.
        """
        if policy.spec not in self._obstacles:
            refuse_policy(self._model, policy)
            reason = self._known_obstacle(policy)
            if reason is None:
                try:
                    self._try(policy, self.strategy)
                except GenerationError as error:
                    reason = str(error)
            if len(self._obstacles) >= MOST_POLICIES:
                self._obstacles = {NATIVE.spec: None}
            self._obstacles[policy.spec] = reason
        return self._obstacles[policy.spec]

    def strategy_for(self, policy: KVPolicy) -> str:
        """The strategy that `generate` uses for a policy; ``native``: the engine's own caches."""
        return strategies.NATIVE if policy == NATIVE and self._unfit(policy) else self.strategy

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        policy: KVPolicy = NATIVE,
        *,
        caches: list[Any] | None = None,
        counts: DraftCounts | None = None,
    ) -> Iterator[int]:
        """Continue a prompt greedily.

        Args:
            prompt: token ids, at least one; together with ``max_tokens`` no more than the target's positions.
            max_tokens: give at most so many; stop tokens stop nothing, close the iterator instead.
            policy: which keys and values are kept, and how.
            caches: filled with the caches handed over, before the first token; empty where it keeps its own.
            counts: filled with what the engine tells of its drafts, as tokens come.

        Raises:
            ConfigurationError: the policy has an `obstacle`; at once, not at the first token.
            GenerationError: from the iterator: the engine failed, or did not use the caches.
        """
        if reason := self.obstacle(policy):
            raise ConfigurationError(f"engine {self.name} cannot decode under {policy.spec}: {reason}")
        given, told = [] if caches is None else caches, counts or DraftCounts()
        return self._tokens(list(prompt), max_tokens, policy, self.strategy_for(policy), given, told)

    def _known_obstacle(self, policy: KVPolicy) -> str | None:
        if policy.source is not None:
            return "old positions are restored by our own prefill, which the engine does not run"
        if self.strategy == strategies.NATIVE:
            return f"it has no hook and keeps its own caches ({self.why})"
        if policy.attended and self._entry.attends:
            return "it attends by itself, which reads no codes; lattice policies are decoded before"
        return self._unfit(policy)

    def _unfit(self, policy: KVPolicy) -> str | None:
        """Why an engine that takes positions back could not do so on the caches of a policy, or None."""
        caches = policy.new_caches(self._model, self._loop.block) if self._entry.drafts else []
        fixed = next((cache for cache in caches if not cache.is_trimmable()), None)
        if fixed is None:
            return None
        return f"it takes positions back by trimming, which a {type(fixed).__name__} cannot do"

    def _try(self, policy: KVPolicy, strategy: str) -> None:
        prompt = [index % self._target.target.vocab_size for index in range(1, TRIAL_PROMPT + 1)]
        given = len(list(self._tokens(prompt, TRIAL_TOKENS, policy, strategy, [], DraftCounts())))
        if given != TRIAL_TOKENS:
            raise GenerationError(f"engine {self.name} gave {given} of {TRIAL_TOKENS} tokens")

    def _tokens(  # noqa: PLR0917 - all of one generation
        self,
        prompt: list[int],
        max_tokens: int,
        policy: KVPolicy,
        strategy: str,
        caches: list[Any],
        counts: DraftCounts,
    ) -> Iterator[int]:
        """Run the engine from token to token; between two of them the target is as it was."""
        where = f"engine {self.name}, strategy {strategy}, policy {policy.spec}"
        state = ModelState(self._model)
        own = strategy == strategies.NATIVE
        caches[:] = [] if own else policy.new_caches(self._model, self._loop.block)

        def failed(reason: str) -> EngineError:
            return GenerationError(f"{where}: {reason}")

        with ExitStack() as opened:
            if policy.attended:
                opened.callback(CodedAttention(self._model).close)
            handed = handed_over(strategy, self._entry, self._model, caches)
            with state.installed(), wrap_errors(failed), handed as keywords:
                steps = self._loop.steps(prompt, max_tokens, counts, **keywords)
                opened.callback(_close, steps, state)
                token = next(steps, None)
            for given in range(1, max_tokens + 1):
                if token is None:
                    return
                verify_use(caches, len(prompt) + given - 1, where)
                yield token
                if given < max_tokens:
                    with state.installed(), wrap_errors(failed):
                        token = next(steps, None)


def _close(steps: Generator[int], state: ModelState) -> None:
    """Let a loop that was left midway clear up after itself."""
    with state.installed():
        steps.close()


def open_external_engine(
    name: str, target: LoadedTarget, drafter: Path | None = None, block: int | None = None
) -> ExternalEngine:
    """Open one of `ENGINES` for a target, which several engines and sessions may share.

    Args:
        name: of the engine.
        target: loaded by us.
        drafter: the folder of its drafter or draft model, for engines that need one.
        block: positions of a verify forward, the bonus included; None leaves it to the engine.

    Raises:
        ConfigurationError: there is no such engine, it is not installed, or it does not fit the models.
        ModelError: the drafter's folder cannot be used.
    """
    if name not in ENGINES:
        raise ConfigurationError(f"engine {name!r} is none of {', '.join(ENGINES)}")
    entry = ENGINES[name]
    if find_spec(entry.module) is None:
        raise ConfigurationError(f"engine {name} is not installed here; run: {entry.install}")
    if entry.drafts and drafter is None:
        raise ConfigurationError(f"engine {name} needs a drafter's folder; name one")
    if not entry.drafts and drafter is not None:
        raise ConfigurationError(f"engine {name} has no drafter; leave {drafter} out")
    if block is not None and (block > 1) != entry.drafts:
        raise ConfigurationError(f"engine {name} cannot verify {block} tokens at a time; leave the block out")
    with wrap_errors(lambda reason: ConfigurationError(f"engine {name} cannot open these models: {reason}")):
        loop = entry.open(target, drafter, block)
    return ExternalEngine(name, entry, target, loop)
