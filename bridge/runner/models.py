"""Where ``${model:NAME}`` lies on this machine.

Places, first hit wins: the policy file; ``KAKEYA_MODEL_<NAME>``; ``~/kakeya-models/<name>``;
``models/<name>`` of the workload (only for presets that run the workload's code: it is the requester's data);
and for the demo pair the folder shipped with the engine. A folder that still holds Git LFS pointers is
refused, because a model loader would only say that a file is corrupt.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from bridge.errors import RequestRefused

SHIPPED = {"demo-target": "target", "demo-drafter": "drafter"}
LFS_MARK = b"version https://git-lfs.github.com/spec/"


class ModelMissing(RequestRefused):
    """A model the preset names is not on this machine."""


def resolve(
    name: str,
    *,
    configured: Mapping[str, Path],
    environment: Mapping[str, str],
    home: Path,
    workload: Path | None = None,
) -> Path:
    """The folder of a model.

    Args:
        name: As in the preset, e.g. ``demo-target``.
        configured: Folders named in the policy.
        environment: The runner's environment.
        home: The user's home.
        workload: The workspace, for presets that run the workload's code.

    Raises:
        ModelMissing: No place holds it; the message lists them all. Or it holds LFS pointers.
    """
    looked: list[str] = []
    for place, folder in _places(name, configured, environment, home, workload):
        if folder is None:
            looked.append(f"{place} (not set)")
        elif folder.is_dir():
            _refuse_pointers(name, folder)
            return folder.resolve()
        else:
            looked.append(f"{place} (no folder)")
    raise ModelMissing(
        f"the model {name} is not on this machine; looked at: {'; '.join(looked)}",
        f"put it in ~/kakeya-models/{name} on the runner, or name its folder in the policy",
    )


def _places(
    name: str,
    configured: Mapping[str, Path],
    environment: Mapping[str, str],
    home: Path,
    workload: Path | None,
) -> list[tuple[str, Path | None]]:
    variable = "KAKEYA_MODEL_" + name.upper().replace("-", "_")
    value = environment.get(variable)
    places = [
        (f"models.{name} in the policy", configured.get(name)),
        (variable, Path(value).expanduser() if value else None),
        (f"~/kakeya-models/{name}", home / "kakeya-models" / name),
    ]
    if workload is not None:
        places.append((f"models/{name} of the workload", workload / "models" / name))
    if name in SHIPPED:
        places.append(("the engine's shipped models", _shipped(name)))
    return places


def _shipped(name: str) -> Path | None:
    """The demo model's folder beside the installed engine, found without importing it."""
    spec = importlib.util.find_spec("engine")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "models" / "demo" / SHIPPED[name]


def _refuse_pointers(name: str, folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as handle:
            if handle.read(len(LFS_MARK)) == LFS_MARK:
                raise ModelMissing(
                    f"the model {name} holds a Git LFS pointer instead of weights: {path.name}",
                    "run `git lfs pull` in that folder on the runner",
                )
