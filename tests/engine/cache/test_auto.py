"""`--kv auto:BITS`: bits go where they take most off the error, and no layer's make the whole larger."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from engine.batch_decode import Request, decode_batch
from engine.cache import auto
from engine.cache.auto import allocate, layer_bits
from engine.cache.policy import KVPolicy, parse_policy
from engine.cache.stats import kv_use
from engine.cache.transaction import new_caches
from engine.cli import run
from engine.config import Options, open_engine
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.errors import ConfigurationError
from engine.evaluation.arms import speculate
from engine.memory import RunLengths, held_by
from engine.session import Session
from engine.target.attention import refuse_policy
from engine.target.loading import SHIPPED_TARGET
from engine.target.model import Target
from evidence_format.policies import AFFINE_BITS
from tests.engine import batches, families, tiny
from tests.engine.cache import models
from tests.engine.memory.measured import run_alone, run_together

TEXT = [9, 8, 7, 6, 5, 11, 12] * 20


def fitted(model: object, text: str) -> KVPolicy:
    policy = parse_policy(text)
    return replace(policy, layer_bits=layer_bits(policy, model, TEXT))


@pytest.mark.parametrize("bits", [2, 3, 5, 7, 8])
def test_no_other_choice_has_a_smaller_error(bits):
    scales = {(0, 0): 1.0, (0, 1): 0.1, (1, 0): 30.0, (1, 1): 2.0}
    errors = {part: [scale * 4.0**-width for width in AFFINE_BITS] for part, scale in scales.items()}

    def total(chosen: tuple[int, ...]) -> float:
        return sum(scale * 4.0**-width for scale, width in zip(scales.values(), chosen, strict=True))

    found = tuple(allocate(errors, bits).values())
    fitting = [each for each in product(AFFINE_BITS, repeat=4) if sum(each) <= 4 * bits]
    assert sum(found) == 4 * bits
    assert total(found) == pytest.approx(min(map(total, fitting)))


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("bits", [3, 7])
def test_layers_that_hold_alike_have_the_mean_asked_for(bits, head_dim):
    model = families.build("gemma3_text", head_dim=head_dim)
    policy = fitted(model, f"auto:{bits}@inner:1")
    assert policy == parse_policy(f"auto:{bits}@inner:1")
    assert policy.layer_bits == fitted(model, f"auto:{bits}@inner:1").layer_bits
    assert [layer for layer, *_ in policy.layer_bits] == policy.chosen_layers(model) == [1, 2, 3, 4]
    sliding = {layer for layer, cache in enumerate(new_caches(model, 1)) if hasattr(cache, "window")}
    for group in (sliding, {0, 1, 2, 3, 4, 5} - sliding):
        spent = [width for layer, *both in policy.layer_bits if layer in group for width in both]
        assert sum(spent) == bits * len(spent)


@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_are_those_predicted_without_weights(batch):
    target = Target(families.build("gemma3_text", head_dim=64))
    run_of = RunLengths(20, batch=batch)
    unmeasured = sum(kind.bytes for kind in held_by(target, parse_policy("auto:3@inner:1"), run_of))
    measure = run_together if batch > 1 else run_alone
    assert measure(target, fitted(target.model, "auto:3@inner:1"), run_of) == unmeasured


def test_drafts_and_batches_give_the_text_of_plain_decoding():
    target = Target(families.build("gemma3_text", head_dim=64))
    policy = fitted(target.model, "auto:7@all")
    assert len({bits for _, *both in policy.layer_bits for bits in both}) > 1
    prompt = list(batches.prompt_of(9))

    def tokens(drafter: object, block: int) -> list[int]:
        length = FixedDraftLength(block)
        steps = decode(target, drafter, prompt, max_tokens=12, draft_length=length, policy=policy)
        return batches.tokens_of(list(steps))

    plain = tokens(None, 1)
    assert tokens(tiny.ScriptedDrafter(prompt + plain, wrong=0.3), 6) == plain
    requests = [Request(each, 12) for each in (prompt, batches.prompt_of(14))]
    together = batches.gather(decode_batch(target, None, requests, policy=policy), 2)
    assert batches.tokens_of(together[0]) == plain


def test_an_engine_measures_its_model_and_says_the_bits(capsys, monkeypatch):
    monkeypatch.setattr(auto, "TOKENS", 32)  # as much is quick
    engine = open_engine(Options(drafter="none", kv="auto:3@inner:1"))
    outcome = speculate(engine, batches.prompt_of(30), 2, FixedDraftLength(1))
    predicted = held_by(engine.target.target, parse_policy("auto:3@inner:1"), RunLengths(30))
    assert sum(kind.bytes for kind in predicted) == outcome.resident_bytes
    given = ("--drafter", "none", "--kv", "auto:3@inner:1", "--max-tokens", "2", "--json")
    assert run(["generate", "--model", str(SHIPPED_TARGET), "text", *given]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["kv"], said["layer_bits"]) == ("auto:3@inner:1", engine.policy.bits_text)
    assert engine.policy.bits_text.count("/") == len(engine.policy.layer_bits) > 0


@pytest.mark.parametrize("head_dim", [64, 256])
def test_keys_and_values_have_the_bits_of_their_own(head_dim):
    target = Target(families.build("llama", head_dim=head_dim))
    caches = new_caches(target.model, 4, parse_policy("rotated:8/2,32"))
    with Session(target, None, headroom=4, caches=caches, policy=parse_policy("rotated:8/2,32")) as session:
        session.prefill(TEXT)
    use = kv_use(caches)
    assert use is not None
    assert 8 * use.nbytes / use.values == (8 + 2) / 2 + 1
    assert [codec.bits for codec in caches[0]._codecs] == [8, 2]


@pytest.mark.parametrize("text", ["auto:4@all", "rotated:8/4,64"])
def test_heads_that_cannot_be_rotated_are_refused_by_name(text):
    with pytest.raises(ConfigurationError, match=rf"--kv {text}.*: .*dimension of 72"):
        refuse_policy(families.build("llama", head_dim=72), parse_policy(text))


def test_keys_and_values_of_different_widths_take_one_number():
    model = models.model("kimi_linear")
    refuse_policy(model, parse_policy("lattice:d4,38@all"))
    with pytest.raises(ConfigurationError, match="layer 1 differ in width; give one number for both"):
        refuse_policy(model, parse_policy("lattice:d4,38/10@all"))
