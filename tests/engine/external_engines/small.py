"""Small engines, real ones: greedy loops of a few lines that differ in where their caches come from."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from engine.external_engines.engine import DraftCounts, ExternalEngine, LoopEntry
from engine.target.loading import LoadedTarget


def make_caches(model: Any) -> list[Any]:
    """A maker of its own, which asks no model."""
    return [KVCache() for _ in model.layers]


def asking(model: Any) -> list[Any]:
    """A maker that asks the model."""
    return make_prompt_cache(model)


def greedy(model: Any, prompt: Sequence[int], count: int, caches: list[Any]) -> Generator[int]:
    fed = list(prompt)
    for _ in range(count):
        logits = model(mx.array([fed]), cache=caches)
        fed = [int(mx.argmax(logits[0, -1]).item())]
        yield fed[0]


class Loop:
    """Takes caches where ``keyword`` says so, else makes them inline."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.runs = 0

    def steps(self, prompt: list[int], limit: int, counts: DraftCounts, **caches: Any) -> Generator[int]:
        self.runs += 1
        yield from self.run(prompt, limit, **caches)

    def run(self, prompt: Sequence[int], count: int, kv: Any = None) -> Generator[int]:
        yield from greedy(self.model, prompt, count, kv or [KVCache() for _ in self.model.layers])


class Inline(Loop):
    """Makes them inline and takes none."""

    def run(self, prompt: Sequence[int], count: int, kv: Any = None) -> Generator[int]:
        assert kv is None
        yield from greedy(self.model, prompt, count, [KVCache() for _ in self.model.layers])


class Cheating(Loop):
    """Takes them and looks the other way."""

    def run(self, prompt: Sequence[int], count: int, kv: Any = None) -> Generator[int]:
        yield from greedy(self.model, prompt, count, [KVCache() for _ in self.model.layers])


class Moving(Loop):
    """Takes them, and from some token on goes on in copies."""

    after = 8

    def run(self, prompt: Sequence[int], count: int, kv: Any = None) -> Generator[int]:
        kv = kv or [KVCache() for _ in self.model.layers]
        done = list(greedy(self.model, prompt, min(count, self.after), kv))
        yield from done
        if count > self.after:
            yield from greedy(self.model, done[-1:], count - self.after, copy.deepcopy(kv))


class Named(Loop):
    """Asks this module's own maker."""

    def run(self, prompt: Sequence[int], count: int) -> Generator[int]:
        yield from greedy(self.model, prompt, count, make_caches(self.model))


class Twice(Loop):
    """Asks the model for caches two times."""

    def run(self, prompt: Sequence[int], count: int) -> Generator[int]:
        asking(self.model)
        yield from greedy(self.model, prompt, count, asking(self.model))


class Asking(Loop):
    """Asks the model for caches."""

    def run(self, prompt: Sequence[int], count: int) -> Generator[int]:
        yield from greedy(self.model, prompt, count, asking(self.model))


class Failing(Asking):
    """Breaks down at its sixth token."""

    def run(self, prompt: Sequence[int], count: int) -> Generator[int]:
        for at, token in enumerate(super().run(prompt, count)):
            if at == 5:
                raise RuntimeError("out of\nluck")
            yield token


class Hook:
    """What is put in place of a layer."""

    def __init__(self, layer: Any, rows: list[Any]) -> None:
        self.layer, self.rows = layer, rows

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        out = self.layer(*arguments, **named)
        self.rows[0] = out
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class Hooking(Asking):
    """Leaves a hook on a layer, rows and a flag on the model, and a method and a mark on a class."""

    def run(self, prompt: Sequence[int], count: int) -> Generator[int]:
        model, layers = self.model, self.model.model.layers
        model._rows = [None]
        model.flag = object()
        layers[1] = Hook(layers[1], model._rows)
        kind = type(layers[0].self_attn)
        before = kind.__call__

        def call(*arguments: Any, **named: Any) -> Any:
            return before(*arguments, **named)

        kind.__call__ = call
        kind.marked = True
        for token in super().run(prompt, count):
            assert model._rows[0] is not None
            assert kind.marked
            model._rows[0] = None
            yield token


def opened(
    target: LoadedTarget, kind: type[Loop], keyword: str | None = None, **changes: Any
) -> ExternalEngine:
    """One of them on a target."""
    maker = ((__name__, "make_caches"),)
    about: dict[str, Any] = {"drafts": False, "keyword": keyword, "makers": maker} | changes
    loop = kind(target.target.model)
    entry = LoopEntry(__name__, "nothing", lambda *_: (1, loop.steps), **about)
    return ExternalEngine(kind.__name__, entry, target, (1, loop.steps))
