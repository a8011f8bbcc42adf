"""An external engine on one of our targets, with the caches of a KV policy in it.

Opening one tries these strategies with a few real tokens and keeps the first after which every layer's cache
has received prompt and text. Every later token is held to the same count before it is yielded.

    keyword     its loop has an argument for them
    instance    the model gets a `make_cache` of its own, which hands them out
    attribute   the name that makes caches in the engine's module hands them out, for this model alone
    native      it keeps its own caches, which are not counted, and decodes under the native policy alone
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import ArraysCache

from engine.cache.policy import NATIVE, KVPolicy
from engine.cache.ring import SlidingRing
from engine.cache.transaction import members_of
from engine.errors import ConfigurationError, GenerationError, wrap_errors
from engine.target.attention import CodedAttention, refuse_policy
from engine.target.loading import LoadedTarget

OWN_CACHES = "native"
STRATEGIES = ("keyword", "instance", "attribute", OWN_CACHES)  # in the order in which they are tried
TRIAL_PROMPT, TRIAL_TOKENS = (1, 2, 3, 4, 5, 6), 4


@dataclass
class DraftCounts:
    """What an engine tells of its drafts; no rounds: it tells nothing."""

    rounds: int = 0  # verify forwards
    accepted: int = 0  # drafts that the target confirmed
    caches: list[Any] = field(default_factory=list)  # the draft model's, where it has ours

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verify forward gave; None without one."""
        return 1 + self.accepted / self.rounds if self.rounds else None


# Most positions of a later forward, and the loop: (prompt, tokens, counts, **caches) to a greedy continuation
ExternalLoop = tuple[int, Callable[..., Generator[int]]]


@dataclass(frozen=True)
class LoopEntry:
    """What is known of an engine before it is imported."""

    module: str  # the package it needs
    install: str  # what installs that
    open: Callable[[LoadedTarget, Any, int | None], ExternalLoop]  # given a drafter's folder and a block
    drafts: bool = True  # needs a drafter's folder, and takes positions back, which caches must allow
    attends: bool = False  # may attend past the function of the model's module that can read codes
    keyword: str | None = None  # what its loop calls the target's caches
    makers: tuple[tuple[str, str], ...] = ()  # what makes caches, given the model: MODULE[:CLASS] and name


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object's own attribute be ``value``; afterwards it is what it was, or not there at all."""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def handed_over(strategy: str, entry: LoopEntry, model: Any, caches: list[Any]) -> Iterator[dict[str, Any]]:
    """Hand caches to an engine, and yield arguments for its loop; to be left at the first token."""
    models, left = models_of(model), [list(caches)]
    places = {"instance": [(each, "make_cache") for each in models], "attribute": entry.makers}
    if strategy == "keyword" and entry.keyword is None:
        raise GenerationError("the loop has no argument for caches")

    def maker(before: Callable[..., Any] | None) -> Callable[..., Any]:
        def make(*arguments: Any, **named: Any) -> Any:  # a function also serves as a method
            asked = (*arguments, *named.values())
            if before is not None and not any(one is each for one in asked for each in models):
                return before(*arguments, **named)  # for another model
            if not left:
                raise GenerationError("caches were made for more than one sequence")
            return left.pop()

        return make

    with ExitStack() as replacements:
        for place, name in places.get(strategy, ()):
            owner = resolve_name(place) if isinstance(place, str) else place
            replacements.enter_context(replaced(owner, name, maker(vars(owner).get(name))))
        yield {entry.keyword: list(caches)} if strategy == "keyword" and entry.keyword else {}


def models_of(model: Any) -> list[Any]:
    """A model and the text model inside it, where it has one: some engines ask that."""
    return [each for each in (model, getattr(model, "language_model", None)) if each is not None]


def positions_in(cache: Any) -> int | None:
    """Positions that a layer's cache has received; None for a recurrent state, which does not tell."""
    counts = []
    for member in members_of(cache):
        if member.empty():
            counts.append(0)
        elif not isinstance(member, ArraysCache):
            keys = member.keys[0] if isinstance(member.keys, tuple) else member.keys  # three where quantized
            offset, rows = int(member.offset), int(keys.shape[2])
            kept = min(offset, member.capacity) if type(member) is SlidingRing else offset
            counts.append(offset if rows >= kept else rows)
    return min(counts, default=None)


def verify_use(caches: Sequence[Any], at_least: int, where: str) -> None:
    """Raise GenerationError, with ``where`` in front, unless every layer has received so many positions."""
    for layer, count in enumerate(map(positions_in, caches)):
        if count is not None and count < at_least:
            used = f"layer {layer} received {count} of at least {at_least} positions"
            raise GenerationError(f"{where} did not use the caches it was given: {used}")


