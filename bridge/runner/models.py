"""Where ``${model:NAME}`` is on this machine, and which shipped model replaces one that is missing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import RequestRefused
from bridge.presets import ModelNeed
from evidence_format import weights

SHIPPED = {
    "demo-target": "target",
    "demo-drafter": "drafter",
    "demo-projector": "projector",
    "demo-proposer": "proposer",
}

# How the names of models end that go with another one: drafters and projectors.
COMPANIONS = ("-dflash", "-projector", "-mdlm")


class ModelMissing(RequestRefused):
    """A model the preset names is not on this machine."""


@dataclass(frozen=True)
class FoundModel:
    """A model of a preset on this machine; `stand_in` names the shipped model that replaces it, if any."""

    folder: Path
    stand_in: str | None = None

    def __str__(self) -> str:
        return f"stand-in {self.stand_in}: {self.folder}" if self.stand_in else str(self.folder)


@dataclass(frozen=True)
class Places:
    """Where this machine may hold models."""

    configured: Mapping[str, Path]  # by the policy
    environment: Mapping[str, str]  # the runner's
    home: Path
    metal: bool  # this machine has Metal, so no stand-in is used
    workload: Path | None = None  # the workspace, for presets that run the workload's code

    def of(self, name: str) -> dict[str, Path | None]:
        """Every place of one model in order, by its name for people; None: that place is not set."""
        variable = "KAKEYA_MODEL_" + name.upper().replace("-", "_")
        value = self.environment.get(variable)
        named = Path(os.path.expanduser(value)) if value else None
        if named is not None and not named.is_dir():
            message = f"{variable} is {value!r}, which is no folder"
            raise ModelMissing(message, "correct it on the runner, or unset it there")
        configured = self.configured.get(name)
        if configured is not None and not configured.is_dir():
            message = f"models.{name} in the policy is {str(configured)!r}, which is no folder"
            raise ModelMissing(message, "correct it on the runner: kakeya_mac runner models check")
        places = {
            f"models.{name} in the policy": configured,
            variable: named,
            f"~/kakeya-models/{name}": self.home / "kakeya-models" / name,
        }
        if self.workload is not None:  # the requester's data
            places[f"models/{name} of the workload"] = self.workload / "models" / name
        if name in SHIPPED:
            places["the engine's shipped models"] = shipped(name)
        return places


def resolve(needs: Mapping[str, ModelNeed], places: Places) -> dict[str, FoundModel]:
    """The folder of each model of a preset, by the name the preset gives it: the first place that exists.

    A shipped stand-in is used only without Metal, for all models of a preset or none. A folder with missing
    or broken files is refused, because a model loader would only say that a file is corrupt.
    """
    found = {name: _find(places.of(name)) for name in needs}
    present = any(folder is not None for folder in found.values())
    models = {}
    for name, need in needs.items():
        folder = found[name] or _stand_in(name, need, places, present)
        if faults := weights.faults(folder):
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise ModelMissing(
                f"the model {name} is not whole: {faults[0]}{more}",
                "fetch it again on the runner: `git lfs pull` in that folder, or a new download",
            )
        # An owner may name the shipped model, as the demo does.
        is_small = need.stand_in is not None and folder == shipped(need.stand_in)
        models[name] = FoundModel(folder, need.stand_in if is_small else None)
    return models


def engine_folder() -> Path | None:
    """The installed engine's package, found without importing it; None: there is none."""
    spec = importlib.util.find_spec("engine")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def shipped(name: str) -> Path | None:
    """The folder of a shipped model (one of `SHIPPED`) in the installed engine; None: it is not there."""
    engine = engine_folder()
    return None if engine is None else _find({name: engine / "models" / "demo" / SHIPPED[name]})


def _find(places: Mapping[str, Path | None]) -> Path | None:
    return next((folder.resolve() for folder in places.values() if folder and folder.is_dir()), None)


def _stand_in(name: str, need: ModelNeed, places: Places, present: bool) -> Path:
    """The stand-in of a model that is in no place, or the refusal."""
    looked = "; ".join(
        f"{place} ({'not set' if folder is None else 'no folder'})"
        for place, folder in places.of(name).items()
    )
    message = f"the model {name} is not on this machine; looked at: {looked}"
    remedy = f"put {need.mac} in ~/kakeya-models/{name} on the runner, or name its folder in the policy"
    if need.stand_in is not None:
        if not places.metal and not present and (folder := shipped(need.stand_in)) is not None:
            return folder
        remedy += (
            f"; {need.stand_in} replaces it only on machines without Metal, and only where no other model of"
            " the preset is there"
        )
    raise ModelMissing(message, remedy)
