"""Parity: drafters and pairs against stored outputs of published implementations, blocks against tokens.

A *case* of a drafter alone is a folder with ``config.json``, ``model.safetensors`` and ``golden.npz``:

    target_embedding [V, H], target_lm_head [V, H]    the target's table, scaled as the target does, and head
    target_hidden [1, T, K·H]                         hidden states of T positions
    blocks [R, B], spans [R, 2]                       the block of each round, and the rows that are new in it
    round<i>_hidden [1, B, H], round<i>_logits [1, B, V], round<i>_path [1, B-1]    i from 1; path: DFlash 2
    reference []                                      the implementation's name, a text; may be missing

One of a pair holds ``target/`` and ``drafter/``, and in ``golden.npz`` what one greedy run made of a prompt:

    prompt [P]           the token ids it began with
    drafts [R, B-1]      what was drafted in each round; -1 behind the drafts of a shorter block
    logits [R, B-1, V]   the drafter's logits
    accepted [R]         tokens that the round emitted, the target's own included
    tokens [N]           all tokens: the first comes from the prompt, the others from the rounds
    reference []         as above

Of shorter blocks only the tokens are compared: those depend on how a loop runs out. A target is compared with
itself: the text of `generate_step` is run again in blocks, partly rolled back, against forwards of one token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import cycle, islice
from math import inf, isfinite
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engine.decode import Step, decode
from engine.device import Runtime, fit_threads
from engine.draft_length import FixedDraftLength
from engine.drafters.base import Draft
from engine.drafters.block import BlockDrafter, likeliest_path
from engine.errors import ConfigurationError, ModelError, wrap_errors
from engine.evaluation.arms import plain_steps
from engine.evaluation.environment import LoadWatch, describe, target_card
from engine.evaluation.measure import BoundedSwitches, Progress, at_least, check_choice
from engine.evaluation.prompts import Prompt, encode, load_prompts
from engine.evaluation.report import build_report, now
from engine.evaluation.rounding import Run, paired_logits
from engine.generate import token_limit
from engine.memory import require_memory
from engine.networks.dflash import Context, DFlash
from engine.networks.dflash2 import DFlash2
from engine.networks.dflash_config import DFlashConfig
from engine.sampling import Sampler
from engine.target import loading
from engine.target.folder import require_file, weight_files
from engine.target.loading import DTYPES, SHIPPED_TARGET, LoadedTarget
from engine.target.model import Target
from evidence_format import model as evidence
from evidence_format.claims import FEWEST_EQUAL
from evidence_format.model import Implementation, Model, Report, ReportRequest
from evidence_format.text import text_digest
from evidence_format.weights import file_sha256

GOLDEN, TARGET, DRAFTER = "golden.npz", "target", "drafter"
REALS, WHOLES, TEXT = "f", "iu", "U"  # numpy's kinds of types
NAME, LONGEST_NAME, UNNAMED = "reference", 400, "unknown"  # the gate refuses an unknown one
DIFFERENCES = ("hidden_max_abs", "logits_max_abs")
PAD = -1
# The largest difference that passes unless told otherwise. In float32 it is the order of additions that
# differs; half precision rounds every intermediate value, and logits of 10 are told apart by 0.008 and 0.06.
TOLERANCES = {"float32": 1e-4, "float16": 0.25, "bfloat16": 1.0}
# Blocks and single tokens of a target add in different orders, layer after layer.
TARGET_TOLERANCES = TOLERANCES | {"float32": 1e-3}
ROUNDS = ((2, 1), (4, 1), (8, 7), (16, 9), (3, 0), (1, 0))  # block and accepted drafts, over and over

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class RoundParity:
    """One block of a case, or of a text: a report's `ParityRound`, where a difference may be infinite."""

    case: str  # name of the case's folder, or the prompt's id
    round: int  # 1 for the first
    hidden_max_abs: float | None  # None where only logits are compared
    logits_max_abs: float
    argmax_agreement: float  # share of rows with the same likeliest token; of a pair, of equal drafts
    path_equal: bool | None  # of the greedy path through the candidates, where there is one
    rows: int  # of the block; of a pair, its drafts
    tokens_equal: bool | None = None  # of a pair, whether the round emitted the reference's tokens


