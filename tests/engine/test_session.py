"""A session goes on where it was: nothing is computed twice, and the tokens are those of a fresh decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama

from engine.cache.policy import parse_policy
from engine.decode import decode
from engine.draft_length import DraftLength, FixedDraftLength
from engine.drafters.autoregressive import Autoregressive
from engine.drafters.base import Drafter
from engine.drafters.block import BlockDrafter
from engine.drafters.prompt_lookup import PromptLookup
from engine.drafters.with_lookup import WithLookup
from engine.errors import ConfigurationError, ModelError
from engine.networks.dflash import DFlash, DFlashConfig
from engine.sampling import Sampler, Sampling
from engine.session import Session
from engine.target.model import Target
from tests.engine import families, tiny

FAMILIES = ("llama", "gemma3_text", "qwen3_5", "qwen3_next")
DRAFTERS = ("dflash", "prompt-lookup", "prompt-lookup+dflash", "scripted", "none")
BLOCK = 5
FIRST = [7, 8, 9, 50, 60, 70, 80, 90, 100, 110, 9, 50]  # longer than the window
MORE = [20, 21, 9, 50, 22, 23]

every_family = pytest.mark.parametrize("family", FAMILIES)
every_drafter = pytest.mark.parametrize("kind", DRAFTERS)


@cache
def target_of(family: str) -> Target:
    return Target(families.build(family))


@cache
def fresh(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """mlx-lm's own continuation, with caches of its own."""
    return tiny.plain_tokens(target_of(family).model, prompt, count)


def drafter_of(kind: str, family: str) -> Drafter | None:
    target = target_of(family)
    if kind == "none":
        return None
    if kind == "prompt-lookup":
        return PromptLookup()
    if kind.startswith("prompt-lookup+"):
        other = drafter_of(kind.removeprefix("prompt-lookup+"), family)
        assert other is not None
        return WithLookup(other)
    if kind == "autoregressive":
        return Autoregressive(target)
    if kind == "scripted":
        return tiny.ScriptedDrafter([], wrong=0.3)
    mx.random.seed(5)
    config = tiny.drafter_config(
        num_target_layers=target.layer_count, dflash_config={"mask_token_id": 4, "target_layer_ids": [0, 2]}
    )
    drafter = BlockDrafter(DFlash(DFlashConfig.from_dict(config)))
    drafter.bind(target)
    return drafter


class Conversation:
    """A session whose forwards are counted, and whose every turn is compared with a fresh decode."""

    def __init__(self, family: str, kind: str) -> None:
        self.family, self.drafter = family, drafter_of(kind, family)
        self.session = Session(target_of(family), self.drafter, headroom=BLOCK)
        self.computed = 0  # positions forwarded so far
        forward = self.session.forward

        def counting(tokens: mx.array) -> Any:
            self.computed += tokens.shape[1]
            return forward(tokens)

        self.session.forward = counting  # type: ignore[method-assign]

    def draft_length(self, seed: int = 0) -> DraftLength:
        return tiny.Alternating(seed) if self.drafter else FixedDraftLength(1)

    def prompt_cost(self, prompt: Sequence[int]) -> int:
        """Positions forwarded until the first token of a turn is known; the turn is left there."""
        before = self.computed
        self.turn(prompt, 1)
        return self.computed - before

    def turn(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        steps: int | None = None,
        seed: int = 0,
        held: list[Any] | None = None,
    ) -> list[int]:
        """Continue a prompt by ``count`` tokens, or leave after so many steps; returns what came.

        The continuation is closed then, or put into ``held``.
        """
        truth = fresh(self.family, tuple(prompt), max(count, 1))
        if isinstance(self.drafter, tiny.ScriptedDrafter):
            self.drafter.truth = [*prompt, *truth]
        emitted: list[int] = []
        generation = decode(
            self.session.target,
            self.drafter,
            prompt,
            max_tokens=count,
            draft_length=self.draft_length(seed),
            prefill_chunk=4,
            session=self.session,
        )
        for taken, step in enumerate(generation, 1):
            emitted.extend(step.tokens)
            if taken == steps:
                break
        if held is None:
            generation.close()  # type: ignore[attr-defined]
        else:
            held.append(generation)
        assert emitted == truth[: len(emitted)], "not the tokens of a fresh decode"
        assert self.session.tokens == [*prompt, *emitted][:-1], "all but the newest token are committed"
        assert steps is not None or len(emitted) == count
        return emitted


