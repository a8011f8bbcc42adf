"""The device: its BLAS, whether mlx may compile, and how graphs are launched, waited for and read.

The Linux wheel of mlx links a reference BLAS. A faster one wins where it is in the global symbol scope before
mlx is loaded: this module imports mlx inside its functions alone. macOS has Metal and Accelerate.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shutil
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from engine.errors import ConfigurationError

if TYPE_CHECKING:
    import mlx.core as mx

INSTALL_HINT = "apt install libopenblas0-pthread"
SWITCH = "KAKEYA_BLAS"
# Libraries that export the C interface (cblas_sgemm), best first.
FAST_LIBRARIES = (
    "libopenblas.so.0", "libopenblas.so", "libopenblasp.so.0", "libmkl_rt.so.2", "libmkl_rt.so.1",
    "libmkl_rt.so", "libblis.so.4", "libblis.so.3",
)  # fmt: skip
FAST_MARKS = ("openblas", "mkl", "blis", "armpl")
CORE = "OPENBLAS_CORETYPE"
# OpenBLAS takes an x86 processor that is newer than it for this one, whose kernels are 4 times as slow
UNKNOWN_CORE = b"Prescott"
# OpenBLAS' names of kernels, best first, with the processor's flags that each needs
CORES = {"SkylakeX": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}, "Haswell": {"avx2", "fma"}}
NARROW = 512  # columns
# Bytes of address space that stacks of threads, arenas of malloc and a BLAS take besides arrays: without them
# a run under a limit hangs or crashes. Measured on Linux: 0.7 GiB was too little, 0.9 enough.
RESERVED = 2**30
COMPILER = "g++"  # mlx's CPU backend calls it by this name when it compiles a fused kernel


class Blas(NamedTuple):
    """The library in use, whether it is a fast one, and how that was decided."""

    name: str
    fast: bool
    how: str


class Runtime(NamedTuple):
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
    """Settle how mlx runs. On the CPU without a C++ compiler, kernels are left unfused instead of failing."""
    blas = load_fast_blas()
    import mlx.core as mx

    metal = bool(mx.metal.is_available())
    compiles = metal or shutil.which(COMPILER) is not None
    if not compiles:
        mx.disable_compile()
    if metal:  # keep weights resident, as mlx-lm's own generation does
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    return Runtime(blas, metal, compiles)


@cache
def load_fast_blas() -> Blas:
    """Load a fast BLAS into the global scope before mlx is imported, and say which library mlx will use.

    ``KAKEYA_BLAS=reference`` keeps the bundled library; unset, empty or ``auto`` look for a fast one.
    """
    choice = os.environ.get(SWITCH, "").strip().lower() or "auto"
    if choice not in ("auto", "reference"):
        raise ConfigurationError(f"{SWITCH}={choice!r} is not one of auto, reference")
    if sys.platform == "darwin":
        return Blas("accelerate", True, "macOS")
    if choice == "reference":
        return Blas("reference", False, f"{SWITCH}=reference")
    present = _provider()
    if present is not None:
        fast = any(mark in present.lower() for mark in FAST_MARKS)
        return Blas(present, fast, "already in the process")
    if "mlx.core" in sys.modules:
        return Blas("reference", False, "mlx was imported before a fast BLAS could be loaded")
    for soname in FAST_LIBRARIES:
        try:
            _name_core(soname)
            ctypes.CDLL(soname, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if _provider() is not None:
            _limit_threads(available_cpus())
            return Blas(soname, True, "loaded before mlx")
    return Blas("reference", False, f"no fast BLAS found; {INSTALL_HINT}")


def _name_core(soname: str) -> None:
    """Tell an OpenBLAS that does not know the processor which kernels it can run, before it is loaded."""
    flags = _cpu_flags()
    known = next((name for name, needed in CORES.items() if needed <= flags), None)
    if known is None or CORE in os.environ:
        return
    library = ctypes.CDLL(soname)
    core = getattr(library, "openblas_get_corename", None)
    if core is not None:
        core.restype = ctypes.c_char_p
        if core() == UNKNOWN_CORE:
            os.environ[CORE] = known
    _ctypes.dlclose(library._handle)  # or the next one to load it would get it as it is


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def threads() -> int | None:
    """How many threads share a matrix product; None where the library does not say (only OpenBLAS does)."""
    try:
        return int(ctypes.CDLL(None).openblas_get_num_threads())
    except AttributeError:
        return None


def fit_threads(hidden_size: int) -> None:
    """Use one thread for a model so narrow that its products are over before a second one has joined in.

    Measured with OpenBLAS on 2 cores, one and eight rows: below 512 columns a second thread brings less than
    a sixth, and as the threads wait for each other by spinning, it makes every product up to 30 times slower
    as soon as anything else runs. ``OPENBLAS_NUM_THREADS`` in the environment is left as it is.
    """
    if hidden_size < NARROW and "OPENBLAS_NUM_THREADS" not in os.environ:
        _limit_threads(1)


def available_cpus() -> int:
    """Number of CPUs this process may use: affinity, and the control group's quota where there is one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def _provider() -> str | None:
    """File name of the library that the global scope resolves ``cblas_sgemm`` to, or None."""
    scope = ctypes.CDLL(None)
    try:
        function = scope.cblas_sgemm
    except AttributeError:
        return None
    info = (ctypes.c_char_p * 4)()  # Dl_info: file name, base, symbol name, symbol
    if not scope.dladdr(ctypes.cast(function, ctypes.c_void_p), info) or not info[0]:
        return "unknown"
    # The link may be an alternative (libblas.so.3 -> openblas-pthread/libblas.so.3): name the real file.
    real = Path(os.fsdecode(info[0])).resolve()
    return real.name if any(mark in real.name.lower() for mark in FAST_MARKS) else "/".join(real.parts[-2:])


