"""Which library does the CPU matrix products, chosen before mlx is imported.

The Linux wheel of mlx links a reference BLAS through the dynamic linker. A faster library that is already
in the global symbol scope wins the lookup, so loading it first is enough. This module never installs
anything and, on macOS, has nothing to choose: mlx uses Metal and Accelerate there.
"""

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigurationError

INSTALL_HINT = "apt install libopenblas0-pthread"
SWITCH = "KAKEYA_BLAS"

# Sonames of libraries that export the C interface (cblas_sgemm), best first.
FAST_LIBRARIES = (
    "libopenblas.so.0",
    "libopenblas.so",
    "libopenblasp.so.0",
    "libmkl_rt.so.2",
    "libmkl_rt.so.1",
    "libmkl_rt.so",
    "libblis.so.4",
    "libblis.so.3",
)
NARROW = 512
FAST_MARKS = ("openblas", "mkl", "blis", "armpl")


@dataclass(frozen=True)
class Blas:
    """The library in use: its name, whether it is a fast one, and how that was decided."""

    name: str
    fast: bool
    how: str


_chosen: list[Blas] = []


def load_fast_blas() -> Blas:
    """Load a fast BLAS into the global scope, once, and say which library mlx will use.

    Call it before the first import of mlx. ``KAKEYA_BLAS=reference`` keeps the bundled library;
    unset, empty or ``auto`` look for a fast one.

    Returns:
        The library in use. After mlx has been imported without one, this is the reference library.

    Raises:
        ConfigurationError: ``KAKEYA_BLAS`` holds an unknown value.
    """
    if not _chosen:
        _chosen.append(_choose())
    return _chosen[0]


def threads() -> int | None:
    """How many threads share a matrix product; None where the library does not say (only OpenBLAS does)."""
    try:
        return int(ctypes.CDLL(None).openblas_get_num_threads())
    except AttributeError:
        return None


def fit_threads(width: int) -> None:
    """Use one thread for a model so narrow that its products are over before a second one has joined in.

    Measured with OpenBLAS on 2 cores, one and eight rows: below 512 columns a second thread brings less than
    a sixth, and as the threads wait for each other by spinning, it makes every product up to 30 times slower
    as soon as anything else runs. ``OPENBLAS_NUM_THREADS`` in the environment is left as it is.

    Args:
        width: Hidden size of the target.
    """
    if width < NARROW and "OPENBLAS_NUM_THREADS" not in os.environ:
        _set_threads(1)


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


def _choose() -> Blas:
    wish = os.environ.get(SWITCH, "").strip().lower() or "auto"
    if wish not in ("auto", "reference"):
        raise ConfigurationError(f"{SWITCH}={wish!r} is not one of auto, reference")
    if sys.platform == "darwin":
        return Blas("accelerate", True, "macOS")
    if wish == "reference":
        return Blas("reference", False, f"{SWITCH}=reference")
    present = _provider()
    if present is not None:
        fast = any(mark in present.lower() for mark in FAST_MARKS)
        return Blas(present, fast, "already in the process")
    if "mlx.core" in sys.modules:
        return Blas("reference", False, "mlx was imported before a fast BLAS could be loaded")
    for soname in FAST_LIBRARIES:
        try:
            ctypes.CDLL(soname, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if _provider() is not None:
            _set_threads(available_cpus())
            return Blas(soname, True, "loaded before mlx")
    return Blas("reference", False, f"no fast BLAS found; {INSTALL_HINT}")


def _provider() -> str | None:
    """File name of the library that the global scope resolves ``cblas_sgemm`` to, or None."""

    class Info(ctypes.Structure):
        _fields_ = (
            ("file_name", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol_name", ctypes.c_char_p),
            ("symbol", ctypes.c_void_p),
        )

    scope = ctypes.CDLL(None)
    try:
        function = scope.cblas_sgemm
    except AttributeError:
        return None
    info = Info()
    address = ctypes.cast(function, ctypes.c_void_p)
    if not scope.dladdr(address, ctypes.byref(info)) or not info.file_name:
        return "unknown"
    # The link may be an alternative (libblas.so.3 -> openblas-pthread/libblas.so.3): name the real file.
    real = Path(os.fsdecode(info.file_name)).resolve()
    return real.name if any(mark in real.name.lower() for mark in FAST_MARKS) else "/".join(real.parts[-2:])


def _set_threads(most: int) -> None:
    """Lower OpenBLAS's threads to `most`: it counts the host's CPUs, not those this process may use."""
    now = threads()
    if now is not None and now > most:
        ctypes.CDLL(None).openblas_set_num_threads(ctypes.c_int(most))