@pytest.mark.sampled(24, 6)
@every_drafter
@every_family
def test_the_next_turn_computes_only_what_is_new(family: str, kind: str):
    talk = Conversation(family, kind)
    text = [*FIRST, *talk.turn(FIRST, 23)]
    for more in (MORE, MORE[:1]):
        prompt = [*text, *more]
        assert talk.prompt_cost(prompt) == len(more) + 1  # and the newest token of the last turn
        text = [*prompt, *talk.turn(prompt, 17, seed=len(more))]
    talk.session.close()


@pytest.mark.sampled(24, 2)
@every_drafter
@every_family
def test_the_same_prompt_again_gives_the_same_tokens(family: str, kind: str):
    talk = Conversation(family, kind)
    assert talk.turn(FIRST, 20) == talk.turn(FIRST, 20, seed=1)
    talk.session.close()


@pytest.mark.sampled(24, 3)
@pytest.mark.parametrize("kind", ["dflash", "prompt-lookup"])
@every_family
@pytest.mark.parametrize("shared", [0, 6, 30])
def test_a_prompt_that_takes_another_way_gives_its_own_tokens(family: str, kind: str, shared: int):
    talk = Conversation(family, kind)
    text = [*FIRST, *talk.turn(FIRST, 24)]
    other = [*text[:shared], *MORE, 33, 34]
    cost = talk.prompt_cost(other)
    if family == "llama" and kind != "dflash":
        assert cost == len(other) - shared  # plain caches go back any way; a sliding drafter may not
    else:
        assert cost in (len(other), len(other) - shared)  # all over, where they cannot
    talk.turn([*other, *MORE], 12)
    talk.session.close()


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize("back", range(5))
def test_a_ring_goes_back_as_far_as_its_headroom(back: int):
    talk = Conversation("gemma3_text", "prompt-lookup")
    text = [*FIRST, *talk.turn(FIRST, 24)][:-1]
    kept = text[: len(text) - back]
    assert talk.prompt_cost([*kept, 33, 34]) == 2
    talk.session.close()


@pytest.mark.sampled(30, 8)
@pytest.mark.parametrize("kind", [*DRAFTERS, "autoregressive"])
@every_family
def test_leaving_a_turn_at_any_yield_leaves_a_session_that_goes_on(family: str, kind: str):
    talk = Conversation(family, kind)
    for steps in (1, 2, 3, 5, 8):
        text = [*FIRST, *talk.turn(FIRST, 40, steps=steps, seed=steps)]
        prompt = [*text, *MORE]
        assert talk.prompt_cost(prompt) == len(MORE) + 1
        talk.turn(prompt, 9, seed=steps + 1)
    talk.session.close()


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("kind", ["none", "scripted", "dflash"])
def test_a_turn_that_is_held_and_not_closed_ends_where_the_next_begins(kind: str):
    talk = Conversation("gemma3_text", kind)
    for steps in (1, 2, 3, 5):
        held: list[Any] = []
        text = [*FIRST, *talk.turn(FIRST, 40, steps=steps, seed=steps, held=held)]
        prompt = [*text, *MORE]
        assert talk.prompt_cost(prompt) == len(MORE) + 1
        with pytest.raises(ValueError, match="another one was started in its session"):
            next(held[0])
        emitted = talk.turn(prompt, 9, steps=3, seed=steps + 1, held=held)
        held[0].close()
        emitted += [token for step in held[1] for token in step.tokens]
        assert emitted == fresh("gemma3_text", tuple(prompt), 9)
    talk.session.close()


