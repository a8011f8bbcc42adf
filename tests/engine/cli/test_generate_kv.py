"""``generate`` under policies of keys and values, the target's and the drafter's: what it says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.evidence.gate import judge
from engine.cli import run
from engine.target.loading import SHIPPED_DRAFTER
from tests.engine import tiny

PROMPT = "abcdefghijklmnopqrstuvwxyz abcdefghijk"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("wide")
    return {
        "target": str(tiny.save_target(folder / "target", "gemma3_text", head_dim=32)),
        "dflash": str(tiny.save_drafter(folder / "drafter", head_dim=32)),
        "small": str(tiny.save_target(folder / "small", "llama", head_dim=32)),
    }


def generate(capsys: pytest.CaptureFixture[str], models: dict[str, str], *arguments: str) -> dict[str, Any]:
    words = ["generate", "--model", models["target"], *arguments, "--max-tokens", "24", "--json", PROMPT]
    assert run(words) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def of_caches(found: dict[str, Any]) -> int:
    """Bytes of the target's caches: all that is resident but the drafter's part."""
    return int(found["resident_bytes"] - found["drafter_resident_bytes"])


BOTH = ("--drafter", f"{SHIPPED_DRAFTER}?kv=affine:8,64", "--drafter-kv", "sink-window:4,64")


@pytest.mark.parametrize("drafter", ["dflash", "small"])
def test_a_drafters_policy_changes_its_bytes_and_not_the_text(capsys, models: dict[str, str], drafter: str):
    arguments = ("--drafter", models[drafter], "--block", "6")
    native = generate(capsys, models, *arguments)
    for policy in ("affine:8,32", "rotated:4,32", "sink-window:2,16"):
        found = generate(capsys, models, *arguments, "--drafter-kv", policy)
        assert (found["text"], of_caches(found)) == (native["text"], of_caches(native))
        assert 0 < found["drafter_resident_bytes"] <= native["drafter_resident_bytes"]
        if policy != "sink-window:2,16":  # a buffer of one step holds this text either way
            assert found["drafter_resident_bytes"] < native["drafter_resident_bytes"]


def test_a_drafters_text_may_name_its_policy(capsys, models: dict[str, str]):
    spec = f"{models['dflash']}?kv=affine:4,32"
    by_text = generate(capsys, models, "--drafter", spec, "--block", "6")
    by_option = generate(
        capsys, models, "--drafter", models["dflash"], "--drafter-kv", "affine:4,32", "--block", "6"
    )
    assert by_text["drafter_resident_bytes"] == by_option["drafter_resident_bytes"]


def test_without_a_drafter_it_holds_nothing(capsys, models: dict[str, str]):
    assert generate(capsys, models, "--drafter", "none")["drafter_resident_bytes"] == 0


@pytest.mark.parametrize("kv", ["native", "full-kv", "affine:8,32", "sink-window:2,8"])
def test_the_report_declares_the_policies_that_ran(capsys, models: dict[str, str], kv: str, tmp_path: Path):
    path = tmp_path / "report.json"
    words = ("--kv", kv, "--drafter", models["dflash"], "--drafter-kv", "affine:8,32", "--block", "6")
    generate(capsys, models, *words, "--report", str(path))
    document = json.loads(path.read_text())
    assert document["arms"][0]["system"]["kv"].partition("@")[0] == kv
    assert document["configuration"]["drafter_settings"] == "kv=affine:8,32@all"
    verdict = judge(path.read_bytes())
    assert {each.code for each in verdict.violations} <= {"POLICY_NO_EFFECT"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drafter", "none", "--drafter-kv", "affine"), "--drafter-kv affine needs a drafter"),
        (("--drafter", "prompt-lookup", "--drafter-kv", "affine"), "prompt-lookup keeps no keys and values"),
        (("--drafter-kv", "lattice"), "a drafter takes native, sink-window, affine, rotated"),
        (("--drafter-kv", "affine:9,64"), "--drafter-kv 'affine:9,64'"),
        (BOTH, f"--drafter {BOTH[1]} and --drafter-kv sink-window:4,64@all name two policies; give one"),
        ((*BOTH, "--block", "1"), "name two policies; give one"),
    ],
)
def test_a_policy_that_cannot_be_is_one_error(capsys, arguments: tuple[str, ...], message: str):
    assert run(["generate", *arguments, PROMPT]) == 2
    assert message in capsys.readouterr().err
