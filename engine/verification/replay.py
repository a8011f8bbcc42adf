"""One row run again: the target over what it says, its rounds with the drafter, and its plain steps.

The claimed tokens are fed whatever the models would have chosen, so that one difference does not hide what
comes after it. Nothing here judges: what comes back is what the models say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.acceptance import likeliest
from engine.cache.stats import KVUse, kept_positions, kv_use
from engine.cache.transaction import resident
from engine.config import Engine
from engine.device import read_float, read_tokens, wait
from engine.drafters.base import Drafter
from engine.session import Session
from engine.verification.rows import kept_by, shared
from evidence_format.model import Round

SMALL_CHUNK = 64
STEP = Round(block=1, accepted=0, draft_s=0, verify_s=0)


@dataclass(frozen=True)
class RowReplay:
    """A row that was run again; what caches hold afterwards is named as in `engine.generate.Outcome`."""

    logits: mx.array  # of the claimed tokens, [n, V]
    drafts: list[int]  # how many the drafter gave in each round
    accepted: list[int]  # how many of them were confirmed
    cache_classes: dict[str, int]
    resident_bytes: int
    kept: int | None
    restored: int
    kv: KVUse | None


def native_logits(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> mx.array:
    """Logits of the tokens, [n, V], from one forward over all of them on mlx-lm's own caches."""
    target = engine.target.target
    caches: list[Any] = make_prompt_cache(target.model)
    for part in _chunks(engine, prompt):
        target.forward(mx.array([part], mx.int32), caches, None)
        wait([cache.state for cache in caches])
    logits, _ = target.forward(mx.array([[prompt[-1], *tokens[:-1]]], mx.int32), caches, None)
    wait(logits)
    return logits[0]


def _chunks(engine: Engine, prompt: Sequence[int]) -> list[Sequence[int]]:
    chunk, last = engine.options.prefill_chunk, len(prompt) - 1
    return [prompt[start : min(start + chunk, last)] for start in range(0, last, chunk)]


def policy_steps(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> mx.array:
    """Logits of the tokens, [n, V], from one forward for each, under the engine's policy.

    The prompt is read in small parts, so that what a policy keeps of it is rounded otherwise, too.
    """
    small = min(SMALL_CHUNK, engine.options.prefill_chunk)
    engine = replace(engine, options=replace(engine.options, prefill_chunk=small))
    return replay(engine, prompt, tokens, [STEP] * (len(tokens) - 1), None).logits


def replay(
    engine: Engine,
    prompt: Sequence[int],
    tokens: Sequence[int],
    rounds: Sequence[Round],
    drafter: Drafter | None,
) -> RowReplay:
    """Run the ``rounds`` of a row again, each of the block that is claimed of it, under the engine's policy.

    Together they give the ``tokens``, see `kept_by`. Without a drafter no round has any drafts.
    """
    drafts: list[int] = []
    accepted: list[int] = []
    headroom = max([engine.new_draft_length().largest, *(each.block for each in rounds)])
    how: dict[str, Any] = {"policy": engine.policy, "restoration": engine.restoration}
    with Session(engine.target.target, drafter, headroom=headroom, compiled=False, **how) as session:
        for part in _chunks(engine, prompt):
            session.take_in(part)
        logits = [_forward(session, prompt[-1:], 1)]
        done = 0  # tokens before the one that is fed next
        for each, kept in zip(rounds, kept_by(rounds, len(tokens)) or [], strict=True):
            said = tokens[done : done + kept]  # the bonus, and the drafts that were confirmed
            proposed: list[int] = []
            if each.block > 1 and drafter is not None:
                proposed = read_tokens(drafter.propose(said[0], each.block - 1, None).tokens)
            found = _forward(session, [*said, *proposed[kept - 1 :]], kept)
            logits.append(found[:kept])
            drafts.append(len(proposed))
            accepted.append(_confirmed(proposed, tokens[done + 1 :], found))
            done += kept
        return RowReplay(
            mx.concatenate(logits),
            drafts,
            accepted,
            *resident(session.caches),
            kept=kept_positions(session.caches),
            restored=session.restored,
            kv=kv_use(session.caches),
        )


def _forward(session: Session, fed: Sequence[int], kept: int) -> mx.array:
    """Logits [N, V] of the tokens fed; the first ones are kept."""
    uncached = session.uncached
    session.transaction.begin(len(uncached) + len(fed))
    logits, rows = session.forward(mx.array([[*uncached, *fed]], mx.int32))
    wait(logits, rows)
    session.commit(fed[:kept], None if rows is None else rows[:, len(uncached) :])
    return logits[0, len(uncached) :]


def _confirmed(proposed: Sequence[int], said: Sequence[int], logits: mx.array) -> int:
    """How many drafts the text confirms, and beyond its end the target."""
    confirmed = shared(proposed, said)
    if len(proposed) > confirmed == len(said):
        beyond = read_tokens(likeliest(logits[confirmed : len(proposed)]))
        confirmed += shared(proposed[confirmed:], beyond)
    return confirmed


def largest_difference(one: mx.array, other: mx.array) -> float:
    return read_float(mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max())


def gaps(logits: mx.array, tokens: Sequence[int]) -> list[float]:
    """By how much the best logit of each row [n, V] lies above its token's."""
    rows = logits.astype(mx.float32)
    chosen = mx.take_along_axis(rows, mx.array(list(tokens), mx.int32)[:, None], axis=-1)[:, 0]
    return [float(gap) for gap in (rows.max(axis=-1) - chosen).tolist()]  # type: ignore[union-attr, arg-type]