@dataclass(frozen=True)
class Parity:
    """All rounds of all cases in the order run, the largest difference that passes, and the dtype of ours."""

    rounds: tuple[RoundParity, ...]
    tolerance: float
    dtype: str = "float32"

    @property
    def passed(self) -> bool:
        return all(self._passes(item) for item in self.rounds)

    def _passes(self, item: RoundParity) -> bool:
        """Whether nothing is above the tolerance and choices agree; NaN never passes."""
        close = all(
            value is None or value <= self.tolerance for value in (item.hidden_max_abs, item.logits_max_abs)
        )
        equal = item.path_equal is not False and item.tokens_equal is not False
        return close and equal and item.argmax_agreement >= FEWEST_EQUAL.get(self.dtype, 1.0)

    def rows(self) -> list[dict[str, Any]]:
        return [
            asdict(item) | {name: finite(getattr(item, name)) for name in DIFFERENCES} for item in self.rounds
        ]

    def document(self) -> dict[str, Any]:
        """For the JSON line: what was not compared is left out."""
        cases = []
        for item, row in zip(self.rounds, self.rows(), strict=True):
            absent = [name for name in ("hidden_max_abs", "tokens_equal") if getattr(item, name) is None]
            shown = {name: value for name, value in row.items() if name not in ("rows", *absent)}
            cases.append(shown | {"passed": self._passes(item)})
        return {"kind": "parity", "cases": cases, "tolerance": self.tolerance, "passed": self.passed}


def finite(value: float | None) -> float | None:
    """The number, or None where there is none or it is not finite."""
    return value if value is not None and isfinite(value) else None


def on_host(array: mx.array) -> Array:
    """The same numbers for numpy, which knows no bfloat16."""
    return np.array(array.astype(mx.float32))


def largest_difference(ours: Array, reference: Array) -> float:
    """Largest absolute difference; infinity where one is not finite, so that it cannot pass."""
    difference = np.abs(ours.astype(np.float64) - reference)
    return float(difference.max()) if np.isfinite(difference).all() else inf


def _checked(tolerance: float) -> float:
    if not 0 <= tolerance < inf:
        raise ConfigurationError(f"--tolerance must be a number of at least 0, not {tolerance}")
    return tolerance


class StoredArrays(dict[str, Array]):
    """The arrays of an npz file, each checked by `take`; nothing pickled is ever loaded."""

    def __init__(self, file: Path, largest: float = inf) -> None:
        self.file = file
        if not file.exists():
            raise ModelError(f"{file} is missing")
        require_file(file)
        with wrap_errors(lambda reason: ModelError(f"{file} is corrupt: {reason}")):
            with ZipFile(file) as packed:
                size = sum(item.file_size for item in packed.infolist())
            if size > largest:
                raise ModelError(f"{file} holds {size:,} bytes of arrays; at most {largest:,} are compared")
            with np.load(file, allow_pickle=False) as stored:
                super().__init__({name: np.asarray(value) for name, value in stored.items()})

    def refuse(self, problem: str) -> ModelError:
        return ModelError(f"{self.file}: {problem}")

    def take(self, name: str, kinds: str, *shape: int | None, finite: bool = True) -> Array:
        """An array of one of numpy's `kinds`; a size of None may be any but 0, reals become float32."""
        if name not in self:
            raise ModelError(f"{self.file} lacks {name}")
        value = self[name]
        sizes = zip(shape, value.shape, strict=False)
        if value.ndim != len(shape) or not all(found and wanted in (None, found) for wanted, found in sizes):
            wanted = ", ".join("rows" if size is None else str(size) for size in shape)
            raise self.refuse(f"{name} is {value.shape}, should be ({wanted})")
        if value.dtype.kind not in kinds:
            raise self.refuse(f"{name} is of type {value.dtype}")
        if kinds == REALS:
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity, caught below
                value = self[name] = value.astype(np.float32)
            if finite and not np.isfinite(value).all():
                raise self.refuse(f"{name} holds NaN or infinity")
        return value

    def take_tokens(self, name: str, vocabulary: int, *shape: int | None) -> Array:
        value = self.take(name, WHOLES, *shape)
        self.check_tokens(name, value, vocabulary)
        return value

    def check_tokens(self, name: str, tokens: Array, vocabulary: int) -> None:
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise self.refuse(f"{name} holds tokens outside the vocabulary of {vocabulary}")

    @property
    def reference(self) -> str | None:
        """The name of the implementation that made them; None where they do not say it."""
        if NAME not in self:
            return None
        name = str(self.take(NAME, TEXT))
        if not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
            raise self.refuse(f"{NAME} must be 1 to {LONGEST_NAME} printable characters")
        return name


