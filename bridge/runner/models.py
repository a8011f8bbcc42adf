"""Where ``${model:NAME}`` lies on this machine, and what stands in for a model that is not there.

Places, first hit wins: the policy file; ``KAKEYA_MODEL_<NAME>``, which must name a folder where it is set;
``~/kakeya-models/<name>``; ``models/<name>`` of the workload (only for presets that run the workload's code:
it is the requester's data); and, for a preset that names a shipped model itself, the folder beside the
installed engine.

A preset may also name a shipped model that *stands in* for one the machine has not. That is for machines
without Metal, where the preset can then still be tried; a Mac's figures are those of the named model, or the
request is refused. Stand-ins replace all models of a preset or none: half a pair is no pair. A folder that
is not whole is refused, because a model loader would only say that a file is corrupt.
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
class Found:
    """A model of a preset on this machine.

    Attributes:
        folder: Where it lies.
        stand_in: Name of the shipped model that was taken instead; None: it is the named one.
    """

    folder: Path
    stand_in: str | None = None

    def __str__(self) -> str:
        """The folder, after the stand-in's name if it is one."""
        return f"stand-in {self.stand_in}: {self.folder}" if self.stand_in else str(self.folder)


@dataclass(frozen=True)
class Places:
    """Where this machine may hold models.

    Attributes:
        configured: Folders named in the policy.
        environment: The runner's environment.
        home: The user's home.
        metal: Whether this is a machine whose figures count, so that nothing may stand in.
        workload: The workspace, for presets that run the workload's code.
    """

    configured: Mapping[str, Path]
    environment: Mapping[str, str]
    home: Path
    metal: bool
    workload: Path | None = None

    def of(self, name: str) -> list[tuple[str, Path | None]]:
        """Every place of one model in order, with its name for people; None: that place is not set.

        Raises:
            ModelMissing: The variable of the environment names something that is no folder.
        """
        variable = "KAKEYA_MODEL_" + name.upper().replace("-", "_")
        places = [
            (f"models.{name} in the policy", self.configured.get(name)),
            (variable, self._named(variable)),
            (f"~/kakeya-models/{name}", self.home / "kakeya-models" / name),
        ]
        if self.workload is not None:
            places.append((f"models/{name} of the workload", self.workload / "models" / name))
        if name in SHIPPED:
            places.append(("the engine's shipped models", shipped(name)))
        return places

    def _named(self, variable: str) -> Path | None:
        """The folder that a variable names; None: it is not set."""
        value = self.environment.get(variable)
        if not value:
            return None
        folder = Path(os.path.expanduser(value))
        if not folder.is_dir():
            raise ModelMissing(
                f"{variable} is {value!r}, which is no folder", "correct it on the runner, or unset it there"
            )
        return folder


def resolve(needs: Sequence[ModelNeed], places: Places) -> dict[str, Found]:
    """The folder of each model of a preset, by the name the preset gives it.

    Raises:
        ModelMissing: A model is in no place, and nothing stands in for it here; the message lists the places.
            Or a folder is not whole, or a variable of the environment names none.
    """
    own = {need.name: _own(need.name, places) for need in needs}
    missing = [need for need in needs if own[need.name] is None]
    present = [name for name, folder in own.items() if folder is not None]
    found: dict[str, Found] = {}
    for need in needs:
        if (folder := own[need.name]) is not None:
            found[need.name] = Found(folder, need.stand_in if _is_stand_in(folder, need) else None)
    for need in missing:
        found[need.name] = _stand_in(need, places, present)
    for name, model in found.items():
        _refuse_incomplete(name, model.folder)
    return {need.name: found[need.name] for need in needs}


def shipped(name: str) -> Path | None:
    """The folder of a shipped model beside the installed engine, found without importing it.

    Args:
        name: One of `SHIPPED`.
    """
    spec = importlib.util.find_spec("engine")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "models" / "demo" / SHIPPED[name]


def _own(name: str, places: Places) -> Path | None:
    folders = (folder for _, folder in places.of(name))
    return next((folder.resolve() for folder in folders if folder is not None and folder.is_dir()), None)


def _is_stand_in(folder: Path, need: ModelNeed) -> bool:
    """Whether the place of a model holds the small shipped one, as in the demo."""
    small = shipped(need.stand_in) if need.stand_in else None
    return small is not None and small.resolve() == folder


def _stand_in(need: ModelNeed, places: Places, present: Sequence[str]) -> Found:
    """What stands in for a model that is in no place, or the refusal."""
    looked = "; ".join(
        f"{place} ({'not set' if folder is None else 'no folder'})" for place, folder in places.of(need.name)
    )
    message = f"the model {need.name} is not on this machine; looked at: {looked}"
    remedy = f"put {need.mac} in ~/kakeya-models/{need.name} on the runner, or name its folder in the policy"
    if need.stand_in is None:
        raise ModelMissing(message, remedy)
    if places.metal:
        raise ModelMissing(message, f"{remedy}; {need.stand_in} stands in only where there is no Metal")
    if present:
        raise ModelMissing(message, f"{remedy}; {need.stand_in} does not stand in beside a real {present[0]}")
    folder = shipped(need.stand_in)
    if folder is None or not folder.is_dir():
        raise ModelMissing(f"{message}; its stand-in {need.stand_in} is not installed either", remedy)
    return Found(folder.resolve(), need.stand_in)


def _refuse_incomplete(name: str, folder: Path) -> None:
    if not (found := weights.faults(folder)):
        return
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise ModelMissing(
        f"the model {name} in {folder} is not whole: {found[0]}{more}",
        "fetch it again on the runner: `git lfs pull` in that folder, or a new download",
    )
