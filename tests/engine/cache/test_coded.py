"""Under every policy a block of partly wrong drafts leaves what single steps leave, and gives the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from engine.batch_decode import Request, decode_batch
from engine.cache.coded import CodedKV
from engine.cache.policy import parse_policy
from engine.cache.stats import held, kv_use
from engine.cache.transaction import new_caches, resident
from engine.decode import Diagnosis, decode
from engine.draft_length import FixedDraftLength
from engine.session import Session
from engine.target.model import Target
from tests.engine import batches, families, tiny

LENGTH, HEADROOM = 40, 8
POLICIES = (
    "full-kv",
    "sliding-bounded:2,4",
    "sink-window:2,6",
    "affine:8,64",
    "affine:4,32@full",
    "rotated:4,64",
    "rotated:3,32@inner:1",
    "rotated:8/3,32",
    "auto:4@inner:1",
    "lattice:d4,10",
    "lattice:e8,38@all",
    "lattice-packed:e8,5@all",
    "lattice-packed:d4,4@full",
)
FAMILIES = ("gemma3_text", "gemma4_text", "gemma4", "gpt_oss", "llama", "qwen3_5")
CASES = [
    (policy, family)
    for policy in POLICIES
    for family in FAMILIES
    if not (policy.startswith(("sliding", "full")) and family in ("llama", "qwen3_5"))
]


@cache
def target(family: str) -> Target:
    return Target(families.build(family, head_dim=32))


def follow(policy: str, family: str, blocks: list[tuple[int, int]], compiled: bool) -> tuple[list[Any], Any]:
    """Logits of kept positions and the caches after rounds of (block, kept) along one text."""
    random = tiny.seeded(len(family))
    text = [random.randrange(5, tiny.VOCAB) for _ in range(LENGTH)]
    logits = []
    with Session(
        target(family), None, headroom=HEADROOM, compiled=compiled, policy=parse_policy(policy)
    ) as session:
        session.prefill(text[:5])
        done = 5
        for block, kept in blocks:
            fed = text[done : done + kept] + [7] * (block - kept)
            session.transaction.begin(len(session.uncached) + block)
            rows, _ = session.forward(mx.array([[*session.uncached, *fed]]))
            session.commit(text[done : done + kept], None)
            logits.extend(np.array(rows[0, -block:][:kept].astype(mx.float32)))
            done += kept
        assert done == LENGTH
        return logits, session.caches


ROUNDS = [(8, 3), (1, 1), (6, 6), (8, 1), (3, 2), (8, 8), (5, 4), (8, 2), (4, 4), (8, 4)]
SINGLES = [(1, 1)] * (LENGTH - 5)


@pytest.mark.sampled(64, 16)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("policy", "family"), CASES)
def test_blocks_leave_what_single_steps_leave(policy, family, compiled):
    """A value on the edge between two codes may fall on either side: few rows differ, and by one step.

    What layers above the first such row hold may differ a little everywhere.
    """
    ours, caches = follow(policy, family, ROUNDS, compiled)
    theirs, singles = follow(policy, family, SINGLES, compiled=False)
    worst = [np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)]
    assert np.median(worst) < 2e-3
    coded = parse_policy(policy).coded
    assert max(worst) < (0.5 if coded else 2e-3)
    turned = False
    for one, other in zip(caches, singles, strict=True):
        assert type(one) is type(other)
        mine, plain = held(one), held(other)
        if mine is None or plain is None:
            continue
        assert mine.positions == plain.positions
        rows = np.stack(
            [
                mx.abs(a - b).max(axis=(0, 1, 3))
                for a, b in ((mine.keys, plain.keys), (mine.values, plain.values))
            ]
        )
        assert rows.max() < (0.5 if coded else 2e-3)
        assert turned or np.mean(rows > 2e-3, axis=1).max() <= 0.2
        turned = turned or bool(np.any(rows > 2e-3))


# Fine codes: with few bits, a value that rounding turns to another code can change which token is the best.
@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("policy", ["affine:8,64", "lattice-packed:e8,8@all", "sink-window:2,6"])
def test_decoding_with_drafts_gives_the_tokens_without(policy):
    family, chosen = "gemma3_text", parse_policy(policy)
    prompt = [9, 8, 7, 6, 5, 11, 12]

    def run(drafter: Any, block: int) -> list[int]:
        steps = decode(
            target(family), drafter, prompt, max_tokens=30,
            draft_length=FixedDraftLength(block), policy=chosen,
            diagnosis=Diagnosis(compiled=block > 1),
        )  # fmt: skip
        return [token for step in steps for token in step.tokens]

    plain = run(None, 1)
    assert run(tiny.ScriptedDrafter(prompt + plain, wrong=0.3), 6) == plain


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("policy", ["affine:4,32", "lattice-packed:d4,5@all", "sink-window:1,5"])
def test_sequences_decoded_together_keep_their_own_tokens(policy):
    chosen, model = parse_policy(policy), target("gemma3_text")
    prompts = [batches.prompt_of(length) for length in (3, 9, 14)]
    requests = [Request(prompt, 16) for prompt in prompts]
    emitted = batches.gather(decode_batch(model, None, requests, policy=chosen), len(prompts))
    for prompt, steps in zip(prompts, emitted, strict=True):
        alone = decode(model, None, prompt, max_tokens=16, policy=chosen)
        assert batches.tokens_of(steps) == batches.tokens_of(list(alone))
        share = steps[-1].share
        assert share is not None
        assert (share.kv is not None) == chosen.coded


def test_affine_codes_are_those_of_mlx_lms_quantized_cache():
    """But for scales and biases, which we keep in 16 bits."""
    model = target("llama").model
    ours = new_caches(model, 4, parse_policy("affine:8,32"))
    theirs = [QuantizedKVCache(32, 8) for _ in model.layers]
    tokens = mx.array([[5, 6, 7, 8, 9]])
    policy = parse_policy("affine:8,32")
    with Session(target("llama"), None, headroom=4, caches=ours, policy=policy) as session:
        logits, _ = session.forward(tokens)
    assert mx.abs(logits - model(tokens, cache=theirs)).max().item() < 0.05
    store, quantized = ours[0].stores[0], theirs[0].keys_and_values()[0][0]
    assert mx.array_equal(store.keys_and_values()[0], quantized)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if parse_policy(policy).coded])
def test_bytes_are_those_of_the_arrays_held_and_as_many_as_the_code_says(policy):
    chosen, model = parse_policy(policy), target("gemma3_text").model
    caches = new_caches(model, HEADROOM, chosen)
    with Session(target("gemma3_text"), None, headroom=HEADROOM, caches=caches, policy=chosen) as session:
        session.prefill([7] * 300)
    arrays = [
        array
        for cache in caches
        for store in (cache.stores if isinstance(cache, CodedKV) else [cache])
        for array in (store.keys, store.values)
    ]
    assert resident(caches)[1] == sum(array.size * array.dtype.size for array in arrays)
    use = kv_use(caches)
    assert use is not None
    assert list(use.layers) == chosen.chosen_layers(model)
    codecs = caches[use.layers[0]]._codecs
    assert 8 * use.nbytes / use.values == pytest.approx(sum(c.bits_per_value() for c in codecs) / 2, rel=1e-9)


def test_native_and_bounded_caches_code_nothing():
    caches = new_caches(target("llama").model, 4, parse_policy("sink-window"))
    assert kv_use(caches) is None
    assert [held(cache) for cache in caches] == [None] * len(caches)


@pytest.mark.parametrize("bounded", [False, True])
def test_trimming_goes_through_all_stores(bounded):
    model = families.build("gemma3_text" if bounded else "llama", head_dim=32)
    cache = parse_policy("rotated:4,32").new_caches(model, 4)[0]
    keys = mx.random.normal((1, 2, 12, 32))
    cache.update_and_fetch(keys, keys)
    before = held(cache)
    cache.update_and_fetch(keys[:, :, :3], keys[:, :, :3])
    assert cache.is_trimmable()
    assert cache.trim(3) == 3
    after = held(cache)
    assert after.positions == before.positions
    assert mx.array_equal(after.keys, before.keys)
    assert {store.offset for store in cache.stores} == {12}
