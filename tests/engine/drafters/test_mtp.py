"""Next-token heads and the Gemma 4 assistant as drafters: opening them, exactness, what they remember."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from engine.batch_decode import Request, decode_batch
from engine.config import Options, open_engine
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.mtp import SPARE, AssistantDrafter, HiddenStateDrafter
from engine.drafters.registry import kind_of, open_drafter
from engine.errors import ConfigurationError, DrafterMismatchError, ModelError
from engine.evaluation.prompts import load_prompts
from engine.networks.mtp import SPLIT_FILE, build_head, write_mtp
from engine.networks.mtp_assistant import Assistant
from engine.sampling import Sampler, Sampling
from engine.target.loading import SHIPPED_TARGET, LoadedTarget, load_target
from engine.target.model import Target
from engine.training.mtp import train_head, write_head
from tests.engine import families, tiny
from tests.engine.batches import prompt_of, target_of
from tests.engine.random_drafters import Helped, mtp_drafter

COUNT = 24
DEMO = Path(__file__).parents[2] / "data" / "mtp" / "demo"
ASSISTANT = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 32,
    "tie_word_embeddings": True,
    "text_config": tiny.PLAIN
    | {
        "model_type": "gemma4_text",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": tiny.WINDOW,
        "hidden_size_per_layer_input": 0,
    },
}


def assistant(seed: int = 7) -> AssistantDrafter:
    mx.random.seed(seed)
    network = Assistant(ASSISTANT)
    network.update(tree_map(lambda w: 2 * w if w.ndim > 1 else w, network.parameters()))
    return AssistantDrafter(network)


def made(kind: str) -> tuple[Target, HiddenStateDrafter]:
    """A target and a bound drafter of random weights."""
    drafter = assistant() if kind == "gemma4_text" else mtp_drafter()
    target = target_of(kind)
    drafter.bind(target)
    return target, drafter


def text(target: Target, drafter: Any, prompt: Sequence[int], block: int = 5, **more: Any) -> list[int]:
    steps = decode(target, drafter, prompt, max_tokens=COUNT, draft_length=FixedDraftLength(block), **more)
    return [token for step in steps for token in step.tokens]


def rows_of(target: Target, drafter: HiddenStateDrafter, tokens: Sequence[int]) -> mx.array:
    hooks = target.hook_layers(drafter.target_layers)
    try:
        rows = target.forward(mx.array([tokens]), target.model.make_cache(), hooks)[1]
    finally:
        hooks.close()
    assert rows is not None
    return rows


def save_qwen_head(folder: Path, shift: int = 0) -> None:
    """A random head in ``mtp.safetensors``, with Qwen's names, beside the configuration of its target."""
    mx.random.seed(11)
    network, _ = build_head(json.loads((folder / "config.json").read_text()))
    names = {
        "projection": "fc",
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
    }
    stored = {}
    for own, value in tree_flatten(network.parameters()):
        part, _, kind = own.rpartition(".")
        stored[f"mtp.{names.get(part, part)}.{kind}"] = value - shift if value.ndim == 1 else value
    mx.save_safetensors(str(folder / SPLIT_FILE), stored, {"format": "pt" if shift else "mlx"})


