"""What a projector's weights are: a regression, then the distillation of attention outputs.

First a ridge regression from the features to the target's key and value rows, then the distillation: `losses`
compares what attention makes of restored rows with what it makes of the exact ones, by direction (1 - cosine)
and norm (log of the ratio of lengths, squared), each query weighted by how much of its attention falls on
restored positions. All in whitened features, which are folded into the weights at the end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from engine.cache.policy import parse_policy
from engine.device import read_float, read_token
from engine.errors import ConfigurationError, EngineError
from engine.haystack_text import generator
from engine.networks.projector import DrafterFeatures
from engine.restoration.session import RestorationPlan
from engine.restoration.sites import Site
from engine.restoration.sources import LEARNED
from engine.target.attention import softmax_with_sinks
from engine.target.model import HiddenStateHooks, Target
from evidence_format.policies import LARGEST_WINDOW, LAYERS

Progress = Callable[[int, int, str, str], None]  # done, total, phase, detail
Weights = list[dict[str, mx.array]]  # of each layer, in whitened features
# The tokens of one text, all of the same length: from what training may see, or (True) from what is held out.
DrawText = Callable[[Random, bool], list[int]]

SHORTEST = 192  # tokens of a text: a fact and its question fit in any tokenizer
RIDGE = 1e-3
DROPPED = 1e-5  # directions of the features with less than this share of the largest variance
QUERIES = 96  # of each text in a step
REUSED = 4  # steps a batch of texts serves, with other queries each time
RATE = 1e-3
NORM_TERM = 0.1
HELD_OUT_BATCHES = 4
HIDDEN = -1e9  # score of a position that is not seen
LEAST = 0.02  # weight of a query that looks at nothing restored
TINY = 1e-6


@dataclass(frozen=True)
class ProjectorSwitches:
    """What the command line can set."""

    layers: str = "full"  # as behind the @ of ``--kv``
    sink: int = 4  # positions at the beginning that stay as they are
    window: int = 64  # newest positions that do
    steps: int = 320  # of distillation; 0 leaves the regression as it is
    batches: int = 20  # of texts that the regression sees
    texts: int = 4  # in a batch
    length: int = 512  # tokens of a text
    seed: int = 0  # of texts, and of the queries looked at
    texts_file: str | None = None  # see `engine.training.projector.file_texts`; None: generated texts

    def check(self, context: int | None) -> None:
        """Raise ConfigurationError where a switch does not make sense for a target of that context."""
        for name, least in (("steps", 0), ("batches", 1), ("texts", 1), ("seed", 0), ("length", SHORTEST)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"--{name} must be at least {least}, not {getattr(self, name)}")
        for name, least in (("sink", 0), ("window", 1)):
            if not least <= getattr(self, name) <= LARGEST_WINDOW:
                raise ConfigurationError(
                    f"--{name} must lie in {least} to {LARGEST_WINDOW}, not {getattr(self, name)}"
                )
        if not LAYERS.fullmatch(self.layers):
            raise ConfigurationError(
                f"--layers {self.layers!r} names no layers; give full, or numbers such as 2,5 or 2-6"
            )
        if context is not None and self.length > context:
            raise ConfigurationError(f"--length {self.length} is more than the target's context of {context}")
        plan = self.plan()
        if first_restored(plan) >= self.length:
            raise ConfigurationError(
                f"--length {self.length} leaves nothing to restore beyond --sink {self.sink} and "
                f"--window {self.window}"
            )

    def plan(self) -> RestorationPlan:
        """Which positions are restored when, once `check` has passed."""
        return RestorationPlan(LEARNED, self.sink, self.window)

    def layers_of(self, model: Any) -> list[int]:
        """The layers it is trained for; ConfigurationError where one cannot be restored."""
        policy = parse_policy(f"restored:{LEARNED}:{self.sink},{self.window}@{self.layers}")
        try:
            return policy.chosen_layers(model)
        except ConfigurationError as error:
            reason = str(error).removeprefix(f"--kv {policy.spec}").partition("; use")[0]
            raise ConfigurationError(
                f"--layers {self.layers}{reason}; a projector is for layers that keep all positions"
            ) from None


def batch(draw: DrawText, switches: ProjectorSwitches, key: str, held_out: bool) -> mx.array:
    """Texts [texts, length] that depend on the seed and the key alone."""
    rng = generator(f"projector/{switches.seed}/{key}")
    return mx.array([draw(rng, held_out) for _ in range(switches.texts)], mx.int32)


@dataclass(frozen=True)
class LayerRows:
    """One layer's part of some texts, S of T tokens."""

    key_rows: mx.array  # as the projection gives them, [S, T, KV heads · head dim]
    value_rows: mx.array
    queries: mx.array  # normalised, rotated and scaled, [S, heads, T, head dim]
    keys: mx.array  # as attention reads them, [S, KV heads, T, head dim]
    values: mx.array
    sinks: mx.array | None  # scores next to those of positions, [heads]


