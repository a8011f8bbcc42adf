"""One row run again: the target over what it says, its rounds with the drafter, and its plain steps.

The claimed tokens are fed whatever the models would have chosen, so that one difference does not hide what
comes after it. Nothing here judges: what comes back is what the models say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.acceptance import likeliest
from engine.cache.stats import KVUse, kept_positions, kv_use
from engine.cache.transaction import resident
from engine.config import Engine
from engine.device import available_cpus, launch, read_float, read_tokens, wait
from engine.drafters.base import Drafter
from engine.session import Session
from evidence_format.model import Round

SMALL_CHUNK = 64


@dataclass(frozen=True)
class Held:
    """What caches held when a row had ended; see `engine.evaluation.arms.Outcome` for the fields."""

    classes: dict[str, int]
    resident_bytes: int
    kept: int | None
    restored: int
    kv: KVUse | None = None


@dataclass(frozen=True)
class Followed:
    """A row that was run again.

    Attributes:
        logits: of the claimed tokens, [n, V].
        drafts: how many the drafter gave in each round.
        accepted: how many of them were confirmed.
        held: what the caches hold afterwards; None: they were not the row's.
    """

    logits: mx.array
    drafts: list[int]
    accepted: list[int]
    held: Held | None = None


def follow(
    engine: Engine,
    drafter: Drafter | None,
    prompt: Sequence[int],
    tokens: Sequence[int],
    rounds: Sequence[Round],
) -> Followed:
    """The target over prompt and tokens once, on mlx-lm's own caches, and the drafter along the rounds.

    Args:
        engine: the models; native caches are meant, whatever its policy.
        drafter: proposes the drafts of rounds of two tokens or more; None: nothing is drafted.
        prompt: token ids.
        tokens: that were generated, by claim.
        rounds: by claim; together they give the tokens, see `kept_by`.
    """
    target, text = engine.target.target, [*prompt, *tokens[:-1]]
    taps = target.tap(drafter.tap_layers) if drafter and drafter.tap_layers else None
    try:
        caches, heard = make_prompt_cache(target.model), list[mx.array]()
        for part in _parts(len(prompt), len(text), engine.options.prefill_chunk):
            logits, rows = target.forward(mx.array([text[part]], mx.int32), caches, taps)
            heard += [] if rows is None else [rows]
            wait([cache.state for cache in caches], rows)
        wait(logits)
    finally:
        if taps is not None:
            taps.close()
    said = logits[0, -len(tokens) :]
    if drafter is None:
        return Followed(said, [0] * len(rounds), [0] * len(rounds))
    memory = None if taps is None else mx.concatenate(heard, axis=1)
    drafter.start()
    drafter.observe(prompt, None if memory is None else memory[:, : len(prompt)])
    drafts, accepted, done = [], [], 0
    for each, kept in zip(rounds, kept_by(rounds, len(tokens)), strict=True):
        proposed: list[int] = []
        if each.block > 1:
            proposed = read_tokens(drafter.propose(tokens[done], each.block - 1, None).tokens)
        confirmed = _shared(proposed, tokens[done + 1 :])
        if (
            len(proposed) > confirmed == len(tokens) - done - 1
        ):  # the text ends; the target says how they fare
            confirmed += _confirmed_behind(engine, [*prompt, *tokens], proposed[confirmed:])
        drafts.append(len(proposed))
        accepted.append(confirmed)
        at = len(prompt) + done
        drafter.observe(tokens[done : done + kept], None if memory is None else memory[:, at : at + kept])
        done += kept
    return Followed(said, drafts, accepted)


def width() -> int:
    """How many texts are best looked at at once: mlx runs one CPU stream on one core."""
    return 1 if mx.metal.is_available() else available_cpus()


def gaps_of(texts: Sequence[tuple[Sequence[int], Sequence[int]]], engine: Engine) -> list[list[float]]:
    """`gaps` of texts by one forward each, on mlx-lm's own caches, all at once.

    Args:
        texts: prompt and generated tokens of each, at most `width` of them.
        engine: the models; native caches are meant, whatever its policy.
    """
    device, found = mx.default_device(), []
    for prompt, tokens in texts:
        with mx.stream(mx.new_stream(device) if len(texts) > 1 else mx.default_stream(device)):
            text, caches = [*prompt, *tokens[:-1]], make_prompt_cache(engine.target.target.model)
            for part in _parts(len(prompt), len(text), engine.options.prefill_chunk):
                logits, _ = engine.target.target.forward(mx.array([text[part]], mx.int32), caches, None)
            found.append(_missing(logits[0], tokens))
            launch(found[-1])
    return [_read(each) for each in found]


def _parts(prompt: int, whole: int, chunk: int) -> list[slice]:
    """The forwards over a text: all of its prompt but the last token in chunks, then the rest."""
    starts = list(range(0, prompt - 1, chunk))
    return [slice(start, min(start + chunk, prompt - 1)) for start in starts] + [slice(prompt - 1, whole)]


def _shared(drafts: Sequence[int], text: Sequence[int]) -> int:
    """How many of the drafts the text confirms."""
    pairs = enumerate(zip(drafts, text, strict=False))
    return next((at for at, (draft, token) in pairs if draft != token), min(len(drafts), len(text)))


def _confirmed_behind(engine: Engine, text: Sequence[int], drafts: Sequence[int]) -> int:
    """How many drafts behind a text's end are what the target says there."""
    caches = _prefilled(engine, text)
    fed = mx.array([[text[-1], *drafts[:-1]]], mx.int32)
    logits, _ = engine.target.target.forward(fed, caches, None)
    return _shared(drafts, read_tokens(likeliest(logits[0])))


