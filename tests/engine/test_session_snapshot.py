"""Sessions that begin from a snapshot go on as the one it was taken of would have, and leave it as it is."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from engine.cache.policy import parse_policy
from engine.cache.saved import pack, unpack
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.autoregressive import Autoregressive
from engine.drafters.base import Drafter
from engine.drafters.masked_diffusion import MaskedDiffusion
from engine.session import Session, SessionSnapshot, filled
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.cache import models
from tests.engine.drafters.test_masked_diffusion import network as diffusion_network
from tests.engine.drafters.test_mtp import made as hidden_state_drafter
from tests.engine.test_session import (
    BLOCK,
    FIRST,
    MORE,
    Conversation,
    drafter_of,
    every_family,
    fresh,
    target_of,
)

AT = 9  # of the twelve tokens of FIRST: longer than the window
# kinds of models that are no targets: the engine does not find their layers
NO_TARGETS = ("recurrent", "rwkv", "fewer-caches-than-layers")
TAILS = ([33, 34], [*MORE, 35], [36])
EVERY_DRAFTER = ("dflash", "prompt-lookup", "prompt-lookup+dflash", "autoregressive", "none")


def taken(talk: Conversation) -> SessionSnapshot:
    """Take in the beginning of FIRST, take a snapshot, and decode far past it."""
    session = talk.session
    at = session.resume(FIRST)
    session.prefill(FIRST[at:AT])
    snapshot = session.snapshot()
    assert snapshot.tokens == tuple(FIRST[:AT])
    talk.turn(FIRST, 31)
    return snapshot


@pytest.mark.sampled(28, 3)
@pytest.mark.parametrize("kind", EVERY_DRAFTER)
@every_family
def test_a_restored_session_computes_only_what_stands_behind_the_snapshot(family: str, kind: str):
    talk = Conversation(family, kind)
    snapshot = taken(talk)
    for tail in TAILS:  # again and again: a snapshot is not used up
        talk.session.restore(snapshot)
        talk.drafter = talk.session.drafter
        other = [*FIRST[:AT], *tail]
        assert snapshot.common(other) == AT
        assert talk.prompt_cost(other) == len(tail)
        talk.turn([*other, 40, 41], 19, seed=len(tail))
    talk.session.close()


def steps(session: Session, prompt: Sequence[int], count: int, block: int) -> Iterator[list[int]]:
    generation = decode(
        session.target,
        session.drafter,
        prompt,
        max_tokens=count,
        draft_length=FixedDraftLength(block),
        session=session,
    )
    with closing(generation) as taken:
        for step in taken:
            yield list(step.tokens)


def side_by_side(sessions: Sequence[Session], prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Decode in all of them at once, a round each in turn."""
    texts: list[list[int]] = [[] for _ in sessions]
    running = {
        place: steps(session, prompt, count, BLOCK if session.drafter else 1)
        for place, (session, prompt) in enumerate(zip(sessions, prompts, strict=True))
    }
    while running:
        for place, generation in list(running.items()):
            if (tokens := next(generation, None)) is None:
                del running[place]
            else:
                texts[place] += tokens
    return texts


@pytest.mark.sampled(16, 2)
@pytest.mark.parametrize("kind", EVERY_DRAFTER)
@every_family
def test_sessions_begun_from_one_snapshot_do_not_affect_each_other(family: str, kind: str):
    target = target_of(family)
    with Session(target, drafter_of(kind, family), headroom=BLOCK) as session:
        session.prefill(FIRST[:AT])
        snapshot = session.snapshot()
    prompts = [[*FIRST[:AT], *tail] for tail in TAILS]
    sessions = [
        Session(target, drafter.twin() if (drafter := snapshot.drafter) else None, headroom=BLOCK)
        for _ in prompts
    ]
    for session in sessions:
        session.restore(snapshot)
    texts = side_by_side(sessions, prompts, 21)
    for session in sessions:
        session.close()
    assert texts == [fresh(family, tuple(prompt), 21) for prompt in prompts]
    assert snapshot.common(prompts[0]) == AT


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("kind", ["dflash", "none"])
@every_family
def test_a_snapshot_of_a_whole_turn_begins_the_next_one(family: str, kind: str):
    """Taken where the turn ended or was left, perhaps with tokens that no cache holds."""
    talk = Conversation(family, kind)
    text = [*FIRST, *talk.turn(FIRST, 23)]
    for prompt_steps in (None, 2):
        snapshot = talk.session.snapshot()
        talk.turn([99, 98, 97], 3)  # something else in between
        talk.session.restore(snapshot)
        talk.drafter = talk.session.drafter
        prompt = [*text, *MORE]
        assert snapshot.common(prompt) == len(snapshot.tokens)
        assert talk.prompt_cost(prompt) == len(prompt) - len(snapshot.tokens) + snapshot.uncached
        text = [*prompt, *talk.turn(prompt, 17, steps=prompt_steps)]
    talk.session.close()


