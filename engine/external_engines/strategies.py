"""How an engine that makes its own caches is made to take others. Each way is a context manager.

    keyword     its loop is given them
    instance    the model is given a `make_cache` of its own, which hands them out
    attribute   the name that makes caches in the engine's module hands them out, for this model alone
    native      nothing: the engine keeps its own

A context is open while the engine makes its caches, that is until its first token is there, and is closed
before anybody else gets the word: caches of another sequence on the same model are made in the meantime.
Leaving it puts back what was there, in whatever order contexts are left that were opened one in another.
Whether an engine really used what it was handed is for `counting` to say.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from operator import attrgetter
from typing import Any

from engine.errors import GenerationError
from engine.external_engines.base import ForeignEngine

Strategy = Callable[[ForeignEngine, Any, list[Any]], AbstractContextManager[dict[str, Any]]]
MAKER = "make_cache"  # what mlx-lm asks a model for caches by


class UnusableStrategyError(GenerationError):
    """The engine has no such door."""


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


@contextmanager
def keyword(engine: ForeignEngine, model: Any, caches: list[Any]) -> Iterator[dict[str, Any]]:  # noqa: ARG001
    """Give the caches to the engine's loop."""
    if engine.keyword is None:
        raise UnusableStrategyError(f"the loop of {engine.name} takes no caches")
    yield {engine.keyword: list(caches)}


@contextmanager
def instance(engine: ForeignEngine, model: Any, caches: list[Any]) -> Iterator[dict[str, Any]]:
    """Let the model hand them out, and the text model inside it, which some engines ask instead."""
    hand_out = _once(engine, caches)
    with ExitStack() as opened:
        for asked in models_of(model):
            opened.enter_context(replaced(asked, MAKER, hand_out))
        yield {}


@contextmanager
def attribute(engine: ForeignEngine, model: Any, caches: list[Any]) -> Iterator[dict[str, Any]]:
    """Let the engine's own name for making caches hand them out; for other models it does what it did."""
    if not engine.makers:
        raise UnusableStrategyError(f"{engine.name} makes caches by no name of its own")
    hand_out = _once(engine, caches)
    asked = [id(each) for each in models_of(model)]
    with ExitStack() as opened:
        for module, path in engine.makers:
            inner, _, name = path.rpartition(".")
            owner = import_module(module)
            owner = attrgetter(inner)(owner) if inner else owner
            before = vars(owner).get(name)
            if before is None:
                raise UnusableStrategyError(f"{engine.name} has no {module}.{path} in this version")
            opened.enter_context(replaced(owner, name, _for_model(asked, hand_out, before)))
        yield {}


@contextmanager
def native(engine: ForeignEngine, model: Any, caches: list[Any]) -> Iterator[dict[str, Any]]:  # noqa: ARG001
    """Hand out nothing."""
    yield {}


NATIVE = "native"
STRATEGIES: dict[str, Strategy] = {
    "keyword": keyword,
    "instance": instance,
    "attribute": attribute,
    NATIVE: native,
}


def models_of(model: Any) -> list[Any]:
    """A model and the text model inside it, where it has one."""
    inner = getattr(model, "language_model", None)
    return [model] if inner is None else [model, inner]


def _once(engine: ForeignEngine, caches: list[Any]) -> Callable[..., list[Any]]:
    """What hands the caches out, one time: two sequences must not share them."""
    left = [list(caches)]

    def hand_out(*_: Any, **__: Any) -> list[Any]:
        if not left:
            raise GenerationError(f"{engine.name} made caches for more than one sequence")
        return left.pop()

    return hand_out


def _for_model(asked: list[int], hand_out: Callable[..., Any], before: Callable[..., Any]) -> Any:
    """A maker that knows the models it hands out for; a function, so that it also serves as a method."""

    def make(*arguments: Any, **named: Any) -> Any:
        if any(id(argument) in asked for argument in (*arguments, *named.values())):
            return hand_out()
        return before(*arguments, **named)

    return make
