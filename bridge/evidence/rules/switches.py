"""Does the configuration hold nothing but switches of the engine?"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.case import Case
from bridge.evidence.shown import several

# Those of `generate` alone: evaluations decode greedily, and a replay refuses what is said to be drawn.
OF_GENERATE = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "stop",
    }
)
# Every switch that a command of the engine writes; tests hold both sides together.
SWITCHES = OF_GENERATE | frozenset(
    {
        "command",
        "block",
        "blas_threads",
        "compiled",
        "drafter",
        "drafter_settings",
        "dtype",
        "fused_kernels",
        "kv",
        "prefill_chunk",
        "projector",
        "quantize",
        "resumed",
        "single_graph",
        "speed_not_claimed",
        "prompts",
        "limit",
        "max_tokens",
        "seed",
        "claim",
        "ignore_stops",
        "min_stops",
        "min_speedup",
        "min_match",
        "min_recall",
        "batch",
        "context",
        "depths",
        "per_depth",
        "chat",
        "thinking",
        "channel_prefix",
        "system",
        "policies",
        "answer_tokens",
        "speed_prompts",
        "speed_limit",
        "claim_parity",
        "claim_bytes",
        "golden",
        "tolerance",
        "product_gflop_per_s",
        "blas_fast",
        "blas_how",
        "ring_rollback_exact",
        "peak_memory_bytes",
        "clients",
        "transport",
        "model_id",
        "checks",
        "checks_failed",
    }
)


def configuration_unknown(case: Case) -> Iterator[str]:
    """A switch that the command of the engine does not have."""
    stated = case.report.configuration
    allowed = SWITCHES if stated.get("command") == "generate" else SWITCHES - OF_GENERATE
    if unknown := sorted(stated.keys() - allowed):
        yield f"configuration holds unknown switches: {several(unknown)}"
