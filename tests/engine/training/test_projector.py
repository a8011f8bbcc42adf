"""Training a projector: the restored rows are compared where inference puts them, and the error goes down."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from engine.cache.policy import parse_policy
from engine.errors import ConfigurationError, EngineError, ModelError
from engine.haystack_text import generator
from engine.networks.projector import DrafterFeatures
from engine.restoration.loading import load_learned
from engine.restoration.session import RestorationPlan
from engine.restoration.sites import sites_of
from engine.session import Session
from engine.target.loading import LoadedTarget, load_target
from engine.target.model import Target
from engine.training.projector import file_texts, retrieval_texts, train_projector, write_projector
from engine.training.projector_fit import (
    AttentionRecorder,
    ProjectorSwitches,
    Visibility,
    batch,
    first_restored,
    losses,
    relative_error,
)
from tests.engine import families, random_drafters

TOY = ProjectorSwitches(window=8, steps=24, batches=2, texts=2, length=192)
PLAN = RestorationPlan("exact", 2, 8)


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LoadedTarget:
    return load_target(folders[0])


@pytest.fixture(scope="module")
def trained(
    target: LoadedTarget, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], list[tuple[int, int, str, str]]]:
    """A projector's folder, its figures, and what was told of the progress."""
    out, told = tmp_path_factory.mktemp("trained") / "projector", []
    figures = train_projector(target, folders[1], out, TOY, progress=lambda *step: told.append(step))
    return out, figures, told


def recorder_of(family: str) -> AttentionRecorder:
    target = Target(families.build(family))
    layers = parse_policy("restored:exact").chosen_layers(target.model)
    features = DrafterFeatures(random_drafters.block_drafter(target).network)
    return AttentionRecorder(target, sites_of(target.model, layers), features)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_queries_keys_and_values_are_those_attention_works_with(family: str) -> None:
    """They reproduce what the output projection of the layer is given."""
    recorder = recorder_of(family)
    model = recorder._target.model
    tokens = mx.array([[(7 * i) % 290 + 5 for i in range(30)]], mx.int32)
    seen = recorder.record(tokens)
    recorder.close()
    caches = make_prompt_cache(model)
    model(tokens, cache=caches)
    visible = Visibility.of(PLAN, 30, range(20, 30))
    for site, rows in zip(recorder.sites, seen.layers, strict=True):
        keys, values = caches[site.layer].keys_and_values()
        assert mx.allclose(rows.keys, keys, rtol=1e-4, atol=1e-4)
        assert mx.allclose(rows.values, values, rtol=1e-4, atol=1e-4)
        own = losses(site, rows, (rows.key_rows, rows.value_rows), visible)
        assert mx.abs(own).max().item() < 1e-4
        other = losses(site, rows, (-rows.key_rows, -rows.value_rows), visible)
        assert other[0].item() > 1e-3


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "gpt_oss", "qwen3_next"])
def test_queries_are_the_ones_attention_asks(family: str) -> None:
    """What attention gives with them is what the layer's output projection is given, gates apart."""
    recorder = recorder_of(family)
    heard: list[mx.array] = []
    site = recorder.sites[0]
    plain = type(site.attention.o_proj)

    def call(self: Any, x: mx.array) -> mx.array:
        heard.append(x)
        out: mx.array = plain.__call__(self, x)
        return out

    site.attention.o_proj.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    seen = recorder.record(mx.array([[(7 * i) % 290 + 5 for i in range(30)]], mx.int32))
    recorder.close()
    rows = seen.layers[0]
    output = mx.fast.scaled_dot_product_attention(
        rows.queries, rows.keys, rows.values, scale=1.0, mask="causal", sinks=rows.sinks
    )
    output = output.transpose(0, 2, 1, 3).reshape(1, 30, -1)
    if family == "qwen3_next":
        ratio = heard[0] / output
        assert ((ratio > -1e-3) & (ratio < 1 + 1e-3)).all().item()
    else:
        assert mx.allclose(heard[0], output, rtol=1e-3, atol=1e-4)


def test_a_query_sees_restored_what_inference_has_restored_by_then() -> None:
    visible = Visibility.of(PLAN, 40, [23, 24, 31])
    assert first_restored(PLAN) == 16
    for row, query in enumerate((23, 24, 31)):
        chunk = query - query % 8
        restored = [place for place, value in enumerate(visible.restored[row].tolist()) if value]
        assert restored == list(range(2, chunk - 8))
        assert visible.seen[row].tolist() == [place <= query for place in range(40)]


