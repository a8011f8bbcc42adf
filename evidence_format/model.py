"""The evidence report, ``kakeya.evidence/1``: its types, their bounds, and the JSON Schema made from both.

These types say what one value may be; what values mean together is for the rules. Times are seconds, sizes
bytes, digests sha256.
"""

from __future__ import annotations

import math
import re
from datetime import datetime
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.annotated_handlers import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from evidence_format.policies import NATIVE, PolicySpec, policy_of
from evidence_format.text import loop_start, shown

OUR_LOOP, PLAIN_LOOP = "kakeya.decode", "mlx_lm.generate.generate_step"
CUT_LOOPS = "cut"  # what `configuration.loops` says of that rule
WEIGHTLESS = "prompt-lookup"  # the drafter without a network
SCHEMA_ID: Literal["kakeya.evidence/1"] = "kakeya.evidence/1"
TIME_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z$"

# Every switch that a command of the engine writes; tests hold both sides together. Those of `generate` alone
# are apart: evaluations decode greedily, and a replay refuses what is said to be drawn.
_OF_GENERATE = "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty stop"
_OF_ALL = """
command model_id quantize dtype drafter drafter_settings projector block kv layer_bits compiled fused_kernels
single_graph prefill_chunk blas_threads resumed prompts limit max_tokens seed chat thinking channel_prefix
system batch context depths per_depth policies answer_tokens speed_prompts speed_limit ignore_stops
text chunk piece max_increase loops execute retrieval restarts
claim claim_parity claim_bytes min_stops min_speedup min_match min_recall speed_not_claimed golden tolerance
product_gflop_per_s blas_fast blas_how ring_rollback_exact peak_memory_bytes clients transport
checks checks_failed
"""
OF_GENERATE = frozenset(_OF_GENERATE.split())
SWITCHES = OF_GENERATE | frozenset(_OF_ALL.split())

T = TypeVar("T")


class _NotNull:
    """Marks a field that may be left out, but not be null."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(next(kind for kind in get_args(source) if kind is not NoneType))


class _AsGiven:
    """Marks a number that is written as it was given: 7 or 7.0."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def keep(value: Any, check: core_schema.ValidatorFunctionWrapHandler) -> Any:
            found = check(value)
            return value if type(value) is int else found

        unchanged = core_schema.plain_serializer_function_ser_schema(lambda value: value)
        return core_schema.no_info_wrap_validator_function(keep, handler(source), serialization=unchanged)


