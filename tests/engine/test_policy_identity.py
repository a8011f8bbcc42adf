"""Every policy with every drafter: speculative text is the policy's own plain text, rolled back or not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from engine.cache.policy import parse_policy
from engine.decode import Diagnosis, decode
from engine.draft_length import FixedDraftLength
from engine.restoration.session import RestorationPlan
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.identity import tokens_of
from tests.engine.random_drafters import KINDS, Helped, make

POLICIES = (
    "native",
    "full-kv",
    "sliding-bounded:2,4",
    "sink-window:2,6",
    "affine:8,32",
    "rotated:8,64@full",
    "lattice:d4,152@all",
    "lattice:e8,38",
    "lattice-packed:e8,8@all",
    "restored:exact:2,6",
    "restored:noise:2,6",
)
PROMPT = tuple(range(5, 40))
COUNT = 40


@cache
def target() -> Target:
    return Target(families.build("gemma3_text", head_dim=32))


def run(policy: str, drafter: Any, block: int, compiled: bool) -> list[int]:
    chosen = parse_policy(policy)
    plan = RestorationPlan(chosen.source, chosen.sink, chosen.window) if chosen.source else None
    steps = decode(
        target(),
        drafter,
        PROMPT,
        max_tokens=COUNT,
        draft_length=FixedDraftLength(block),
        policy=chosen,
        restoration=plan,
        diagnosis=Diagnosis(compiled=compiled),
    )
    return tokens_of(list(steps))


@cache
def plain(policy: str) -> list[int]:
    return run(policy, None, 1, compiled=False)


@pytest.mark.sampled(268, 37)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_change_nothing_under_any_policy(policy, kind, compiled):
    truth = plain(policy)
    drafter = Helped(make(kind, target()), [*PROMPT, *truth], 0.6)
    assert run(policy, drafter, 7, compiled) == truth


@pytest.mark.slow
def test_the_policies_are_at_work():
    """What loses information gives another text than native decoding, what loses none the same."""
    native = plain("native")
    assert native == tiny.plain_tokens(target().model, PROMPT, COUNT)
    assert plain("restored:exact:2,6") == plain("full-kv") == native
    for policy in ("sink-window:2,6", "restored:noise:2,6"):
        assert plain(policy) != native


def test_a_window_that_covers_the_text_changes_nothing():
    assert plain(f"sink-window:0,{len(PROMPT) + COUNT}") == plain("native")
    assert plain(f"sink-window:4,{len(PROMPT) + COUNT - 4}") == plain("native")