@pytest.mark.slow
def test_the_loss_goes_down_and_the_folder_says_so(
    trained: tuple[Path, dict[str, Any], list[tuple[int, int, str, str]]],
) -> None:
    out, figures, told = trained
    before, after = figures["held_out"]["regression"], figures["held_out"]["distilled"]
    assert after["direction"] < before["direction"] < 1
    assert [row["step"] for row in figures["log"]] == list(range(1, 25))
    document = json.loads((out / "config.json").read_text())
    assert document["training"] == {"switches": asdict(TOY), **figures}
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [step[0] for step in told] == list(range(told[0][1] + 1))
    assert told[-1] == (told[0][1], told[0][1], "held out", "done")


@pytest.mark.slow
def test_the_file_loads_and_restores(
    trained: tuple[Path, dict[str, Any], list[tuple[int, int, str, str]]],
    target: LoadedTarget,
    folders: tuple[Path, Path],
) -> None:
    learned = load_learned(trained[0], target, str(folders[1]))
    policy = parse_policy("restored:learned:4,8")
    plan = RestorationPlan("learned", 4, 8, learned)
    with Session(target.target, None, headroom=1, policy=policy, restoration=plan) as session:
        session.prefill(list(range(5, 65)))
        assert session.restored == 2 * (60 - 4 - 8)


@pytest.mark.slow
def test_training_again_gives_the_same_file(
    trained: tuple[Path, dict[str, Any], list[tuple[int, int, str, str]]],
    target: LoadedTarget,
    folders: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    figures = train_projector(target, folders[1], tmp_path, TOY, progress=lambda *_: None)
    assert figures == trained[1]
    same = (tmp_path / "model.safetensors").read_bytes() == (trained[0] / "model.safetensors").read_bytes()
    assert same


@pytest.mark.slow
def test_training_leaves_the_target_as_it_was(
    target: LoadedTarget, folders: tuple[Path, Path], tmp_path: Path
):
    classes = [type(module) for module in target.target.model.modules()]
    toy = ProjectorSwitches(window=8, steps=0, batches=1, texts=1, length=192)
    train_projector(target, folders[1], tmp_path, toy, progress=lambda *_: None)
    assert [type(module) for module in target.target.model.modules()] == classes


def test_texts_depend_on_seed_and_key_and_fill_their_length(target: LoadedTarget) -> None:
    draw = retrieval_texts(target.tokenizer, 192)
    first = batch(draw, TOY, "a", False)
    assert first.shape == (2, 192)
    assert (first[:, 0] == target.tokenizer.bos_token_id).all().item()
    assert mx.array_equal(first, batch(draw, TOY, "a", False))
    assert not mx.array_equal(first, batch(draw, TOY, "b", False))
    assert not mx.array_equal(first, batch(draw, TOY, "a", True))
    document = target.tokenizer.decode(draw(generator(1), False))
    assert "The secret code of" in document
    assert "Question: what is" in document


LINES = "".join(f"The {number}th day was warm and line {number} of it is here.\n" for number in range(400))


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_users_texts_are_stretches_of_the_file_and_its_end_is_held_out(
    suffix: str, target: LoadedTarget, tmp_path: Path
) -> None:
    file = tmp_path / f"texts.{suffix}"
    records = "\n\n".join(json.dumps({"text": line, "id": 1}) for line in LINES.splitlines())
    file.write_text(records if suffix == "jsonl" else LINES)
    draw = file_texts(file, target.tokenizer, 64)
    rng = generator(3)
    for held_out, numbers in ((False, range(361)), (True, range(359, 400))):
        for _ in range(20):
            tokens = draw(rng, held_out)
            assert len(tokens) == 64
            assert tokens[0] == target.tokenizer.bos_token_id
            text = target.tokenizer.decode(tokens[1:])
            whole = "".join(f"{line}<eos>" for line in LINES.splitlines()) if suffix == "jsonl" else LINES
            assert text in whole
            assert all(int(number) in numbers for number in re.findall(r"line (\d+) of", text))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, r"none.txt cannot be read: No such file.*; give a UTF-8 text, or a .jsonl file"),
        ("bytes.txt", b"\xff\xfe", r"bytes.txt cannot be read: it is not UTF-8; give"),
        ("few.txt", b"a b c", r"few.txt has \d+ tokens, too few for texts of --length 192; .* 384 tokens"),
        ("empty.jsonl", b"", r"empty.jsonl has 0 tokens, too few"),
        ("lines.jsonl", b'{"text": "a"}\n{"txt": "b"}', r"""line 2 is no text: '{"txt": "b"}'; each line"""),
        ("numbers.jsonl", b'{"text": 7}', "line 1 is no text"),
        ("broken.jsonl", b'{"text": "\\ud800"}', "line 1 is no text"),
        ("plain.jsonl", b"once upon a time", "line 1 is no text"),
    ],
)
def test_a_file_that_holds_no_texts_is_refused(
    name: str,
    content: bytes | None,
    message: str,
    target: LoadedTarget,
    folders: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    switches = replace(TOY, texts_file=str(tmp_path / name))
    with pytest.raises(ConfigurationError, match=f"--texts-file .*{message}"):
        train_projector(target, folders[1], tmp_path / "out", switches, progress=lambda *_: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": -1}, "--steps must be at least 0, not -1"),
        ({"length": 100}, "--length must be at least 192, not 100"),
        ({"length": 513}, "--length 513 is more than the target's context of 512"),
        ({"window": 0}, "--window must lie in 1 to 1048576, not 0"),
        ({"window": 2**30}, "--window must lie in 1 to 1048576, not 1073741824"),
        ({"sink": -1}, "--sink must lie in 0 to 1048576, not -1"),
        ({"window": 190}, "--length 192 leaves nothing to restore beyond --sink 4 and --window 190"),
        ({"layers": "0"}, "^--layers 0: layer 0 slides and evicts nothing that could be restored; a proj"),
        ({"layers": "99"}, "^--layers 99: layer 99 is no attention layer"),
        ({"layers": "best"}, "^--layers 'best' names no layers; give full"),
    ],
    ids=[
        *("steps", "short", "long", "no-window", "wide", "sink", "nothing-left"),
        *("slides", "no-layer", "no-layers"),
    ],
)
def test_switches_that_make_no_sense_are_refused(
    changes: dict[str, Any],
    message: str,
    target: LoadedTarget,
    folders: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    switches = ProjectorSwitches(**(asdict(TOY) | changes))
    with pytest.raises(ConfigurationError, match=message):
        train_projector(target, folders[1], tmp_path, switches, progress=lambda *_: None)


def test_another_models_folder_is_left_alone(target: LoadedTarget, folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigurationError, match="holds another model"):
        train_projector(target, folders[1], folders[0], TOY, progress=lambda *_: None)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_weights_without_a_configuration_are_left_alone(
    name: str, target: LoadedTarget, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigurationError, match="holds another model"):
        train_projector(target, folders[1], tmp_path, TOY, progress=lambda *_: None)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]


