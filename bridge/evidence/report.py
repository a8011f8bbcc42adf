"""An evidence report as frozen types, one class for each object of ``schema.json``.

The schema file holds the bounds and the meanings; these types only carry the values, so that no rule reads
a raw dictionary. Nothing here judges: `bridge.evidence.parse` turns bytes into a `Report`, the rules read it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(_Frozen):
    """The request a report answers; absent from a run by hand."""

    nonce: str
    workload_sha: str
    preset_digest: str
    engine_source: str


class Claim(_Frozen):
    """One thing the report wants to be believed for."""

    name: str
    arm: str | None = None
    baseline: str | None = None
    at_least: float | None = None
    at_most: float | None = None


class Versions(_Frozen):
    """Versions of what ran."""

    python: str
    mlx: str
    mlx_lm: str
    kakeya: str


class Source(_Frozen):
    """Which source ran: the checkout's commit where there is one, and a digest over the files anyway."""

    sha: str | None
    dirty: bool | None
    source_sha256: str


class CacheLayer(_Frozen):
    """One cache as the model makes it: ``full``, ``sliding`` or ``other``, numbers a position, window."""

    kind: str
    values: int
    window: int | None


class Model(_Frozen):
    """A model by its weights."""

    id: str
    weights_sha256: str
    dtype: str
    quantization: str | None
    parameters: int
    vocab_size: int | None
    largest_block: int | None
    cache_layers: tuple[CacheLayer, ...] | None


class Load(_Frozen):
    """What else the machine did while rows were timed: seconds watched, CPU share, CPU seconds."""

    seconds: float
    other_cpu_share: float | None
    services: dict[str, float]


class Environment(_Frozen):
    """Where it ran."""

    machine: str
    system: str
    os_release: str
    chip: str
    cpu_count: int
    memory_bytes: int
    metal: bool
    device: str
    blas: str
    power_source: str
    thermal_state: str
    swapping: bool | None
    load: Load
    versions: Versions
    git: Source
    models: dict[str, Model]


class Round(_Frozen):
    """One verify forward of `block` tokens, of which `accepted` drafts were confirmed (seconds)."""

    block: int
    accepted: int
    draft_s: float
    verify_s: float


class Cache(_Frozen):
    """Cache classes by count, and the bytes they held after the run."""

    classes: dict[str, int]
    resident_bytes: int
    measured: bool


class Needle(_Frozen):
    """The fact a retrieval prompt hides, and whether the answer came back."""

    needle: str
    answer: str
    depth: float
    prompt_contains_answer_outside_needle: bool
    prompt_contains_needle: bool
    hit: bool


class KVUse(_Frozen):
    """What a KV policy held after a run: layers, numbers of keys and values, bytes of their codes."""

    layers: tuple[int, ...]
    values: int
    bytes: int
    key_distortion: float | None
    value_distortion: float | None


class Sample(_Frozen):
    """One prompt run through one arm. Times are seconds; `tokens` are all generated tokens."""

    prompt_id: str
    prompt_sha256: str
    source_sha256: str
    instruction_sha256: str
    prompt_tokens: int
    prefill_s: float | None = None
    decode_s: float | None = None
    tokens: tuple[int, ...]
    tokens_sha256: str
    text: str
    answer_text: str | None = None
    finish_reason: str
    path: str
    rounds: tuple[Round, ...]
    cache: Cache
    kv: KVUse | None = None
    kept_positions: int | None = None
    restored_positions: int | None = None
    needle: Needle | None = None

    @property
    def decoded(self) -> int:
        """Tokens generated after the first, which the prefill gives."""
        return max(len(self.tokens) - 1, 0)

    @property
    def answer(self) -> str:
        """The text in which an answer counts: without its reasoning, where that was stripped."""
        return self.text if self.answer_text is None else self.answer_text


class System(_Frozen):
    """What an arm declares to have run."""

    loop: str
    drafter: str | None
    block: str | None
    kv: str
    restoration: str | None


class Arm(_Frozen):
    """One system over a set of prompts."""

    name: str
    role: str
    control: str | None = None
    system: System
    timing_scope: str
    samples: tuple[Sample, ...]


