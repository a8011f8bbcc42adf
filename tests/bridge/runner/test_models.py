"""Where a model is looked for, what may stand in for it and where not, and that no LFS pointer passes."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from bridge.presets import ModelNeed
from bridge.runner import models
from bridge.runner.models import FoundModel, ModelMissing, Places
from tests.bridge.runner.folders import model_folder

TARGET = {"big": ModelNeed(mac="a big model", stand_in="demo-target")}
PAIR = TARGET | {"big-drafter": ModelNeed(mac="its drafter", stand_in="demo-drafter")}


def places(
    root: Path,
    *,
    metal: bool = False,
    configured: Mapping[str, Path] | None = None,
    environment: Mapping[str, str] | None = None,
    workload: Path | None = None,
) -> Places:
    return Places(configured or {}, environment or {}, root / "home", metal, workload)


def at_home(root: Path, name: str) -> Path:
    return model_folder(root / "home" / "kakeya-models" / name)


@pytest.mark.parametrize("metal", [True, False])
def test_the_places_are_tried_in_order(tmp_path: Path, metal: bool) -> None:
    workload = tmp_path / "workload"
    for folder in ("policy", "variable", "home/kakeya-models/big", "workload/models/big"):
        model_folder(tmp_path / folder)
    configured, environment = {"big": tmp_path / "policy"}, {"KAKEYA_MODEL_BIG": str(tmp_path / "variable")}

    def found(**changes: object) -> Path:
        arguments: dict[str, object] = {
            "metal": metal,
            "configured": configured,
            "environment": environment,
            "workload": workload,
        }
        here = places(tmp_path, **{**arguments, **changes})  # type: ignore[arg-type]
        model = models.resolve(TARGET, here)["big"]
        assert model.stand_in is None
        return model.folder

    assert found() == tmp_path / "policy"
    assert found(configured={}) == tmp_path / "variable"
    assert found(configured={}, environment={}) == tmp_path / "home/kakeya-models/big"
    shutil.rmtree(tmp_path / "home/kakeya-models/big")
    assert found(configured={}, environment={}) == workload / "models" / "big"


@pytest.mark.parametrize("metal", [True, False])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_variable_that_names_no_folder_is_an_error(tmp_path: Path, metal: bool, elsewhere: bool) -> None:
    if elsewhere:
        at_home(tmp_path, "big")
    here = places(tmp_path, metal=metal, environment={"KAKEYA_MODEL_BIG": "/absent"})
    with pytest.raises(ModelMissing, match="KAKEYA_MODEL_BIG is '/absent', which is no folder") as caught:
        models.resolve(PAIR, here)
    assert caught.value.remedy == "correct it on the runner, or unset it there"


def test_without_metal_the_shipped_models_stand_in_and_say_so(tmp_path: Path) -> None:
    found = models.resolve(PAIR, places(tmp_path))
    assert found == {
        "big": FoundModel(models.shipped("demo-target") or Path(), "demo-target"),
        "big-drafter": FoundModel(models.shipped("demo-drafter") or Path(), "demo-drafter"),
    }
    assert str(found["big"]) == f"stand-in demo-target: {found['big'].folder}"


def test_with_metal_a_missing_model_is_refused_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="the model big is not on this machine") as caught:
        models.resolve(PAIR, places(tmp_path, metal=True))
    assert caught.value.remedy == (
        "put a big model in ~/kakeya-models/big on the runner, or name its folder in the policy;"
        " demo-target replaces it only on machines without Metal, and only where no other model of the preset"
        " is there"
    )


@pytest.mark.parametrize("metal", [True, False])
def test_model_named_by_the_owner_is_used_even_if_shipped(tmp_path: Path, metal: bool) -> None:
    folder = models.shipped("demo-target")
    assert folder is not None
    found = models.resolve(TARGET, places(tmp_path, metal=metal, configured={"big": folder}))
    assert found == {"big": FoundModel(folder, "demo-target")}
    assert str(found["big"]) == f"stand-in demo-target: {folder}"


def test_half_a_pair_is_completed_by_no_stand_in(tmp_path: Path) -> None:
    at_home(tmp_path, "big")
    with pytest.raises(ModelMissing, match="the model big-drafter") as caught:
        models.resolve(PAIR, places(tmp_path))
    assert "only where no other model of the preset is there" in (caught.value.remedy or "")
    own = at_home(tmp_path, "big-drafter")
    assert models.resolve(PAIR, places(tmp_path))["big-drafter"] == FoundModel(own)


@pytest.mark.parametrize("metal", [True, False])
def test_shipped_model_is_found_by_name_on_every_machine(tmp_path: Path, metal: bool) -> None:
    own = {"demo-target": ModelNeed(mac="the shipped target")}
    found = models.resolve(own, places(tmp_path, metal=metal))["demo-target"]
    assert found.stand_in is None
    assert found.folder.parts[-4:] == ("engine", "models", "demo", "target")


@pytest.mark.parametrize("metal", [True, False])
def test_the_refusal_lists_every_place(tmp_path: Path, metal: bool) -> None:
    here = places(tmp_path, metal=metal, workload=tmp_path / "workload")
    with pytest.raises(ModelMissing) as caught:
        models.resolve({"gemma-4": ModelNeed(mac="Gemma 4")}, here)
    assert caught.value.message == (
        "the model gemma-4 is not on this machine; looked at: models.gemma-4 in the policy (not set);"
        " KAKEYA_MODEL_GEMMA_4 (not set); ~/kakeya-models/gemma-4 (no folder);"
        " models/gemma-4 of the workload (no folder)"
    )


def test_a_path_of_the_policy_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    at_home(tmp_path, "big")  # which does not take its place
    with pytest.raises(ModelMissing, match="is '/absent', which is no folder"):
        models.resolve(TARGET, places(tmp_path, configured={"big": Path("/absent")}))


def test_weights_that_are_lfs_pointers_are_refused(tmp_path: Path) -> None:
    pointer = at_home(tmp_path, "big") / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ModelMissing, match="is a git-lfs pointer"):
        models.resolve(TARGET, places(tmp_path))