@every_family
def test_what_is_common_says_what_resume_keeps(family: str):
    with Session(target_of(family), drafter_of("dflash", family), headroom=BLOCK) as session:
        session.prefill([*FIRST, *range(100, 180)])
        snapshot = session.snapshot()
        for kept in (0, 1, 30, 85, 91, 92):
            session.restore(snapshot)
            prompt = [*snapshot.tokens[:kept], 3, 4, 5]
            assert session.resume(prompt) == snapshot.common(prompt)


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("kind", [kind for kind in models.KINDS if kind not in NO_TARGETS])
def test_every_kind_of_cache_is_restored(kind: str):
    """Also those of other libraries and those that mlx-lm makes: compared with the session gone on with."""
    entry = models.KINDS[kind]
    built = models.model(entry.family)
    target = Target(built)
    text = [5 + 7 * at % (models.VOCAB - 5) for at in range(40)]
    with Session(target, None, headroom=BLOCK, caches=entry.ours(built, BLOCK), compiled=False) as session:
        session.prefill(text[:30])
        snapshot = session.snapshot()
        alone = [token for step in steps(session, text, 12, 1) for token in step]
        other = [token for step in steps(session, [7, 7, *text], 12, 1) for token in step]
        assert other  # and what came after it changed nothing:
        for _ in range(2):
            session.restore(snapshot)
            assert session.resume(text) == 30
            assert [token for step in steps(session, text, 12, 1) for token in step] == alone


@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize(
    "spec", ["affine:8,32", "rotated:4,32", "sink-window:2,6", "lattice-packed:e8,8@all", "lattice:e8,8"]
)
def test_policies_are_restored(spec: str):
    target, policy = Target(tiny.build(head_dim=32)), parse_policy(spec)
    prompts = [[*FIRST[:AT], *tail] for tail in TAILS]
    alone: list[list[int]] = []
    for prompt in prompts:
        with Session(target, None, headroom=BLOCK, policy=policy) as session:
            session.prefill(FIRST[:AT])  # in the same parts: a code may differ where rounding does
            alone += side_by_side([session], [prompt], 15)
            snapshot = snapshot_of_prefix(target, policy)
    sessions = [Session(target, None, headroom=BLOCK, policy=policy) for _ in prompts]
    for at, session in enumerate(sessions):
        session.restore(snapshot if at else read_again(snapshot, session))
    assert side_by_side(sessions, prompts, 15) == alone
    for session in sessions:
        session.close()


def snapshot_of_prefix(target: Target, policy: Any) -> SessionSnapshot:
    with Session(target, None, headroom=BLOCK, policy=policy) as session:
        session.prefill(FIRST[:AT])
        return session.snapshot()


def other_drafter(kind: str) -> tuple[Target, Drafter]:
    if kind == "masked-diffusion":
        target = target_of("llama")
        drafter = MaskedDiffusion(diffusion_network(), 4, block_size=4)
        drafter.bind(target)
        return target, drafter
    return hidden_state_drafter(kind)


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text", "masked-diffusion"])
def test_heads_assistants_and_diffusion_drafters_go_on_drafting_the_same(kind: str):
    target, drafter = other_drafter(kind)
    with Session(target, drafter, headroom=BLOCK) as session:
        session.prefill(FIRST)
        drafter.propose(9, 3)
        snapshot = session.snapshot()
        wanted = drafter.propose(7, 3).tokens.tolist()
        session.prefill([30, 31, 32])
        drafter.propose(9, 3)
        for _ in range(2):
            session.restore(snapshot)
            assert session.drafter is not None
            assert session.drafter.propose(7, 3).tokens.tolist() == wanted


def read_again(snapshot: SessionSnapshot, session: Session) -> SessionSnapshot:
    """The snapshot as it is when it was saved and read, by an empty session like its own."""
    return filled(session.snapshot(), snapshot.tokens, unpack(pack(snapshot.state(), {"about": "nothing"})))