def _check_time(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(TIME_PATTERN.rstrip("$"), value):
        raise PydanticCustomError("string_pattern_mismatch", "no time", {"pattern": TIME_PATTERN})
    return value


def _check_switch(value: object) -> object:
    if isinstance(value, dict | list):
        raise PydanticCustomError("switch", "must be of type string or number, boolean or null")
    return value


def _check_unique(values: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(values)) != len(values):
        raise PydanticCustomError("unique", "holds a number twice")
    return values


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Nonce = Annotated[str, Field(pattern=r"^[0-9]{8}t[0-9]{6}z[0-9a-f]{12}$")]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")]
Omissible = Annotated[T | None, _NotNull()]
# Of each array one fault is reported: a hostile report could hold millions.
Many = Annotated[tuple[T, ...], Field(fail_fast=True)]
Word = Annotated[str, Field(min_length=1, max_length=400)]
ShortText = Annotated[str, Field(max_length=100)]
ModelText = Annotated[str, Field(max_length=400_000)]
Count = Annotated[int, Field(ge=0)]
Block = Annotated[int, Field(ge=1, le=1024)]
Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Bound = Annotated[float, _AsGiven()]
Share = Annotated[float, Field(ge=0, le=1)]
Nats = Annotated[float, Field(ge=0, le=100)]
Time = Annotated[
    datetime,
    Field(strict=False),
    BeforeValidator(_check_time),
    WithJsonSchema({"type": "string", "pattern": TIME_PATTERN}),
]
Switch = Annotated[
    Any,
    AfterValidator(_check_switch),
    WithJsonSchema({"type": ["string", "number", "integer", "boolean", "null"]}),
]
Layers = Annotated[
    Many[Annotated[int, Field(ge=0, le=4095)]],
    Field(min_length=1, max_length=4096, json_schema_extra={"uniqueItems": True}),
    AfterValidator(_check_unique),
]
Role = Literal["target", "drafter", "projector"]
ArmRole = Literal["sut", "baseline", "oracle", "control"]
Control = Literal["exact", "noise", "zeros", "no_needle", "block_1", "ignore_stops"]
Kind = Literal["throughput", "recall", "kv", "parity", "probe", "quality", "perplexity"]


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    """`numerator / denominator`, or None where one is missing or the result is no finite number."""
    if numerator is None or not denominator:
        return None
    result = numerator / denominator
    return result if math.isfinite(result) else None


class Frozen(BaseModel):
    """A part of a record: strict, immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ReportRequest(Frozen):
    """The request that a record answers; absent from a run by hand."""

    nonce: Nonce
    workload_sha: Sha
    preset_digest: Digest
    engine_source: Literal["installed", "workload"]


class ReportClaim(Frozen):
    """One thing the report wants to be believed for; docs/evidence.md says what decides each."""

    name: Literal[
        "identical_output",
        "exact_match",
        "speedup",
        "no_slowdown",
        "acceptance_length",
        "recall",
        "recall_parity",
        "resident_bytes",
        "restoration",
        "natural_stops",
        "parity",
        "nll_increase",
        "machine",
    ]
    arm: Omissible[Word] = None
    baseline: Omissible[Word] = None
    at_least: Omissible[Bound] = None
    at_most: Omissible[Bound] = None


class Versions(Frozen):
    """Versions of what ran."""

    python: Word
    mlx: Word
    mlx_lm: Word
    kakeya: Word


class SourceState(Frozen):
    """Which source ran: the checkout's commit, if any, and a digest over the engine's own source files."""

    sha: Sha | None
    dirty: bool | None
    source_sha256: Digest


class CacheLayer(Frozen):
    """A cache as the model makes it.

    values: numbers per position, keys and values of all KV heads (other: 0). window: of a sliding layer.
    """

    kind: Literal["full", "sliding", "other"]
    values: Count
    window: Positive | None


class Model(Frozen):
    """A model by its weights.

    vocab_size and cache_layers are a target's, largest_block (the bonus token included) a drafter's.
    """

    id: Word
    weights_sha256: Digest
    dtype: Word
    quantization: ShortText | None
    parameters: Count
    vocab_size: Positive | None
    largest_block: Block | None
    cache_layers: Annotated[Many[CacheLayer], Field(max_length=1024)] | None


class OtherLoad(Frozen):
    """What else the machine did in the timed seconds.

    other_cpu_share: CPU time of other processes, and where it is counted of other machines on the host, as a
    share of what all cores had. services: CPU seconds of macOS services that come and go by themselves.
    """

    seconds: Amount
    other_cpu_share: Share | None
    services: dict[Literal["spotlight", "time_machine", "photos"], Amount]


class Environment(Frozen):
    """Where it ran. blas: library of the CPU products, e.g. libopenblas.so.0, reference, accelerate."""

    machine: Word
    system: Word
    os_release: Word
    chip: Word
    cpu_count: Positive
    memory_bytes: Positive
    metal: bool
    device: Word
    blas: Word
    power_source: Literal["ac", "battery", "not_applicable", "unknown"]
    thermal_state: Literal["nominal", "fair", "serious", "critical", "not_applicable", "unknown"]
    swapping: bool | None
    load: OtherLoad
    versions: Versions
    git: SourceState
    models: dict[Role, Model]


class VerifyRound(Frozen):
    """One verify forward; block counts the bonus token, so 1 is a plain step, and accepted is under block."""

    block: Block
    accepted: Annotated[int, Field(ge=0, le=1023)]
    draft_s: Amount
    verify_s: Amount
    looked_up: bool = False  # the drafts are from a look-up in the text, not from a network


class Cache(Frozen):
    """Caches after the run. measured: true for the sum of their nbytes, false for a formula."""

    classes: Annotated[dict[str, Positive], Field(min_length=1)]
    resident_bytes: Count
    measured: bool


class NeedleResult(Frozen):
    """The fact a retrieval prompt hides, and whether the answer came back."""

    needle: Word
    answer: Annotated[str, Field(max_length=400)]
    depth: Share
    prompt_contains_answer_outside_needle: bool
    prompt_contains_needle: bool
    hit: bool


class TaskResult(Frozen):
    """What a text is worth as an answer. compiles: of a program; solved: null where no test was run."""

    name: Literal["humaneval", "gsm8k"]
    expected: ShortText | None
    compiles: bool | None
    solved: bool | None


class KVRecord(Frozen):
    """What a KV policy held otherwise than natively: layers, their keys and values, the bytes of the codes.

    Distortion: relative squared error of what the next query sees after the prompt, against native caches.
    """

    layers: Layers
    values: Positive
    bytes: Positive
    key_distortion: Amount | None
    value_distortion: Amount | None


class Sample(Frozen):
    """One prompt run through one arm.

    source_sha256: the prompt before templates and tokens: JSON of its text or of its [role, content] pairs.
    instruction_sha256: the instruction beyond the prompt's content (the empty string's where there is none).
    tokens: the first is from the prefill. decode_s: from the first token to the last. tokens_sha256: of the
    tokens as ASCII decimals joined by spaces. answer_text: the text without reasoning, where that differs.
    path: what really ran, e.g. speculative:dflash. kept_positions: the most that the next query sees in a
    layer with a window. restored_positions: positions x layers whose keys and values were injected.
    """

    prompt_id: Word
    prompt_sha256: Digest
    source_sha256: Digest
    instruction_sha256: Digest
    prompt_tokens: Positive
    prefill_s: Omissible[Amount] = None
    decode_s: Omissible[Amount] = None
    tokens: Many[Count] = Field(max_length=65_536)
    tokens_sha256: Digest
    text: ModelText
    answer_text: Omissible[ModelText] = None
    finish_reason: Literal["stop", "length"]
    path: Word
    rounds: Many[VerifyRound] = Field(max_length=65_536)
    cache: Cache
    kv: Omissible[KVRecord] = None
    kept_positions: Omissible[Count] = None
    restored_positions: Omissible[Count] = None
    needle: Omissible[NeedleResult] = None
    task: Omissible[TaskResult] = None

    @property
    def decoded(self) -> int:
        """Tokens generated after the first, which the prefill gives."""
        return max(len(self.tokens) - 1, 0)

    @property
    def is_distortion_known(self) -> bool:
        """Whether it says how far its codes lie from native keys and values."""
        return self.kv is not None and None not in (self.kv.key_distortion, self.kv.value_distortion)

    @property
    def drafted_blocks(self) -> int:
        """Rounds that verified drafts; those of one token are plain steps."""
        return sum(turn.block >= 2 for turn in self.rounds)

    @property
    def positions(self) -> int:
        """Tokens of the prompt and of the output."""
        return self.prompt_tokens + len(self.tokens)

    @property
    def seconds(self) -> float:
        """What the row took; a missing time counts as none."""
        return (self.prefill_s or 0.0) + (self.decode_s or 0.0)

    @property
    def step_s(self) -> float | None:
        """Seconds per decoded token, where both are there and the quotient is finite."""
        return quotient(self.decode_s, self.decoded)

    @property
    def context_class(self) -> int:
        """Rows of one class have like contexts, within a factor of two: the same work a decoded token."""
        return (2 * self.prompt_tokens + self.decoded).bit_length()

    @property
    def before_loop(self) -> Sample:
        """The row up to where its text begins to loop, if it does: what counts for speed and acceptance.

        Of rounds, up to the end of the one in which that is, and their share of the row's time; of plain
        decoding as many steps.
        """
        start = loop_start(self.tokens)
        if start is None:
            return self
        wanted, decoded, spent, kept = max(start - 1, 0), 0, 0.0, 0
        for turn in self.rounds:
            if decoded >= wanted:
                break
            decoded, kept = decoded + turn.accepted + 1, kept + 1
            spent += turn.draft_s + turn.verify_s
        decoded = min(decoded, self.decoded) if self.rounds else wanted
        whole = sum(turn.draft_s + turn.verify_s for turn in self.rounds) if self.rounds else self.decoded
        share = quotient(spent if self.rounds else wanted, whole) or 0.0
        seconds = None if self.decode_s is None else self.decode_s * share
        cut = {"tokens": self.tokens[: decoded + 1], "rounds": self.rounds[:kept], "decode_s": seconds}
        return self.model_copy(update=cut)

    @property
    def answer(self) -> str:
        """The text in which an answer counts: without its reasoning, where that was stripped."""
        return self.text if self.answer_text is None else self.answer_text


class System(Frozen):
    """What an arm declares. loop: kakeya.decode, or mlx_lm.generate.generate_step for the plain baseline."""

    loop: Word
    drafter: Annotated[str, Field(max_length=400)] | None
    block: Annotated[str, Field(pattern="^(auto|[1-9][0-9]{0,3})$")] | None
    kv: Word
    restoration: ShortText | None

    @property
    def policy(self) -> PolicySpec | None:
        """The declared KV policy, where it is one."""
        return policy_of(self.kv)

    @property
    def has_network(self) -> bool:
        """Whether a drafter with weights is declared."""
        return self.drafter not in (None, WEIGHTLESS)

    @property
    def looks_up(self) -> bool:
        """Whether it drafts by look-ups, at least first; each drafts as many tokens as it finds."""
        return (self.drafter or "").partition("+")[0] == WEIGHTLESS

    @property
    def is_native(self) -> bool:
        """Whether the declared KV policy is that of the model's own caches."""
        return self.policy == NATIVE

    @property
    def is_plain(self) -> bool:
        """Whether it is nothing but mlx-lm's own plain decoding."""
        return (self.loop, self.drafter, self.restoration, self.kv) == (PLAIN_LOOP, None, None, "native")


