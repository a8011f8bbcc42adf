"""What a projector's weights are: a regression, then the distillation of attention outputs.

First a ridge regression in closed form, from the features to the target's key and value rows. Then the
projection is changed by `distillation`, so that what attention makes of it comes close to what it makes of
the exact rows. All in whitened features, which are folded into the weights at the end. Texts come from the
generators in `corpora`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from engine.cache.policy import KVPolicy, parse_policy
from engine.device import read_float, read_token
from engine.errors import ConfigurationError, EngineError
from engine.restoration.session import RestorationPlan
from engine.restoration.sources import LEARNED
from engine.training.corpora import retrieval
from engine.training.corpora.batches import encode, program_document
from engine.training.corpora.lexicon import HELD_OUT, TRAIN, Lexicon, generator
from engine.training.distillation import Sight, Texts, Watcher, losses, relative_error
from engine.training.tokenizer import DemoTokenizer
from evidence_format.policies import LARGEST_WINDOW, LAYERS

Progress = Callable[[int, int, str, str], None]  # done, total, phase, detail
Weights = list[dict[str, mx.array]]  # of each layer, in whitened features

SHORTEST = 192  # tokens of a text: room for a fact and its question in any tokenizer
FACTS = 12  # in a text, at most
RETRIEVAL = 0.8  # share of texts; the others are programs
RIDGE = 1e-3
DROPPED = 1e-5  # directions of the features with less than this share of the largest variance
QUERIES = 96  # of each text in a step
REUSED = 4  # steps a batch of texts serves, with other queries each time
RATE = 1e-3
NORM_TERM = 0.1
HELD_OUT_BATCHES = 4


@dataclass(frozen=True)
class ProjectorSwitches:
    """What the command line can set.

    Attributes:
        layers: as behind the @ of ``--kv``.
        sink: positions at the beginning that stay as they are.
        window: newest positions that do.
        steps: of distillation; 0 leaves the regression as it is.
        batches: of texts that the regression sees.
        texts: in a batch.
        length: tokens of a text.
        seed: of texts, and of the queries looked at.
    """

    layers: str = "full"
    sink: int = 4
    window: int = 64
    steps: int = 320
    batches: int = 20
    texts: int = 4
    length: int = 512
    seed: int = 0

    def check(self, context: int | None) -> None:
        """Raise ConfigurationError where a switch does not make sense for a target of that context."""
        for name, least in (("steps", 0), ("batches", 1), ("texts", 1), ("seed", 0), ("length", SHORTEST)):
            value = getattr(self, name)
            if value < least:
                raise ConfigurationError(f"--{name} must be at least {least}, not {value}")
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
        if Sight.first(plan) >= self.length:
            raise ConfigurationError(
                f"--length {self.length} leaves nothing to restore beyond --sink {self.sink} and "
                f"--window {self.window}"
            )

    @property
    def policy(self) -> KVPolicy:
        """What it is trained for, once `check` has passed."""
        return parse_policy(f"restored:{LEARNED}:{self.sink},{self.window}@{self.layers}")

    def layers_of(self, model: Any) -> list[int]:
        """The layers it is trained for.

        Raises:
            ConfigurationError: one that is named cannot be restored, or there are none.
        """
        policy = self.policy
        try:
            return policy.chosen_layers(model)
        except ConfigurationError as error:
            reason = str(error).removeprefix(f"--kv {policy.spec}").partition("; use")[0]
            raise ConfigurationError(
                f"--layers {self.layers}{reason}; a projector is for layers that keep all positions"
            ) from None

    def plan(self) -> RestorationPlan:
        """Which positions are restored when."""
        policy = self.policy
        return RestorationPlan(LEARNED, policy.sink, policy.window)


class TargetTokenizer(DemoTokenizer):
    """The corpora's texts in the tokens of any target: its own marks for beginning and end."""

    def _encode_once(self, text: str) -> tuple[int, ...]:
        own = self.backend
        text = text.replace("<bos>", own.bos_token or "").replace("<eos>", own.eos_token or "")
        return tuple(int(token) for token in own.encode(text, add_special_tokens=False))


