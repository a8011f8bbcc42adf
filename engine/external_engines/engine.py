"""A foreign engine on one of our targets, with the caches of a KV channel in it.

Opening one finds out, by a few real tokens each, in which way it takes caches: the first of the strategies
after which every layer's cache has taken in prompt and text is kept for good. Each later generation is held
to the same count before any of its tokens is handed on.

    channel         strategy found          caches
    native          any but native          ours where the engine can take positions back on them
    native          otherwise               the engine's own; nothing is counted
    another one     any but native          the channel's
    another one     native                  refused

Decoding is greedy. Sampling, logits processors and stop tokens are not handed on: a caller who wants to stop
closes the iterator. Several generations may take turns, on one thread.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.cache.policy import NATIVE, KVPolicy
from engine.errors import ConfigurationError, EngineError, GenerationError, PromptError, wrap_errors
from engine.external_engines import strategies
from engine.external_engines.base import ForeignEngine, Loop
from engine.external_engines.counting import verify_use
from engine.external_engines.model_state import ModelState
from engine.external_engines.registry import engine_named, open_loop
from engine.external_engines.strategies import STRATEGIES
from engine.sampling import Sampling
from engine.target.attention import CodedAttention, refuse_policy
from engine.target.loading import LoadedTarget

TRIAL_PROMPT, TRIAL_TOKENS = 6, 4


class ExternalEngine:
    """An open engine. Nothing of it is on the target while none of its generations is running."""

    def __init__(self, engine: ForeignEngine, target: LoadedTarget, loop: Loop) -> None:
        """Find out how the engine takes caches.

        Args:
            engine: what is known of it.
            target: the target ``loop`` was opened for.
            loop: the open engine.

        Raises:
            ConfigurationError: it cannot decode with this target at all.
        """
        self.engine, self.target = engine, target
        self._model = target.target.model
        self._loop: Loop | None = loop
        self._refusals: dict[str, str | None] = {NATIVE.spec: None}
        self.strategy, self.why = self._detect(loop)
        """The way it takes caches, a key of `STRATEGIES`, and why ways before it were not taken."""

    def refuse(self, policy: KVPolicy) -> None:
        """Decode a few tokens under a policy, once; what fails is refused from then on.

        Raises:
            ConfigurationError: the engine cannot keep its keys and values so; the message says why.
            ModelError: the target cannot.
        """
        loop = self._open()
        if policy.spec not in self._refusals:
            refuse_policy(self._model, policy)
            reason = self._obstacle(policy, loop)
            if reason is None:
                strategy = self._strategy_for(policy, loop)
                try:
                    self._try(loop, policy, strategy)
                except GenerationError as error:
                    reason = str(error)
            self._refusals[policy.spec] = reason
        if reason := self._refusals[policy.spec]:
            raise ConfigurationError(
                f"engine {self.engine.name} cannot serve channel {policy.spec}: {reason}"
            )

    def strategy_for(self, policy: KVPolicy) -> str:
        """The strategy that `generate` uses for a policy; ``native`` means the engine's own caches."""
        return self._strategy_for(policy, self._open())

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        policy: KVPolicy = NATIVE,
        *,
        sampling: Sampling | None = None,
        caches: list[Any] | None = None,
    ) -> Iterator[int]:
        """Continue a prompt greedily; what is wrong with the arguments is said here, not at the first token.

        Args:
            prompt: token ids, at least one.
            max_tokens: give at most so many; stop tokens stop nothing.
            policy: which keys and values are kept, and how.
            sampling: None or greedy; anything else is refused.
            caches: a list that gets the caches handed in, to look into afterwards; nothing where the engine
                keeps its own.

        Yields:
            Token ids.

        Raises:
            PromptError: the prompt is empty, or too long for the target.
            ConfigurationError: ``max_tokens`` is not positive, sampling is wanted, or the engine does not go
                with the policy.
            GenerationError: from the iterator: the engine failed, or did not use the caches.
        """
        loop, room = self._open(), self.target.context
        if not prompt:
            raise PromptError("the prompt holds no token; give at least one")
        if room is not None and len(prompt) >= room:
            raise PromptError(f"the prompt holds {len(prompt)} tokens, the target was made for {room}")
        if max_tokens < 1:
            raise ConfigurationError(f"max_tokens must be at least 1, not {max_tokens}")
        if sampling is not None and not sampling.greedy:
            raise ConfigurationError(
                f"engine {self.engine.name} decodes greedily here; temperature must be 0, "
                f"not {sampling.temperature}"
            )
        self.refuse(policy)
        count = max_tokens if room is None else min(max_tokens, room - len(prompt))
        strategy = self._strategy_for(policy, loop)
        own = [] if strategy == strategies.NATIVE else policy.new_caches(self._model, loop.block)
        if caches is not None:
            caches[:] = own
        return self._tokens(loop, list(prompt), count, policy, strategy, own)

    def close(self) -> None:
        """Let go of the engine and its drafter. Closing twice does nothing."""
        self._loop = None

    def __enter__(self) -> "ExternalEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Loop:
        if self._loop is None:
            raise ValueError(f"the engine {self.engine.name} has been closed")
        return self._loop

    # --- what goes together ------------------------------------------------------------------------------

    def _detect(self, loop: Loop) -> tuple[str, str]:
        """The first strategy that works, and what kept the others from it."""
        unfit = self._unfit(NATIVE, loop)
        obstacles = [] if unfit is None else [unfit]
        for name in STRATEGIES if unfit is None else [strategies.NATIVE]:
            try:
                self._try(loop, NATIVE, name)
            except GenerationError as error:
                obstacles.append(f"{name}: {error}")
            else:
                return name, "; ".join(obstacles)
        raise ConfigurationError(
            f"engine {self.engine.name} does not decode with this target: {obstacles[-1]}"
        )

    def _try(self, loop: Loop, policy: KVPolicy, strategy: str) -> None:
        """A few real tokens, counted."""
        prompt = [index % self.target.target.vocab_size for index in range(1, TRIAL_PROMPT + 1)]
        caches = [] if strategy == strategies.NATIVE else policy.new_caches(self._model, loop.block)
        given = len(list(self._tokens(loop, prompt, TRIAL_TOKENS, policy, strategy, caches)))
        if given != TRIAL_TOKENS:
            raise GenerationError(f"engine {self.engine.name} gave {given} of {TRIAL_TOKENS} tokens")

    def _strategy_for(self, policy: KVPolicy, loop: Loop) -> str:
        return strategies.NATIVE if policy == NATIVE and self._unfit(policy, loop) else self.strategy

    def _obstacle(self, policy: KVPolicy, loop: Loop) -> str | None:
        """Why a policy cannot be tried, or None."""
        if policy == NATIVE:
            return None
        if policy.source is not None:
            return "old positions are restored by our own prefill, which the engine does not run"
        if self.strategy == strategies.NATIVE:
            return f"it keeps its own caches ({self.why})"
        if policy.attended and self.engine.attends:
            return "it attends by itself, which reads no codes; lattice channels are decoded before"
        return self._unfit(policy, loop)

    def _unfit(self, policy: KVPolicy, loop: Loop) -> str | None:
        """Why an engine that takes positions back could not do so on the caches of a policy, or None."""
        if not self.engine.trims:
            return None
        fixed = [c for c in policy.new_caches(self._model, loop.block) if not c.is_trimmable()]
        if not fixed:
            return None
        return f"it takes positions back by trimming, which a {type(fixed[0]).__name__} cannot do"

    # --- one generation ------------------------------------------------------------------------------------

    def _tokens(  # noqa: PLR0917 - all of one generation
        self,
        loop: Loop,
        prompt: list[int],
        max_tokens: int,
        policy: KVPolicy,
        strategy: str,
        caches: list[Any],
    ) -> Iterator[int]:
        """Run the engine from token to token; between two of them the target is as it was."""
        name = self.engine.name
        belongings = ModelState(self._model)

        def failed(reason: str) -> EngineError:
            return GenerationError(f"engine {name}, strategy {strategy}, channel {policy.spec}: {reason}")

        with ExitStack() as opened:
            if policy.attended:
                opened.callback(CodedAttention(self._model).close)
            handed = STRATEGIES[strategy](self.engine, self._model, caches)
            with belongings.installed(), wrap_errors(failed), handed as keywords:
                steps = loop.steps(prompt, max_tokens, **keywords)
                opened.callback(_ended, steps, belongings)
                token = next(steps, None)
            for given in range(1, max_tokens + 1):
                if token is None:
                    return
                verify_use(name, strategy, policy.spec, caches, len(prompt) + given - 1)
                yield token
                if given < max_tokens:
                    with belongings.installed(), wrap_errors(failed):
                        token = next(steps, None)


def _ended(steps: Generator[int], belongings: ModelState) -> None:
    """Let a loop that was left midway clear up after itself."""
    with belongings.installed():
        steps.close()


def open_guest(
    name: str, target: LoadedTarget, drafter: Path | None = None, block: int | None = None
) -> ExternalEngine:
    """Open a foreign engine for a target.

    Args:
        name: a key of `ENGINES`.
        target: loaded by us; several guests and sessions may share it.
        drafter: the folder of its drafter or draft model, for engines that need one.
        block: positions a verify forward takes, the bonus included; None leaves it to the engine.

    Raises:
        ConfigurationError: there is no such engine, it is not installed, or it does not go with the models.
        ModelError: the drafter's folder cannot be used.
    """
    engine = engine_named(name)
    return ExternalEngine(engine, target, open_loop(engine, target, drafter, block))
