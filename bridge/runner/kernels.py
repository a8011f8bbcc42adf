"""Compiled kernels of mlx's CPU backend, made once on a machine and copied into each job's TMPDIR.

On a CPU mlx compiles a fused kernel with g++ when it is first used, into ``$TMPDIR/mlx/VERSION/cpu``, and
loads it from there if it exists. A job's TMPDIR is new, so every job would compile them all again. Here the
installed engine makes those of the shipped pair, in folders of the runner's own and outside of any job; jobs
get copies, and nothing flows back from them. Kernels of other models are compiled by the job, as ever.

A failure costs time, not the job: it is reported to the caller, and not tried again by this process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bridge.errors import MachineError
from bridge.proc import run_program, spawn
from bridge.runner.folders import remove_tree
from bridge.runner.isolation.room import Room, environment

COMPILER = "g++"  # mlx calls it by this name
MAKER = (sys.executable, "-I", "-m", "engine.kernels")
PLACE = "mlx/*/cpu"  # below TMPDIR; the part between is mlx's version
_MAKING_S, _HEADER_S, _POLL_S = 300.0, 60.0, 0.1
_MAX_OUTPUT = 2000
# mlx's kernels all begin with this header. Where they are compiled, g++ looks for it first, and takes a
# precompiled one if it was made with the same switches; otherwise it ignores it. That makes a kernel in a
# fifth of the time.
_HEADER = "mlx/backend/cpu/compiled_preamble.h"
_SWITCHES = ("-std=c++17", "-O3", "-Wall", "-fPIC")


class KernelsMissing(MachineError):
    """The kernels could not be made beforehand; each job compiles its own."""


class Kernels:
    """The kernels of one runner.

    Args:
        folder: Where they are kept: the runner's own, reached by no job.
        tools: Versions of the packages that the kernels belong to.
        ours: The runner's environment.
        maker: The program that uses every kernel once, with its arguments.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tools: Mapping[str, str],
        ours: Mapping[str, str],
        maker: Sequence[str] = MAKER,
    ) -> None:
        versions = (tools.get(name, "none") for name in ("mlx", "kakeya-mac"))
        self._folder = folder
        self._kept = folder / "-".join((*versions, platform.machine()))
        self._room = Room(folder / "making")
        self._version = tools.get("mlx")
        self._environment = environment(self._room, ours)
        self._maker = tuple(maker)
        self._gave_up = False

    @property
    def wanted(self) -> bool:
        """Whether they are to be made: mlx and a compiler are here, they are not, and nothing has failed."""
        if self._kept.is_dir() or self._gave_up or self._version is None:
            return False
        return shutil.which(COMPILER, path=self._environment["PATH"]) is not None

    def make(self, stop: Callable[[], bool]) -> None:
        """Make them; call it while no job runs.

        Args:
            stop: Asked about ten times a second; True ends the making, which is then left for later.

        Raises:
            KernelsMissing: They could not be made.
        """
        try:
            remove_tree(self._folder)  # those of another version
            self._folder.mkdir(mode=0o700)
            self._room.make()
            self._precompile_header()
            if self._run_maker(stop):
                self._keep()
        except OSError as error:
            self._gave_up = True
            raise KernelsMissing(f"no room for compiled kernels: {error.strerror or error}") from None
        except MachineError:
            self._gave_up = True
            raise
        finally:
            self._room.remove()

    def copy_to(self, temporary: Path) -> int:
        """Copy the kernels, if they were made, to where a process with this new, empty TMPDIR finds them.

        Returns:
            How many there were.
        """
        count = 0
        for place in self._kept.glob(PLACE):
            folder = temporary / place.relative_to(self._kept)
            for kernel in _libraries(place):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.copyfile(kernel, folder / kernel.name, follow_symlinks=False)
                count += 1
        return count

    def _precompile_header(self) -> None:
        """Put mlx's header, precompiled, where its kernels will be compiled; without it that takes longer."""
        found = importlib.util.find_spec("mlx")
        for root in (found and found.submodule_search_locations) or ():
            include = Path(root) / "include"
            if (include / _HEADER).is_file():
                place = self._room.temporary / "mlx" / str(self._version) / "cpu" / f"{_HEADER}.gch"
                place.parent.mkdir(parents=True, mode=0o700)
                done = run_program(
                    [
                        *(COMPILER, *_SWITCHES, "-w", "-I", str(include)),
                        *("-x", "c++-header", str(include / _HEADER), "-o", str(place)),
                    ],
                    timeout_s=_HEADER_S,
                    env=self._environment,
                    cwd=self._room.workspace,
                )
                if not done.ok:
                    place.unlink(missing_ok=True)

    def _run_maker(self, stop: Callable[[], bool]) -> bool:
        """Run the maker to its end; False when it was stopped."""
        said = self._room.out / "said.txt"
        with said.open("wb") as output:
            process = spawn(
                self._maker, env=self._environment, cwd=self._room.workspace, output=output.fileno()
            )
        code, left = None, _MAKING_S
        try:
            while code is None and left > 0 and not stop():
                code, left = process.wait(_POLL_S), left - _POLL_S
        finally:
            process.kill()
        if code is None and left > 0:
            return False
        if code != 0:
            how = f"took more than {_MAKING_S:g} s" if code is None else f"ended with code {code}"
            words = said.read_bytes()[-_MAX_OUTPUT:].decode("utf-8", "replace").strip()
            raise KernelsMissing(f"compiling kernels {how}: {words}")
        return True

    def _keep(self) -> None:
        """Let the kernels just made take their place, all at once; nothing else the maker left is kept."""
        staged = self._room.root / "kept"
        staged.mkdir(mode=0o700)
        for place in self._room.temporary.glob(PLACE):
            folder = staged / place.relative_to(self._room.temporary)
            folder.mkdir(parents=True, mode=0o700)
            for kernel in _libraries(place):
                kernel.replace(folder / kernel.name)
        staged.replace(self._kept)


def _libraries(folder: Path) -> Iterator[Path]:
    """The shared libraries in a folder: regular files, no links."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".so") and entry.is_file(follow_symlinks=False):
                yield Path(entry.path)