@pytest.mark.sampled(14, 2)
@pytest.mark.parametrize("kind", EVERY_DRAFTER)
@every_family
def test_a_saved_snapshot_is_the_same(family: str, kind: str):
    target = target_of(family)
    with Session(target, drafter_of(kind, family), headroom=BLOCK) as session:
        session.prefill(FIRST[:AT])
        snapshot = session.snapshot()
    sessions = [Session(target, drafter_of(kind, family), headroom=BLOCK) for _ in TAILS]
    for session in sessions:
        session.restore(read_again(snapshot, session))
    prompts = [[*FIRST[:AT], *tail] for tail in TAILS]
    assert snapshot.common(prompts[0]) == AT
    assert side_by_side(sessions, prompts, 21) == [fresh(family, tuple(prompt), 21) for prompt in prompts]
    for session in sessions:
        session.close()


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("kind", [kind for kind in models.KINDS if kind not in NO_TARGETS])
def test_every_kind_of_cache_is_saved(kind: str):
    entry = models.KINDS[kind]
    built = models.model(entry.family)
    target = Target(built)
    text = [5 + 7 * at % (models.VOCAB - 5) for at in range(40)]
    with Session(target, None, headroom=BLOCK, caches=entry.ours(built, BLOCK), compiled=False) as session:
        empty = session.snapshot()
        session.prefill(text[:30])
        snapshot = session.snapshot()
        alone = [token for step in steps(session, text, 12, 1) for token in step]
        session.restore(filled(empty, snapshot.tokens, unpack(pack(snapshot.state(), {}))))
        assert session.resume(text) == 30
        assert [token for step in steps(session, text, 12, 1) for token in step] == alone


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text", "masked-diffusion"])
def test_heads_assistants_and_diffusion_drafters_are_saved(kind: str):
    target, drafter = other_drafter(kind)
    with Session(target, drafter, headroom=BLOCK) as session:
        empty = session.snapshot()
        session.prefill(FIRST)
        drafter.propose(9, 3)
        snapshot = session.snapshot()
        wanted = drafter.propose(7, 3).tokens.tolist()
        again = filled(empty, snapshot.tokens, unpack(pack(snapshot.state(), {})))
        assert again.drafter is not None
        assert again.drafter.propose(7, 3).tokens.tolist() == wanted
        assert again.drafter.rewind(2)


def test_a_saved_snapshot_is_as_small_as_the_policy_packs_it():
    target = Target(tiny.build(head_dim=32))
    sizes = {}
    for spec in ("native", "rotated:8,32", "lattice-packed:e8,4@all"):
        with Session(target, None, headroom=BLOCK, policy=parse_policy(spec)) as session:
            session.prefill([5 + at % 90 for at in range(300)])
            snapshot = session.snapshot()
            document = pack(snapshot.state(), {})
            sizes[spec] = len(document)
            assert len(document) < snapshot.nbytes + 8000
    assert sizes["lattice-packed:e8,4@all"] < sizes["rotated:8,32"] < sizes["native"] / 2


def test_what_cannot_be_saved_is_refused():
    with pytest.raises(TypeError, match="set cannot be saved"):
        pack({"a": {1}}, {})


def test_forks_of_a_small_model_let_go_of_its_modules_with_the_last():
    """Recurrent layers are listened to as long as a drafter uses them, and forks come and go."""
    target = Target(families.build("qwen3_5"))
    kinds = [type(module) for module in target.model.modules()]
    drafter = Autoregressive(target)
    drafter.observe(FIRST, None)
    drafter.propose(9, 3)
    forks = [drafter.fork().fork() for _ in range(2)]
    assert [type(module) for module in target.model.modules()] != kinds
    wanted = drafter.propose(7, 3).tokens.tolist()
    del drafter
    assert [fork.propose(7, 3).tokens.tolist() for fork in forks] == [wanted] * 2
    forks.clear()
    gc.collect()
    assert [type(module) for module in target.model.modules()] == kinds


def test_restoring_ends_the_continuation_of_the_session():
    with Session(target_of("llama"), None, headroom=BLOCK) as session:
        session.prefill(FIRST)
        snapshot = session.snapshot()
        running = steps(session, FIRST, 9, 1)
        next(running)
        session.restore(snapshot)
        with pytest.raises(ValueError, match="this continuation has ended"):
            next(running)
        assert tuple(session.tokens) == snapshot.tokens


def test_bytes_are_those_of_caches_and_drafter():
    for kind in ("dflash", "none"):
        with Session(target_of("gemma3_text"), drafter_of(kind, "gemma3_text"), headroom=BLOCK) as session:
            session.prefill(FIRST)
            own = session.drafter.nbytes if session.drafter else 0
            held = sum(cache.nbytes for cache in session.caches)
            assert session.snapshot().nbytes == held + own > 0
