"""The models of a machine's owner: `runner models`, and the parameter `model` of presets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge import presets
from bridge.runner import policy
from tests.bridge.runner.folders import model_folder
from tests.fixtures.repo import RepoFixture


@pytest.fixture
def folders(repo: RepoFixture) -> dict[str, Path]:
    return {name: model_folder(repo.root / name) for name in ("qwen", "qwen-dflash")}


def test_a_model_is_added_under_its_header_and_can_be_chosen(repo: RepoFixture, folders: dict[str, Path]):
    path = repo.root / "config" / "policy.toml"
    done = repo.kakeya("runner", "models", "add", "qwen", str(folders["qwen"]))
    assert done.code == 0, done.err
    assert (
        "presets that can choose qwen now: baseline, perplexity, proposer" in done.out
    )  # others need a drafter, too
    done = repo.kakeya("runner", "models", "add", "qwen-dflash", str(folders["qwen-dflash"]))
    assert done.code == 0, done.err
    text = path.read_text()
    assert len(text.splitlines()) == len(policy.default_text().splitlines()) + 2  # comments stay
    listed = repo.kakeya("runner", "models", "list", "--json").json
    choices = {each["name"]: each["models"] for each in listed["presets"]}
    assert choices["throughput"] == ["gemma-4-26b-a4b", "qwen"]
    assert choices["restored"] == ["gemma-4-26b-a4b"]  # there is no projector
    again = repo.kakeya("runner", "models", "add", "qwen", str(folders["qwen"]))
    assert (again.code, "models.qwen is" in again.err) == (2, True)
    assert repo.kakeya("runner", "models", "check").code == 0
    (folders["qwen"] / "config.json").parent.rename(repo.root / "moved")
    gone = repo.kakeya("runner", "models", "check")
    assert (gone.code, "which is no folder" in gone.out) == (6, True)
    assert repo.kakeya("runner", "models", "add", "other", str(repo.root)).code == 6


def explained(repo: RepoFixture, model: str) -> dict:
    shown = repo.kakeya("run", "--preset", "throughput", "-p", f"model={model}", "--dry-run", "--json")
    assert shown.code == 0, shown.err
    file = repo.root / "request.json"
    file.write_text(json.dumps(shown.json["manifest"]))
    return repo.kakeya("runner", "policy", "explain", str(file), "--json").json


def test_a_request_gets_the_model_that_it_chooses_and_its_drafter(
    repo: RepoFixture, folders: dict[str, Path]
):
    for name, folder in folders.items():
        repo.kakeya("runner", "models", "add", name, str(folder))
    argv = explained(repo, "qwen")["job"]["argv"]
    assert f"--model={folders['qwen']}" in argv
    assert f"--drafter={folders['qwen-dflash']}" in argv
    other = explained(repo, "llama")
    assert (other["allowed"], other["reason"], other["line"][:20]) == (
        False,
        "policy",
        "policy.toml: models ",
    )
    assert "'llama' is not one of" in other["message"]
    # Without a choice it is the preset's own, here its stand-in.
    assert "demo/target" in " ".join(explained(repo, "gemma-4-26b-a4b")["job"]["argv"])


def test_only_names_reach_a_path() -> None:
    preset = presets.get("throughput")
    names = presets.model_names(preset, {"model": "../../etc"})
    assert names == {name: name for name in preset.models}
    assert presets.model_names(preset, {"model": "qwen"})["gemma-4-26b-a4b-dflash"] == "qwen-dflash"