class Fallback(_Frozen):
    """A component that was replaced by another during the run, and why."""

    component: str
    reason: str
    count: int


class Liveness(_Frozen):
    """Counters of what really ran."""

    rounds: int
    drafter_forwards: int
    restored_positions: int
    fallbacks: tuple[Fallback, ...]


class Rounding(_Frozen):
    """Largest logit difference between block and single-token forwards of this model, over `positions`."""

    max_abs_logit_error: float
    positions: int


class Divergence(_Frozen):
    """First generated position where an arm's tokens differ from the baseline's."""

    arm: str
    prompt_id: str
    position: int
    plain_token: int
    speculative_token: int
    plain_gap: float


class Restart(_Frozen):
    """A measurement given up after so many samples because the machine was disturbed, then begun again."""

    after_samples: int
    reason: str


class Implementation(_Frozen):
    """A side of a parity comparison: its name, and a digest over what it is or what it wrote."""

    implementation: str
    sha256: str


class ParityRound(_Frozen):
    """One block of a case; a difference that is not finite is None. A pair has no hidden states."""

    case: str
    round: int
    hidden_max_abs: float | None
    logits_max_abs: float | None
    argmax_agreement: float
    path_equal: bool | None
    rows: int
    tokens_equal: bool | None = None


class Parity(_Frozen):
    """Outputs of the subject against stored ones of the reference, both computed in `dtype`."""

    tolerance: float
    dtype: str
    rounds: tuple[ParityRound, ...]
    reference: Implementation
    subject: Implementation

    @property
    def compares_hidden(self) -> bool:
        """Whether hidden states were compared, or logits alone."""
        return any(turn.hidden_max_abs is not None for turn in self.rounds)


class BlockTimes(_Frozen):
    """Seconds a block: of the first eight, the longest, and the mean of all."""

    first: tuple[float, ...]
    max: float
    mean: float


class ArmSummary(_Frozen):
    """Figures of one arm; tokens per second, tokens per verify, bytes, bits."""

    samples: int
    generated_tokens: int
    decoded_tokens: int
    median_decoded_tokens: float
    decode_tokens_per_s: float | None
    end_to_end_tokens_per_s: float | None
    verify_rounds: int
    acceptance_length: float | None
    recall: float | None
    max_resident_bytes: int | None
    stored_bits_per_value: float | None
    key_distortion: float | None
    value_distortion: float | None
    runaway_samples: int
    block_s: BlockTimes | None = None


class Comparison(_Frozen):
    """Figures of an arm relative to the baseline, or to the oracle, over the prompts both ran."""

    arm: str
    baseline: str
    decode_ratio: float | None
    median_decode_ratio: float | None
    end_to_end_ratio: float | None
    identical_samples: int
    compared_samples: int


class ParitySummary(_Frozen):
    """Figures of a comparison with a reference: counts, largest differences, share of equal choices."""

    cases: int
    rounds: int
    rows: int
    hidden_max_abs: float | None
    logits_max_abs: float | None
    argmax_agreement: float | None
    paths_equal: int
    paths_compared: int


class Summary(_Frozen):
    """Everything derived from the rows."""

    arms: dict[str, ArmSummary]
    comparisons: tuple[Comparison, ...]
    parity: ParitySummary | None = None


class Report(_Frozen):
    """A whole report."""

    schema_id: str = Field(alias="schema")
    kind: str
    request: Request | None = None
    started_at: datetime
    finished_at: datetime
    claims: tuple[Claim, ...]
    environment: Environment
    configuration: dict[str, Any]
    arms: tuple[Arm, ...]
    order: tuple[tuple[str, str], ...]
    liveness: Liveness
    rounding: Rounding | None
    divergences: tuple[Divergence, ...]
    restarts: tuple[Restart, ...]
    parity: Parity | None = None
    summary: Summary

    def arm(self, name: str) -> Arm | None:
        """The arm of that name."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def with_role(self, role: str) -> tuple[Arm, ...]:
        """The arms of a role, in the report's order."""
        return tuple(arm for arm in self.arms if arm.role == role)
