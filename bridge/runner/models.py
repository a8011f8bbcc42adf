"""Where ``${model:NAME}`` is on this machine, and which shipped model replaces one that is missing.

The first of these places that exists is used: the policy; ``KAKEYA_MODEL_<NAME>``, which must name a folder
if it is set; ``~/kakeya-models/<name>``; ``models/<name>`` of the workload (only for presets that run the
workload's code: it is the requester's data); for a preset that names a shipped model, the installed
engine's folder.

A preset may name a shipped *stand-in* for a model. It is used only on machines without Metal, where the
preset can then still be tried; on a Mac the request is refused instead. All models of a preset are
replaced, or none. A folder with missing or broken files is refused, because a model loader would only say
that a file is corrupt.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge import weights
from bridge.errors import RequestRefused
from bridge.presets import ModelNeed

SHIPPED = {
    "demo-target": "target",
    "demo-drafter": "drafter",
    "demo-projector": "projector",
    "demo-proposer": "proposer",
}


class ModelMissing(RequestRefused):
    """A model the preset names is not on this machine."""


@dataclass(frozen=True)
class FoundModel:
    """A model of a preset on this machine; `stand_in` names the shipped model that replaces it, if any."""

    folder: Path
    stand_in: str | None = None

    def __str__(self) -> str:
        """The folder, after the stand-in's name if it is one."""
        return f"stand-in {self.stand_in}: {self.folder}" if self.stand_in else str(self.folder)


@dataclass(frozen=True)
class Places:
    """Where this machine may hold models."""

    configured: Mapping[str, Path]  # by the policy
    environment: Mapping[str, str]  # the runner's
    home: Path
    metal: bool  # this machine has Metal, so no stand-in is used
    workload: Path | None = None  # the workspace, for presets that run the workload's code

    def of(self, name: str) -> list[tuple[str, Path | None]]:
        """Every place of one model in order, with its name for people; None: that place is not set.

        Raises:
            ModelMissing: The variable of the environment names something that is no folder.
        """
        variable = "KAKEYA_MODEL_" + name.upper().replace("-", "_")
        named = None
        if value := self.environment.get(variable):
            named = Path(os.path.expanduser(value))
            if not named.is_dir():
                message = f"{variable} is {value!r}, which is no folder"
                raise ModelMissing(message, "correct it on the runner, or unset it there")
        places = [
            (f"models.{name} in the policy", self.configured.get(name)),
            (variable, named),
            (f"~/kakeya-models/{name}", self.home / "kakeya-models" / name),
        ]
        if self.workload is not None:
            places.append((f"models/{name} of the workload", self.workload / "models" / name))
        if name in SHIPPED:
            places.append(("the engine's shipped models", shipped(name)))
        return places


def resolve(needs: Sequence[ModelNeed], places: Places) -> dict[str, FoundModel]:
    """The folder of each model of a preset, by the name the preset gives it.

    Raises:
        ModelMissing: A model is in no place and has no stand-in here; the message lists the places.
            Or a folder is not whole, or a variable of the environment names none.
    """
    found = {need.name: _find(need, places) for need in needs}
    present = [name for name, model in found.items() if model is not None]
    whole = {need.name: found[need.name] or _stand_in(need, places, present) for need in needs}
    for name, model in whole.items():
        if faults := weights.faults(model.folder):
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise ModelMissing(
                f"the model {name} in {model.folder} is not whole: {faults[0]}{more}",
                "fetch it again on the runner: `git lfs pull` in that folder, or a new download",
            )
    return whole


def engine_folder() -> Path | None:
    """The installed engine's package, found without importing it; None: there is none."""
    spec = importlib.util.find_spec("engine")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def shipped(name: str) -> Path | None:
    """The folder of a shipped model (one of `SHIPPED`) in the installed engine."""
    engine = engine_folder()
    return None if engine is None else engine / "models" / "demo" / SHIPPED[name]


def _find(need: ModelNeed, places: Places) -> FoundModel | None:
    """A model in the first of its places that is there; as in the demo it may be the shipped stand-in."""
    folders = (folder for _, folder in places.of(need.name))
    folder = next((folder.resolve() for folder in folders if folder is not None and folder.is_dir()), None)
    if folder is None:
        return None
    small = shipped(need.stand_in) if need.stand_in else None
    return FoundModel(folder, need.stand_in if small is not None and small.resolve() == folder else None)


def _stand_in(need: ModelNeed, places: Places, present: Sequence[str]) -> FoundModel:
    """The stand-in of a model that is in no place, or the refusal."""
    looked = "; ".join(
        f"{place} ({'not set' if folder is None else 'no folder'})" for place, folder in places.of(need.name)
    )
    message = f"the model {need.name} is not on this machine; looked at: {looked}"
    remedy = f"put {need.mac} in ~/kakeya-models/{need.name} on the runner, or name its folder in the policy"
    if need.stand_in is not None:
        folder = shipped(need.stand_in)
        if places.metal:
            remedy += f"; {need.stand_in} replaces it only on machines without Metal"
        elif present:
            remedy += f"; {need.stand_in} does not replace it next to a real {present[0]}"
        elif folder is not None and folder.is_dir():
            return FoundModel(folder.resolve(), need.stand_in)
        else:
            message += f"; its stand-in {need.stand_in} is not installed either"
    raise ModelMissing(message, remedy)
