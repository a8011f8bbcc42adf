"""Parity: a drafter network against stored outputs of the implementation it was published with.

A *case* of a drafter alone is a folder with ``config.json``, ``model.safetensors`` and ``golden.npz``:

    target_embedding [V, H], target_lm_head [V, H]    the target's table, scaled as the target does, and head
    target_hidden [1, T, K·H]                         taps of T positions
    blocks [R, B], spans [R, 2]                       the block of each round, and the rows that are new in it
    round<i>_hidden [1, B, H], round<i>_logits [1, B, V], round<i>_path [1, B-1]    i from 1; path: DFlash 2
    reference []                                      the implementation's name, a text; may be missing

The network, its memory and the walk through its candidates are those the engine drafts with. The stored
outputs are float32; ours are computed in float32, or in half precision to see what that costs.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from engine.drafters.block import likeliest_path
from engine.errors import ConfigurationError, ModelError
from engine.networks.dflash import Context, DFlash
from engine.networks.dflash2 import DFlash2, build_network
from engine.networks.dflash_config import DFlashConfig
from engine.target.folder import check_depth, read_json, require_file, tensor_shapes, weight_files
from engine.target.loading import DTYPES, fill_network, opened
from evidence_format.claims import FEWEST_EQUAL

GOLDEN = "golden.npz"
REALS, WHOLES, TEXT = "f", "iu", "U"  # numpy's kinds of types
LONGEST_NAME = 400  # characters of a reference's name
NAME = "reference"
DIFFERENCES = ("hidden_max_abs", "logits_max_abs")
# The largest difference that passes unless told otherwise. In float32 it is the order of additions that
# differs; half precision rounds every intermediate value, and logits of 10 are told apart by 0.008 and 0.06.
TOLERANCES = {"float32": 1e-4, "float16": 0.25, "bfloat16": 1.0}
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class RoundParity:
    """One block of a case, or of a text (`engine.evaluation.target_parity`).

    Attributes:
        case: name of the case's folder, or the prompt's id.
        round: 1 for the first.
        hidden_max_abs: largest difference of a hidden state; None where only logits are compared.
        logits_max_abs: largest difference of a logit.
        argmax_agreement: share of block rows whose likeliest token is the same; of a pair, of equal drafts.
        path_equal: whether the greedy path through the candidates is the same; None where there is none.
        rows: rows of the block; of a pair, its drafts.
        tokens_equal: of a pair, whether the round emitted as many tokens as the reference, and the same.
    """

    case: str
    round: int
    hidden_max_abs: float | None
    logits_max_abs: float
    argmax_agreement: float
    path_equal: bool | None
    rows: int
    tokens_equal: bool | None = None

    def passed(self, tolerance: float, fewest: float) -> bool:
        """Whether nothing is above the tolerance and choices agree; NaN never passes.

        Args:
            tolerance: the largest difference that passes.
            fewest: the smallest share of equal choices that does.
        """
        differences = (self.hidden_max_abs, self.logits_max_abs)
        close = all(value is None or value <= tolerance for value in differences)
        equal = self.path_equal is not False and self.tokens_equal is not False
        return close and equal and self.argmax_agreement >= fewest


@dataclass(frozen=True)
class Parity:
    """All rounds of all cases.

    Attributes:
        rounds: in the order run.
        tolerance: largest difference that passes.
        dtype: what ours was computed in.
        references: names of the implementations compared with, as the cases say.
    """

    rounds: tuple[RoundParity, ...]
    tolerance: float
    dtype: str = "float32"
    references: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every round did."""
        return all(self._passes(item) for item in self.rounds)

    def _passes(self, item: RoundParity) -> bool:
        return item.passed(self.tolerance, FEWEST_EQUAL.get(self.dtype, 1.0))

    def document(self) -> dict[str, Any]:
        """For the JSON line; a difference that is not finite is null there, one not looked at is left out."""
        return {
            "kind": "parity",
            "cases": [self._row(item) for item in self.rounds],
            "tolerance": self.tolerance,
            "passed": self.passed,
        }

    def _row(self, item: RoundParity) -> dict[str, Any]:
        row = asdict(item) | {"passed": self._passes(item)}
        del row["rows"]
        for name in ("hidden_max_abs", "tokens_equal"):
            if row[name] is None:
                del row[name]
        return row | {name: finite(row[name]) for name in DIFFERENCES if name in row}