@dataclass(frozen=True)
class RecordedTexts:
    """What a forward over some texts has shown."""

    features: mx.array  # [S, T, F]
    layers: list[LayerRows]


class AttentionRecorder:
    """Runs a target and records what attention does in chosen layers; close it to restore the model."""

    def __init__(self, target: Target, sites: Sequence[Site], features: DrafterFeatures) -> None:
        self._target, self.sites, self._features = target, list(sites), features
        modules = [(*site.projections, site.attention.rope, site.attention.rope) for site in sites]
        self._counts = [len(each) for each in modules]
        flat = [module for each in modules for module in each]  # one that runs twice is named as often
        self._capture = HiddenStateHooks(flat, range(len(flat)))
        self._hidden_states = target.hook_layers(features.target_layers)

    def record(self, tokens: mx.array) -> RecordedTexts:
        """Run texts [S, T] from their beginning."""
        with self._capture.collecting(), self._hidden_states.collecting():
            self._target.model(tokens)
        outputs = iter(self._capture.outputs())
        layers = []
        for site, count in zip(self.sites, self._counts, strict=True):
            *rows, first, second = (next(outputs) for _ in range(count))
            queries, rotated = (second, first) if site.kind.keys_first else (first, second)
            keys, values = site.placed(rows[0], rows[-1], 0, rotated.shape[1])
            queries = queries * getattr(site.attention, site.kind.scale)
            sinks = site.attention.sinks if site.kind.sinks else None
            layers.append(LayerRows(rows[0], rows[-1], queries, keys, values, sinks))
        return RecordedTexts(self._features(self._hidden_states.take()), layers)

    def close(self) -> None:
        """Restore the model."""
        self._capture.close()
        self._hidden_states.close()


@dataclass(frozen=True)
class Visibility:
    """Which positions some queries see, and which of those are restored."""

    queries: mx.array  # their positions, [Q]
    seen: mx.array  # [Q, T]
    restored: mx.array

    @classmethod
    def of(cls, plan: RestorationPlan, length: int, queries: Sequence[int]) -> "Visibility":
        """For queries at given positions of texts of ``length`` tokens."""
        at = mx.array(list(queries), mx.int32)[:, None]
        position = mx.arange(length)[None]
        edge = at - at % plan.chunk - plan.window
        restored = (position >= plan.sink) & (position < edge)
        return cls(at[:, 0], position <= at, restored)


def first_restored(plan: RestorationPlan) -> int:
    """The first position whose query sees something restored."""
    behind = plan.sink + plan.window
    return behind + plan.chunk - behind % plan.chunk


def losses(site: Site, rows: LayerRows, restored: tuple[mx.array, mx.array], visible: Visibility) -> mx.array:
    """Direction and norm term [2] of a layer with ``restored`` key and value rows in place of its own."""
    keys, values = site.placed(*restored, 0, rows.keys.shape[1])
    queries = rows.queries[:, :, visible.queries]
    scores = _scores(queries, rows.keys)
    weights = softmax_with_sinks(mx.where(visible.seen, scores, HIDDEN), rows.sinks)
    exact = weights @ rows.values[:, :, None]
    share = mx.stop_gradient(mx.where(visible.restored, weights, 0).sum(axis=-1)) + LEAST  # [S, G, H/G, Q]
    mixed = mx.where(visible.restored, _scores(queries, keys), scores)
    weights = softmax_with_sinks(mx.where(visible.seen, mixed, HIDDEN), rows.sinks)
    far, near = mx.where(visible.restored, weights, 0), mx.where(visible.restored, 0, weights)
    output = far @ values[:, :, None] + near @ rows.values[:, :, None]
    length, wanted = _length(output), _length(exact)
    direction = 1 - (output * exact).sum(axis=-1) / (length * wanted)
    norm = mx.square(mx.log(length / wanted))
    total = share.sum()
    return mx.stack([(share * direction).sum() / total, (share * norm).sum() / total])


