"""The file that GitHub's runner calls before each job."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.mac.action import Action, Write
from bridge.mac.hook_file import text
from bridge.mac.options import Options
from bridge.mac.step import Look, State


@dataclass(frozen=True)
class Hook:
    """That file, written anew when it is another."""

    options: Options
    name: str = "hook"
    stops: bool = False

    @property
    def _file(self) -> Write:
        options = self.options
        own = {"HOME": str(options.home), "USER": options.user, "LOGNAME": options.user, **options.folders}
        return Write(options.hook, text(str(options.python), own), 0o755)

    def look(self) -> Look:
        """Whether it is as it should be."""
        if self._file.is_there:
            return Look(State.DONE, str(self.options.hook), "called before each job")
        return Look(State.TODO, str(self.options.hook), "missing, or another one")

    def actions(self) -> tuple[Action, ...]:
        """Write it."""
        return (self._file,)
