"""Files are looked for in a few places, in order, without the network; only `fetch` downloads."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub.constants
import pytest

from engine.config import Options, open_engine
from engine.drafters.registry import open_drafter
from engine.errors import ConfigurationError, MachineError, ModelNotHere, UnknownModel
from engine.registry import CHANNELS, Located, Places, Registry, fetch, locate, variable_of
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, load_target
from tests.engine.registry.hub import COMMIT, Hub, running_hub
from tests.engine.registry.registries import SHIPPED, at, model_of, published

PAIR = model_of(published("m-4b.1", "Owner/M-4B"), published("d", "Owner/D", COMMIT), "pair")
REPOSITORIES = {
    "Owner/M-4B": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "model-00001-of-00002.safetensors": b"more",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"text",
        "modeling.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"the same again",
        "original/params.json": b"{}",
        "README.md": b"read me",
    },
    "Owner/D": {"config.json": b"{}", "model.safetensors": b"w", "dflash.py": b"raise SystemExit"},
}


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the developer's environment says; the hub of these tests is on this machine."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def places(root: Path, hub: Hub | None = None, **environment: str) -> Places:
    return Places(environment, root / "home", root / "cache", hub.address if hub else "http://127.0.0.1:9")


def folder(root: Path, *parts: str) -> Path:
    path = root.joinpath(*parts)
    path.mkdir(parents=True)
    return path


def cached(root: Path, repository: str, revision: str = "main", *, whole: bool = True) -> Path:
    """A repository in the hub's cache as its library lays it out; not ``whole``: without its weights."""
    store = root / "cache" / f"models--{repository.replace('/', '--')}"
    snapshot = folder(store, "snapshots", COMMIT)
    (snapshot / "config.json").write_text("{}")
    if whole:
        (snapshot / "model.safetensors").write_bytes(b"weights")
    if revision != COMMIT:
        folder(store, "refs").joinpath(revision).write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize(
    ("name", "variable"),
    [("qwen3-4b", "KAKEYA_MODEL_QWEN3_4B"), ("qwen3.5-4b-dflash", "KAKEYA_MODEL_QWEN3_5_4B_DFLASH")],
)
def test_the_variable_of_a_folder(name: str, variable: str):
    assert variable_of(name) == variable


def test_the_first_place_that_is_a_folder_is_used(tmp_path: Path):
    entry = model_of(published("m-4b.1", "Owner/M-4B"), name="m")
    in_cache = cached(tmp_path, "Owner/M-4B")
    assert locate(entry, places(tmp_path)) == Located(entry, in_cache, None)
    at_home = folder(tmp_path, "home", "kakeya-models", "m-4b.1")
    assert locate(entry, places(tmp_path)).target == at_home
    named = folder(tmp_path, "named")
    assert locate(entry, places(tmp_path, KAKEYA_MODEL_M_4B_1=str(named))).target == named
    assert locate(entry, places(tmp_path, KAKEYA_MODEL_M_4B_1="")).target == at_home, "as if it were not set"


@pytest.mark.parametrize("value", ["/absent", "~no-such-user/m", "a file"])
def test_a_variable_that_names_no_folder_is_an_error_whatever_lies_elsewhere(tmp_path: Path, value: str):
    entry = model_of(published("m-4b.1", "Owner/M-4B"), name="m")
    folder(tmp_path, "home", "kakeya-models", "m-4b.1")
    if value == "a file":
        value = str(tmp_path / "file")
        Path(value).write_text("")
    said = re.escape(f"KAKEYA_MODEL_M_4B_1 is {value!r}, which is no folder; correct it, or unset it")
    for find in (locate, fetch):
        with pytest.raises(ConfigurationError, match=f"^{said}$"):
            find(entry, places(tmp_path, KAKEYA_MODEL_M_4B_1=value))


