"""The rotary embedding of a drafter: frequencies of every scaling type, and the rotation itself.

The frequencies follow the definitions of Hugging Face transformers, which the published drafters are trained
with; mlx-lm has no class for those that depend on the length of the sequence. For each pair (x, y) of the
halves of a head at position p, (x, y) → (x cos pω - y sin pω, y cos pω + x sin pω), times an attention
factor.

On Metal one kernel rotates. On a CPU, where it would compute the same cosines for every layer, for queries
and keys alike, they are computed once for many positions and shared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log, pi, sqrt
from typing import Any

import mlx.core as mx

from engine.device import launch
from engine.errors import ModelError

# Fields of each type besides the base, by transformers' names; those behind the bar may be left out.
FIELDS = {
    "default": "| factor",  # written by some exporters, used by none
    "linear": "factor",
    "dynamic": "factor",
    "yarn": "factor | beta_fast beta_slow mscale mscale_all_dim attention_factor truncate",
    "longrope": "short_factor long_factor | factor attention_factor",
    "llama3": "factor low_freq_factor high_freq_factor",
}
ORIGINAL = "original_max_position_embeddings"
# Fields of the target's own embedding that published drafters carry along and do not use.
UNUSED = ("mrope_section", "mrope_interleaved")
LARGEST = 1e18  # of any number here: at some length of a sequence larger ones would overflow


@dataclass(frozen=True)
class RotaryConfig:
    """Which rotation: a type of transformers, its base, and the fields that type reads."""

    kind: str  # one of the keys of `FIELDS`
    theta: float  # the base
    positions: int  # ``max_position_embeddings``
    fields: Mapping[str, Any]  # by transformers' names; the factors of longrope are tuples

    def frequencies(self, dim: int, length: int) -> list[float]:
        """ω of each pair, [dim / 2], in radians a position, for a sequence of ``length`` positions."""
        base, fields = self.theta, self.fields
        if self.kind == "dynamic":
            stretch = fields["factor"] * max(length, self.positions) / self.positions - (fields["factor"] - 1)
            base *= stretch ** (dim / (dim - 2))
        plain = [base ** (-2 * pair / dim) for pair in range(dim // 2)]
        if self.kind == "linear":
            return [omega / fields["factor"] for omega in plain]
        if self.kind == "longrope":
            factors = fields["long_factor" if length > fields[ORIGINAL] else "short_factor"]
            return [omega / factor for omega, factor in zip(plain, factors, strict=True)]
        if self.kind == "llama3":
            return [self._llama3(omega) for omega in plain]
        return self._yarn(plain, dim) if self.kind == "yarn" else plain

    @property
    def grows(self) -> bool:
        return self.kind in ("dynamic", "longrope")

    @property
    def attention_factor(self) -> float:
        fields = self.fields
        if fields.get("attention_factor") is not None:
            return float(fields["attention_factor"])
        if self.kind == "yarn":
            over, under = fields.get("mscale"), fields.get("mscale_all_dim")
            factor = fields["factor"]
            return _mscale(factor, over) / _mscale(factor, under) if over and under else _mscale(factor, 1)
        if self.kind == "longrope":
            factor = fields.get("factor") or self.positions / fields[ORIGINAL]
            return 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(fields[ORIGINAL]))
        return 1.0

    def _llama3(self, omega: float) -> float:
        """Slow pairs are stretched, fast ones kept, those between are blended."""
        fields = self.fields
        low, high, factor = (fields[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
        turns = fields[ORIGINAL] * omega / (2 * pi)  # over the length the model was first trained with
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        return float((1 - blend) * omega / factor + blend * omega)

    def _yarn(self, plain: list[float], dim: int) -> list[float]:
        """Pairs that turn less than ``beta_slow`` times are stretched, those over ``beta_fast`` are kept."""
        fields = self.fields

        def pair_turning(times: float) -> float:
            return float(dim * log(fields[ORIGINAL] / (times * 2 * pi)) / (2 * log(self.theta)))

        low = pair_turning(fields.get("beta_fast") or 32)
        high = pair_turning(fields.get("beta_slow") or 1)
        if fields.get("truncate", True):
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = (high - low) or 0.001
        stretched = [min(max((pair - low) / width, 0.0), 1.0) for pair in range(dim // 2)]
        return [w * (s / fields["factor"] + 1 - s) for w, s in zip(plain, stretched, strict=True)]


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0


def rotary_config(raw: Mapping[str, Any], head_dim: int) -> RotaryConfig:
    """Read ``rope_scaling`` or ``rope_parameters`` of a drafter's config.json, the base there or outside."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"drafter rope parameters must be an object, not {scaling!r}")
    given = {name: value for name, value in scaling.items() if value is not None and name not in UNUSED}
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind not in FIELDS:
        raise ModelError(f"drafter rope_type {kind!r} is not one of {', '.join(FIELDS)}")
    needed, _, optional = FIELDS[kind].partition("|")
    theta = given.pop("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ModelError("drafter config.json: rope_theta is missing")
    positions = _number("max_position_embeddings", raw.get("max_position_embeddings", 32768))  # as Qwen3's
    if given.pop("partial_rotary_factor", 1.0) != 1.0 and kind != "default":
        raise ModelError(f"drafter rope_type {kind!r} does not go with a partial_rotary_factor")
    if odd := sorted(given.keys() - {*needed.split(), *optional.split(), ORIGINAL}):
        raise _fault(f"unknown fields {', '.join(odd)} for {kind!r}")
    if missing := [name for name in needed.split() if name not in given]:
        raise _fault(f"{missing[0]} is missing for {kind!r}")
    if isinstance(raw.get(ORIGINAL), int | float):
        given[ORIGINAL] = raw[ORIGINAL]
    fields: dict[str, Any] = {ORIGINAL: positions}
    for name, value in given.items():
        listed = name in ("short_factor", "long_factor")
        fields[name] = _factors(name, value, head_dim) if listed else _number(name, value)
    if kind == "llama3" and not fields["low_freq_factor"] < fields["high_freq_factor"]:
        raise _fault("low_freq_factor must be less than high_freq_factor")
    if kind == "dynamic" and head_dim < 4:
        raise _fault(f"'dynamic' needs a head_dim of at least 4, not {head_dim}")
    if kind == "longrope" and fields[ORIGINAL] <= 1:
        raise _fault(f"{ORIGINAL} must be more than 1, not {fields[ORIGINAL]}")
    return RotaryConfig(kind, _number("rope_theta", theta), int(positions), fields)


def _number(name: str, value: Any) -> float | bool:
    if name == "truncate" and isinstance(value, bool):
        return value
    if type(value) not in (int, float) or not (0 < value < inf or (name.startswith("mscale") and value == 0)):
        raise _fault(f"{name} must be a positive number, not {value!r}")
    if value > LARGEST:
        raise _fault(f"{name} must be at most {LARGEST:g}, not {value!r}")
    return float(value)


def _factors(name: str, value: Any, head_dim: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != head_dim // 2:
        raise _fault(f"{name} must hold {head_dim // 2} numbers")
    return tuple(_number(name, item) for item in value)


def _fault(what: str) -> ModelError:
    return ModelError(f"drafter rope parameters: {what}")


@dataclass(frozen=True)
class Angles:
    """How far rows at consecutive positions are turned."""

    first: int  # position of the first row
    periods: mx.array  # 1 / ω, [head dim / 2]
    # Cosines and sines, each [rows, 2, head dim / 2], the attention factor included, the sines negative in
    # the first half; None where one kernel does it all.
    turns: tuple[mx.array, mx.array] | None

    def part(self, start: int, stop: int | None = None) -> "Angles":
        turns = self.turns
        if turns is not None and (start or stop is not None):
            turns = turns[0][start:stop], turns[1][start:stop]
        return Angles(self.first + start, self.periods, turns)


class Rotary:
    """Rotates queries and keys. Holds the angles of some positions; no parameters."""

    ahead = 1024  # positions computed at once

    def __init__(self, config: RotaryConfig, dim: int, *, kernel: bool | None = None) -> None:
        """For heads of ``dim``, by mlx's kernel or by stored angles; None: what suits the device."""
        self.config, self.dim = config, dim
        self.kernel = mx.metal.is_available() if kernel is None else kernel
        self.factor = config.attention_factor
        self._periods = self._periods_of(0)
        self._table: tuple[int, mx.array, mx.array] | None = None  # first position, cos, sin

    def __call__(self, rows: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate rows [N, heads, T, head dim] by the kernel, the first at ``offset`` ([N] or one for all)."""
        return self._by_kernel(rows, offset, self._periods)

    def angles(self, first: int, count: int, length: int) -> Angles:
        """The angles of ``count`` positions from ``first`` on, in a sequence of ``length`` positions."""
        periods = self._periods_of(length) if self.config.grows else self._periods
        if self.kernel:
            return Angles(first, periods, None)
        if self.config.grows:
            return Angles(first, periods, self._turns(first, count, periods))
        table = self._table
        if table is None or not table[0] <= first <= table[0] + len(table[1]) - count:
            table = self._table = (first, *self._turns(first, max(count, self.ahead), periods))
            launch(*table[1:])  # arrays that are kept must not need the thread that made them
        start, cos, sin = table
        return Angles(first, periods, (cos[first - start :][:count], sin[first - start :][:count]))

    def rotate(self, rows: mx.array, angles: Angles) -> mx.array:
        """Turn rows [1, T, heads, head dim] at the positions of ``angles``: [1, heads, T, head dim]."""
        if angles.turns is None:
            return self._by_kernel(rows.transpose(0, 2, 1, 3), angles.first, angles.periods)
        pairs = rows.reshape(*rows.shape[:-1], 2, self.dim // 2)
        cos, sin = (part[:, None].astype(rows.dtype) for part in angles.turns)
        turned = _turn(pairs, pairs[..., ::-1, :], cos, sin)
        return turned.reshape(rows.shape).transpose(0, 2, 1, 3)

    def rotate_parts(self, rows: mx.array, parts: Sequence[tuple[Angles, int]]) -> mx.array:
        """As `rotate`, of rows that follow each other in parts, each at so many positions of its own."""
        turns = [angles.turns for angles, _ in parts if angles.turns is not None]
        if turns:
            cos, sin = (mx.concatenate(list(each)) for each in zip(*turns, strict=True))
            return self.rotate(rows, Angles(0, parts[0][0].periods, (cos, sin)))
        turned, first = [], 0
        for angles, count in parts:
            turned.append(self.rotate(rows[:, first : first + count], angles))
            first += count
        return mx.concatenate(turned, axis=2)

    def _by_kernel(self, rows: mx.array, offset: int | mx.array, periods: mx.array) -> mx.array:
        turned = mx.fast.rope(
            rows, self.dim, traditional=False, base=None, scale=1.0, offset=offset, freqs=periods
        )
        return turned if self.factor == 1.0 else turned * self.factor

    def _periods_of(self, length: int) -> mx.array:
        return mx.array([1 / omega for omega in self.config.frequencies(self.dim, length)], mx.float32)

    def _turns(self, first: int, count: int, periods: mx.array) -> tuple[mx.array, mx.array]:
        """Cosines and signed sines, [count, 2, head dim / 2]."""
        angle = mx.arange(first, first + count, dtype=mx.float32)[:, None] / periods
        cos, sin = mx.cos(angle) * self.factor, mx.sin(angle) * self.factor
        return mx.stack([cos, cos], axis=1), mx.stack([-sin, sin], axis=1)


@mx.compile
def _turn(pairs: mx.array, swapped: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    return pairs * cos + swapped * sin
