"""The foreign engines by name. Which of them are installed is found out when one is asked for."""

from importlib.util import find_spec
from pathlib import Path

from engine.errors import ConfigurationError, wrap_errors
from engine.external_engines.base import ForeignEngine, Loop
from engine.external_engines.loops.dflash import MODULE as ZLAB
from engine.external_engines.loops.dflash import open_dflash
from engine.external_engines.loops.dflash_mlx import open_dflash_mlx
from engine.external_engines.loops.lm import open_plain, open_speculative
from engine.target.loading import LoadedTarget

ENGINES: dict[str, ForeignEngine] = {
    engine.name: engine
    for engine in (
        ForeignEngine(
            "mlx-lm",
            module="mlx_lm",
            install="pip install mlx-lm",
            open=open_plain,
            drafter=False,
            trims=False,
            keyword="prompt_cache",
            makers=(("mlx_lm.generate", "make_prompt_cache"),),
        ),
        ForeignEngine(
            "mlx-lm-speculative",
            module="mlx_lm",
            install="pip install mlx-lm",
            open=open_speculative,
            drafter=True,
            trims=True,
            keyword="prompt_cache",
            makers=(("mlx_lm.generate", "make_prompt_cache"),),
        ),
        ForeignEngine(
            "dflash",
            module="dflash",
            install="pip install --no-deps dflash==0.1.0",
            open=open_dflash,
            drafter=True,
            trims=True,
            makers=((ZLAB, "make_prompt_cache"),),
        ),
        ForeignEngine(
            "dflash-mlx",
            module="dflash_mlx",
            install="pip install --no-deps dflash-mlx==0.1.8",
            open=open_dflash_mlx,
            drafter=True,
            trims=True,
            attends=True,
            makers=(("dflash_mlx.engine.target_qwen_gdn", "QwenGdnTargetOps.make_cache"),),
        ),
    )
}


def engine_named(name: str) -> ForeignEngine:
    """The engine of a name, installed or not.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in ENGINES:
        raise ConfigurationError(f"engine {name!r} is none of {', '.join(ENGINES)}")
    return ENGINES[name]


def open_loop(engine: ForeignEngine, target: LoadedTarget, drafter: Path | None, block: int | None) -> Loop:
    """Import an engine and let it load its drafter.

    Raises:
        ConfigurationError: it is not installed, does not go with the target or the drafter, or needs a
            drafter's folder that is not given, or the other way round.
        ModelError: the drafter's folder cannot be used.
    """
    if find_spec(engine.module) is None:
        raise ConfigurationError(f"engine {engine.name} is not installed here; run: {engine.install}")
    if engine.drafter and drafter is None:
        raise ConfigurationError(f"engine {engine.name} needs a drafter's folder; name one")
    if not engine.drafter and drafter is not None:
        raise ConfigurationError(f"engine {engine.name} takes no drafter; leave {drafter} out")
    with wrap_errors(
        lambda reason: ConfigurationError(f"engine {engine.name} does not take these models: {reason}")
    ):
        return engine.open(target, drafter, block)