def test_look_ups_are_added_to_a_drafter_where_the_entry_says(tmp_path: Path):
    target, drafter = cached(tmp_path, "Owner/M-4B"), cached(tmp_path, "Owner/D", COMMIT)
    assert locate(PAIR, places(tmp_path)) == Located(PAIR, target, str(drafter))
    both = model_of(PAIR.target, PAIR.drafter.model_copy(update={"lookups": True}), "pair")
    assert locate(both, places(tmp_path)).drafter == f"prompt-lookup+{drafter}"


@pytest.mark.parametrize("lookups", [False, True])
def test_a_drafters_own_policy_is_handed_on_with_it(tmp_path: Path, lookups: bool):
    cached(tmp_path, "Owner/M-4B")
    folder(tmp_path, "home", "kakeya-models", "d")
    for source in (PAIR.drafter, at(tmp_path), SHIPPED):
        drafter = source.model_copy(update={"kv": "affine:8,64", "lookups": lookups or source.shipped})
        with_policy = model_of(PAIR.target, drafter, "pair")
        without = model_of(PAIR.target, drafter.model_copy(update={"kv": None}), "pair")
        alone = locate(without, places(tmp_path)).drafter
        assert locate(with_policy, places(tmp_path)).drafter == f"{alone}?kv=affine:8,64"


def test_a_named_revision_is_no_other(tmp_path: Path):
    cached(tmp_path, "Owner/M-4B")
    entry = model_of(published("m", "Owner/M-4B", "f" * 40), name="m")
    with pytest.raises(ModelNotHere, match="the hub's cache of Owner/M-4B at ffffffffffff"):
        locate(entry, places(tmp_path))


def test_what_is_in_no_place_is_refused_with_the_places_and_what_to_do(tmp_path: Path):
    folder(tmp_path, "home", "kakeya-models", "m-4b.1")
    with pytest.raises(UnknownModel) as caught:
        locate(PAIR, places(tmp_path))
    assert type(caught.value) is ModelNotHere
    assert str(caught.value) == (
        "the drafter of the model pair is not on this machine; looked at: KAKEYA_MODEL_D; "
        "~/kakeya-models/d; the hub's cache of Owner/D at 0123456789ab; "
        "run: kakeya_engine model pull pair (with your --registry, if it is in one), give --download, "
        "or put Owner/D in ~/kakeya-models/d, or name its folder in KAKEYA_MODEL_D"
    )
    alone = model_of(published("m"), name="m")
    with pytest.raises(ModelNotHere, match=r"name its folder in KAKEYA_MODEL_M$"):
        locate(alone, places(tmp_path))


def test_given_folders_and_texts_are_handed_on_as_they_are(tmp_path: Path):
    for drafter in ("prompt-lookup:4", f"dflash:{tmp_path}", f"{tmp_path}?kv=affine:8,64"):
        entry = model_of(at(tmp_path), at(drafter), "m")
        assert locate(entry, places(tmp_path)) == Located(entry, tmp_path, drafter)


@pytest.mark.parametrize("path", ["/absent", "/absent?kv=affine:8,64", "/" + "x" * 300, "a file"])
def test_a_path_without_a_folder_is_as_missing_as_a_folder_in_no_place(tmp_path: Path, path: str):
    if path == "a file":
        path = str(tmp_path / "file")
        Path(path).write_text("")
    for part, entry in (("target", model_of(at(path))), ("drafter", model_of(SHIPPED, at(path)))):
        said = re.escape(f"the {part} of the model one is not on this machine: {path.partition('?kv')[0]}")
        with pytest.raises(ModelNotHere, match=f"^{said}"):
            locate(entry, places(tmp_path))


def test_a_name_that_the_hub_could_not_have_is_refused(tmp_path: Path):
    entry = model_of(published("m", "Owner/a--b"), name="m")
    with pytest.raises(ConfigurationError, match="Owner/a--b is no name of the hub"):
        locate(entry, places(tmp_path))


