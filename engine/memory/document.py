"""A prediction as its JSON line: labelled analytic, with what was assumed."""

from typing import Any

from engine.memory.model import Unloaded
from engine.memory.predict import Asked, Prediction

NOTE = (
    "predicted by the caches' own code on shapes, after the prompts and one round; "
    "nothing was allocated and no cache was measured"
)
LEFT_OUT = (
    "activations, and what the allocator holds",
    "copies that live while a batch is merged or a buffer grows",
    "rows a restored policy keeps until their turn comes, and a projector's weights",
)


def prediction_document(model: Unloaded, asked: Asked, prediction: Prediction) -> dict[str, Any]:
    """Everything the table shows, and what it was asked for."""
    run = prediction.run
    drafter = None
    if asked.drafter is not None:
        drafter = {"spec": asked.drafter, "weights_bytes": prediction.drafter_weights}
    return {
        "kind": "analytic",
        "table": "prediction",
        "measured": False,
        "note": NOTE,
        "left_out": list(LEFT_OUT),
        "model": str(model.path),
        "dtype": model.dtype,
        "dtype_from": model.dtype_from,
        "weights_bytes": model.weights,
        "weights_from": model.weights_from,
        "drafter": drafter,
        "batch": run.batch,
        "block": run.block,
        "headroom": run.headroom,
        "prefill_chunk": run.prefill_chunk,
        "rows": [
            {
                "kv": row.kv,
                "context": row.context,
                "batch": row.batch,
                "block": row.block,
                "cache_bytes": row.nbytes,
                "bytes_per_sequence": row.per_sequence,
                "bytes_per_token": row.per_token,
                "ratio_to_native": row.ratio,
                "drafter_state_bytes": row.drafter,
                "total_bytes": model.weights + prediction.drafter_weights + row.drafter + row.nbytes,
                "layers": [
                    {"holds": kind.holds, "cache": kind.cache, "layers": kind.layers, "bytes": kind.nbytes}
                    for kind in row.kinds
                ],
            }
            for row in prediction.rows
        ],
        "refused": prediction.refused,
    }
