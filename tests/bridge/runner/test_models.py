"""Where a model is looked for: the order, the list in the refusal, and no LFS pointer passes."""

from pathlib import Path

import pytest

from bridge.runner import models


def test_the_places_are_tried_in_order(tmp_path: Path) -> None:
    home, workload = tmp_path / "home", tmp_path / "workload"
    folders = {
        "policy": tmp_path / "policy",
        "variable": tmp_path / "variable",
        "home": home / "kakeya-models" / "big",
        "workload": workload / "models" / "big",
    }
    for folder in folders.values():
        folder.mkdir(parents=True)
    configured, environment = {"big": folders["policy"]}, {"KAKEYA_MODEL_BIG": str(folders["variable"])}

    def found(**changes: object) -> Path:
        arguments: dict[str, object] = {
            "configured": configured,
            "environment": environment,
            "home": home,
            "workload": workload,
        }
        return models.resolve("big", **{**arguments, **changes})  # type: ignore[arg-type]

    assert found() == folders["policy"]
    assert found(configured={}) == folders["variable"]
    assert found(configured={}, environment={}) == folders["home"]
    folders["home"].rmdir()
    assert found(configured={}, environment={}) == folders["workload"]
    with pytest.raises(models.ModelMissing):
        found(configured={}, environment={}, workload=None)


def test_the_refusal_lists_every_place(tmp_path: Path) -> None:
    with pytest.raises(models.ModelMissing) as caught:
        models.resolve(
            "gemma-4",
            configured={"gemma-4": tmp_path / "gone"},
            environment={},
            home=tmp_path,
            workload=tmp_path,
        )
    assert caught.value.message == (
        "the model gemma-4 is not on this machine; looked at: models.gemma-4 in the policy (no folder);"
        " KAKEYA_MODEL_GEMMA_4 (not set); ~/kakeya-models/gemma-4 (no folder);"
        " models/gemma-4 of the workload (no folder)"
    )


def test_the_demo_pair_is_found_beside_the_installed_engine(tmp_path: Path) -> None:
    with pytest.raises(models.ModelMissing, match="not on this machine"):
        models.resolve("demo", configured={}, environment={}, home=tmp_path)
    shipped = models._shipped("demo-target")
    assert shipped is not None
    assert shipped.parts[-4:] == ("engine", "models", "demo", "target")


def test_weights_that_are_lfs_pointers_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kakeya-models" / "big"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(models.ModelMissing, match="LFS pointer instead of weights"):
        models.resolve("big", configured={}, environment={}, home=tmp_path)
