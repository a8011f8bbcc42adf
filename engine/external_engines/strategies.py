"""How an engine that makes its own caches is given ours, how their use is counted, and how all is undone.

keyword     its loop has an argument for them
instance    the model gets a `make_cache` of its own, which hands them out
attribute   the name that makes caches in the engine's module hands them out, for this model alone
native      nothing: the engine keeps its own
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache

from engine.cache.ring import SlidingRing
from engine.cache.transaction import members_of
from engine.errors import GenerationError
from engine.target.loading import LoadedTarget

MAKER = "make_cache"  # what mlx-lm asks a model for caches by
NATIVE = "native"
STRATEGIES = ("keyword", "instance", "attribute", NATIVE)  # in the order in which they are tried


@dataclass
class DraftCounts:
    """What an engine tells of its drafts; no rounds: it tells nothing."""

    rounds: int = 0  # verify forwards
    accepted: int = 0  # drafts that the target confirmed

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a verify forward gave; None without one."""
        return 1 + self.accepted / self.rounds if self.rounds else None


@dataclass(frozen=True)
class ExternalLoop:
    """An engine opened for one target, its drafter loaded.

    `steps` is given a prompt, a number of tokens, counts to fill in, and the target's caches under the
    engine's keyword, if it has one; it yields the tokens of a greedy continuation, which no token stops.
    """

    block: int  # the most positions that it appends in one forward after the prompt's
    steps: Callable[..., Generator[int]]


@dataclass(frozen=True)
class LoopEntry:
    """What is known of an engine before it is imported."""

    module: str  # the package it needs
    install: str  # what installs that
    open: Callable[[LoadedTarget, Any, int | None], ExternalLoop]  # given a drafter's folder and a block
    drafts: bool = True  # needs a drafter's folder, and takes positions back, which caches must allow
    attends: bool = False  # may attend past the function of the model's module that can read codes
    keyword: str | None = None  # what its loop calls the target's caches; None: it has no such argument
    makers: tuple[tuple[str, str], ...] = ()  # what makes caches: module and dotted name; given the model


@contextmanager
def handed_over(strategy: str, entry: LoopEntry, model: Any, caches: list[Any]) -> Iterator[dict[str, Any]]:
    """Hand caches to an engine until it has made its own, that is until its first token.

    Between two tokens caches of another sequence may be made on the same model, so the context must be left
    by then. Leaving it puts back what was there, also where contexts overlap. Yields arguments for the loop.

    Raises:
        GenerationError: the engine has no such hook, or makes caches for more than one sequence.
    """
    models, left = models_of(model), [list(caches)]
    keywords = {}
    with ExitStack() as replacements:
        if strategy == "keyword":
            if entry.keyword is None:
                raise GenerationError("the loop has no argument for caches")
            keywords = {entry.keyword: list(caches)}
        elif strategy == "instance":
            for each in models:
                replacements.enter_context(replaced(each, MAKER, _maker(models, left)))
        elif strategy == "attribute":
            if not entry.makers:
                raise GenerationError("the engine makes caches by no name of its own")
            for module, path in entry.makers:
                inner, _, name = path.rpartition(".")
                owner = attrgetter(inner)(import_module(module)) if inner else import_module(module)
                if name not in vars(owner):
                    raise GenerationError(f"there is no {module}.{path} in this version")
                replacements.enter_context(replaced(owner, name, _maker(models, left, vars(owner)[name])))
        yield keywords


def _maker(models: list[Any], left: list[Any], before: Callable[..., Any] | None = None) -> Any:
    """Hand caches out once; for other models do what was done before."""

    def make(*arguments: Any, **named: Any) -> Any:  # a function also serves as a method
        asked = (*arguments, *named.values())
        if before is not None and not any(one is each for one in asked for each in models):
            return before(*arguments, **named)
        if not left:
            raise GenerationError("caches were made for more than one sequence")
        return left.pop()

    return make


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object's own attribute be ``value``; afterwards it is what it was, or not there at all."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def models_of(model: Any) -> list[Any]:
    """A model and the text model inside it, where it has one: some engines ask that."""
    inner = getattr(model, "language_model", None)
    return [model] if inner is None else [model, inner]


