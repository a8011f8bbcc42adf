"""The proposer is trained on what the drafter shows it, and the pipeline leaves a drafter that works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

import engine
from engine.drafters.masked_diffusion import MaskedDiffusion
from engine.drafters.registry import open_drafter
from engine.target.loading import load_target
from tools.demo_models import demo_target, evaluate, proposer, selfplay
from tools.demo_models.__main__ import main
from tools.demo_models.selfplay import CHAT, CODE, RETRIEVAL, Continuations
from tools.demo_models.tokenizer import BOS, EOS, MASK

PAIR = Path(engine.__file__).resolve().parent / "models" / "demo"


def streams(rows: int = 6, length: int = 400) -> Continuations:
    """Rows of documents that begin with BOS and end with EOS, the second half of each generated."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(8, 1280, (rows, length)).astype(np.uint16)
    kinds = np.zeros((rows, length), np.uint8)
    for row in range(rows):
        at = 0
        while at < length:
            end = at + int(rng.integers(30, 90))
            tokens[row, at], tokens[row, min(end, length) - 1] = BOS, EOS
            kinds[row, (at + end) // 2 : end] = (CODE, RETRIEVAL, CHAT)[row % 3]
            at = end
    return Continuations(tokens, kinds, np.zeros((rows, length, 0), np.float16))


@pytest.fixture(scope="module")
def network() -> Any:
    return proposer.build(proposer.configuration(demo_target.configuration(), layers=3), seed=2)


@pytest.fixture(scope="module")
def task(network: Any) -> proposer.ProposerTask:
    return proposer.ProposerTask(network, streams(), folded=20, queries=48)


def step_of(task: proposer.ProposerTask, variant: int) -> int:
    """The first step with this block length, negative for one block a row."""
    return next(step for step in range(200) if task.variant(step) == variant)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("block", [4, 8, 16])
def test_a_single_block_is_computed_as_in_drafting(network: Any, task: proposer.ProposerTask, block: int):
    tokens, positions, sees, labels, _, _ = task.batch(step_of(task, -block))
    logits = proposer.forward(network, tokens, positions, sees, block)
    assert labels.shape == (8, 1, block - 1)
    for row in range(8):
        seen = np.flatnonzero(np.array(sees[row, -1]))
        assert len(seen) <= proposer.CONTEXT + block - 1
        text = tokens[row, mx.array(seen)]
        alone = network(text[None], mx.arange(len(seen) - block, len(seen)))
        assert mx.abs(alone - logits[row]).max().item() < 5e-3
        assert (text == BOS).sum().item() == int(len(seen) < proposer.CONTEXT + block - 1)
        known = text[-block + 1 :] != MASK  # what is filled is filled with the true tokens
        assert mx.all(~known | (text[-block + 1 :] == labels[row, 0])).item()


def test_a_folded_block_sees_its_past_and_nothing_sees_its_future(task: proposer.ProposerTask):
    tokens, positions, sees, labels, weights, kinds = (
        np.array(part) for part in task.batch(step_of(task, 8))
    )
    width = proposer.WIDTH
    assert (tokens.shape[0], labels.shape[1:], kinds.shape[1]) == (4, (6, 7), 6)
    for row in range(4):
        places, anchors = positions[row, :width], positions[row, width::8]
        for index, anchor in enumerate(anchors):
            block = slice(width + 8 * index, width + 8 * index + 8)
            known = np.flatnonzero(sees[row, block.start, :width])
            assert (places[known] < anchor).all()
            assert (sees[row, block] == sees[row, block.start]).all()
            assert np.flatnonzero(sees[row, block.start, width:]).tolist() == list(
                range(8 * index, 8 * index + 8)
            )
            later = sees[row][known][:, :width] @ (places >= anchor)  # what its context rows have seen
            assert not later.any()
            if len(known):
                assert known[-1] - known[0] + 1 == len(known)
                assert places[known[-1]] == anchor - 1
                assert (tokens[row, known[1:]] != BOS).all()
        assert not sees[row, :width, width:].any()
        assert (weights[row][tokens[row, width:].reshape(6, 8)[:, 1:] != MASK] == 0).all()


def test_only_generated_tokens_of_one_continuation_are_learned(task: proposer.ProposerTask):
    for step in range(6):
        _, _, _, labels, weights, _ = (np.array(part) for part in task.batch(step))
        assert (weights > 0).any()
        for wanted, weight in zip(
            labels.reshape(-1, labels.shape[-1]), weights.reshape(-1, labels.shape[-1]), strict=True
        ):
            ends = np.flatnonzero(wanted == EOS)
            if len(ends):
                assert not weight[ends[0] + 1 :].any()


def test_a_step_is_the_same_after_a_stop(task: proposer.ProposerTask):
    for step in (3, 25):
        for first, second in zip(task.batch(step), task.batch(step), strict=True):
            assert mx.array_equal(first, second).item()


@pytest.mark.slow
def test_selfplay_without_taps_writes_the_same_text(tiny_target: Any, demo_tokenizer: Any):
    made = [
        selfplay.continue_greedily(tiny_target, demo_tokenizer, seed=0, rows=3, length=96, taps=taps)
        for taps in ((), (0,))
    ]
    assert made[0].taps.shape == (3, 96, 0)
    assert np.array_equal(made[0].tokens, made[1].tokens)


@pytest.mark.slow
def test_rounds_of_a_drafter_without_taps_emit_every_token(tiny_target: Any, network: Any):
    prompt = [int(token) for token in np.random.default_rng(0).integers(8, 1280, 40)]
    continuation = evaluate.greedy(tiny_target, prompt, 30)
    drafter = MaskedDiffusion(network, MASK)
    emitted = evaluate.rounds(evaluate.Target(tiny_target), drafter, prompt, continuation, 8)
    assert sum(emitted) == len(continuation) - 1


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_proposer_of_the_shipped_target_is_trained_resumed_and_exported(tmp_path: Path):
    out, work = tmp_path / "demo", tmp_path / "work"
    (out / "target").mkdir(parents=True)
    for file in (PAIR / "target").iterdir():
        (out / "target" / file.name).write_bytes(file.read_bytes())
    common = ["--work", str(work), "--tiny", "--out", str(out)]
    first = CliRunner().invoke(main, [*common, "proposer"], catch_exceptions=False)
    assert json.loads(first.output.splitlines()[-1])["step"] == 6
    again = CliRunner().invoke(main, [*common, "proposer"], catch_exceptions=False)
    assert again.output == ""
    CliRunner().invoke(main, [*common, "export", "--only", "proposer"], catch_exceptions=False)
    target = load_target(out / "target")
    loaded = open_drafter(f"masked-diffusion:{out / 'proposer'}", target)
    assert isinstance(loaded.drafter, MaskedDiffusion)
    assert (loaded.drafter.mask_token_id, loaded.drafter.context) == (MASK, 256)
    loaded.drafter.observe([BOS, 100, 200], None)
    assert len(loaded.drafter.propose(300, 7)) == 7
