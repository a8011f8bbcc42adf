"""The engines by name. One that is not installed is an error; one that cannot run the models is left out."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from peerbench.engines.base import Engine, MissingEngineError, UnsupportedError, World

BASELINE = "mlx-lm plain"

# name → module of the package it needs, module here, class
ENGINES = {
    "kakeya": ("mlx", "ours", "Kakeya"),
    "mlx-lm": ("mlx_lm", "lm", "Speculative"),
    "z-lab": ("dflash", "zlab", "ZLab"),
    "dflash-mlx": ("dflash_mlx", "dflashmlx", "DFlashMlx"),
    "mlx-vlm": ("mlx_vlm", "vlm", "MlxVlm"),
}
EARLIER = {"kakeya-earlier": ("mlx", "earlier", "Earlier")}  # with --against alone


def require(names: Sequence[str]) -> None:
    """Check that engines are known and installed, before any work.

    Raises:
        MissingEngineError: one is not; the message says what to do.
    """
    if unknown := [name for name in names if name not in ENGINES]:
        raise MissingEngineError(f"unknown engine {unknown[0]!r}; there are {', '.join(ENGINES)}")
    missing = [name for name in names if importlib.util.find_spec(ENGINES[name][0]) is None]
    if missing:
        raise MissingEngineError(
            f"not installed here: {', '.join(missing)}. Make their environment with `make peers-env` and run "
            f"with .venv-peers/bin/python, or leave them out with "
            f"--engines {','.join(name for name in names if name not in missing)}"
        )


def open_engines(names: Sequence[str], world: World) -> tuple[dict[str, Engine], dict[str, str]]:
    """Load the engines.

    Returns:
        The engines, and of those that cannot run these models the reason.
    """
    engines: dict[str, Engine] = {}
    left_out: dict[str, str] = {}
    for name in names:
        _, module, kind = (ENGINES | EARLIER)[name]
        try:
            engines[name] = getattr(importlib.import_module(f"peerbench.engines.{module}"), kind)(world)
        except UnsupportedError as error:
            left_out[name] = str(error)
    return engines, left_out
