"""Predicted bytes are those that the caches hold after a run, exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.cache.policy import NATIVE, parse_policy
from engine.config import Options, open_engine
from engine.draft_length import FixedDraftLength
from engine.errors import ModelError
from engine.evaluation.arms import speculate, speculate_batch
from engine.memory import LayerBytes, RunLengths, held_by
from engine.target.loading import SHIPPED_TARGET, load_target
from engine.target.model import Target
from evidence_format.policies import KINDS
from tests.engine.batches import prompt_of
from tests.engine.cache.models import model
from tests.engine.memory.measured import run_alone, run_together, target_of

POLICIES = (
    "native",
    "full-kv",
    "sliding-bounded:1,4",
    "full-kv",
    "sink-window:3,20",
    "affine:4,64",
    "rotated:8,32@full",
    "lattice:e8,38@inner:1",
    "lattice:d4,152@sliding",
    "lattice-packed:e8,5@all",
    "rotated:8/4,32@full",
    "auto:5@inner:1",
    "restored:exact:4,40",
    "restored:noise:0,8",
)
CONTEXTS = (257, 1, 255, 256, 1000)
RECURRENT = ("qwen3_5", "qwen3_next")
ROUND = RunLengths(0, block=6, headroom=8)


def total(kinds: list[LayerBytes]) -> int:
    return sum(kind.bytes for kind in kinds)


def predicted(family: str, policy: str, run: RunLengths) -> int:
    return total(held_by(target_of(family), parse_policy(policy), run))


def test_every_kind_of_policy_is_here():
    assert {text.partition(":")[0] for text in POLICIES} == set(KINDS)


@pytest.mark.sampled(36, 9)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_sequence_holds_what_was_predicted(policy, context):
    run = RunLengths(context)
    assert predicted("gemma3_text", policy, run) == run_alone(
        target_of("gemma3_text"), parse_policy(policy), run
    )


@pytest.mark.sampled(12, 1)
@pytest.mark.parametrize("policy", ["native", "full-kv", "affine:4,64", "sink-window:3,20"])
@pytest.mark.parametrize("chunk", [100, 5, 256])
def test_chunks_of_a_prompt_are_those_of_the_run(policy, chunk):
    for context in (252, 513):
        run = replace(ROUND, context=context, prefill_chunk=chunk)
        assert predicted("gemma3_text", policy, run) == run_alone(
            target_of("gemma3_text"), parse_policy(policy), run
        )


@pytest.mark.sampled(44, 2)
@pytest.mark.parametrize("context", [255, 1, 256, 300])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_holds_what_was_predicted(policy, context):
    run = RunLengths(context, batch=3, block=1 + context % 3, headroom=4)
    assert predicted("gemma3_text", policy, run) == run_together(
        target_of("gemma3_text"), parse_policy(policy), run
    )


@pytest.mark.sampled(12, 4)
@pytest.mark.parametrize("policy", ["native", "affine:4,64"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma4_text", "gemma4", *RECURRENT])
def test_other_families_hold_what_was_predicted(family, policy):
    for run in (RunLengths(257), replace(ROUND, context=120), RunLengths(257, batch=2)):
        measure = run_together if run.batch > 1 else run_alone
        assert predicted(family, policy, run) == measure(target_of(family), parse_policy(policy), run), run


@pytest.mark.parametrize(
    "family", ["falcon_h1", "lfm2", "kimi_linear", "llama4", "recurrent_gemma", "mistral"]
)
def test_every_kind_of_cache_is_predicted(family):
    """Lists of caches, short convolutions, chunks, and rings beside recurrent states."""
    target = Target(model(family))
    for run in (RunLengths(257), RunLengths(300, prefill_chunk=70)):
        assert total(held_by(target, NATIVE, run)) == run_alone(target, NATIVE, run), run


def test_what_cannot_be_batched_is_refused_by_name():
    for family, says in (("llama4", "ChunkedKVCache"), ("recurrent_gemma", "different lengths")):
        with pytest.raises(ModelError, match=says):
            held_by(Target(model(family)), NATIVE, RunLengths(20, batch=2))


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize("policy", ["rotated", "native", "sink-window", "lattice-packed"])
def test_the_resident_bytes_of_a_report_are_predicted(policy):
    """As evaluations measure them, on the shipped target."""
    engine = open_engine(Options(drafter="none", kv=policy))
    prompt, other = prompt_of(700), prompt_of(700)[::-1]
    alone = speculate(engine, prompt, 2, FixedDraftLength(1))
    together = speculate_batch(engine, [prompt, other], 2, FixedDraftLength(1))
    target, run = load_target(SHIPPED_TARGET).target, RunLengths(700)
    assert total(held_by(target, engine.policy, run)) == alone.resident_bytes
    both = total(held_by(target, engine.policy, replace(run, batch=2)))
    assert [each.resident_bytes for each in together] == [both // 2] * 2


def test_layers_are_counted_by_kind():
    kinds = held_by(target_of("gemma3_text"), NATIVE, RunLengths(100))
    assert [(kind.holds, kind.cache, kind.layers) for kind in kinds] == [
        ("last 8", "SlidingRing", 4),
        ("all positions", "KVCache", 2),
    ]
    coded = held_by(target_of("gemma3_text"), parse_policy("affine@full"), RunLengths(100, batch=2))
    assert [(kind.holds, kind.cache, kind.layers) for kind in coded] == [
        ("last 8", "RaggedKV", 4),
        ("all positions, affine:4,64", "CodedKV", 2),
    ]