class Failing:
    """Lets some calls of a function through, then fails once."""

    def __init__(self, real: Callable[..., Any], after: int, *, late: bool) -> None:
        self._real, self._left, self._late = real, after, late

    def __call__(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left == -1:
            if self._late:  # the caches have grown already
                self._real(*arguments)
            raise RuntimeError("out of memory")
        return self._real(*arguments)


@pytest.mark.sampled(80, 6)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("after", "kind"), [(0, "none"), (2, "dflash"), (3, "none"), (4, "dflash"), (7, "none")]
)
@every_family
def test_a_failing_forward_in_prefill_or_round_leaves_a_session_that_goes_on(
    family: str, kind: str, after: int, late: bool
):
    """The first three forwards take in the prompt, the fourth gives the first token."""
    talk = Conversation(family, kind)
    whole = talk.session.forward
    talk.session.forward = Failing(whole, after, late=late)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        talk.turn(FIRST, 60)
    talk.session.forward = whole  # type: ignore[method-assign]
    held = len(talk.session.tokens)
    assert held >= len(FIRST) if after > 3 else held in (0, 11)
    text = [*FIRST, *fresh(family, tuple(FIRST), 30)]
    assert talk.prompt_cost(text) == len(text) - held  # nothing that was held is computed again
    talk.turn([*text, *MORE], 9)
    talk.session.close()


@pytest.mark.sampled(4, 1)
@every_family
def test_a_failing_drafter_leaves_a_session_that_goes_on(family: str, monkeypatch: pytest.MonkeyPatch):
    talk = Conversation(family, "dflash")
    assert talk.drafter is not None
    with monkeypatch.context() as patch:
        patch.setattr(talk.drafter, "propose", Failing(talk.drafter.propose, 3, late=True))
        with pytest.raises(RuntimeError, match="out of memory"):
            talk.turn(FIRST, 60)
    assert len(talk.session.tokens) >= len(FIRST)
    talk.turn([*FIRST, *fresh(family, tuple(FIRST), 30), *MORE], 20)
    talk.session.close()


@pytest.mark.sampled(12, 3)
@every_family
@pytest.mark.parametrize("kind", ["prompt-lookup", "prompt-lookup+dflash"])
def test_a_session_may_be_sampled_in_and_gives_what_a_fresh_decode_with_the_seed_gives(
    family: str, kind: str
):
    target, prompt = target_of(family), [*FIRST, *MORE] * 3

    def drawn(session: Session | None, drafter: Drafter | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=3))
        steps = decode(
            target,
            drafter,
            prompt,
            max_tokens=40,
            sampler=sampler,
            draft_length=FixedDraftLength(BLOCK),
            session=session,
        )
        return [token for step in steps for token in step.tokens]

    talk = Conversation(family, kind)
    talk.turn(FIRST, 30)
    for _ in range(2):
        assert drawn(talk.session, talk.drafter) == drawn(None, drafter_of(kind, family))
    talk.session.close()


def test_a_session_is_not_asked_for_blocks_it_has_no_room_for():
    talk = Conversation("llama", "dflash")
    with pytest.raises(ConfigurationError, match="needs a session opened for it, not for 5"):
        next(
            decode(
                talk.session.target,
                talk.drafter,
                FIRST,
                max_tokens=4,
                draft_length=FixedDraftLength(6),
                session=talk.session,
            )
        )
    assert talk.turn(FIRST, 9)
    talk.session.close()


@every_family
def test_closing_restores_the_layers(family: str):
    target = target_of(family)
    classes = [type(module) for _, module in target.model.named_modules()]
    with Session(target, drafter_of("dflash", family), headroom=BLOCK) as session:
        list(
            decode(
                target,
                session.drafter,
                FIRST,
                max_tokens=9,
                draft_length=FixedDraftLength(BLOCK),
                session=session,
            )
        )
    assert [type(module) for _, module in target.model.named_modules()] == classes


def test_a_session_that_cannot_be_opened_leaves_the_model_as_it_was():
    model = families.build("llama", head_dim=32)
    before = {id(module): type(module) for module in model.modules()}
    drafter = tiny.ScriptedDrafter([5], hidden_states=(99,))
    with pytest.raises(ModelError, match="layer 99"):
        Session(Target(model), drafter, headroom=4, policy=parse_policy("affine:4,32"))
    assert {id(module): type(module) for module in model.modules()} == before
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
