"""Is this a Mac that can serve at all?"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from dataclasses import dataclass

from bridge.mac.action import Action
from bridge.mac.options import Options
from bridge.mac.step import Look, State, answer

OLDEST_MACOS = (14, 0)
OLDEST_PYTHON = (3, 11)
LEAST_MEMORY = 16 << 30
LEAST_DISK = 20 * 10**9


@dataclass(frozen=True)
class Machine:
    """macOS, chip, account, place, memory, disk, command line tools, Python."""

    options: Options
    name: str = "machine"
    stops: bool = True

    def look(self) -> Look:
        """Ask the system's own programs; the first that does not fit is the finding."""
        found: list[str] = []
        for question in (
            *(self._macos, self._chip, self._account, self._place),
            *(self._memory, self._disk, self._tools, self._python),
        ):
            looked_at, finding, fix = question()
            if fix:
                return Look(State.MISSING, looked_at, finding, fix)
            found.append(finding)
        return Look(State.DONE, "uname, sw_vers, sysctl, xcode-select", ", ".join(found))

    def actions(self) -> tuple[Action, ...]:
        """Nothing: this is a person's to do."""
        return ()

    def _macos(self) -> tuple[str, str, str]:
        system, version = answer("uname", "-s"), answer("sw_vers", "-productVersion")
        if system != "Darwin" or version is None:
            return "uname -s, sw_vers", f"this is {system or 'no Unix'}, not macOS", "run this on the Mac"
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        oldest = ".".join(map(str, OLDEST_MACOS))
        fix = "" if numbers >= OLDEST_MACOS else f"update to macOS {oldest} or later, which MLX needs"
        return "sw_vers -productVersion", f"macOS {version}", fix

    def _chip(self) -> tuple[str, str, str]:
        machine = answer("uname", "-m")
        chip = answer("sysctl", "-n", "machdep.cpu.brand_string") or "unknown chip"
        if machine != "arm64":
            # A shell under Rosetta says x86_64 on Apple silicon, too.
            if answer("sysctl", "-n", "sysctl.proc_translated") == "1":
                return (
                    "sysctl sysctl.proc_translated",
                    "this shell runs under Rosetta",
                    "use a native terminal",
                )
            return "uname -m", f"{chip} ({machine})", "MLX needs Apple silicon"
        return "uname -m, sysctl", chip, ""

    def _account(self) -> tuple[str, str, str]:
        if answer("id", "-u") == "0":
            fix = "run it as the account that is to run jobs; only what needs an administrator takes sudo"
            return "id -u", "this is root: jobs and everything of theirs would be root's", fix
        return "id -u", f"account {self.options.user}", ""

    def _place(self) -> tuple[str, str, str]:
        """Nobody else may put another program in the place of one that a service starts."""
        prefix = self.options.prefix
        for folder in (prefix, *prefix.parents):
            try:
                status = folder.stat()
            except OSError:
                continue
            fix = f"choose another --prefix, or see to {folder}: chown, chmod go-w"
            if status.st_uid not in (0, os.getuid()):
                return str(folder), "it belongs to another account, which could exchange what is in it", fix
            if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
                return str(folder), "other accounts may write there, and exchange what is in it", fix
        return str(prefix), f"prefix {prefix}", ""

    def _memory(self) -> tuple[str, str, str]:
        said = answer("sysctl", "-n", "hw.memsize") or ""
        memory = int(said) if said.isdigit() else 0
        fix = (
            "" if memory >= LEAST_MEMORY else f"{LEAST_MEMORY >> 30} GiB are the least that a model fits into"
        )
        return "sysctl hw.memsize", f"{memory / (1 << 30):.0f} GiB of memory", fix

    def _disk(self) -> tuple[str, str, str]:
        folder = self.options.prefix
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        fix = "" if free >= LEAST_DISK else f"make room: {LEAST_DISK / 1e9:.0f} GB are needed"
        return str(folder), f"{free / 1e9:.0f} GB free", fix

    def _tools(self) -> tuple[str, str, str]:
        where = answer("xcode-select", "-p")
        if where is None:
            return "xcode-select -p", "the command line tools are missing", "xcode-select --install"
        return "xcode-select -p", "command line tools", ""

    def _python(self) -> tuple[str, str, str]:
        version = ".".join(map(str, sys.version_info[:3]))
        fix = (
            "" if sys.version_info >= OLDEST_PYTHON else "brew install python@3.12, or python.org's installer"
        )
        return sys.executable, f"Python {version}", fix
