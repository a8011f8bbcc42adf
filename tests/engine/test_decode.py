"""Decoding gives the tokens of mlx-lm's `generate_step`, whatever is drafted."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from engine import decode as loop
from engine.cache.transaction import new_caches
from engine.decode import Step, decode
from engine.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from engine.drafters.base import Draft
from engine.drafters.block import BlockDrafter
from engine.errors import ConfigurationError, PromptError
from engine.networks.dflash import DFlash, DFlashConfig
from engine.stops import Stops
from engine.target.model import Target
from tests.engine import tiny


def prompt_of(length: int, seed: int = 0) -> list[int]:
    random = tiny.seeded(100 * length + seed)
    return [random.randrange(5, tiny.VOCAB) for _ in range(length)]


TARGETS: dict[int, Target] = {}


def target_of(model: Any) -> Target:
    """One target a model: what it has compiled serves all tests."""
    return TARGETS.setdefault(id(model), Target(model))


def run(
    model: Any, drafter: Any, prompt: list[int], count: int, draft_length: DraftLength, **more: Any
) -> list[Step]:
    return list(
        decode(target_of(model), drafter, prompt, max_tokens=count, draft_length=draft_length, **more)
    )


def tokens_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {family: tiny.build(family) for family in tiny.FAMILIES}


@pytest.mark.sampled(12, 3)
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("wrong", [0.0, 0.25, 1.0])
def test_every_block_gives_the_plain_tokens(models: dict[str, Any], family: str, wrong: float):
    model, prompt = models[family], prompt_of(11)
    truth = tiny.plain_tokens(model, prompt, 48)
    for block in (2, 3, 5, 8, 16):
        drafter = tiny.ScriptedDrafter(prompt + truth, wrong, seed=block)
        steps = run(model, drafter, prompt, 48, FixedDraftLength(block))
        assert tokens_of(steps) == truth, f"block {block}"
        assert steps[-1].finish == "length"


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 40])
def test_prompts_on_both_sides_of_the_window_in_any_chunks(gemma, length: int):
    prompt = prompt_of(length)
    truth = tiny.plain_tokens(gemma, prompt, 24)
    for chunk in (1, 3, 2048):
        drafter = tiny.ScriptedDrafter(prompt + truth, 0.3)
        assert tokens_of(run(gemma, drafter, prompt, 24, FixedDraftLength(6), prefill_chunk=chunk)) == truth


@pytest.mark.sampled(24, 3)
@pytest.mark.parametrize("count", range(1, 24))
def test_max_tokens_is_exact(gemma, count: int):
    prompt = prompt_of(5)
    truth = tiny.plain_tokens(gemma, prompt, 40)
    for block in (1, 8):
        drafter = tiny.ScriptedDrafter(prompt + truth)
        steps = run(gemma, drafter, prompt, count, FixedDraftLength(block))
        assert tokens_of(steps) == truth[:count]
        assert steps[-1].finish == "length"
        assert all(step.finish is None for step in steps[:-1])


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("block", [1, 4, 8, 16])
@pytest.mark.parametrize("position", [0, 1, 4, 5, 11])
def test_a_stop_token_anywhere_in_a_block_ends_the_text_there(gemma, block: int, position: int):
    prompt = prompt_of(9, seed=1)
    truth = tiny.plain_tokens(gemma, prompt, 24)
    stop = truth[position]
    end = truth.index(stop)
    caches = new_caches(gemma, block)
    drafter = tiny.ScriptedDrafter(prompt + truth)
    steps = run(gemma, drafter, prompt, 24, FixedDraftLength(block), stops=Stops({stop}), caches=caches)
    assert tokens_of(steps) == truth[: end + 1]
    assert steps[-1].finish == "stop"
    assert {cache.offset for cache in caches} == {len(prompt) + end}  # all but the stop token itself


@pytest.mark.slow
def test_the_adaptive_pace_changes_nothing_in_the_tokens(gemma):
    prompt = prompt_of(13)
    truth = tiny.plain_tokens(gemma, prompt, 120)
    for wrong in (0.0, 0.5, 1.0):
        drafter = tiny.ScriptedDrafter(prompt + truth, wrong)
        assert tokens_of(run(gemma, drafter, prompt, 120, AdaptiveDraftLength(8))) == truth


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("seed", range(8))
def test_the_seams_between_plain_steps_and_blocks_are_exact(gemma, seed: int):
    prompt = prompt_of(6, seed)
    truth = tiny.plain_tokens(gemma, prompt, 60)
    drafter = tiny.ScriptedDrafter(prompt + truth, 0.3, seed)
    assert tokens_of(run(gemma, drafter, prompt, 60, tiny.Alternating(seed))) == truth


def test_the_drafter_is_told_the_taps_of_a_plain_forward(gemma):
    prompt = prompt_of(6)
    truth = tiny.plain_tokens(gemma, prompt, 30)
    drafter = tiny.ScriptedDrafter(prompt + truth, 0.4)
    run(gemma, drafter, prompt, 30, tiny.Alternating(1))
    target = Target(gemma)
    hidden_states = target.hook_layers(drafter.target_layers)
    _, expected = target.forward(mx.array([drafter.seen]), new_caches(gemma, 1), hidden_states)
    hidden_states.close()
    rows = mx.concatenate(drafter.rows, axis=1)
    assert rows.shape == expected.shape
    assert mx.abs(rows - expected).max().item() < 1e-3


@pytest.mark.slow
def test_a_real_drafter_with_random_weights_is_harmless(gemma):
    mx.random.seed(0)
    drafter = BlockDrafter(DFlash(DFlashConfig.from_dict(tiny.drafter_config())))
    drafter.absorb_at = 16
    drafter.bind(Target(gemma))
    for length in (4, 40):
        prompt = prompt_of(length)
        truth = tiny.plain_tokens(gemma, prompt, 40)
        for draft_length in (
            FixedDraftLength(4),
            FixedDraftLength(8),
            AdaptiveDraftLength(8),
            tiny.Alternating(2),
        ):
            assert tokens_of(run(gemma, drafter, prompt, 40, draft_length)) == truth


def test_without_a_drafter_it_decodes_plainly(gemma):
    prompt = prompt_of(10)
    steps = run(gemma, None, prompt, 30, FixedDraftLength(1))
    assert tokens_of(steps) == tiny.plain_tokens(gemma, prompt, 30)
    assert {step.round.block for step in steps[1:]} == {1}


def test_the_first_token_comes_before_anything_is_drafted(gemma):
    prompt = prompt_of(10)
    drafter = tiny.ScriptedDrafter(prompt + tiny.plain_tokens(gemma, prompt, 8))
    steps = decode(target_of(gemma), drafter, prompt, max_tokens=8, draft_length=FixedDraftLength(8))
    next(steps)
    assert drafter.proposals == 0
    next(steps)
    assert drafter.proposals == 1
    steps.close()


def test_a_round_costs_one_transfer_and_one_draft(gemma, monkeypatch: pytest.MonkeyPatch):
    prompt = prompt_of(10)
    drafter = tiny.ScriptedDrafter(prompt + tiny.plain_tokens(gemma, prompt, 41), hidden_states=())
    reads: list[str] = []
    real = loop.read_tokens

    def counted(array: mx.array) -> Any:
        reads.append("read_tokens")
        return real(array)

    monkeypatch.setattr(loop, "read_tokens", counted)
    steps = run(gemma, drafter, prompt, 41, FixedDraftLength(8))
    rounds = [step.round for step in steps if step.round]
    assert [item.accepted for item in rounds] == [7] * 5
    assert reads == ["read_tokens"] * 6
    assert drafter.proposals == 5


@pytest.mark.slow
def test_what_is_yielded_is_committed_so_that_a_caller_may_stop_anywhere(gemma):
    prompt = prompt_of(10)
    truth = tiny.plain_tokens(gemma, prompt, 60)
    for draft_length in (FixedDraftLength(4), FixedDraftLength(1), tiny.Alternating(5)):
        for stop_after in range(1, 9):
            caches = new_caches(gemma, 8)
            drafter = tiny.ScriptedDrafter(prompt + truth, 0.3)
            steps = decode(
                target_of(gemma), drafter, prompt, max_tokens=60, draft_length=draft_length, caches=caches
            )
            emitted: list[int] = []
            for _, step in zip(range(stop_after), steps, strict=False):
                emitted.extend(step.tokens)
            steps.close()
            covered = caches[0].offset - len(prompt)
            assert covered in (len(emitted) - 1, len(emitted))
            assert {cache.offset for cache in caches} == {caches[0].offset}
            assert not any("hidden_state_hooks" in type(layer).__dict__ for layer in gemma.layers)
            rest = (prompt + emitted)[caches[0].offset :] or None
            if rest:
                logits = gemma(mx.array([rest]), cache=caches)
                assert mx.argmax(logits[0, -1]).item() == truth[len(emitted)]


def test_an_exception_while_drafting_leaves_model_and_caches_whole(gemma):
    class Failing(tiny.ScriptedDrafter):
        def propose(self, bonus: int, count: int, sampler: Any = None) -> Draft:
            if len(self.seen) > 20:
                raise RuntimeError("out of memory")
            return super().propose(bonus, count, sampler)

    prompt = prompt_of(10)
    truth = tiny.plain_tokens(gemma, prompt, 40)
    caches = new_caches(gemma, 4)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(gemma, Failing(prompt + truth), prompt, 40, FixedDraftLength(4), caches=caches)
    assert len({cache.offset for cache in caches}) == 1
    assert not any("hidden_state_hooks" in type(layer).__dict__ for layer in gemma.layers)


def test_bad_requests_are_refused_before_any_work(gemma):
    target = Target(gemma)
    with pytest.raises(PromptError, match="empty"):
        next(decode(target, None, [], max_tokens=4))
    with pytest.raises(ConfigurationError, match="at least 1"):
        next(decode(target, None, [5], max_tokens=0))
    with pytest.raises(ConfigurationError, match="needs a drafter"):
        next(decode(target, None, [5], max_tokens=4, draft_length=FixedDraftLength(4)))