def test_a_run_that_is_interrupted_leaves_no_folder(
    target: LoadedTarget, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_projector(target, folders[1], tmp_path / "new" / "projector", TOY, progress=interrupt)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_files_of_whichever_name_beside_the_projector_stay(
    trained: tuple[Path, dict[str, Any], list[tuple[int, int, str, str]]],
    target: LoadedTarget,
    folders: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    mine = {name: f"my {name}" for name in ("new.json", "new.safetensors", "notes.txt")}
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    projector = load_learned(trained[0], target, str(folders[1])).projector
    write_projector(projector, tmp_path, {})
    found = {path.name: path for path in tmp_path.iterdir()}
    assert set(found) == {*mine, "config.json", "model.safetensors"}
    assert {name: found[name].read_text() for name in mine} == mine


def test_weights_that_cannot_be_written_leave_the_folder_as_it_was(
    trained: tuple[Path, dict[str, Any], list[tuple[int, int, str, str]]],
    target: LoadedTarget,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As mlx says it where there is no space."""
    projector = load_learned(trained[0], target, str(folders[1])).projector

    def full(file: str, *_: object, **__: object) -> None:
        Path(file).write_bytes(b"a part")
        raise RuntimeError("[write] Unable to write 4096 bytes to file.")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(EngineError, match=rf"{tmp_path} cannot be written: \[write\] Unable") as caught:
        write_projector(projector, tmp_path, {})
    assert type(caught.value) is EngineError
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_folder(target: LoadedTarget, folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made a folder"):
        train_projector(target, folders[1], tmp_path / "file", TOY, progress=lambda *_: None)


def test_a_drafter_that_is_no_dflash_is_refused(
    target: LoadedTarget, folders: tuple[Path, Path], tmp_path: Path
):
    with pytest.raises(ModelError, match="DFlash drafters are qwen3"):
        train_projector(target, folders[0], tmp_path, TOY, progress=lambda *_: None)


def test_a_folder_that_vanishes_is_our_failure_not_the_users_input(
    trained: tuple[Path, dict[str, Any], list[tuple[int, int, str, str]]],
    target: LoadedTarget,
    folders: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    learned = load_learned(trained[0], target, str(folders[1]))
    (tmp_path / "config.json").mkdir()
    with pytest.raises(EngineError, match="cannot be written"):
        write_projector(learned.projector, tmp_path, {})


def test_the_relative_error_of_the_mean_is_one() -> None:
    rows = mx.random.normal((3, 50, 4), key=mx.random.key(1))
    assert relative_error(rows, rows).item() == 0
    mean = mx.broadcast_to(rows.mean(axis=(0, 1)), rows.shape)
    assert relative_error(mean, rows).item() == pytest.approx(1, abs=1e-5)