@dataclass(frozen=True)
class GoldenCase:
    """A case of a drafter alone: the network and the reference arrays, read and checked."""

    name: str
    network: DFlash
    arrays: StoredArrays
    dtype: mx.Dtype = mx.float32

    @classmethod
    def read(cls, folder: Path, dtype: str = "float32") -> "GoldenCase":
        network = loading.load_network(folder, dtype)[0]
        arrays = StoredArrays(folder / GOLDEN)
        _check_drafter_arrays(arrays, network.config)
        return cls(folder.resolve().name, network, arrays, DTYPES[dtype])

    def compare(self) -> Iterator[RoundParity]:
        network, arrays, context = self.network, self.arrays, Context(self.network.config)
        head = self._ours("target_lm_head").T
        spans = arrays["spans"].tolist()
        for number, (block, (first, last)) in enumerate(zip(arrays["blocks"], spans, strict=True), 1):
            embeddings = self._ours("target_embedding", block)[None] * network.config.input_embedding_scale
            hidden = network(embeddings, self._ours("target_hidden")[:, first:last], context)
            logits = network.shape_logits(hidden @ head)
            path_equal = None
            if isinstance(network, DFlash2):
                bonus = mx.array(block[:1].astype(np.int32))
                path = likeliest_path(network.candidate_selector(hidden[0, 1:], logits[0, 1:], bonus)).tokens
                path_equal = bool(np.array_equal(np.array(path), arrays[f"round{number}_path"][0]))
            ours, reference = on_host(logits), arrays[f"round{number}_logits"]
            hidden_max = largest_difference(on_host(hidden), arrays[f"round{number}_hidden"])
            logits_max = largest_difference(ours, reference)
            equal = float((ours.argmax(-1) == reference.argmax(-1)).mean())
            yield RoundParity(self.name, number, hidden_max, logits_max, equal, path_equal, len(block))

    def _ours(self, name: str, rows: Any = slice(None)) -> mx.array:
        return mx.array(self.arrays[name][rows]).astype(self.dtype)


def _check_drafter_arrays(arrays: StoredArrays, config: DFlashConfig) -> None:
    size, width = config.vocab_size, config.hidden_size
    arrays.take("target_embedding", REALS, size, width)
    arrays.take("target_lm_head", REALS, size, width)
    rows = arrays.take("target_hidden", REALS, 1, None, len(config.target_layer_ids) * width).shape[1]
    rounds, length = arrays.take_tokens("blocks", size, None, None).shape
    spans = arrays.take("spans", WHOLES, rounds, 2).tolist()
    end = 0
    for first, last in spans:
        if first != end or not first <= last <= rows:
            raise arrays.refuse(f"spans {spans} do not run on from 0 within {rows} rows")
        end = last
    for number in range(1, rounds + 1):
        arrays.take(f"round{number}_hidden", REALS, 1, length, width, finite=False)
        arrays.take(f"round{number}_logits", REALS, 1, length, size, finite=False)
        if config.second is not None:
            arrays.take_tokens(f"round{number}_path", size, 1, length - 1)


