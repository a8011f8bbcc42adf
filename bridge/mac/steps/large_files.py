"""git-lfs, for workloads whose policy names where its objects come from, and for models that lie in git."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.mac.action import Action, Run
from bridge.mac.options import Options
from bridge.mac.step import Look, State, answer, succeeds

_FILTER = "filter.lfs.process"


@dataclass(frozen=True)
class LargeFiles:
    """git-lfs, installed, and known to git without fetching anything by itself."""

    options: Options
    name: str = "git-lfs"
    stops: bool = False

    def look(self) -> Look:
        """Whether it is there and set up."""
        if (version := answer("git", "lfs", "version")) is None:
            if succeeds("brew", "--version"):
                return Look(State.TODO, "git lfs version", "not installed")
            fix = "brew install git-lfs (https://brew.sh), or the package of git-lfs.com"
            return Look(State.MISSING, "git lfs version", "not installed, and there is no Homebrew", fix)
        where = f"git config --global {_FILTER}"
        own = answer("git", "config", "--global", "--get", _FILTER)
        if own is None:
            return Look(State.TODO, where, "not set up for this account")
        if "--skip" not in own.split():
            finding = f"git itself fetches objects with every checkout of this account ({own})"
            return Look(State.ADVICE, where, finding, "git lfs install --skip-smudge --force")
        return Look(State.DONE, "git lfs version", version.split(" ")[0])

    def actions(self) -> tuple[Action, ...]:
        """Install it where it is missing; what git checks out is left as pointers."""
        install = () if succeeds("git", "lfs", "version") else (Run(("brew", "install", "git-lfs")),)
        if succeeds("git", "config", "--global", "--get", _FILTER):
            return install  # the owner's is left as it is
        return (*install, Run(("git", "lfs", "install", "--skip-smudge", "--skip-repo")))