class Arm(Frozen):
    """One system over a set of prompts."""

    name: Word
    role: ArmRole
    control: Control | None = None
    system: System
    timing_scope: Literal["decode", "end_to_end"]
    samples: Many[Sample] = Field(max_length=10_000)

    @property
    def label(self) -> str:
        """The name, quoted for a message."""
        return shown(self.name)

    @property
    def before_loops(self) -> Arm:
        """The arm with every row up to where its text begins to loop."""
        return self.model_copy(update={"samples": tuple(sample.before_loop for sample in self.samples)})

    @property
    def prompts(self) -> frozenset[str]:
        """The ids of the prompts it ran."""
        return frozenset(sample.prompt_id for sample in self.samples)

    @property
    def needles(self) -> list[NeedleResult]:
        """The needles of its rows."""
        return [sample.needle for sample in self.samples if sample.needle is not None]

    @property
    def rounds(self) -> list[VerifyRound]:
        """The rounds of all rows."""
        return [turn for sample in self.samples for turn in sample.rounds]

    @property
    def drafted_blocks(self) -> int:
        """Rounds that verified drafts, of all rows."""
        return sum(sample.drafted_blocks for sample in self.samples)

    @property
    def steps_s(self) -> list[float]:
        """Seconds per decoded token, of each row that has both."""
        return [sample.step_s for sample in self.samples if sample.step_s is not None]


