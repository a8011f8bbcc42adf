"""What restores is opened before any work, and refused where it belongs to something else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.policy import NATIVE, parse_policy
from engine.errors import ConfigurationError, DrafterMismatchError, InputError, ModelError
from engine.restoration.loading import SHIPPED_PROJECTOR, load_learned, open_restoration
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, LoadedTarget, load_target
from engine.training.projector import train_projector
from engine.training.projector_fit import ProjectorSwitches
from tests.engine import families, tiny
from tests.engine.refusals import reweigh, rewrite, spoil

LEARNED = parse_policy("restored:learned:4,8")
TOY = ProjectorSwitches(window=8, steps=0, batches=1, texts=1, length=192)


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LoadedTarget:
    return load_target(folders[0])


@pytest.fixture(scope="module")
def shipped() -> LoadedTarget:
    return load_target(SHIPPED_TARGET)


@pytest.fixture(scope="module")
def trained(
    target: LoadedTarget, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("projector") / "projector"
    train_projector(target, folders[1], out, TOY, progress=lambda *_: None)
    return out


@pytest.fixture
def projector(trained: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(trained, tmp_path / "projector"))


def opened(target: LoadedTarget, folders: tuple[Path, Path], projector: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"model": folders[0], "projector": projector, "drafter": str(folders[1])}
    return open_restoration(LEARNED, target, **(options | changes))


def test_other_policies_restore_nothing(target: LoadedTarget) -> None:
    assert open_restoration(NATIVE, target) is None
    assert open_restoration(parse_policy("sink-window"), target) is None


@pytest.mark.parametrize("source", ["exact", "zeros", "noise"])
def test_the_controls_need_no_projector(
    source: str, target: LoadedTarget, folders: tuple[Path, Path]
) -> None:
    plan = open_restoration(parse_policy(f"restored:{source}:3,9"), target, model=folders[0], seed=5)
    assert plan is not None
    assert (plan.source, plan.sink, plan.window, plan.learned, plan.seed) == (source, 3, 9, None, 5)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("prefix", ["", "dflash:", "prompt-lookup+", "prompt-lookup+dflash:"])
def test_the_drafter_is_that_of_the_command_line(
    prefix: str, target: LoadedTarget, folders: tuple[Path, Path], projector: Path
) -> None:
    plan = opened(target, folders, projector, drafter=prefix + str(folders[1]))
    assert plan.learned.card.weights_sha256
    assert plan.learned.features.target_layers == (0, 2, 5)


@pytest.mark.parametrize("drafter", [None, "prompt-lookup"])
def test_or_the_one_beside_the_projector(
    drafter: str | None, target: LoadedTarget, folders: tuple[Path, Path], projector: Path
) -> None:
    shutil.copytree(folders[1], projector.parent / "drafter")
    assert opened(target, folders, projector, drafter=drafter).learned is not None


def test_without_a_drafter_it_says_where_to_put_it(
    target: LoadedTarget, folders: tuple[Path, Path], projector: Path
) -> None:
    with pytest.raises(ConfigurationError, match="give it as --drafter"):
        opened(target, folders, projector, drafter="prompt-lookup")


def test_for_the_shipped_target_all_is_shipped(shipped: LoadedTarget) -> None:
    plan = open_restoration(parse_policy("restored:learned"), shipped)
    assert plan is not None
    assert plan.learned is not None
    assert plan.learned.card.id.endswith("projector")
    assert plan.learned.projector.config.target_layers == (1, 3, 5, 8)
    assert [shape.layer for shape in plan.learned.projector.config.layers] == [2, 5, 8]
    assert (SHIPPED_PROJECTOR.parent / "drafter") == SHIPPED_DRAFTER


@pytest.mark.parametrize("drafter", [None, "prompt-lookup", "masked-diffusion:elsewhere"])
def test_an_own_projector_for_the_shipped_drafter_needs_no_other(
    drafter: str | None, shipped: LoadedTarget, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(SHIPPED_PROJECTOR, tmp_path / "projector"))
    assert load_learned(folder, shipped, drafter).projector.config.target_layers == (1, 3, 5, 8)


def test_another_target_needs_a_projector(target: LoadedTarget, folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigurationError, match="needs a projector for this target; give --projector"):
        open_restoration(LEARNED, target, model=folders[0])


def test_a_projector_that_nothing_uses_is_refused(target: LoadedTarget, projector: Path) -> None:
    with pytest.raises(ConfigurationError, match="--projector goes with --kv restored:learned alone"):
        open_restoration(NATIVE, target, projector=projector)


def test_the_projector_of_another_target_is_refused(target: LoadedTarget) -> None:
    with pytest.raises(DrafterMismatchError, match="this projector is for another target"):
        load_learned(SHIPPED_PROJECTOR, target)


def test_another_drafter_is_refused(target: LoadedTarget, projector: Path, tmp_path: Path) -> None:
    other = tiny.save_drafter(tmp_path / "other", seed=6)
    with pytest.raises(DrafterMismatchError, match="this projector is for another drafter"):
        load_learned(projector, target, str(other))


def test_a_layer_it_was_not_trained_for_is_refused(shipped: LoadedTarget, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHIPPED_PROJECTOR, tmp_path / "projector"))
    config = load_learned(folder, shipped, str(SHIPPED_DRAFTER)).projector.config.document()
    rewrite(folder, layers=config["layers"][:2])
    reweigh(folder, lambda weights: {name: value for name, value in weights.items() if ".2." not in name})
    with pytest.raises(ModelError, match="does not restore layer 8; it was trained for 2, 5"):
        open_restoration(
            parse_policy("restored:learned"), shipped, projector=folder, drafter=str(SHIPPED_DRAFTER)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": None}, "not a projector"),
        ({"feature_size": 65}, "is not the drafter's|config says"),
        ({"target_layer_ids": [0, 2]}, r"are not the drafter's \[0, 2, 5\]"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, target: LoadedTarget, folders: tuple[Path, Path], projector: Path
) -> None:
    rewrite(projector, **changes)
    with pytest.raises(ModelError, match=message):
        opened(target, folders, projector)


def test_rows_of_other_widths_are_refused(
    target: LoadedTarget, folders: tuple[Path, Path], projector: Path
) -> None:
    layers = [{"layer": 2, "keys": 16, "values": 8}, {"layer": 5, "keys": 16, "values": 16}]
    rewrite(projector, layers=layers)

    def narrower(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return {name: value[:8] if "0.v_proj" in name else value for name, value in weights.items()}

    reweigh(projector, narrower)
    with pytest.raises(
        ModelError, match="layer 2 gives keys and values of width 16 and 8; the target's are 16 and"
    ):
        opened(target, folders, projector)


def test_broken_weights_are_refused(
    target: LoadedTarget, folders: tuple[Path, Path], projector: Path
) -> None:
    reweigh(projector, spoil("layers.0.k_proj.bias", float("nan")))
    with pytest.raises(ModelError, match=r"layers\.0\.k_proj\.bias holds NaN"):
        opened(target, folders, projector)
    (projector / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="git-lfs pointer"):
        opened(target, folders, projector)


def test_layers_that_share_keys_and_values_are_refused_before_any_work(tmp_path: Path) -> None:
    folder = families.save(tmp_path / "gemma4", "gemma4_text")
    loaded = load_target(folder)
    with pytest.raises(InputError, match="layer 7"):
        open_restoration(parse_policy("restored:exact@7"), loaded, model=folder)
