"""Training a projector: which keys and values of the target the drafter's features foretell.

The switches are checked, `projector_fit` finds the weights, and a folder is written that
`engine.restoration.loading` reads. Figures are those of held-out words.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from engine.errors import ConfigurationError, EngineError
from engine.networks.projector import LayerShape, Projector, ProjectorConfig
from engine.restoration.loading import features_of
from engine.restoration.sites import sites_of
from engine.target.folder import read_json
from engine.target.loading import LoadedTarget
from engine.training.distillation import Watcher
from engine.training.projector_fit import Fit, Progress, ProjectorSwitches, TargetTokenizer, Weights
from engine.training.trainer import named_parameters


def train_projector(
    target: LoadedTarget,
    drafter: Path,
    out: Path,
    switches: ProjectorSwitches,
    *,
    dtype: str | None = None,
    progress: Progress,
) -> dict[str, Any]:
    """Train a projector and write its folder.

    Args:
        target: the model.
        drafter: folder of its DFlash drafter.
        out: folder to write; one that holds another kind of model is left alone.
        switches: see there.
        dtype: of the drafter while training.
        progress: told how far it has come.

    Returns:
        The held-out figures, as they stand in the folder's config.json under ``training``.

    Raises:
        ConfigurationError: a switch does not make sense, or ``out`` cannot be used.
        ModelError: keys and values of a layer cannot be restored, or a folder cannot be used.
        DrafterMismatchError: the drafter was made for another target.
    """
    switches.check(target.context)
    sites = sites_of(target.target.model, switches.layers_of(target.target.model))
    features, card = features_of(drafter, target.target, dtype)
    with _made(out):
        weights, figures = _fitted(target, Watcher(target.target, sites, features), switches, progress)
        shapes = [
            LayerShape(site.layer, int(layer["k_proj.weight"].shape[0]), int(layer["v_proj.weight"].shape[0]))
            for site, layer in zip(sites, weights, strict=True)
        ]
        config = ProjectorConfig(
            target.card.weights_sha256, card.weights_sha256, features.taps, features.size, tuple(shapes)
        )
        projector = Projector(config)
        projector.load_weights(
            [
                (f"layers.{index}.{name}", value)
                for index, layer in enumerate(weights)
                for name, value in layer.items()
            ]
        )
        write_projector(projector, out, {"switches": asdict(switches), **figures})
    return figures


def _fitted(
    target: LoadedTarget, watcher: Watcher, switches: ProjectorSwitches, progress: Progress
) -> tuple[Weights, dict[str, Any]]:
    """The layers' weights, and the figures of the training; the watcher is closed."""
    try:
        fit = Fit(watcher, switches, TargetTokenizer(target.tokenizer), progress)
        fit.regress()
        regressed = fit.judge(fit.folded())
        fit.distil()
        weights = fit.folded()
        distilled = fit.judge(weights)
        fit.tell_end()
    finally:
        watcher.close()
    return weights, {"held_out": {"regression": regressed, "distilled": distilled}, "log": fit.log}


def write_projector(projector: Projector, folder: Path, training: dict[str, Any]) -> None:
    """Write ``model.safetensors`` in float16 and ``config.json``, each whole or not at all."""
    document = projector.config.document() | {"dtype": "float16", "training": training}
    weights = {name: value.astype(mx.float16) for name, value in named_parameters(projector).items()}
    try:
        with TemporaryDirectory(prefix=".new-", dir=folder, ignore_cleanup_errors=True) as half:
            mx.save_safetensors(f"{half}/model.safetensors", weights, metadata={"format": "mlx"})
            text = json.dumps(document, indent=2) + "\n"
            Path(half, "config.json").write_text(text, encoding="utf-8")
            for name in ("config.json", "model.safetensors"):
                os.replace(Path(half, name), folder / name)
    except (OSError, RuntimeError) as error:  # mlx says RuntimeError where a file cannot be written
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise EngineError(f"{folder} cannot be written: {reason}") from None


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """The folder a projector is written to; where nothing is written, what was made for it goes again.

    Raises:
        ConfigurationError: a projector cannot or should not be written there.
    """
    made: list[Path] = []
    try:
        try:
            made += [folder for folder in (out, *out.parents) if not folder.exists()]
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--out {out} cannot be made a folder: {error.strerror}") from None
        if not os.access(out, os.W_OK):
            raise ConfigurationError(f"--out {out} cannot be written")
        config = out / "config.json"
        others = any(out.glob("model*.safetensors")) and not config.exists()
        if others or (config.exists() and "feature_size" not in read_json(config)):
            raise ConfigurationError(f"--out {out} holds another model; give a folder of its own")
        yield
    finally:
        for folder in made:
            with suppress(OSError):  # it holds the projector
                folder.rmdir()