@dataclass(frozen=True)
class PairCase:
    """A case of a target and a drafter, read and checked; the first `full_rounds` have a full block."""

    name: str
    target: Target
    network: DFlash
    arrays: StoredArrays
    full_rounds: int

    @classmethod
    def read(cls, folder: Path, dtype: str = "float32") -> "PairCase":
        target = open_target(folder / TARGET, dtype).target
        drafter = loading.load_drafter(folder / DRAFTER, target, dtype).drafter
        if not isinstance(drafter, BlockDrafter):
            raise ModelError(f"{folder / DRAFTER} is a drafter of the kind {drafter.name}, not a DFlash one")
        arrays = StoredArrays(folder / GOLDEN)
        full = _check_pair_arrays(arrays, target.vocab_size)
        return cls(folder.resolve().name, target, drafter.network, arrays, full)

    def compare(self) -> Iterator[RoundParity]:
        arrays, tokens = self.arrays, self.arrays["tokens"].tolist()
        rows = arrays["drafts"].shape[1]
        drafter = _RecordingDrafter(self.network)
        drafter.bind(self.target)
        first, *steps = decode(
            self.target,
            drafter,
            arrays["prompt"].tolist(),
            max_tokens=len(tokens) + rows + 1,  # blocks stay full for as long as the reference's do
            draft_length=FixedDraftLength(rows + 1),
        )
        same, position = list(first.tokens) == tokens[:1], 1  # part of the first round
        for index, count in enumerate(arrays["accepted"][: self.full_rounds].tolist()):
            own, rest = steps[index : index + 1], steps[index + 1 :]
            same = same and _emitted(own, len(tokens) - position) == tokens[position : position + count]
            position += count
            if index == self.full_rounds - 1:
                same = same and _emitted(rest, len(tokens) - position) == tokens[position:]
            difference, agreement = inf, 0.0  # of ours that emitted more, and has run out
            ran = bool(own) and own[0].round is not None and own[0].round.block == rows + 1
            if ran:
                drafts, logits = map(on_host, drafter.drafted[index])
                difference = largest_difference(logits, arrays["logits"][index])
                agreement = float((drafts == arrays["drafts"][index]).mean())
            yield RoundParity(self.name, index + 1, None, difference, agreement, None, rows, same and ran)
            same = True


def _emitted(steps: Sequence[Step], most: int) -> list[int]:
    return [token for step in steps for token in step.tokens][:most]


class _RecordingDrafter(BlockDrafter):
    """A DFlash drafter that keeps the drafts [B-1] and logits [B-1, V] of its blocks."""

    def __init__(self, network: DFlash) -> None:
        super().__init__(network)
        self.drafted: list[tuple[mx.array, mx.array]] = []
        self._logits: mx.array

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        draft = super().propose(bonus, count, sampler)
        self.drafted.append((draft.tokens, self._logits))
        return draft

    def _block_rows(self, bonus: int, count: int) -> tuple[mx.array, mx.array]:
        hidden, self._logits = super()._block_rows(bonus, count)
        return hidden, self._logits


def _check_pair_arrays(arrays: StoredArrays, vocabulary: int) -> int:
    for name in ("prompt", "tokens"):
        arrays.take_tokens(name, vocabulary, None)
    drafts = arrays.take("drafts", WHOLES, None, None)
    count, most = drafts.shape
    arrays.take("logits", REALS, count, most, vocabulary, finite=False)
    accepted = arrays.take("accepted", WHOLES, count)
    lengths = (drafts != PAD).sum(axis=1)
    for number, (row, length, emitted) in enumerate(zip(drafts, lengths, accepted, strict=True), 1):
        if (row[:length] == PAD).any() or length < 1:
            raise arrays.refuse(f"drafts of round {number} are {row.tolist()}; -1 may only follow drafts")
        arrays.check_tokens(f"drafts of round {number}", row[:length], vocabulary)
        if not 1 <= emitted <= length + 1:
            raise arrays.refuse(
                f"accepted of round {number} is {emitted}; {length} drafts emit 1 to {length + 1} tokens"
            )
    many = len(arrays["tokens"])
    if (total := 1 + int(accepted.sum())) != many:
        raise arrays.refuse(f"tokens holds {many}; the first and those accepted are {total}")
    full = int((lengths == most).sum())
    if (lengths[:full] < most).any() or not full:
        raise arrays.refuse(f"drafts must begin with full blocks; its rounds have {lengths.tolist()} drafts")
    return full


