"""The memory table of the original article, from its formula; imports nothing that is slow."""

from typing import Any

# The table of the original article: a verifier of 28 layers with 8 KV heads of 128 values in 16 bits keeps 28
# positions, 4 pinned and the last 24; all tokens share the proposer's weights. No cache was measured for it.
ARTICLE = {
    "layers": 28,
    "kv_heads": 8,
    "head_dim": 128,
    "bytes_per_value": 2,
    "kv_bytes_per_position": 28 * 2 * 8 * 128 * 2,
    "sink": 4,
    "window": 24,
    "slots": 28,
    "proposer_weights": 596_049_920,
    "proposer_bytes": 2 * 596_049_920,
}
ARTICLE_ROWS = ((8, 8192), (8, 32768), (8, 131072), (64, 131072), (64, 1048576))  # batch and context


def article_bytes(batch: int, context: int) -> float:
    """Bytes a token of ``batch`` sequences of ``context`` positions each, both at least 1."""
    kv = ARTICLE["kv_bytes_per_position"] * min(context, ARTICLE["slots"]) / context
    return kv + ARTICLE["proposer_bytes"] / (batch * context)


def article_document() -> dict[str, Any]:
    """The article's table as the JSON line has it."""
    kv, slots, proposer = (ARTICLE[name] for name in ("kv_bytes_per_position", "slots", "proposer_bytes"))
    rows = [(batch, context, article_bytes(batch, context)) for batch, context in ARTICLE_ROWS]
    return {
        "kind": "analytic",
        "table": "article",
        "formula": f"net(B, S) = {kv:,}·min(S, {slots})/S + {proposer:,}/(B·S); ratio = {kv:,}/net",
        "constants": ARTICLE,
        "measured": False,
        "left_out": [
            "rows kept free for positions that may be taken back",
            "the steps by which buffers grow",
            "the drafter's own state",
            "activations, and what the allocator holds",
            "the verifier's weights",
        ],
        "rows": [
            {
                "batch": batch,
                "context": context,
                "net_bytes_per_token": net,
                "ratio": kv / net,
                "net_bytes_per_token_text": f"{net:,.1f}",
                "ratio_text": f"{kv / net:.2f}×",
            }
            for batch, context, net in rows
        ],
    }