def texts(
    tokenizer: DemoTokenizer, switches: ProjectorSwitches, key: str, lexicon: Lexicon = TRAIN
) -> mx.array:
    """A batch of texts [texts, length] that depends on the seed and the key alone."""
    rng = generator(f"projector/{switches.seed}/{key}")
    rows = [_text(rng, tokenizer, switches.length, lexicon) for _ in range(switches.texts)]
    return mx.array(rows, mx.int32)


def _text(rng: Random, tokenizer: DemoTokenizer, length: int, lexicon: Lexicon) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        if rng.random() < RETRIEVAL:
            facts = rng.randint(2, FACTS)
            document = retrieval.document(rng, lexicon, tokenizer.count, length=length, facts=facts)
        else:
            document = program_document(rng, lexicon)
        tokens += encode(tokenizer, document)[0]
    return tokens[:length]


class Fit:
    """The regression, and the distillation that goes on from it."""

    def __init__(
        self,
        watcher: Watcher,
        switches: ProjectorSwitches,
        tokenizer: DemoTokenizer,
        progress: Progress,
    ) -> None:
        self._watcher, self._switches, self._tokenizer = watcher, switches, tokenizer
        self._plan, self._progress, self._done = switches.plan(), progress, 0
        self._total = switches.batches + -(-switches.steps // REUSED) + 2 * HELD_OUT_BATCHES
        self.log: list[dict[str, float]] = []  # of the distillation

    def regress(self) -> None:
        """Whiten the features, and regress the target's rows on them.

        With z whitened, ridge regression is the covariance of z with the rows, divided by 1 + the ridge.
        """
        count, sums, products, outputs, crossed = (
            0,
            mx.array(0.0),
            mx.array(0.0),
            mx.array(0.0),
            mx.array(0.0),
        )
        for step in range(self._switches.batches):
            seen = self._watch(f"regression/{step}", TRAIN, "regression")
            x = seen.features.reshape(-1, seen.features.shape[-1]).astype(mx.float32)
            y = _joined(seen).astype(mx.float32)
            count += x.shape[0]
            sums, products = sums + x.sum(axis=0), products + x.T @ x
            outputs, crossed = outputs + y.sum(axis=0), crossed + x.T @ y
            mx.eval(sums, products, outputs, crossed)
        self._widths = [(rows.key_rows.shape[-1], rows.value_rows.shape[-1]) for rows in seen.layers]
        self._mean = sums / count
        variances, directions = mx.linalg.eigh(
            products / count - mx.outer(self._mean, self._mean), stream=mx.cpu
        )
        kept = read_token((variances > DROPPED * variances.max()).sum())
        self._whiten = directions[:, -kept:] / mx.sqrt(variances[-kept:])  # [F, R], ascending order
        covariance = crossed / count - mx.outer(self._mean, outputs / count)
        slopes = self._whiten.T @ covariance / (1 + RIDGE)  # [R, all widths]
        self._weights: Weights = []
        for part, mean in zip(
            _divided(slopes, self._widths), _divided((outputs / count)[None], self._widths), strict=True
        ):
            self._weights.append({"k": part[0], "v": part[1], "k_mean": mean[0][0], "v_mean": mean[1][0]})
        mx.eval(self._weights, self._whiten, self._mean)

    def distil(self) -> None:
        """Adam on the losses of `distillation`, the rate falling to nothing."""
        steps, draw = self._switches.steps, generator(f"projector/{self._switches.seed}/queries")
        if not steps:
            return
        adam = optim.Adam(optim.cosine_decay(RATE, steps))
        gradient = mx.value_and_grad(self._loss)
        first = Sight.first(self._plan)
        total = mx.zeros(2)
        for step in range(steps):
            if step % REUSED == 0:
                seen = self._watch(f"distillation/{step // REUSED}", TRAIN, "distillation")
            chosen = draw.sample(
                range(first, self._switches.length), min(QUERIES, self._switches.length - first)
            )
            sight = Sight.of(self._plan, self._switches.length, sorted(chosen))
            (_, terms), changes = gradient(self._weights, seen, sight)
            self._weights = adam.apply_gradients({"layers": changes}, {"layers": self._weights})["layers"]
            total = total + terms
            mx.eval(self._weights, adam.state, total)
            every = max(1, steps // 20)
            if (step + 1) % every == 0:
                direction, norm = (read_float(term) / every for term in total)
                self.log.append(_rounded({"step": step + 1, "direction": direction, "norm": norm}))
                total = mx.zeros(2)

    def _loss(self, weights: Weights, seen: Texts, sight: Sight) -> tuple[mx.array, mx.array]:
        z = (seen.features.astype(mx.float32) - self._mean) @ self._whiten
        pairs = [(z @ w["k"] + w["k_mean"], z @ w["v"] + w["v_mean"]) for w in weights]
        terms = self._terms(seen, pairs, sight)
        return terms[0] + NORM_TERM * terms[1], mx.stop_gradient(terms)

    def _terms(self, seen: Texts, pairs: list[tuple[mx.array, mx.array]], sight: Sight) -> mx.array:
        """Direction and norm term, the mean over layers, [2]."""
        parts = zip(self._watcher.sites, seen.layers, pairs, strict=True)
        return mx.stack([losses(site, rows, pair, sight) for site, rows, pair in parts]).mean(axis=0)

    def folded(self) -> Weights:
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

    def judge(self, weights: Weights) -> dict[str, float]:
        """Held-out figures of folded weights: both losses, and errors of keys and values."""
        sums: dict[str, float] = {}
        first, length = Sight.first(self._plan), self._switches.length
        sight = Sight.of(self._plan, length, range(first, length))
        for step in range(HELD_OUT_BATCHES):
            seen = self._watch(f"held out/{step}", HELD_OUT, "held out")
            x = seen.features.astype(mx.float32)
            pairs = []
            for w in weights:
                exact = {name: value.astype(mx.float32) for name, value in w.items()}
                pairs.append(
                    (
                        x @ exact["k_proj.weight"].T + exact["k_proj.bias"],
                        x @ exact["v_proj.weight"].T + exact["v_proj.bias"],
                    )
                )
            terms = self._terms(seen, pairs, sight)
            figures = {"direction": terms[0], "norm": terms[1]}
            for rows, (keys, values), site in zip(seen.layers, pairs, self._watcher.sites, strict=True):
                figures[f"key_error_{site.layer}"] = relative_error(keys, rows.key_rows)
                figures[f"value_error_{site.layer}"] = relative_error(values, rows.value_rows)
            for name, value in figures.items():
                sums[name] = sums.get(name, 0.0) + read_float(value) / HELD_OUT_BATCHES
        return _rounded(sums)

    def tell_end(self) -> None:
        """Show as progress that all is done."""
        self._progress(self._total, self._total, "held out", "done")

    def _watch(self, key: str, lexicon: Lexicon, phase: str) -> Texts:
        self._progress(self._done, self._total, phase, key.rpartition("/")[2])
        self._done += 1
        return self._watcher.watch(texts(self._tokenizer, self._switches, key, lexicon))


def _joined(seen: Texts) -> mx.array:
    """Key and value rows of all layers side by side, [positions, all widths]."""
    parts = [part for rows in seen.layers for part in (rows.key_rows, rows.value_rows)]
    return mx.concatenate([part.reshape(-1, part.shape[-1]) for part in parts], axis=-1)


def _divided(rows: mx.array, widths: list[tuple[int, int]]) -> Iterator[tuple[mx.array, mx.array]]:
    """The columns of `_joined`, apart again."""
    at = 0
    for keys, values in widths:
        yield rows[:, at : at + keys], rows[:, at + keys : at + keys + values]
        at += keys + values


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    if odd := [name for name, value in figures.items() if not math.isfinite(value)]:
        raise EngineError(f"training has failed: {odd[0]} is {figures[odd[0]]}")
    return {name: round(value, 6) for name, value in figures.items()}
