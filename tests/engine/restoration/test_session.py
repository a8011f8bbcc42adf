"""Evicted prompt positions, and only those, get rows from the source, in this turn and in later ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen2

from engine.batch_decode import Request, decode_batch
from engine.cache.policy import NATIVE, RestoredKV, parse_policy
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.errors import ModelError
from engine.restoration.session import RestorationPlan, restoration_for
from engine.restoration.sites import KINDS, sites_of
from engine.session import Session
from engine.target.model import Target
from tests.engine import families, tiny

SINK, WINDOW = 2, 8
PROMPT = [(7 * i * i + 11 * i) % 290 + 5 for i in range(45)]
MORE = [(5 * i * i + 3 * i) % 290 + 5 for i in range(20)]
EVERY = (*families.FAMILIES, "qwen2")
TINY = ("gemma3_text", "llama", "qwen3")


@cache
def target_of(family: str) -> Target:
    if family != "qwen2":
        return Target(families.build(family))
    mx.random.seed(3)
    return Target(qwen2.Model(qwen2.ModelArgs.from_dict(tiny.PLAIN | {"model_type": "qwen2"})))


def plan(source: str, sink: int = SINK, window: int = WINDOW) -> RestorationPlan:
    return RestorationPlan(source, sink, window)


def opened(family: str, source: str | None, drafter: Any = None, headroom: int = 1) -> Session:
    """A session that restores from a source, or natively."""
    policy = parse_policy(f"restored:{source}:{SINK},{WINDOW}") if source else NATIVE
    return Session(
        target_of(family),
        drafter,
        headroom=headroom,
        policy=policy,
        restoration=plan(source) if source else None,
    )


def said(session: Session, prompt: list[int], count: int = 12) -> list[int]:
    steps = decode(
        session.target, None, prompt, max_tokens=count, session=session, prefill_chunk=plan("exact").chunk
    )
    return [token for step in steps for token in step.tokens]


def rows_of(session: Session) -> list[mx.array]:
    """Keys and values of the full layers, [KV heads, positions, head dim]."""
    found = []
    for held in session.caches:
        if hasattr(held, "keys_and_values") and not hasattr(held, "window"):
            found += [each[0] for each in held.keys_and_values()]
    return found


def unlike(left: mx.array, right: mx.array) -> list[int]:
    """Positions whose rows differ."""
    differ = (mx.abs(left - right).max(axis=-1) > 1e-4).any(axis=0)
    return [index for index, value in enumerate(differ.tolist()) if value]


def first_layer_rows(family: str, source: str | None) -> list[mx.array]:
    """Rows after the prompt but its last token; those of the first layer depend on nothing restored."""
    with opened(family, source) as session:
        for done in range(0, len(PROMPT) - 1, 8):
            session.prefill(PROMPT[done : min(done + 8, len(PROMPT) - 1)])
        return rows_of(session)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("family", EVERY)
def test_exact_rows_give_what_native_caches_give(family: str) -> None:
    with opened(family, None) as native, opened(family, "exact") as restored:
        assert said(restored, PROMPT) == said(native, PROMPT)
        for ours, theirs in zip(rows_of(restored), rows_of(native), strict=True):
            assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4), (
                "a row came back at another place or scale"
            )
        assert native.restored == 0
        layers = sum(isinstance(held, RestoredKV) for held in restored.caches)
        assert restored.restored == layers * (len(PROMPT) - 1 - SINK - WINDOW)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("source", ["zeros", "noise"])
def test_exactly_the_evicted_positions_are_replaced(family: str, source: str) -> None:
    native, replaced = first_layer_rows("llama", None), first_layer_rows("llama", source)
    held = len(PROMPT) - 1
    for left, right in zip(native[:2], replaced[:2], strict=True):
        assert unlike(left, right) == list(range(SINK, held - WINDOW))


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("source", ["zeros", "noise"])
def test_other_rows_change_the_text(family: str, source: str) -> None:
    with opened(family, None) as native, opened(family, source) as restored:
        assert said(restored, PROMPT) != said(native, PROMPT)


def test_zeros_are_zeros_and_noise_is_as_large_as_what_it_replaces() -> None:
    middle = slice(SINK, len(PROMPT) - 1 - WINDOW)
    keys, values = (rows[:, middle] for rows in first_layer_rows("llama", "zeros")[:2])
    assert not keys.any().item()
    assert not values.any().item()
    for made, true in zip(first_layer_rows("llama", "noise"), first_layer_rows("llama", None), strict=True):
        ratio = mx.std(made[:, middle]) / mx.std(true[:, middle])
        assert 0.5 < ratio.item() < 2


def test_noise_is_repeatable_and_depends_on_the_seed() -> None:
    def rows(seed: int) -> mx.array:
        policy = parse_policy(f"restored:noise:{SINK},{WINDOW}")
        made = RestorationPlan("noise", SINK, WINDOW, seed=seed)
        with Session(target_of("llama"), None, headroom=1, policy=policy, restoration=made) as session:
            session.prefill(PROMPT)
            return rows_of(session)[0]

    assert mx.array_equal(rows(1), rows(1))
    assert not mx.allclose(rows(1), rows(2))


def test_a_prompt_within_the_window_is_left_alone() -> None:
    with opened("llama", "noise") as restored, opened("llama", None) as native:
        assert said(restored, PROMPT[: SINK + WINDOW], 6) == said(native, PROMPT[: SINK + WINDOW], 6)
        assert restored.restored == 0


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("family", ["gemma3_text", "llama", "qwen3_5"])
def test_later_turns_go_on_and_restore_what_they_push_out(family: str) -> None:
    with opened(family, "exact") as restored, opened(family, None) as native:
        first = said(restored, PROMPT)
        assert first == said(native, PROMPT)
        before = restored.restored
        turn = [*PROMPT, *first, *MORE]
        assert said(restored, turn) == said(native, turn)
        assert restored.restored > before


def test_generated_tokens_stay_as_they_are() -> None:
    def rows(source: str | None) -> mx.array:
        with opened("llama", source) as session:
            session.prefill(PROMPT)
            generated = mx.array([[9, 8, 7, 6]], mx.int32)
            session.transaction.begin(4)
            session.forward(generated)
            session.commit([9, 8, 7, 6], None)
            session.prefill(MORE)
            return rows_of(session)[0]

    total = len(PROMPT) + 4 + len(MORE)
    places = [place for place in range(SINK, total - WINDOW) if not len(PROMPT) <= place < len(PROMPT) + 4]
    assert unlike(rows(None), rows("noise")) == places


def test_an_edited_prompt_starts_over_where_its_window_was_restored() -> None:
    with opened("llama", "noise") as session, opened("llama", "noise") as fresh:
        said(session, PROMPT, 3)
        edited = [*PROMPT[:20], *MORE]
        assert session.resume(edited) == 0
        assert session.restored == 0
        assert said(session, edited) == said(fresh, edited)


def test_a_common_part_before_anything_was_restored_is_kept() -> None:
    short, longer = PROMPT[: SINK + WINDOW - 2], [*PROMPT[: SINK + WINDOW - 4], *MORE]
    with opened("llama", "exact") as session, opened("llama", None) as native:
        said(session, short, 2)
        assert session.resume(longer) == SINK + WINDOW - 4
        assert said(session, longer) == said(native, longer)
        assert session.restored == 3 * (len(longer) - 1 - SINK - WINDOW)


@pytest.mark.parametrize("block", [1, 4])
def test_speculation_gives_the_same_tokens(block: int) -> None:
    target = target_of("gemma3_text")
    policy, made = parse_policy(f"restored:noise:{SINK},{WINDOW}"), plan("noise")
    with opened("gemma3_text", "noise") as session:
        truth = said(session, PROMPT, 20)
    drafter = tiny.ScriptedDrafter([*PROMPT, *truth], wrong=0.3)
    with Session(target, drafter, headroom=4, policy=policy, restoration=made) as session:
        steps = decode(
            target, drafter, PROMPT, max_tokens=20, session=session, draft_length=FixedDraftLength(block)
        )
        assert [token for step in steps for token in step.tokens] == truth


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5"])
def test_closing_gives_modules_their_classes_back(family: str) -> None:
    target = Target(families.build(family))
    classes = [type(module) for module in target.model.modules()]
    policy = parse_policy(f"restored:exact:{SINK},{WINDOW}")
    sessions = [Session(target, None, headroom=1, policy=policy, restoration=plan("exact")) for _ in range(2)]
    for session in sessions:
        session.prefill(PROMPT)
    for session in sessions:
        session.close()
        session.close()
    assert [type(module) for module in target.model.modules()] == classes


def test_a_failing_forward_starts_over() -> None:
    with opened("llama", "exact") as session, opened("llama", None) as native:
        wrong = [*PROMPT[:30], "no token"]
        with pytest.raises(ValueError):
            session.prefill(wrong)  # type: ignore[arg-type]
        assert session.tokens == []
        assert said(session, PROMPT) == said(native, PROMPT)


def test_a_policy_without_a_plan_is_no_policy_at_all() -> None:
    policy = parse_policy("restored:exact")
    with pytest.raises(ValueError, match="go together"):
        Session(target_of("llama"), None, headroom=1, policy=policy)
    with pytest.raises(ValueError, match="go together"):
        Session(target_of("llama"), None, headroom=1, restoration=plan("exact"))


@pytest.mark.parametrize("source", ["learned", "luck"])
def test_a_source_that_cannot_be_opened_is_an_error(source: str) -> None:
    caches = parse_policy("restored:exact").new_caches(target_of("llama").model, 1)
    with pytest.raises(ValueError, match=f"nothing restores from '{source}'"):
        restoration_for(plan(source), target_of("llama"), caches)


def test_every_known_kind_of_attention_is_tried() -> None:
    found = set()
    for family in EVERY:
        model = target_of(family).model
        for layer in parse_policy("restored:exact").chosen_layers(model):
            attention = type(sites_of(model, [layer])[0].attention)
            found.add(f"{attention.__module__.rsplit('.', 1)[-1]}.{attention.__name__}")
    assert found == set(KINDS)


def test_unknown_attention_is_refused_by_name() -> None:
    target = Target(families.build("llama"))
    kind = type(target.model.layers[1].self_attn)
    target.model.layers[1].self_attn.__class__ = type("Novel", (kind,), {"__module__": "mlx_lm.models.novel"})
    with pytest.raises(ModelError, match=r"layer 1 \(novel.Novel\) cannot be restored"):
        sites_of(target.model, [0, 1])


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_sequences_decoded_together_are_restored_as_alone(family: str) -> None:
    target, policy = target_of(family), parse_policy(f"restored:zeros:{SINK},{WINDOW}")
    prompts = [PROMPT, [*MORE, *MORE]]
    alone = []
    for prompt in prompts:
        with opened(family, "zeros") as session:
            alone.append(said(session, prompt, 6))
    together: list[list[int]] = [[], []]
    requests = [Request(prompt, 6) for prompt in prompts]
    for emitted in decode_batch(target, None, requests, policy=policy, restoration=plan("zeros")):
        for part in emitted:
            together[part.request] += part.step.tokens
    assert together == alone


def test_without_injection_nothing_is_counted_and_noise_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RestoredKV, "overwrite", lambda *_: None)
    with opened("llama", "noise") as disabled, opened("llama", None) as native:
        assert said(disabled, PROMPT) == said(native, PROMPT)
        assert disabled.restored == 0


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text"])
def test_a_session_that_starts_over_restores_again(family: str):
    """Recurrent layers are listened to by two: neither may take the other's place away."""
    target = Target(families.build(family))
    policy = parse_policy("restored:exact:2,6")
    plan = RestorationPlan("exact", policy.sink, policy.window)
    first, edited = list(range(5, 45)), [9, *range(6, 45)]

    def continued(session: Session | None, prompt: list[int]) -> list[int]:
        more = {"session": session} if session else {"policy": policy, "restoration": plan}
        steps = decode(target, None, prompt, max_tokens=6, **more)
        return [token for step in steps for token in step.tokens]

    with Session(target, None, headroom=4, policy=policy, restoration=plan) as session:
        assert continued(session, first) == continued(None, first)
        assert session.restored > 0
        for prompt in (edited, first):
            assert continued(session, prompt) == continued(None, prompt)
            assert session.restored > 0
