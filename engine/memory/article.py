"""The memory table of the original article, from its formula. Analytic: no cache was measured for it.

    net(B, S) = 114,688 · min(S, 28) / S + 1,192,099,840 / (B · S)      bytes a token
    ratio     = 114,688 / net

The verifier keeps keys and values of 28 positions, whatever the length: 4 pinned and the last 24. The weights
of the proposer are shared by all tokens of all sequences. What the formula leaves out is in `LEFT_OUT`.
"""

from dataclasses import dataclass
from typing import Any

LAYERS, KV_HEADS, HEAD_DIM, BYTES = 28, 8, 128, 2  # of the verifier; values in 16 bits
SINK, WINDOW = 4, 24
PROPOSER_WEIGHTS = 596_049_920
KV_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * BYTES  # of one position: keys and values of all layers
SLOTS = SINK + WINDOW
PROPOSER_BYTES = PROPOSER_WEIGHTS * BYTES
FORMULA = f"net(B, S) = {KV_BYTES:,}·min(S, {SLOTS})/S + {PROPOSER_BYTES:,}/(B·S); ratio = {KV_BYTES:,}/net"
PRINTED = ((8, 8192), (8, 32768), (8, 131072), (64, 131072), (64, 1048576))  # batch and context of its rows
LEFT_OUT = (
    "rows kept free for positions that may be taken back",
    "the steps by which buffers grow",
    "the drafter's own state",
    "activations, and what the allocator holds",
    "the verifier's weights",
)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        batch: sequences B.
        context: positions S of each.
        net: bytes a token.
        ratio: how many times fewer than the `KV_BYTES` of a full cache.
    """

    batch: int
    context: int
    net: float
    ratio: float

    @property
    def net_text(self) -> str:
        """As the article prints it."""
        return f"{self.net:,.1f}"

    @property
    def ratio_text(self) -> str:
        """As the article prints it."""
        return f"{self.ratio:.2f}×"


def net_bytes(batch: int, context: int) -> float:
    """Bytes a token of ``batch`` sequences of ``context`` positions each, both at least 1."""
    return KV_BYTES * min(context, SLOTS) / context + PROPOSER_BYTES / (batch * context)


def table() -> tuple[Row, ...]:
    """The article's five rows."""
    nets = [(batch, context, net_bytes(batch, context)) for batch, context in PRINTED]
    return tuple(Row(batch, context, net, KV_BYTES / net) for batch, context, net in nets)


def table_document() -> dict[str, Any]:
    """The table as the JSON line has it."""
    return {
        "kind": "analytic",
        "table": "article",
        "formula": FORMULA,
        "constants": {
            "layers": LAYERS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "bytes_per_value": BYTES,
            "kv_bytes_per_position": KV_BYTES,
            "sink": SINK,
            "window": WINDOW,
            "slots": SLOTS,
            "proposer_weights": PROPOSER_WEIGHTS,
            "proposer_bytes": PROPOSER_BYTES,
        },
        "measured": False,
        "left_out": list(LEFT_OUT),
        "rows": [
            {
                "batch": row.batch,
                "context": row.context,
                "net_bytes_per_token": row.net,
                "ratio": row.ratio,
                "net_bytes_per_token_text": row.net_text,
                "ratio_text": row.ratio_text,
            }
            for row in table()
        ],
    }