def finite(value: float | None) -> float | None:
    """The number, or None where there is none or it is not finite."""
    return value if value is not None and isfinite(value) else None


def settled(tolerance: float | None, dtype: str, tolerances: Mapping[str, float] = TOLERANCES) -> float:
    """The tolerance that was given, or the one of the dtype.

    Raises:
        ConfigurationError: the tolerance is not a number of at least 0, or the dtype is unknown.
    """
    if dtype not in tolerances:
        raise ConfigurationError(f"--dtype {dtype!r} is not one of {', '.join(tolerances)}")
    if tolerance is None:
        return tolerances[dtype]
    if not 0 <= tolerance < float("inf"):
        raise ConfigurationError(f"--tolerance must be a number of at least 0, not {tolerance}")
    return tolerance


@dataclass(frozen=True)
class Case:
    """A case read from disk: the network and the reference arrays, checked."""

    name: str
    network: DFlash
    arrays: Arrays
    dtype: mx.Dtype = mx.float32

    @classmethod
    def read(cls, folder: Path, dtype: str = "float32") -> "Case":
        """Read and check one case; ``dtype`` is what the network is computed in.

        Raises:
            ModelError: a file is missing or corrupt, an array is missing, has another shape, or holds NaN or
                infinity.
        """
        config_file = folder / "config.json"
        raw = read_json(config_file)
        files = weight_files(folder)
        check_depth(config_file, raw, tensor_shapes(files))
        try:
            config: DFlashConfig = opened(folder, "config.json", lambda: DFlashConfig.from_dict(raw))
        except ModelError as error:
            raise ModelError(f"{config_file}: {error}") from None
        network = opened(folder, "config.json", lambda: build_network(config))
        fill_network(folder, files, network, raw.get("quantization"))
        network.set_dtype(DTYPES[dtype])
        _refuse_not_finite(folder, network)
        arrays = read_arrays(folder / GOLDEN)
        _check_arrays(folder / GOLDEN, arrays, config)
        return cls(folder.resolve().name, network, arrays, DTYPES[dtype])

    def compare(self) -> list[RoundParity]:
        """Run the rounds one after another, as drafting would."""
        context = Context(self.network.config)
        head = self._taken("target_lm_head").T
        return [self._round(number, context, head) for number in range(1, len(self.arrays["blocks"]) + 1)]

    def _taken(self, name: str, rows: Any = slice(None)) -> mx.array:
        """An array of the case, or some of its first axis's rows, in the dtype of the network."""
        return mx.array(self.arrays[name][rows]).astype(self.dtype)

    def _round(self, number: int, context: Context, head: mx.array) -> RoundParity:
        network, arrays = self.network, self.arrays
        block = arrays["blocks"][number - 1]
        first, last = (int(bound) for bound in arrays["spans"][number - 1])
        embeddings = self._taken("target_embedding", block)[None] * network.config.input_embedding_scale
        hidden = network(embeddings, self._taken("target_hidden")[:, first:last], context)
        logits = network.shape_logits(hidden @ head)
        path_equal = None
        if isinstance(network, DFlash2):
            bonus = mx.array(block[:1].astype(np.int32))
            candidates = network.candidate_selector(hidden[0, 1:], logits[0, 1:], bonus)
            path = np.array(likeliest_path(candidates).tokens)
            path_equal = bool(np.array_equal(path, arrays[f"round{number}_path"][0]))
        reference = arrays[f"round{number}_logits"]
        ours = on_host(logits)
        return RoundParity(
            case=self.name,
            round=number,
            hidden_max_abs=largest_difference(on_host(hidden), arrays[f"round{number}_hidden"]),
            logits_max_abs=largest_difference(ours, reference),
            argmax_agreement=float((ours.argmax(-1) == reference.argmax(-1)).mean()),
            path_equal=path_equal,
            rows=len(block),
        )


def on_host(array: mx.array) -> np.ndarray[Any, Any]:
    """The same numbers for numpy, which knows no bfloat16."""
    return np.array(array.astype(mx.float32))


