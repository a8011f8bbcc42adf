"""One request on its way through the engine: what is to be decoded, and what is told about it.

Made where requests come in, worked off by the engine's thread (`engine.server.decoding.worker`). Arrays are
made there alone, so nothing here holds any.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.cache.stats import KVUse
from engine.decode import Round, Step
from engine.grammar import Grammar
from engine.registry import Channel
from engine.sampling import Sampling

Drafting = Literal["default", "none", "prompt-lookup"]  # the model's own, nothing, or look-ups alone


@dataclass(frozen=True)
class Work:
    """What is to be decoded.

    Attributes:
        prompt: token ids.
        lasting: so many of the prompt's tokens are likely to begin the conversation's next prompt, too.
        max_tokens: emit at most so many.
        channel: how keys and values are kept.
        drafter: what drafts.
        block: tokens a verification, the bonus included; None lets the draft length choose.
        sampling: how tokens are drawn.
        stop_texts: strings that end the text.
        logprobs: alternatives of each token to tell; None for no log-probabilities.
        penalties: mlx-lm's names of penalties to their values; zeros are left out.
        bias: token ids to what is added to their logits.
        grammar: what the text has to follow.
        owner: whose sessions may be used, see `engine.server.decoding.sessions.Key`.
    """

    prompt: list[int]
    lasting: int
    max_tokens: int
    channel: Channel
    drafter: Drafting = "default"
    block: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop_texts: tuple[str, ...] = ()
    logprobs: int | None = None
    penalties: Mapping[str, float] = field(default_factory=dict)
    bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    owner: str = ""


@dataclass(frozen=True)
class Progress:
    """So many of the prompt's tokens are computed, or were held already."""

    done: int
    total: int


@dataclass(frozen=True)
class Ended:
    """The last event of a request that came to its end; see `engine.server.wire.replies.Provenance`."""

    finish: str
    drafter: str | None
    block: int | str | None
    why_off: str | None
    rounds: tuple[Round, ...]
    drafter_forwards: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    resident_bytes: int
    cache_classes: Mapping[str, int]
    cache_strategy: str | None = None
    kept_positions: int | None = None
    coded: KVUse | None = None


@dataclass(frozen=True)
class Failed:
    """The last event of a request that did not."""

    error: Exception


Event = Progress | Step | Ended | Failed
Deliver = Callable[[Event], None]