class Fallback(Frozen):
    """A component that was replaced by another during the run, and why."""

    component: Word
    reason: Word
    count: Positive


class Liveness(Frozen):
    """Counters of what really ran."""

    rounds: Count
    drafter_forwards: Count
    warm_up_forwards: Count = 0  # of the drafter, before any row, to learn what they cost
    restored_positions: Count
    fallbacks: Many[Fallback] = Field(max_length=64)


class Rounding(Frozen):
    """Largest difference between the logits of a block forward and of single-token forwards in this run."""

    max_abs_logit_error: Amount
    positions: Positive


class Divergence(Frozen):
    """Where an arm's tokens first differ from the baseline's; plain_gap: of its two best logits there."""

    arm: Word
    prompt_id: Word
    position: Count
    plain_token: Count
    speculative_token: Count
    plain_gap: Amount


class Restart(Frozen):
    """A measurement that was abandoned and repeated because identical work took very different times."""

    after_samples: Positive
    reason: Word


class Implementation(Frozen):
    """A side of a parity comparison: its name, and a digest over its source or over what it wrote."""

    implementation: Word
    sha256: Digest


class ParityRound(Frozen):
    """One block of a case; a difference that is not finite, or of what was not compared, is null.

    argmax_agreement: share of `rows` whose likeliest token is the same; of a pair, of equal drafts.
    tokens_equal: of a whole pair, which has no hidden states, whether it emitted the reference's tokens.
    """

    case: Word
    round: Positive
    hidden_max_abs: Amount | None
    logits_max_abs: Amount | None
    argmax_agreement: Share
    path_equal: bool | None
    rows: Positive
    tokens_equal: bool | None = None


class ParityComparison(Frozen):
    """Outputs of the subject against stored outputs of the reference, both computed in dtype."""

    tolerance: Amount
    dtype: Word
    rounds: Many[ParityRound] = Field(max_length=10_000)
    reference: Implementation
    subject: Implementation

    @property
    def compares_hidden(self) -> bool:
        """Whether hidden states were compared, or logits alone."""
        return any(turn.hidden_max_abs is not None for turn in self.rounds)


class ScoredChunk(Frozen):
    """One chunk of a text, read in pieces by both systems; a chunk begins with empty caches.

    tokens: those predicted. native_nll, policy_nll: mean of -ln p over them, nats. native_bytes,
    policy_bytes: resident after the chunk, measured. kv: of coded layers, distortion not measured.
    """

    tokens: Positive
    tokens_sha256: Digest
    native_nll: Nats
    policy_nll: Nats
    native_bytes: Positive
    policy_bytes: Positive
    kv: KVRecord | None