def largest_difference(ours: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    """Largest absolute difference; infinity where ours is not finite, so that it cannot pass."""
    difference = np.abs(ours.astype(np.float64) - reference)
    return float(difference.max()) if np.isfinite(difference).all() else float("inf")


def _refuse_not_finite(folder: Path, network: Any) -> None:
    for name, value in dict(tree_flatten(network.parameters())).items():
        if not mx.all(mx.isfinite(value)).item():
            raise ModelError(f"{folder}: {name} holds NaN or infinite weights")


def read_arrays(file: Path) -> Arrays:
    """The arrays of an npz file; nothing pickled is ever loaded.

    Raises:
        ModelError: the file is missing or corrupt.
    """
    if not file.exists():
        raise ModelError(f"{file} is missing")
    require_file(file)
    try:
        with np.load(file, allow_pickle=False) as stored:
            return {name: np.asarray(value) for name, value in stored.items()}
    except Exception as error:  # zip, zlib and numpy raise many kinds; all of them are the file's fault
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{file} is corrupt: {reason}") from None


def take(
    file: Path, arrays: Arrays, name: str, kinds: str, *shape: int | None, finite: bool = True
) -> np.ndarray[Any, Any]:
    """An array of a case, checked; reals become float32.

    Args:
        file: the case's file, for messages.
        arrays: what it holds.
        name: of the array.
        kinds: numpy's kinds of types it may have.
        shape: its sizes, None for any.
        finite: whether reals must be finite; stored outputs that are not fail the comparison instead.

    Raises:
        ModelError: it is missing, or has another shape or type.
    """
    if name not in arrays:
        raise ModelError(f"{file} lacks {name}")
    value = arrays[name]
    fits = value.ndim == len(shape) and all(
        wanted in (None, found) for wanted, found in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ModelError(f"{file}: {name} is {value.shape}, should be ({wanted})")
    if value.dtype.kind not in kinds:
        raise ModelError(f"{file}: {name} is of type {value.dtype}")
    if kinds == REALS:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity, caught below
            value = arrays[name] = value.astype(np.float32)
        if finite and not np.isfinite(value).all():
            raise ModelError(f"{file}: {name} holds NaN or infinity")
    return value


def check_name(file: Path, arrays: Arrays) -> None:
    """Raise ModelError where the reference's name is no text that a report could hold."""
    if NAME in arrays:
        named = str(take(file, arrays, NAME, TEXT))
        if not named.isprintable() or not 0 < len(named) <= LONGEST_NAME:
            raise ModelError(f"{file}: {NAME} must be 1 to {LONGEST_NAME} printable characters")


def _check_arrays(file: Path, arrays: Arrays, config: DFlashConfig) -> None:
    """Names, kinds and shapes of the arrays, and that what the network is given are numbers."""
    check_name(file, arrays)
    size, width = config.vocab_size, config.hidden_size
    take(file, arrays, "target_embedding", REALS, size, width)
    take(file, arrays, "target_lm_head", REALS, size, width)
    rows = take(file, arrays, "target_hidden", REALS, 1, None, len(config.target_layer_ids) * width).shape[1]
    blocks = take(file, arrays, "blocks", WHOLES, None, None)
    rounds, length = blocks.shape
    if rounds < 1 or length < 2:
        raise ModelError(f"{file}: blocks is {blocks.shape}; there must be a round, and a draft in its block")
    refuse_outside(file, "blocks", blocks, size)
    _check_spans(file, take(file, arrays, "spans", WHOLES, rounds, 2), rows)
    for number in range(1, rounds + 1):
        take(file, arrays, f"round{number}_hidden", REALS, 1, length, width, finite=False)
        take(file, arrays, f"round{number}_logits", REALS, 1, length, size, finite=False)
        if config.second is not None:
            path = take(file, arrays, f"round{number}_path", WHOLES, 1, length - 1)
            refuse_outside(file, f"round{number}_path", path, size)


def refuse_outside(file: Path, name: str, tokens: np.ndarray[Any, Any], vocabulary: int) -> None:
    """Raise ModelError for tokens that are not in the vocabulary."""
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ModelError(f"{file}: {name} holds tokens outside the vocabulary of {vocabulary}")


def _check_spans(file: Path, spans: np.ndarray[Any, Any], rows: int) -> None:
    """Each round's rows begin where those of the round before ended."""
    end = 0
    for first, last in spans.tolist():
        if first != end or not first <= last <= rows:
            raise ModelError(f"{file}: spans {spans.tolist()} do not run on from 0 within {rows} rows")
        end = last
