"""What the engine runs on: device, BLAS, and whether mlx may compile kernels. Prepared once a process."""

import shutil
from dataclasses import dataclass

import mlx.core as mx

from engine.blas import Blas, load_fast_blas

COMPILERS = ("g++",)  # mlx's CPU backend calls it by this name when it compiles a fused kernel


@dataclass(frozen=True)
class Runtime:
    """Facts about the process that results depend on."""

    blas: Blas
    metal: bool
    compiles: bool  # whether mx.compile fuses kernels here

    @property
    def device(self) -> str:
        """``metal`` or ``cpu``."""
        return "metal" if self.metal else "cpu"

    @property
    def fast(self) -> bool:
        """Whether a block costs less than its tokens one by one, so that speculation can pay."""
        return self.metal or self.blas.fast


def prepare() -> Runtime:
    """Settle how mlx runs. On the CPU without a C++ compiler, kernels are left unfused instead of failing.

    Raises:
        ConfigurationError: ``KAKEYA_BLAS`` holds an unknown value.
    """
    blas = load_fast_blas()
    metal = bool(mx.metal.is_available())
    compiles = metal or any(shutil.which(name) for name in COMPILERS)
    if not compiles:
        mx.disable_compile()
    if metal:  # keep weights resident, as mlx-lm's own generation does
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    return Runtime(blas, metal, compiles)