def plain_steps(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[mx.array, Held]:
    """Logits of the tokens, [n, V], from one forward for each, on mlx-lm's own caches; and what these hold.

    As mlx-lm's loop does, a step is taken for the last token too, whose outcome is not looked at.
    """
    caches, rows = _prefilled(engine, prompt), []
    for token in [prompt[-1], *tokens]:
        logits, _ = engine.target.target.forward(mx.array([[token]], mx.int32), caches, None)
        wait(logits)
        rows.append(logits[0])
    classes, nbytes = resident(caches)
    held = Held(classes, nbytes, kept_positions(caches), 0)
    return mx.concatenate(rows[:-1]), held


def _prefilled(engine: Engine, prompt: Sequence[int]) -> list[object]:
    """mlx-lm's caches with all of a prompt but its last token."""
    caches: list[object] = make_prompt_cache(engine.target.target.model)
    chunk, last = engine.options.prefill_chunk, len(prompt) - 1
    for start in range(0, last, chunk):
        engine.target.target.forward(mx.array([prompt[start : min(start + chunk, last)]]), caches, None)
        wait([cache.state for cache in caches])  # type: ignore[attr-defined]
    return caches


def policy_steps(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> mx.array:
    """Logits of the tokens, [n, V], from one forward for each, under the engine's policy.

    The prompt is taken in by small parts, so that what a policy keeps of it is rounded otherwise, too.
    """
    small = min(SMALL_CHUNK, engine.options.prefill_chunk)
    engine = replace(engine, options=replace(engine.options, prefill_chunk=small))
    steps = [Round(block=1, accepted=0, draft_s=0, verify_s=0)] * (len(tokens) - 1)
    return redo(engine, None, prompt, tokens, steps).logits


def redo(
    engine: Engine,
    drafter: Drafter | None,
    prompt: Sequence[int],
    tokens: Sequence[int],
    rounds: Sequence[Round],
) -> Followed:
    """Run rounds again, each of the block that is claimed of it, under the engine's policy.

    Args:
        engine: the models; its policy is the row's.
        drafter: proposes the drafts; None: every round is a plain step.
        prompt: token ids.
        tokens: that were generated, by claim.
        rounds: by claim; together they give the tokens, see `kept_by`.
    """
    logits: list[mx.array] = []
    drafts: list[int] = []
    accepted: list[int] = []
    largest = max((each.block for each in rounds), default=1)
    headroom = max(engine.new_draft_length().largest, largest)
    with Session(
        engine.target.target,
        drafter,
        headroom=headroom,
        compiled=False,
        policy=engine.policy,
        restoration=engine.restoration,
    ) as session:
        chunk, last = engine.options.prefill_chunk, len(prompt) - 1
        for start in range(0, last, chunk):
            session.take_in(prompt[start : min(start + chunk, last)])
        logits.append(_forward(session, prompt[-1:], prompt[-1:]))
        done = 0  # tokens before the one that is fed next
        for each, kept in zip(rounds, kept_by(rounds, len(tokens)), strict=True):
            bonus, said = tokens[done], tokens[done + 1 : done + kept]
            proposed: list[int] = []
            if each.block > 1 and drafter is not None:
                proposed = read_tokens(drafter.propose(bonus, each.block - 1, None).tokens)
            fed = [bonus, *said, *proposed[len(said) :]]
            found = _forward(session, fed, [bonus, *said])
            logits.append(found[:kept])
            drafts.append(len(proposed))
            accepted.append(_confirmed(proposed, tokens[done + 1 :], found))
            done += kept
        classes, nbytes = resident(session.caches)
        held = Held(classes, nbytes, kept_positions(session.caches), session.restored, kv_use(session.caches))
    return Followed(mx.concatenate(logits), drafts, accepted, held)


def kept_by(rounds: Sequence[Round], tokens: int) -> list[int]:
    """How many tokens each round gave; the prompt gave the first of all, and the end may cut the last round.

    Raises:
        ValueError: they do not give just these tokens.
    """
    kept, left = [], tokens - 1
    for each in rounds:
        if left < 1 or each.accepted >= each.block:
            break
        kept.append(min(each.accepted + 1, left))
        left -= kept[-1]
    if left or len(kept) < len(rounds):
        raise ValueError(f"{len(rounds)} rounds do not give {tokens} tokens")
    return kept


def _forward(session: Session, fed: Sequence[int], kept: Sequence[int]) -> mx.array:
    """Logits [N, V] of the tokens fed, of which the first are kept."""
    carried = session.carried
    session.transaction.begin(len(carried) + len(fed))
    logits, rows = session.forward(mx.array([[*carried, *fed]], mx.int32))
    wait(logits, rows)
    session.commit(kept, None if rows is None else rows[:, len(carried) :])
    return logits[0, len(carried) :]


def _confirmed(proposed: Sequence[int], said: Sequence[int], logits: mx.array) -> int:
    """How many drafts the text confirms, and behind its end the target."""
    confirmed = _shared(proposed, said)
    if len(proposed) > confirmed == len(said):
        behind = read_tokens(likeliest(logits[confirmed : len(proposed)]))
        confirmed += _shared(proposed[confirmed:], behind)
    return confirmed


def largest_difference(one: mx.array, other: mx.array) -> float:
    """Largest absolute difference of two arrays of logits."""
    return read_float(mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max())


def gaps(logits: mx.array, tokens: Sequence[int]) -> list[float]:
    """By how much the best logit of each row [n, V] lies above its token's."""
    return _read(_missing(logits, tokens))


def _missing(logits: mx.array, tokens: Sequence[int]) -> mx.array:
    rows = logits.astype(mx.float32)
    chosen = mx.take_along_axis(rows, mx.array(list(tokens), mx.int32)[:, None], axis=-1)[:, 0]
    return rows.max(axis=-1) - chosen


def _read(found: mx.array) -> list[float]:
    return [float(gap) for gap in found.tolist()]  # type: ignore[union-attr, arg-type]