def saved_head(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a random head in DeepSeek's layout, and the configuration of its target."""
    mx.random.seed(11)
    write_head(build_head(config)[0], config, folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = families.save(tmp_path_factory.mktemp("models") / "qwen", "qwen3_5")
    save_qwen_head(folder)
    return folder


@pytest.fixture(scope="module")
def target(qwen: Path) -> LoadedTarget:
    return load_target(qwen)


def test_head_in_the_targets_folder_drafts_for_it(target: LoadedTarget, qwen: Path):
    prompt = prompt_of(9)
    plain = text(target.target, None, prompt, 1)
    for spec in ("mtp", f"mtp:{qwen}", "prompt-lookup+mtp"):
        loaded = open_drafter(spec, target)
        assert text(target.target, loaded.drafter, prompt) == plain
        assert loaded.card is not None
        assert loaded.drafter.forwards > 0


def test_published_norms_are_stored_less_one(target: LoadedTarget, qwen: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    save_qwen_head(tmp_path, shift=1)
    published, converted = open_drafter(f"mtp:{tmp_path}", target), open_drafter("mtp", target)
    prompt = prompt_of(5)
    drafts = []
    for drafter in (published.drafter, converted.drafter):
        drafter.observe(prompt, rows_of(target.target, drafter, prompt))
        drafts.append(drafter.propose(7, 4).tokens.tolist())
    assert drafts[0] == drafts[1]


def test_head_is_copied_as_it_is_stored(qwen: Path, tmp_path: Path):
    write_mtp(qwen, tmp_path)
    ours, theirs = (mx.load(str(folder / SPLIT_FILE), return_metadata=True) for folder in (qwen, tmp_path))
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys()
    assert all(mx.array_equal(value, theirs[0][name]).item() for name, value in ours[0].items())


def test_head_behind_the_last_layer_is_found_in_a_split_file(tmp_path: Path):
    folder = tiny.save_target(tmp_path / "target")
    target = load_target(saved_head(folder, tiny.GEMMA))
    prompt = prompt_of(9)
    drafter = open_drafter("mtp", target).drafter
    assert text(target.target, drafter, prompt) == text(target.target, None, prompt, 1)


@pytest.mark.parametrize(("place", "fault"), [("split", "lacking"), ("weights", "lacking"), ("split", "cut")])
def test_broken_head_of_the_targets_folder_is_an_error_with_a_remedy(tmp_path: Path, place: str, fault: str):
    folder = families.save(tmp_path / "qwen", "qwen3_5")
    save_qwen_head(folder)
    split = folder / SPLIT_FILE
    tensors = dict(mx.load(str(split)).items())
    if fault == "lacking":
        tensors = {name: value for name, value in tensors.items() if not name.endswith("fc.weight")}
        mx.eval(tensors)
    file = split if place == "split" else folder / "model-mtp.safetensors"
    split.unlink()
    mx.save_safetensors(str(file), tensors, {"format": "mlx"})
    if fault == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    reason = "the weights lack projection.weight" if fault == "lacking" else "cannot be loaded"
    for options in (Options(folder), Options(folder, "mtp")):
        with pytest.raises(ModelError, match=rf"{reason}.*--drafter prompt-lookup or --no-speculation"):
            open_engine(options)
    assert open_engine(Options(folder, "prompt-lookup")).drafter is not None


def test_refusals_say_what_to_do(target: LoadedTarget, tmp_path: Path):
    plain = tiny.save_target(tmp_path / "plain")
    with pytest.raises(ModelError, match=r"holds no next-token head.*--keep-mtp"):
        open_drafter("mtp", load_target(plain))
    with pytest.raises(ModelError, match=r"no next-token head is known for model_type 'qwen3'"):
        open_drafter(f"mtp:{tiny.save_target(tmp_path / 'other', 'qwen3')}", target)
    with pytest.raises(ConfigurationError, match=r"lacks its folder; give mtp:FOLDER"):
        open_drafter("mtp:", target)
    with pytest.raises(ConfigurationError, match=r"mtp keeps its own keys and values native; leave it out"):
        open_drafter("mtp?kv=affine", target)
    with pytest.raises(ModelError, match="for Gemma 4 targets alone"):
        assistant().bind(target.target)
    with pytest.raises(DrafterMismatchError, match="hidden size 64"):
        mtp_drafter(tiny.GEMMA | {"hidden_size": 64}).bind(target.target)


def test_assistants_folder_says_what_it_is(tmp_path: Path):
    weights = dict(tree_flatten(assistant().network.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(ASSISTANT))
    assert kind_of(tmp_path) == "mtp"
    target = LoadedTarget(target_of("gemma4_text"), None, None, None)  # type: ignore[arg-type]
    drafter = open_drafter(str(tmp_path), target).drafter
    prompt = prompt_of(20)
    assert text(target.target, drafter, prompt) == text(target.target, None, prompt, 1)
    assert drafter.forwards > 0


def test_first_token_waits_for_nothing_of_the_head():
    target, drafter = made("gemma3_text")
    steps = decode(target, drafter, prompt_of(600), max_tokens=8, prefill_chunk=256)
    next(steps)
    assert drafter.forwards == 0
    next(steps)
    assert drafter.forwards > 0


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text"])
def test_text_is_the_targets_own_while_drafts_come_true_in_part(kind: str):
    target, drafter = made(kind)
    prompt = prompt_of(3 * tiny.WINDOW)
    plain = tiny.plain_tokens(target.model, prompt, COUNT)
    assert text(target, Helped(drafter, [*prompt, *plain], 0.6), prompt) == plain


def test_an_assistants_batch_has_the_texts_of_single_sequences():  # of heads: tests.engine.batches
    target, drafter = made("gemma4_text")
    prompts = [prompt_of(length) for length in (3, 20, 9)]
    found: list[list[int]] = [[] for _ in prompts]
    requests = [Request(prompt, COUNT) for prompt in prompts]
    for emitted in decode_batch(target, drafter, requests, draft_length=FixedDraftLength(4)):
        for each in emitted:
            found[each.request] += each.step.tokens
    assert found == [text(target, None, prompt, 1) for prompt in prompts]


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text"])
def test_drawn_drafts_come_from_q_and_no_more_than_four(kind: str):
    target, drafter = made(kind)
    prompt = prompt_of(12)
    drafter.observe(prompt, rows_of(target, drafter, prompt))
    draft = drafter.propose(7, 9, Sampler(Sampling(temperature=1.0, seed=3)))
    assert draft.q is not None
    assert len(draft) == draft.q.shape[0] == 4
    assert np.allclose(np.array(draft.q.sum(axis=-1)), 1, atol=1e-5)
    assert (np.array(draft.q)[range(4), draft.tokens.tolist()] > 0).all()


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text"])
@pytest.mark.parametrize("absorb", [4, 512])
def test_proposal_depends_only_on_committed_tokens(kind: str, absorb: int, monkeypatch: pytest.MonkeyPatch):
    """Whatever was observed at a time, proposed in between, rewound, or forked."""
    monkeypatch.setattr("engine.drafters.mtp.ABSORB_AT", absorb)
    target, drafter = made(kind)
    tokens = prompt_of(30)
    fresh = drafter.twin()
    fresh.observe(tokens, rows_of(target, drafter, tokens))
    wanted = fresh.propose(7, 4).tokens.tolist()
    rows = rows_of(target, drafter, tokens)
    drafter.observe(tokens[:11], rows[:, :11])
    drafter.propose(9, 4)
    drafter.observe(tokens[11:13], rows[:, 11:13])
    fork = drafter.fork()
    drafter.observe((5, 6, 8), rows[:, :3])
    drafter.propose(9, 2)
    drafter = fork
    drafter.observe(tokens[13:], rows[:, 13:])
    drafter.observe((5, 6), rows[:, :2])
    drafter.propose(9, 4)
    assert drafter.rewind(2)
    assert drafter.propose(7, 4).tokens.tolist() == wanted
    assert drafter.propose(7, 4).tokens.tolist() == wanted  # asked twice


def test_rewind_beyond_the_rows_kept_still_drafts():
    target, drafter = made("gemma3_text")
    tokens = [5 + place % 40 for place in range(8 * SPARE)]
    for done in range(0, len(tokens), 100):
        part = tokens[done : done + 100]
        drafter.observe(part, rows_of(target, drafter, part))
        drafter.propose(7, 1)
    assert not drafter.rewind(len(tokens) + 1)
    assert drafter.rewind(len(tokens) - 30)
    assert len(drafter.propose(7, 4)) == 0  # until the next token is known
    drafter.observe([8], rows_of(target, drafter, [8]))
    assert len(drafter.propose(7, 4)) == 4


def test_trained_heads_drafts_come_true():
    """The head in ``tests/data/mtp/demo``, on prompts whose continuations it was not trained on."""
    target = load_target(SHIPPED_TARGET)
    drafter = open_drafter(f"mtp:{DEMO}", target).drafter
    accepted = rounds = 0
    for prompt in load_prompts("code")[:2]:
        tokens = target.tokenizer.encode(prompt.text)
        steps = decode(target.target, drafter, tokens, max_tokens=24, draft_length=FixedDraftLength(3))
        found = [step.round for step in steps if step.round is not None]
        accepted += sum(each.accepted for each in found)
        rounds += len(found)
    assert accepted > rounds / 2


@pytest.mark.slow
def test_training_makes_drafts_come_true(tmp_path: Path):
    target = load_target(SHIPPED_TARGET)
    config = json.loads((SHIPPED_TARGET / "config.json").read_text())
    text = [target.tokenizer.encode(prompt.text) for prompt in load_prompts("code")]
    network, losses = train_head(target.target, config, text, steps=40, length=64)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    write_head(network, config, tmp_path)
    drafter = open_drafter(f"mtp:{tmp_path}", target).drafter
    steps = decode(target.target, drafter, text[0], max_tokens=48, draft_length=FixedDraftLength(2))
    assert sum(step.round.accepted for step in steps if step.round is not None) > 0
