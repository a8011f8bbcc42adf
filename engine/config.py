"""The switches of a run, checked once, and the engine they open."""

from dataclasses import dataclass
from pathlib import Path

from engine.blas import fit_threads
from engine.errors import ConfigurationError
from engine.loading import (
    SHIPPED_DRAFTER,
    SHIPPED_TARGET,
    LoadedDrafter,
    LoadedTarget,
    load_drafter,
    load_target,
)
from engine.pace import Adaptive, Fixed, Pace

LARGEST_BLOCK = 1024


@dataclass(frozen=True)
class Options:
    """What the command line can set about the engine itself.

    Attributes:
        model: folder of the target; None for the shipped one.
        drafter: folder of the drafter, or ``none``; None for the shipped one with the shipped target.
        block: ``auto`` or a length of at least 1, the bonus token included.
        prefill_chunk: prompt positions per forward.
        dtype: float32, float16, bfloat16; None for the device's default.
    """

    model: Path | None = None
    drafter: str | None = None
    block: str = "auto"
    prefill_chunk: int = 2048
    dtype: str | None = None


@dataclass(frozen=True)
class Engine:
    """A target, perhaps a drafter bound to it, and how to pace them.

    Attributes:
        options: the switches it was opened with.
        target: the model.
        drafter: None where nothing is drafted: no drafter was given, or every block is to be 1.
        alone: no drafter was given, so there is nothing to compare with plain decoding.
    """

    options: Options
    target: LoadedTarget
    drafter: LoadedDrafter | None
    alone: bool

    def new_pace(self) -> Pace:
        """A pace as ``block`` asks for, knowing nothing yet."""
        if self.drafter is None:
            return Fixed(1)
        size = self.drafter.drafter.block_size
        return Adaptive(size) if self.options.block == "auto" else Fixed(int(self.options.block))


def open_engine(options: Options) -> Engine:
    """Check the switches and load the models.

    Raises:
        ConfigurationError: a switch does not make sense, alone or with the drafter.
        ModelError: a folder cannot be used.
    """
    block = _block(options.block)
    if options.prefill_chunk < 1:
        raise ConfigurationError(f"--prefill-chunk must be at least 1, not {options.prefill_chunk}")
    folder = _drafter_folder(options)
    if folder is None and block is not None and block > 1:
        raise ConfigurationError(f"--block {block} needs a drafter; give --drafter PATH")
    target = load_target(options.model or SHIPPED_TARGET, options.dtype)
    fit_threads(target.target.hidden_size)
    if folder is None or block == 1:
        return Engine(options, target, None, alone=folder is None)
    drafter = load_drafter(folder, target.target, options.dtype)
    most = 2 * drafter.drafter.block_size
    if block is not None and block > most:
        raise ConfigurationError(f"--block {block} is more than {most}, twice what this drafter was made for")
    return Engine(options, target, drafter, alone=False)


def _block(block: str) -> int | None:
    if block == "auto":
        return None
    if not block.isdecimal() or not 1 <= int(block) <= LARGEST_BLOCK:
        raise ConfigurationError(f"--block must be auto or a number from 1 to {LARGEST_BLOCK}, not {block!r}")
    return int(block)


def _drafter_folder(options: Options) -> Path | None:
    if options.drafter == "none":
        return None
    if options.drafter is not None:
        return Path(options.drafter)
    shipped = options.model is None or options.model.resolve() == SHIPPED_TARGET.resolve()
    return SHIPPED_DRAFTER if shipped else None