def test_downloads_are_weights_configurations_and_tokenizers(tmp_path: Path):
    with running_hub(REPOSITORIES) as hub:
        here = places(tmp_path, hub)
        found = fetch(PAIR, here)
        files = {file.name for file in found.target.rglob("*")}
        assert files == {
            "config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "tokenizer.json",
            "chat_template.jinja",
        }
        assert (found.target / "model.safetensors").read_bytes() == b"weights"
        assert {file.name for file in Path(str(found.drafter)).iterdir()} == {
            "config.json",
            "model.safetensors",
        }
        assert not [path for path in hub.asked if path.endswith((".py", ".bin"))]
        asked = len(hub.asked)
        assert locate(PAIR, here) == found
        assert len(hub.asked) == asked, "looking must not ask the hub"


def test_a_broken_off_download_is_completed(tmp_path: Path):
    partial = cached(tmp_path, "Owner/M-4B", whole=False)
    entry = model_of(published("m", "Owner/M-4B"), name="m")
    with pytest.raises(ModelNotHere):
        locate(entry, places(tmp_path))
    with running_hub(REPOSITORIES) as hub:
        assert fetch(entry, places(tmp_path, hub)).target == partial
    assert (partial / "model.safetensors").read_bytes() == b"weights"


def test_what_is_in_a_folder_is_not_downloaded(tmp_path: Path):
    entry = model_of(published("m", "Owner/M-4B"), SHIPPED, "m")
    at_home = folder(tmp_path, "home", "kakeya-models", "m")
    with running_hub(REPOSITORIES) as hub:
        found = fetch(entry, places(tmp_path, hub))
        assert not hub.asked
    assert found == Located(entry, at_home, f"prompt-lookup+{SHIPPED_DRAFTER}")


@pytest.mark.parametrize("known", [{}, {"Owner/M-4B": REPOSITORIES["Owner/M-4B"]}])
def test_what_the_hub_does_not_have_is_an_error_of_the_model(
    known: dict[str, dict[str, bytes]], tmp_path: Path
):
    with running_hub(known) as hub, pytest.raises(UnknownModel) as caught:
        fetch(PAIR, places(tmp_path, hub))
    missing = "Owner/D" if known else "Owner/M-4B"
    assert str(caught.value).startswith(f"the hub has no model {missing}; ")


def test_a_hub_that_does_not_answer_is_an_error_of_the_machine(tmp_path: Path):
    with pytest.raises(MachineError, match="Owner/M-4B cannot be downloaded: "):
        fetch(PAIR, places(tmp_path))


def test_what_is_on_no_hub_cannot_be_downloaded(tmp_path: Path):
    with pytest.raises(ModelNotHere, match="the target of the model m is not on this machine"):
        fetch(model_of(published("m"), name="m"), places(tmp_path))


@pytest.mark.slow
def test_one_loaded_target_serves_channels_and_drafters(tmp_path: Path):
    """What is handed over is what the loaders take: target and drafter apart, or switches of one engine."""
    registry = Registry.load()
    entry, channel = registry.resolve("demo@rotated4")
    found = locate(entry, places(tmp_path))
    assert found == Located(entry, SHIPPED_TARGET, f"prompt-lookup+{SHIPPED_DRAFTER}")
    target = load_target(found.target, entry.dtype, entry.quantize)
    assert open_drafter(str(found.drafter), target, entry.dtype).drafter.block_size == 8
    options = Options.of(found, channel)
    assert options == Options(SHIPPED_TARGET, found.drafter, kv="rotated:4,64@all")
    opened = open_engine(options)
    assert (opened.policy, opened.alone) == (channel.policy, False)


def test_an_entry_without_drafter_opens_an_engine_without(tmp_path: Path):
    entry = model_of(SHIPPED, name="m", block="1", quantize="8,32")
    options = Options.of(locate(entry, places(tmp_path)), CHANNELS["native"])
    assert (options.drafter, options.block, options.quantize, options.kv) == ("none", "1", "8,32", "native")
    assert open_engine(options).alone