def positions_in(cache: Any) -> int | None:
    """Positions that a layer's cache has received; None for a recurrent state, which does not tell."""
    counts = [_positions(member) for member in members_of(cache)]
    return min((count for count in counts if count is not None), default=None)


def _positions(member: Any) -> int | None:
    if member.empty():
        return 0
    if isinstance(member, ArraysCache):
        return None
    keys = member.keys[0] if isinstance(member.keys, tuple) else member.keys  # a quantized one has three
    offset, rows = int(member.offset), int(keys.shape[2])
    kept = min(offset, member.capacity) if type(member) is SlidingRing else offset
    return offset if rows >= kept else rows


def verify_use(caches: Sequence[Any], at_least: int, where: str) -> None:
    """Raise GenerationError, with ``where`` in front, unless every layer has received so many positions.

    To give the k-th token after a prompt of P, a loop must have put P + k - 1 positions through the model.
    The caches' own offsets and rows tell: nothing is wrapped and no type changes, so what an engine decides
    by the kind of a cache stays as it is, and a copy counts for nothing.
    """
    counts = [(layer, positions_in(cache)) for layer, cache in enumerate(caches)]
    short = [(layer, count) for layer, count in counts if count is not None and count < at_least]
    if short:
        layer, count = short[0]
        raise GenerationError(
            f"{where} did not use the caches it was given: layer {layer} received {count} of at least "
            f"{at_least} positions, {len(short)} of {len(caches)} layers are short"
        )


# Every covered class, dictionary and list with a copy of what it holds, and the default stream.
_Looks = tuple[list[tuple[Any, dict[str, Any]]], list[tuple[list[Any], list[Any]]], mx.Stream]


class ModelState:
    """What an engine leaves on a target during one generation: there while it runs, taken off in between.

    Engines put hooks in place of layers, keep hidden states on the model, replace methods of its classes, and
    leave another default stream behind. So generations of several engines, and our own, may take turns on one
    target. Covered are attributes, and lists in attributes, of the model, its text model and the body inside;
    attributes of the classes of all its parts. Parts of single layers are not: no engine here touches them.
    """

    def __init__(self, model: Any) -> None:
        """Begin with nothing; ``model`` must have nothing on it that is not its own."""
        self._roots = models_of(model)
        if isinstance(body := getattr(self._roots[-1], "model", None), nn.Module):
            self._roots.append(body)
        self._classes = sorted({type(part) for part in model.modules()}, key=lambda kind: kind.__qualname__)
        self._left: _Looks | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put back what the engine left; afterwards all is as it was before."""
        outside = self._look()
        if self._left is not None:
            _restore(self._left)
        try:
            yield
        finally:
            self._left = self._look()
            _restore(outside)

    def _look(self) -> _Looks:
        places: list[Any] = [*self._classes, *self._roots, *map(vars, self._roots)]
        copies = [(each, dict(vars(each) if isinstance(each, type) else each)) for each in places]
        lists = [value for root in self._roots for value in root.values() if isinstance(value, list)]
        return copies, [(each, list(each)) for each in lists], mx.default_stream(mx.default_device())


def _restore(looks: _Looks) -> None:
    places, lists, stream = looks
    for place, items in places:
        put, drop = (setattr, delattr) if isinstance(place, type) else (dict.__setitem__, dict.__delitem__)
        now = dict(vars(place) if isinstance(place, type) else place)
        for name in now.keys() - items.keys():
            drop(place, name)
        for name, value in items.items():
            if now.get(name) is not value:
                put(place, name, value)
    for place, entries in lists:
        place[:] = entries
    mx.set_default_stream(stream)
