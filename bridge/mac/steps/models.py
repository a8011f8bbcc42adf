"""Where models lie, and whether each is whole."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.mac.action import Action, Folder
from bridge.mac.options import Options
from bridge.mac.step import Look, State
from bridge.weights import faults


@dataclass(frozen=True)
class Models:
    """The folder of models; what is in it is the owner's."""

    options: Options
    name: str = "models"
    stops: bool = False

    def look(self) -> Look:
        """Whether the folder is there, and every model in it whole."""
        folder = self.options.models
        if not folder.is_dir():
            return Look(State.TODO, str(folder), "there is none")
        found: list[str] = []
        broken: list[str] = []
        for model in sorted(path for path in folder.iterdir() if path.is_dir()):
            lacks = faults(model)
            (broken if lacks else found).append(f"{model.name}: {lacks[0]}" if lacks else model.name)
        if broken:
            fix = "fetch it again into that folder"
            return Look(State.ADVICE, str(folder), f"not whole: {'; '.join(broken)}", fix)
        return Look(State.DONE, str(folder), f"whole: {', '.join(found)}" if found else "no models yet")

    def actions(self) -> tuple[Action, ...]:
        """Make the folder."""
        return () if self.options.models.is_dir() else (Folder(self.options.models),)
