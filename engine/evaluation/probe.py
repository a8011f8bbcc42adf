"""What this machine is and whether the engine's foundations hold on it; needs no model.

Its report claims only that the environment block describes the machine.
"""

from time import perf_counter
from typing import Any

import mlx.core as mx

from engine.cache.ring import SlidingRing
from engine.device import INSTALL_HINT, Runtime
from engine.evaluation.environment import LoadWatch, describe
from engine.evaluation.report import build_report, now
from evidence_format.model import Report, ReportClaim, ReportRequest

SIZE = 512


def probe_machine(runtime: Runtime, request: ReportRequest | None = None) -> Report:
    """Look at the machine."""
    started, watch = now(), LoadWatch()
    a, seconds = mx.random.normal((SIZE, SIZE)), []
    for _ in range(4):  # the first is a warm-up
        before = perf_counter()
        mx.eval(a @ a)
        seconds.append(perf_counter() - before)
    facts: dict[str, Any] = {
        "command": "probe",
        "product_gflop_per_s": round(2 * SIZE**3 / min(seconds[1:]) / 1e9, 1),  # of SIZE x SIZE float32
        "blas_fast": runtime.blas.fast,
        "blas_how": runtime.blas.how,
        "fused_kernels": runtime.compiles,
        "ring_rollback_exact": ring_rolls_back(),
        "peak_memory_bytes": int(mx.get_peak_memory()),
    }
    return build_report(
        "probe",
        started=started,
        claims=[ReportClaim(name="machine")],
        environment=describe(runtime, watch, {}),
        configuration=facts,
        request=request,
    )


def advice(runtime: Runtime) -> str | None:
    """One line on how to make this machine faster, or None."""
    if runtime.fast or runtime.blas.how.startswith("KAKEYA_BLAS"):
        return None
    return f"matrix products use the reference BLAS; for speculation to pay: {INSTALL_HINT}"


def ring_rolls_back(window: int = 8, block: int = 4, rounds: int = 12) -> bool:
    """Whether a ring that drops half of each block holds the same rows as one that never saw them."""
    rolled, straight = SlidingRing(window, block), SlidingRing(window, block)
    position = 0
    for _ in range(rounds):
        rows = mx.arange(position, position + block, dtype=mx.float32).reshape(1, 1, block, 1)
        rolled.begin(block)
        rolled.update_and_fetch(rows, -rows)
        rolled.commit(block // 2)
        kept = rows[:, :, : block - block // 2]
        straight.update_and_fetch(kept, -kept)
        position += block - block // 2
    pairs = zip(rolled.keys_and_values(), straight.keys_and_values(), strict=True)
    return rolled.offset == position and all(
        a is not None and b is not None and bool(mx.array_equal(a, b).item()) for a, b in pairs
    )