def _limit_threads(most: int) -> None:
    """OpenBLAS counts the machine's CPUs, not those this process may use."""
    now = threads()
    if now is not None and now > most:
        ctypes.CDLL(None).openblas_set_num_threads(ctypes.c_int(most))


# Decoding launches, waits and reads through these alone, so that the transfers of a round can be counted.


def launch(*trees: Any) -> None:
    """Start computing arrays (None is skipped) without waiting."""
    import mlx.core as mx

    mx.async_eval([tree for tree in trees if tree is not None])  # type: ignore[no-untyped-call]


def wait(*trees: Any) -> None:
    """Compute arrays and wait for them; no transfer."""
    import mlx.core as mx

    mx.eval([tree for tree in trees if tree is not None])


def wait_for(array: mx.array) -> None:
    """Wait for one launched array and nothing queued after it (`mx.eval` would wait for the whole stream)."""
    memoryview(array).release()  # type: ignore[arg-type]  # the stub does not know the buffer protocol


def read_token(array: mx.array) -> int:
    """One integer of an array [] or [1]: waits and transfers."""
    return int(array.item())  # type: ignore[arg-type]  # typed as any scalar


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, its limits and control group, Metal's share."""
    import mlx.core as mx

    free = psutil.virtual_memory().available
    limit = getrlimit(RLIMIT_AS)[0]
    if limit != RLIM_INFINITY:  # ulimit -v
        free = min(free, max(limit - psutil.Process().memory_info().vms - RESERVED, 0))
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no control group, or none with a limit ("max")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, max(limit - used + int(counts["inactive_file"]), 0))  # files' pages are given back
    if mx.metal.is_available():
        free = min(free, int(mx.device_info()["max_recommended_working_set_size"]) - mx.get_active_memory())
    return int(free)


def read_float(array: mx.array) -> float:
    """One number of an array []: waits and transfers."""
    return float(array.item())  # type: ignore[arg-type]  # typed as any scalar


def read_tokens(array: mx.array) -> list[int]:
    """The integers of an array [N]: waits and transfers, once."""
    return [int(token) for token in array.tolist()]  # type: ignore[arg-type, union-attr]  # typed as any nesting


def read_tail(array: mx.array, start: int) -> list[int]:
    """The integers of an array [N] from ``start`` on: waits for this array alone and copies no others."""
    with memoryview(array) as view:  # type: ignore[arg-type]  # the stub does not know the buffer protocol
        return view[start:].tolist()
