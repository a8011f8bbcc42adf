"""A marked session comes back to its mark, whatever was decoded after it, for every kind of layer."""

from __future__ import annotations

import pytest

from engine.cache.policy import parse_policy
from engine.decode import decode
from engine.drafters.block import BlockDrafter
from engine.session import Session
from engine.target.model import Target
from tests.engine import tiny
from tests.engine.test_session import BLOCK, FIRST, MORE, Conversation, drafter_of, every_family, target_of

MARK = 9  # of the twelve tokens of FIRST: longer than the window
EVERY_DRAFTER = ("dflash", "prompt-lookup", "prompt-lookup+dflash", "autoregressive", "none")


def marked(talk: Conversation) -> None:
    """Take in the beginning of FIRST, mark, and decode far past it."""
    session = talk.session
    at = session.resume(FIRST)
    session.prefill(FIRST[at:MARK])
    session.mark()
    assert session.marked == MARK
    talk.turn(FIRST, 31)


@pytest.mark.sampled(28, 3)
@pytest.mark.parametrize("kind", EVERY_DRAFTER)
@every_family
def test_a_prompt_that_takes_another_way_after_the_mark_computes_what_stands_behind_it(
    family: str, kind: str
):
    talk = Conversation(family, kind)
    marked(talk)
    for tail in ([33, 34], [*MORE, 35], [36]):  # again and again: a mark is not used up
        other = [*FIRST[:MARK], *tail]
        assert talk.prompt_cost(other) == len(tail)
        talk.turn([*other, 40, 41], 19, seed=len(tail))
    assert talk.session.marked == MARK
    talk.session.close()


@pytest.mark.sampled(3, 1)
@every_family
def test_the_same_prompt_again_begins_at_the_mark_or_after_it(family: str):
    talk = Conversation(family, "none")
    marked(talk)
    assert talk.prompt_cost(FIRST) in (1, len(FIRST) - MARK)
    talk.session.close()


@pytest.mark.sampled(4, 1)
@every_family
def test_a_prompt_that_takes_another_way_before_the_mark_forgets_it(family: str):
    talk = Conversation(family, "none")
    marked(talk)
    talk.turn([*FIRST[: MARK - 2], 33, 34, 35, 36], 12)
    assert (talk.session.marked, talk.session.mark_nbytes) == (0, 0)
    talk.turn([*FIRST, 50], 9)
    talk.session.close()


def test_a_mark_holds_the_bytes_of_what_cannot_go_back():
    plain, sliding = (Session(target_of(name), None, headroom=BLOCK) for name in ("llama", "gemma3_text"))
    for session in (plain, sliding):
        session.prefill(FIRST)
        session.mark()
    assert plain.mark_nbytes == 0  # rows can be trimmed at any time
    rings = sum(cache.nbytes for cache in sliding.caches if type(cache).__name__ == "SlidingRing")
    assert 0 < sliding.mark_nbytes <= rings
    for session in (plain, sliding):
        session.close()


def test_a_mark_holds_the_bytes_of_the_drafters_copies_too():
    native = drafter_of("dflash", "llama")
    for policy, everything in (("native", False), ("sink-window:2,6", True)):
        drafter = BlockDrafter(native.network, parse_policy(policy))
        drafter.bind(target_of("llama"))
        session = Session(target_of("llama"), drafter, headroom=BLOCK)
        session.prefill(FIRST)
        drafter.propose(FIRST[-1], BLOCK - 1)
        session.mark()
        assert 0 < session.mark_nbytes <= drafter.nbytes  # under native of its sliding layer alone
        assert (session.mark_nbytes == drafter.nbytes) == everything
        session.close()


@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize(
    "spec", ["affine:8,32", "rotated:4,32", "sink-window:2,6", "lattice-packed:e8,8@all"]
)
def test_policies_come_back_too(spec: str):
    target, policy = Target(tiny.build(head_dim=32)), parse_policy(spec)
    other = [*FIRST[:MARK], *MORE]

    def tokens(session: Session, prompt: list[int]) -> list[int]:
        return [
            token
            for step in decode(target, None, prompt, max_tokens=15, session=session)
            for token in step.tokens
        ]

    with Session(target, None, headroom=BLOCK, policy=policy) as fresh:
        fresh.prefill(FIRST[:MARK])  # in the same parts: a code may differ where rounding does
        alone = tokens(fresh, other)
    with Session(target, None, headroom=BLOCK, policy=policy) as session:
        session.prefill(FIRST[:MARK])
        session.mark()
        tokens(session, FIRST)
        assert session.resume(other) == MARK
        assert tokens(session, other) == alone