def _scores(queries: mx.array, keys: mx.array) -> mx.array:
    """[S, G, heads / G, Q, T] from queries [S, heads, Q, D] and keys [S, G, T, D]."""
    texts, heads, count, dim = queries.shape
    grouped = queries.reshape(texts, keys.shape[1], heads // keys.shape[1], count, dim)
    return grouped @ keys[:, :, None].swapaxes(-1, -2)


def _length(rows: mx.array) -> mx.array:
    return mx.sqrt((rows * rows).sum(axis=-1) + TINY)


def relative_error(found: mx.array, wanted: mx.array) -> mx.array:
    """Squared difference over the squared deviation from the mean; 1: no better than the mean."""
    axes: Any = tuple(range(wanted.ndim - 1))
    spread = wanted - wanted.mean(axis=axes, keepdims=True)
    return mx.square(found - wanted).sum() / mx.maximum(mx.square(spread).sum(), TINY)


class Fit:
    """The regression, and the distillation that goes on from it."""

    def __init__(
        self, recorder: AttentionRecorder, switches: ProjectorSwitches, draw: DrawText, progress: Progress
    ) -> None:
        self._recorder, self._switches, self._draw = recorder, switches, draw
        self._plan, self._progress, self._done = switches.plan(), progress, 0
        self._total = switches.batches + -(-switches.steps // REUSED) + 2 * HELD_OUT_BATCHES
        self._weights: Weights = []

    def run(self) -> tuple[Weights, dict[str, Any]]:
        """The layers' weights for features as they come, in float16, and the figures of the training."""
        self._regress()
        regressed = self._judge(self._folded())
        log = self._distil()
        weights = self._folded()
        held_out = {"regression": regressed, "distilled": self._judge(weights)}
        self._progress(self._total, self._total, "held out", "done")
        return weights, {"held_out": held_out, "log": log}

    def _regress(self) -> None:
        """Whiten the features, and regress the target's rows on them.

        With z whitened, ridge regression is the covariance of z with the rows, divided by 1 + the ridge.
        """
        count = 0
        sums, products, outputs, crossed = (mx.array(0.0) for _ in range(4))
        for step in range(self._switches.batches):
            seen = self._record(f"regression/{step}", "regression")
            x = seen.features.reshape(-1, seen.features.shape[-1]).astype(mx.float32)
            rows = [part for layer in seen.layers for part in (layer.key_rows, layer.value_rows)]
            y = mx.concatenate([part.reshape(-1, part.shape[-1]) for part in rows], axis=-1)
            y = y.astype(mx.float32)  # [positions, all widths]
            count += x.shape[0]
            sums, products = sums + x.sum(axis=0), products + x.T @ x
            outputs, crossed = outputs + y.sum(axis=0), crossed + x.T @ y
            mx.eval(sums, products, outputs, crossed)
        self._mean = sums / count
        spread = products / count - mx.outer(self._mean, self._mean)
        variances, directions = mx.linalg.eigh(spread, stream=mx.cpu)
        kept = read_token((variances > DROPPED * variances.max()).sum())
        self._whiten = directions[:, -kept:] / mx.sqrt(variances[-kept:])  # [F, R], ascending order
        covariance = crossed / count - mx.outer(self._mean, outputs / count)
        slopes = self._whiten.T @ covariance / (1 + RIDGE)  # [R, all widths]
        ends = list(accumulate(part.shape[-1] for part in rows))[:-1]
        parts, means = mx.split(slopes, ends, axis=-1), mx.split(outputs / count, ends)
        self._weights = [
            {"k": parts[at], "v": parts[at + 1], "k_mean": means[at], "v_mean": means[at + 1]}
            for at in range(0, len(parts), 2)
        ]
        mx.eval(self._weights, self._whiten, self._mean)

    def _distil(self) -> list[dict[str, float]]:
        """Adam on `losses`, the rate falling to nothing; a log of some twenty rows."""
        steps, length = self._switches.steps, self._switches.length
        log: list[dict[str, float]] = []
        if not steps:
            return log
        draw = generator(f"projector/{self._switches.seed}/queries")
        adam = optim.Adam(optim.cosine_decay(RATE, steps))
        gradient = mx.value_and_grad(self._loss)
        first, every = first_restored(self._plan), max(1, steps // 20)
        total = mx.zeros(2)
        for step in range(steps):
            if step % REUSED == 0:
                seen = self._record(f"distillation/{step // REUSED}", "distillation")
            chosen = draw.sample(range(first, length), min(QUERIES, length - first))
            visible = Visibility.of(self._plan, length, sorted(chosen))
            (_, terms), changes = gradient(self._weights, seen, visible)
            self._weights = adam.apply_gradients({"layers": changes}, {"layers": self._weights})["layers"]
            total = total + terms
            mx.eval(self._weights, adam.state, total)
            if (step + 1) % every == 0:
                direction, norm = (read_float(term) / every for term in total)
                log.append(_rounded({"step": step + 1, "direction": direction, "norm": norm}))
                total = mx.zeros(2)
        return log

    def _loss(self, weights: Weights, seen: RecordedTexts, visible: Visibility) -> tuple[mx.array, mx.array]:
        z = (seen.features.astype(mx.float32) - self._mean) @ self._whiten
        pairs = [(z @ w["k"] + w["k_mean"], z @ w["v"] + w["v_mean"]) for w in weights]
        terms = self._terms(seen, pairs, visible)
        return terms[0] + NORM_TERM * terms[1], mx.stop_gradient(terms)

    def _terms(
        self, seen: RecordedTexts, pairs: list[tuple[mx.array, mx.array]], visible: Visibility
    ) -> mx.array:
        """Direction and norm term, the mean over layers, [2]."""
        parts = zip(self._recorder.sites, seen.layers, pairs, strict=True)
        return mx.stack([losses(site, rows, pair, visible) for site, rows, pair in parts]).mean(axis=0)

    def _folded(self) -> Weights:
        """The layers' matrices and offsets for features as they come, in float16 as they are stored."""
        layers = []
        for w in self._weights:
            layer = {}
            for name in ("k", "v"):
                slopes = self._whiten @ w[name]
                layer[f"{name}_proj.weight"] = slopes.T
                layer[f"{name}_proj.bias"] = w[f"{name}_mean"] - self._mean @ slopes
            layers.append({name: value.astype(mx.float16) for name, value in layer.items()})
        mx.eval(layers)
        return layers

    def _judge(self, weights: Weights) -> dict[str, float]:
        """Held-out figures of folded weights: both losses, and errors of keys and values."""
        sums: dict[str, float] = {}
        length = self._switches.length
        visible = Visibility.of(self._plan, length, range(first_restored(self._plan), length))
        for step in range(HELD_OUT_BATCHES):
            seen = self._record(f"held out/{step}", "held out")
            x = seen.features.astype(mx.float32)
            pairs = []
            for layer in weights:
                w = {name: value.astype(mx.float32) for name, value in layer.items()}
                keys = x @ w["k_proj.weight"].T + w["k_proj.bias"]
                pairs.append((keys, x @ w["v_proj.weight"].T + w["v_proj.bias"]))
            direction, norm = self._terms(seen, pairs, visible)
            figures = {"direction": direction, "norm": norm}
            for rows, (keys, values), site in zip(seen.layers, pairs, self._recorder.sites, strict=True):
                figures[f"key_error_{site.layer}"] = relative_error(keys, rows.key_rows)
                figures[f"value_error_{site.layer}"] = relative_error(values, rows.value_rows)
            for name, value in figures.items():
                sums[name] = sums.get(name, 0.0) + read_float(value) / HELD_OUT_BATCHES
        return _rounded(sums)

    def _record(self, key: str, phase: str) -> RecordedTexts:
        self._progress(self._done, self._total, phase, key.rpartition("/")[2])
        self._done += 1
        return self._recorder.record(batch(self._draw, self._switches, key, phase == "held out"))


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    if odd := [name for name, value in figures.items() if not math.isfinite(value)]:
        raise EngineError(f"training has failed: {odd[0]} is {figures[odd[0]]}")
    return {name: round(value, 6) for name, value in figures.items()}