class PerplexityComparison(Frozen):
    """A text under a KV policy, perhaps with packed weights, against native caches and weights as stored.

    piece: positions a forward; what it reads of earlier pieces comes out of the policy's caches.
    """

    text_sha256: Digest
    piece: Positive
    kv: Word
    quantize: ShortText | None
    chunks: Many[ScoredChunk] = Field(max_length=4096)

    @property
    def policy(self) -> PolicySpec | None:
        """The declared KV policy, where it is one."""
        return policy_of(self.kv)


class BlockTimes(Frozen):
    """Seconds of draft and verification: of the first blocks, of the longest, and the mean of all."""

    first: Many[Amount] = Field(min_length=1, max_length=8)
    max: Amount
    mean: Amount


class ArmSummary(Frozen):
    """Figures of one arm. block_s: only where configuration.single_graph is true, null without rounds.

    pass_at_1: share of the tasks solved; compiled: share of the programs that compile. Only with tasks.
    """

    samples: Count
    generated_tokens: Count
    decoded_tokens: Count
    median_decoded_tokens: Annotated[Amount, _AsGiven()]
    decode_tokens_per_s: Amount | None
    end_to_end_tokens_per_s: Amount | None
    verify_rounds: Count
    acceptance_length: Amount | None
    recall: Share | None
    max_resident_bytes: Count | None
    stored_bits_per_value: Amount | None
    key_distortion: Amount | None
    value_distortion: Amount | None
    runaway_samples: Count
    block_s: BlockTimes | None = None
    pass_at_1: Share | None = None
    compiled: Share | None = None


class Comparison(Frozen):
    """Figures of an arm relative to the baseline, or to the oracle, over the prompts both ran."""

    arm: Word
    baseline: Word
    decode_ratio: float | None
    median_decode_ratio: float | None
    end_to_end_ratio: float | None
    identical_samples: Count
    compared_samples: Count


class ParitySummary(Frozen):
    """Figures of a comparison with a reference: counts, largest differences, share of equal choices."""

    cases: Count
    rounds: Count
    rows: Count
    hidden_max_abs: Amount | None
    logits_max_abs: Amount | None
    argmax_agreement: Share | None
    paths_equal: Count
    paths_compared: Count


class PerplexitySummary(Frozen):
    """Figures of a perplexity report. nll_interval: 95 %, of the increase; null with fewer than 8 chunks."""

    chunks: Count
    tokens: Count
    native_nll: Amount | None
    policy_nll: Amount | None
    native_perplexity: Amount | None
    policy_perplexity: Amount | None
    nll_increase: float | None
    nll_interval: tuple[float, float] | None
    stored_bits_per_value: Amount | None
    native_bytes: Count | None
    policy_bytes: Count | None


class Summary(Frozen):
    """Everything derived from the rows."""

    arms: dict[str, ArmSummary]
    comparisons: Many[Comparison] = Field(max_length=64)
    parity: Omissible[ParitySummary] = None
    perplexity: Omissible[PerplexitySummary] = None


class Report(Frozen):
    """kakeya evidence report, version 1: written by the engine, judged by the gate.

    configuration: every switch of the run. order: [arm, prompt id] in the order run.
    """

    schema_id: Literal["kakeya.evidence/1"] = Field(alias="schema")
    kind: Kind
    request: Omissible[ReportRequest] = None
    started_at: Time
    finished_at: Time
    claims: Many[ReportClaim] = Field(max_length=32)
    environment: Environment
    configuration: dict[str, Switch] = Field(max_length=64)
    arms: Many[Arm] = Field(max_length=32)
    order: Many[tuple[Word, Word]] = Field(max_length=200_000)
    liveness: Liveness
    rounding: Rounding | None
    divergences: Many[Divergence] = Field(max_length=10_000)
    restarts: Many[Restart] = Field(max_length=16)
    parity: Omissible[ParityComparison] = None
    perplexity: Omissible[PerplexityComparison] = None
    summary: Summary

    @property
    def document(self) -> dict[str, Any]:
        """The report as JSON values, without what was left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    @property
    def cuts_loops(self) -> bool:
        """Whether the run was made under the rule that loops count for no speed and no acceptance."""
        return self.configuration.get("loops") == CUT_LOOPS

    def arm(self, name: str) -> Arm | None:
        """The arm of that name."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def with_role(self, role: str) -> tuple[Arm, ...]:
        """The arms of a role."""
        return tuple(arm for arm in self.arms if arm.role == role)