class ModelState:
    """What an engine leaves on a target during one generation: there while it runs, removed in between.

    Covered: attributes and lists of the model, its text model and body, classes of all parts, default stream.
    """

    def __init__(self, model: Any) -> None:
        self._roots = models_of(model)
        if isinstance(body := getattr(self._roots[-1], "model", None), nn.Module):
            self._roots.append(body)
        self._classes = {type(part) for part in model.modules()}
        self._restore: Callable[[], None] = lambda: None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put back what the engine left; afterwards all is as it was before."""
        before = self._remember()
        self._restore()
        try:
            yield
        finally:
            self._restore = self._remember()
            before()

    def _remember(self) -> Callable[[], None]:
        classes = [(kind, dict(vars(kind))) for kind in self._classes]
        dicts = [(each, dict(each)) for root in self._roots for each in (root, vars(root))]
        lists = [(v, list(v)) for root in self._roots for v in root.values() if isinstance(v, list)]
        stream = mx.default_stream(mx.default_device())

        def restore() -> None:
            for kind, attributes in classes:
                for name in vars(kind).keys() - attributes.keys():
                    delattr(kind, name)
                for name, value in attributes.items():
                    if vars(kind).get(name) is not value:
                        setattr(kind, name, value)
            for each, items in dicts:
                dict.clear(each)
                dict.update(each, items)  # a module has an `update` of its own
            for each, entries in lists:
                each[:] = entries
            mx.set_default_stream(stream)

        return restore


class ExternalEngine:
    """An open engine. Between two tokens of its generations nothing of it is on the target."""

    def __init__(self, name: str, entry: LoopEntry, target: LoadedTarget, loop: ExternalLoop) -> None:
        """Find the strategy; ConfigurationError if the engine cannot decode with this target at all."""
        self.name, self._entry = name, entry
        self._model, (self.block, self._loop) = target.target.model, loop
        # Why it cannot decode under a policy, or None; InputError if the target itself cannot.
        self.obstacle = lru_cache(256)(self._obstacle)  # requests may spell out any number of policies
        failed = [unfit] if (unfit := self._unfit(NATIVE)) else []
        for strategy in [OWN_CACHES] if unfit else STRATEGIES:
            self.strategy, self.why = strategy, "; ".join(failed)  # why: what kept those before from working
            reason = self._failure(NATIVE)
            if reason is None:
                return
            failed.append(f"{strategy}: {reason}")
        raise ConfigurationError(f"engine {name} does not decode with this target: {failed[-1]}")

    def _obstacle(self, policy: KVPolicy) -> str | None:
        if policy == NATIVE:
            return None
        refuse_policy(self._model, policy)
        if policy.kind == "auto":
            return "the bits of each layer are measured for our own loop alone"
        if policy.source is not None:
            return "old positions are restored by our own prefill, which the engine does not run"
        if self.strategy == OWN_CACHES:
            return f"it has no hook and keeps its own caches ({self.why})"
        if policy.attended and self._entry.attends:
            return "it attends by itself, which reads no codes; lattice policies are decoded before"
        return self._unfit(policy) or self._failure(policy)

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        policy: KVPolicy = NATIVE,
        *,
        caches: list[Any] | None = None,
        counts: DraftCounts | None = None,
    ) -> Iterator[int]:
        """Continue a prompt greedily; stop tokens stop nothing, close the iterator instead.

        ``caches`` is filled with those handed over before the first token, ``counts`` as tokens come. Raises
        ConfigurationError at once for an `obstacle`; GenerationError later, where the caches are not used.
        """
        if reason := self.obstacle(policy):
            raise ConfigurationError(f"engine {self.name} cannot decode under {policy.spec}: {reason}")
        caches = [] if caches is None else caches
        return self._tokens(prompt, max_tokens, policy, caches, counts or DraftCounts())

    def _unfit(self, policy: KVPolicy) -> str | None:
        """Why an engine that takes positions back could not do so on the caches of a policy, or None."""
        caches = policy.new_caches(self._model, self.block) if self._entry.drafts else []
        fixed = [type(cache).__name__ for cache in caches if not cache.is_trimmable()]
        return f"it takes positions back by trimming, which a {fixed[0]} cannot do" if fixed else None

    def _failure(self, policy: KVPolicy) -> str | None:
        """Why a trial of a few tokens fails, or None."""
        try:
            given = len(list(self._tokens(TRIAL_PROMPT, TRIAL_TOKENS, policy, [], DraftCounts())))
        except GenerationError as error:
            return str(error)
        return None if given == TRIAL_TOKENS else f"engine {self.name} gave {given} of {TRIAL_TOKENS} tokens"

    def _tokens(
        self, prompt: Sequence[int], limit: int, policy: KVPolicy, caches: list[Any], counts: DraftCounts
    ) -> Iterator[int]:
        """Run the engine from token to token; between two of them the target is as it was."""
        where = f"engine {self.name}, strategy {self.strategy}, policy {policy.spec}"
        own, state = self.strategy == OWN_CACHES, ModelState(self._model)
        caches[:] = [] if own else policy.new_caches(self._model, self.block)

        def steps() -> Generator[int]:
            with ExitStack() as handing:  # until the first token
                keywords = handing.enter_context(handed_over(self.strategy, self._entry, self._model, caches))
                for token in self._loop(list(prompt), limit, counts, **keywords):
                    handing.close()
                    yield token

        running = steps()
        with closing(CodedAttention(self._model)) if policy.attended else nullcontext():
            try:
                for given in range(limit):
                    with state.installed(), wrap_errors(lambda reason: GenerationError(f"{where}: {reason}")):
                        token = next(running, None)
                    if token is None:
                        return
                    verify_use(caches, len(prompt) + given, where)
                    yield token
            finally:
                with state.installed():
                    running.close()
                    mx.synchronize(generation_stream)  # a loop launches a forward more than there are tokens
                    mx.synchronize()
