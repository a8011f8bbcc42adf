"""One row again: what needs no model (prompt, texts, end, the sum of its rounds), then the models over it.

The target gets what the row says, its rounds with the drafter, and its plain steps. The claimed tokens are
fed whatever the models would have chosen, so that one difference does not hide what comes after it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.acceptance import likeliest
from engine.cache.stats import KVUse, kept_positions, kv_use
from engine.cache.transaction import resident
from engine.config import Engine
from engine.detokenize import text_of
from engine.device import read_float, read_tokens, wait
from engine.drafters.base import Drafter
from engine.drafters.with_lookup import network_of
from engine.evaluation.prompts import answer_of
from engine.evaluation.report import needle_result
from engine.evaluation.throughput import IGNORE_STOPS
from engine.session import Session
from engine.stops import Stops
from engine.target.loading import LoadedTarget
from engine.verification.inputs import EncodedPrompt
from evidence_format.model import Arm, Sample, VerifyRound
from evidence_format.text import shown, text_digest, tokens_digest
from evidence_format.verification import Check, ReplayFinding

LONGEST = 4000  # characters of a finding's message
BEFORE = 30  # characters of a long text that are shown before the first difference
SMALL_CHUNK = 64
STEP = VerifyRound(block=1, accepted=0, draft_s=0, verify_s=0)


def finding(where: str, check: Check, message: str) -> ReplayFinding:
    """What the report says of a row (``arm/prompt_id``) or a model (its role), and the replay does not."""
    return ReplayFinding(where=where, check=check, message=message[:LONGEST])


def differences(
    where: str, check: Check, pairs: Mapping[str, tuple[Any, Any]], near: float = 0.0
) -> Iterator[ReplayFinding]:
    """Find values (reported, computed) that are not equal; numbers may differ by the share `near`."""
    for name, (one, other) in pairs.items():
        if one == other or (near and abs(one - other) <= near * max(abs(one), abs(other))):
            continue
        texts = [each if isinstance(each, str) else str(each) for each in (one, other)]
        is_text = isinstance(one, str) and isinstance(other, str)
        start = max(shared(one, other) - BEFORE, 0) if is_text else 0
        at = f" from character {start}" if start else ""
        reported, computed = (shown(text[start:]) for text in texts)
        yield finding(where, check, f"{name}{at}: reported {reported}, computed {computed}")


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How many entries two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def name_of(arm: Arm, row: Sample) -> str:
    """A row as findings name it."""
    return f"{arm.name}/{row.prompt_id}"


def check_set(arm: Arm, prompts: Mapping[str, EncodedPrompt]) -> Iterator[ReplayFinding]:
    """Find whether an arm ran just the prompts that its configuration gives, in their order."""
    ran, wanted = [row.prompt_id for row in arm.samples], list(prompts)
    faults = dict.fromkeys(prompts.keys() - ran, "the configuration asks for this prompt; it has no row")
    for name, more in (Counter(ran) - Counter(wanted)).items():
        faults[name] = f"{more} rows more are of this prompt than the configuration gives"
    if not faults and ran != wanted:
        first = next(one for one, other in zip(ran, wanted, strict=True) if one != other)
        faults[first] = "the rows are not in the order of the prompts"
    for name, fault in faults.items():
        yield finding(f"{arm.name}/{name}", "prompts", fault)


def check_row(
    target: LoadedTarget, stop_texts: Sequence[str], arm: Arm, row: Sample, asked: EncodedPrompt
) -> Iterator[ReplayFinding]:
    """Find what of a row does not follow from its prompt and its tokens."""
    where, prompt, tokenizer = name_of(arm, row), asked.prompt, target.tokenizer
    said = row.model_dump(exclude={"rounds", "tokens"}) | {"tokens": len(row.tokens)}

    def unlike(check: Check, **computed: Any) -> Iterator[ReplayFinding]:
        return differences(where, check, {name: (said[name], value) for name, value in computed.items()})

    yield from unlike(
        "prompts",
        prompt_sha256=tokens_digest(asked.tokens),
        source_sha256=prompt.source_sha256,
        prompt_tokens=len(asked.tokens),
        instruction_sha256=text_digest(prompt.instruction),
    )
    if outside := [token for token in row.tokens if token >= target.target.vocab_size]:
        message = f"token {outside[0]} is not one of the model's {target.target.vocab_size}"
        yield finding(where, "rows", message)
        return
    ends = () if arm.control == IGNORE_STOPS else target.stops
    stops = Stops(ends, stop_texts, tokenizer if stop_texts else None)
    stops.start(asked.tokens)
    end = stops.find(row.tokens)
    yield from unlike(
        "rows",
        tokens_sha256=tokens_digest(row.tokens),
        tokens=asked.limit if end is None else min(end, asked.limit),
        finish_reason="length" if end is None else "stop",
    )
    text = text_of(tokenizer, row.tokens, Stops(ends, stop_texts, tokenizer), asked.tokens)
    answer = answer_of(tokenizer, asked.tokens, text)
    needle: dict[str, Any] = {}
    if prompt.needle is not None and prompt.text is not None:
        needle = needle_result(prompt.needle, prompt.text, answer, text).model_dump()
    hidden = said["needle"] or {}
    said["hit"] = hidden.pop("hit", None)
    stripped, hit = None if answer == text else answer, needle.pop("hit", None)
    yield from unlike("text", text=text, answer_text=stripped, hit=hit)
    both = {name: (hidden.get(name), needle.get(name)) for name in {**hidden, **needle}}
    yield from differences(where, "prompts", both)
    if row.rounds and kept_by(row.rounds, len(row.tokens)) is None:
        message = f"{len(row.rounds)} rounds do not give {len(row.tokens)} tokens"
        yield finding(where, "rounds", message)


def kept_by(rounds: Sequence[VerifyRound], tokens: int) -> list[int] | None:
    """How many tokens each round gave; None where they do not give just these tokens.

    The prompt gave the first token of all, and the end may cut the last round.
    """
    kept, left = [], tokens - 1
    for each in rounds:
        if left < 1 or each.accepted >= each.block:
            return None
        kept.append(min(each.accepted + 1, left))
        left -= kept[-1]
    return None if left else kept


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
    rounds: Sequence[VerifyRound],
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
            session.prefill(part)
        logits = [_forward(session, prompt[-1:], 1)]
        done = 0  # tokens before the one that is fed next
        for each, kept in zip(rounds, kept_by(rounds, len(tokens)) or [], strict=True):
            said = tokens[done : done + kept]  # the bonus, and the drafts that were confirmed
            proposed: list[int] = []
            if each.block > 1 and drafter is not None:
                # Which of the two drafted depends on times; a row says it.
                draft = drafter.look_up if each.looked_up else network_of(drafter).propose
                proposed = read_tokens(draft(said[0], each.block - 1).tokens)
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
    """Largest absolute difference of two arrays of logits."""
    return read_float(mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max())


def gaps(logits: mx.array, tokens: Sequence[int]) -> list[float]:
    """By how much the best logit of each row [n, V] lies above its token's."""
    rows = logits.astype(mx.float32)
    chosen = mx.take_along_axis(rows, mx.array(list(tokens), mx.int32)[:, None], axis=-1)[:, 0]
    return [float(gap) for gap in (rows.max(axis=-1) - chosen).tolist()]  # type: ignore[union-attr, arg-type]
