"""What a report says about the machine, the versions and the source that ran."""

import ctypes
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache, make_prompt_cache

from engine.child import printed_by
from engine.device import Runtime
from engine.evaluation.system_load import StrainWatch
from engine.target.folder import CacheLayer
from engine.target.loading import LoadedTarget, ModelCard
from evidence_format.weights import source_digest

PACKAGE = Path(__file__).resolve().parent.parent


def describe(runtime: Runtime, watch: StrainWatch, models: dict[str, ModelCard]) -> dict[str, Any]:
    """The ``environment`` block of a report.

    Args:
        runtime: what runs.
        watch: made when the evaluation began.
        models: by role.
    """
    return {
        "machine": platform.machine() or "unknown",
        "system": platform.system() or "unknown",
        "os_release": platform.release() or "unknown",
        "chip": _chip(),
        "cpu_count": os.cpu_count() or 1,
        "memory_bytes": _memory(),
        "metal": runtime.metal,
        "device": runtime.device,
        "blas": runtime.blas.name,
        "power_source": watch.power_source(),
        "thermal_state": watch.thermal_state(),
        "swapping": watch.swapping(),
        "load": watch.load(),
        "versions": {
            "python": platform.python_version(),
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
            "kakeya": _own_version(),
        },
        "git": _git() | {"source_sha256": source_digest(PACKAGE)},
        "models": {role: asdict(card) for role, card in models.items()},
    }


def target_card(target: LoadedTarget) -> ModelCard:
    """The card of a target, with its vocabulary and the caches it makes for itself."""
    layers = tuple(_cache_layers(target.target.model))
    return replace(target.card, vocab_size=target.target.vocab_size, cache_layers=layers)


def _cache_layers(model: Any) -> Iterator[CacheLayer]:
    """What each cache keeps a position, from the shapes that one token leaves; nothing is computed."""
    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    for cache in caches:
        keys = None if isinstance(cache, (ArraysCache, CacheList)) else cache.keys
        if keys is None:
            yield CacheLayer("other", 0, None)
            continue
        values = keys.shape[1] * keys.shape[3] + cache.values.shape[1] * cache.values.shape[3]
        sliding = isinstance(cache, RotatingKVCache)
        yield CacheLayer("sliding" if sliding else "full", values, cache.max_size if sliding else None)


def _own_version() -> str:
    try:
        return version("kakeya-mac")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "uninstalled"


def _chip() -> str:
    """The processor's name, by the same source as the runner's: sysctl on a Mac, /proc/cpuinfo on Linux."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine() or "unknown"


def _sysctl(name: str) -> str:
    """A text of the kernel's; empty where it has none of that name."""
    text = ctypes.create_string_buffer(256)
    length = ctypes.c_size_t(len(text))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), text, ctypes.byref(length), None, 0)
    return "" if failed else text.value.decode("utf-8", "replace").strip()


def _memory() -> int:
    if sys.platform == "darwin":
        size = ctypes.c_uint64()
        length = ctypes.c_size_t(ctypes.sizeof(size))
        ctypes.CDLL(None).sysctlbyname(b"hw.memsize", ctypes.byref(size), ctypes.byref(length), None, 0)
        return int(size.value)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _git() -> dict[str, Any]:
    """The commit of the checkout that holds this package, and whether the package differs from it.

    Both None outside a checkout, and where git itself cannot be run. Git is asked for the commit's names and
    digests alone; files are read here, so nothing a configuration says (filters, ignored or unwatched files)
    runs or hides a difference.
    """
    sha = _asked_git("rev-parse", "--verify", "HEAD") if (PACKAGE.parent / ".git").exists() else None
    listed = sha and _asked_git("ls-tree", "-r", "-z", sha.strip(), "--", ".")
    if sha is None or listed is None:
        return {"sha": None, "dirty": None}
    rows = (row.partition("\t") for row in listed.split("\0") if row)
    committed = {name: about.rpartition(" ")[2] for about, _, name in rows}  # about: mode, type, digest
    there = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py")}
    changed = any(_blob(PACKAGE / name, len(digest)) != digest for name, digest in committed.items())
    return {"sha": sha.strip(), "dirty": changed or not there <= committed.keys()}


def _asked_git(*words: str) -> str | None:
    """What git says of this package's checkout; an object that is not there is fetched from nowhere.

    It is asked whoever owns the checkout: this code comes from it and runs already.
    """
    git = ("git", "--no-replace-objects", "-c", "safe.directory=*")
    return printed_by((*git, *words), PACKAGE, {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"})


def _blob(file: Path, digits: int) -> str | None:
    """Git's digest of a file, or of where a link leads, in so many digits; None without a file."""
    try:
        data = os.fsencode(os.readlink(file)) if file.is_symlink() else file.read_bytes()
    except OSError:
        return None
    algorithm = "sha256" if digits == hashlib.sha256().digest_size * 2 else "sha1"
    return hashlib.new(algorithm, b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