def case_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a case, else its subfolders that hold anything of a case, sorted."""
    with wrap_errors(lambda reason: ModelError(f"{folder} cannot be read: {reason}")):
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder; give a case or a folder of cases")
        found = [each for each in (folder, *sorted(folder.iterdir())) if _is_case(each)]
    if not found:
        raise ModelError(
            f"{folder} holds no case: config.json, model.safetensors and {GOLDEN}, "
            f"or {TARGET}, {DRAFTER} and {GOLDEN}"
        )
    return found[:1] if found[0] == folder else found


def _is_case(folder: Path) -> bool:
    return any((folder / part).exists() for part in ("config.json", GOLDEN, f"{TARGET}/config.json"))


def _is_pair(folder: Path) -> bool:
    """Whether a case has a target; a drafter alone has its config.json in the folder."""
    has_part = any((folder / part).exists() for part in (TARGET, DRAFTER))
    return has_part and not (folder / "config.json").exists()


def compare_all(
    folder: Path, tolerance: float | None = None, *, dtype: str = "float32"
) -> tuple[Parity, Implementation]:
    """Compare a case, or every case in a folder; all are read before the first is computed."""
    folders = case_folders(folder)
    pairs = [path for path in folders if _is_pair(path)]
    # Logits of a pair come from hidden states of forwards over blocks.
    tolerances = TARGET_TOLERANCES if pairs else TOLERANCES
    largest = _checked(tolerances[dtype] if tolerance is None else tolerance)
    cases = [
        PairCase.read(path, dtype) if path in pairs else GoldenCase.read(path, dtype) for path in folders
    ]
    names = {name for case in cases if (name := case.arrays.reference) is not None}
    parity = Parity(tuple(item for case in cases for item in case.compare()), largest, dtype)
    return parity, Implementation(
        implementation="; ".join(sorted(names)) or UNNAMED, sha256=_digest(_case_files(folders))
    )


def _case_files(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for case in folders:
        for model in (case / TARGET, case / DRAFTER) if _is_pair(case) else (case,):
            for file in (model / "config.json", *weight_files(model)):
                yield f"{case.resolve().name}/{file.relative_to(case).as_posix()}", file
        yield f"{case.resolve().name}/{GOLDEN}", case / GOLDEN


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    """sha256 over the lines ``<sha256>  <name>`` of the files that hold outputs, or the source of others."""
    return text_digest("".join(f"{file_sha256(file)}  {name}\n" for name, file in files))


def open_target(model: Path | None, dtype: str | None) -> LoadedTarget:
    """The target of a folder, or the shipped one."""
    require_memory(model or SHIPPED_TARGET, dtype=dtype)
    target = loading.load_target(model or SHIPPED_TARGET, dtype)
    fit_threads(target.target.hidden_size)
    return target


def compare_target(
    target: LoadedTarget,
    prompts: Sequence[Prompt],
    max_tokens: int,
    chunk: int,
    *,
    tolerance: float | None = None,
    progress: Progress,
) -> Parity:
    """Compare the logits of blocks and of single tokens along what plain decoding makes of the prompts."""
    dtype = target.card.dtype
    usual = TARGET_TOLERANCES.get(dtype, TARGET_TOLERANCES["bfloat16"])
    largest = _checked(usual if tolerance is None else tolerance)
    if max_tokens < 2:
        raise ConfigurationError(f"--max-tokens must be at least 2, not {max_tokens}")
    encoded = [encode(p, target.tokenizer, target.target.vocab_size, target.context) for p in prompts]
    model = target.target.model
    rounds: list[RoundParity] = []
    for done, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
        progress(done, len(prompts), "comparing", prompt.id)
        count = token_limit(target, len(tokens), max_tokens)
        text = [int(token) for token, _ in plain_steps(model, tokens, count, chunk, make_prompt_cache(model))]
        run = Run(tokens, text, list(islice(cycle(ROUNDS), len(text))))
        for number, pair in enumerate(paired_logits(target, run, chunk), 1):
            ours, singles = map(on_host, pair)
            difference, equal = largest_difference(ours, singles), ours.argmax(-1) == singles.argmax(-1)
            rounds.append(
                RoundParity(prompt.id, number, None, difference, float(equal.mean()), None, ours.shape[1])
            )
    progress(len(prompts), len(prompts), "comparing", "done")
    return Parity(tuple(rounds), largest, dtype)


def plain_reference() -> Implementation:
    """mlx-lm's plain decoding, and the digest of mlx-lm's own Python files."""
    package = Path(mlx_lm.__file__).resolve().parent
    files = ((file.relative_to(package).as_posix(), file) for file in sorted(package.rglob("*.py")))
    name = f"mlx_lm {version('mlx-lm')} (generate_step's text, token by token on its own caches)"
    return Implementation(implementation=name, sha256=_digest(files))


@dataclass(frozen=True)
class ParitySwitches(BoundedSwitches):
    """What the command line can set about a comparison."""

    golden: Path | None = None  # a case or a folder of cases
    target: bool = False  # compare a target with plain decoding
    model: Path | None = None  # the target's folder
    prompts: str = "all"  # of a target, as the next three
    limit: int = at_least(2)
    max_tokens: int = 48
    prefill_chunk: int = at_least(2048)
    dtype: str | None = None
    tolerance: float | None = None
    reference: str | None = None  # name of the implementation behind the cases

    def check(self) -> None:
        super().check()
        if (self.golden is not None) == self.target:
            raise ConfigurationError("give either --golden DIR or --target")
        if self.target and self.reference is not None:
            raise ConfigurationError("--reference names who made stored outputs; leave it out with --target")
        if self.dtype is not None:
            check_choice("--dtype", self.dtype, tuple(DTYPES))


def measure_parity(
    switches: ParitySwitches, runtime: Runtime, *, progress: Progress, request: ReportRequest | None = None
) -> tuple[Parity, Report]:
    """Compare, and report it. The report claims parity within the tolerance, whatever came out."""
    switches.check()
    started, watch = now(), LoadWatch()
    models: dict[str, Model] = {}
    if switches.golden is not None:
        dtype = switches.dtype or "float32"
        parity, reference = compare_all(switches.golden, switches.tolerance, dtype=dtype)
        if switches.reference is not None:
            reference = reference.model_copy(update={"implementation": switches.reference})
        own: dict[str, Any] = {"command": "parity --golden", "golden": switches.golden.resolve().name}
    else:
        prompts = load_prompts(switches.prompts, switches.limit)
        target = open_target(switches.model, switches.dtype)
        most, chunk = switches.max_tokens, switches.prefill_chunk
        parity = compare_target(target, prompts, most, chunk, tolerance=switches.tolerance, progress=progress)
        models["target"], reference = target_card(target), plain_reference()
        own = {name: getattr(switches, name) for name in ("prompts", "limit", "max_tokens", "prefill_chunk")}
        own["command"] = "parity --target"
    environment = describe(runtime, watch, models)
    versions = environment["versions"]
    subject = Implementation(
        implementation=f"kakeya engine {versions['kakeya']} (mlx {versions['mlx']})",
        sha256=environment["git"]["source_sha256"],
    )
    report = build_report(
        "parity",
        started=started,
        claims=[evidence.ReportClaim(name="parity", at_most=parity.tolerance)],
        environment=environment,
        configuration=own | {"dtype": parity.dtype, "tolerance": parity.tolerance},
        parity=evidence.ParityComparison(
            tolerance=parity.tolerance,
            dtype=parity.dtype,
            rounds=tuple(evidence.ParityRound(**row) for row in parity.rows()),
            reference=reference,
            subject=subject,
        ),
        request=request,
    )
    return parity, report
