"""Stored references on disk: which cases a folder holds, of which layout, and how all of them compare."""

from collections.abc import Callable
from pathlib import Path

from engine.errors import ModelError
from engine.evaluation.pair_parity import DRAFTER, TARGET, PairCase
from engine.evaluation.parity import GOLDEN, NAME, TOLERANCES, Case, Parity, RoundParity, settled
from engine.evaluation.target_parity import TOLERANCES as TARGET_TOLERANCES
from engine.target.folder import weight_files


def compare_all(
    folder: Path,
    tolerance: float | None = None,
    progress: Callable[[RoundParity], None] | None = None,
    *,
    dtype: str = "float32",
) -> Parity:
    """Compare a case, or every case in a folder of cases. All are read before the first is computed.

    Args:
        folder: one case, or a folder whose subfolders are cases, of either layout.
        tolerance: largest difference that passes, in the outputs' own units; None for the dtype's, with a
            pair among the cases that of `engine.evaluation.target_parity`.
        progress: told of each round as it is done.
        dtype: what ours is computed in.

    Raises:
        ConfigurationError: the tolerance is not a number of at least 0, or the dtype is unknown.
        ModelError: the folder or a file in it cannot be used.
    """
    folders = case_folders(folder)
    pairs = [path for path in folders if _is_pair(path)]
    # Hidden states of a pair come from forwards over blocks, so they get the tolerances of `target_parity`.
    largest = settled(tolerance, dtype, TARGET_TOLERANCES if pairs else TOLERANCES)
    cases = [PairCase.read(path, dtype) if path in pairs else Case.read(path, dtype) for path in folders]
    rounds = []
    for case in cases:
        for item in case.compare():
            rounds.append(item)
            if progress is not None:
                progress(item)
    names = {str(case.arrays[NAME]) for case in cases if NAME in case.arrays}
    return Parity(tuple(rounds), largest, dtype, tuple(sorted(names)))


def case_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a case, else its subfolders that hold anything of a case, sorted.

    Raises:
        ModelError: there is no such folder, or no case in it.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give a case or a folder of cases")
    try:
        if _is_case(folder):
            return [folder]
        found = [path for path in sorted(folder.iterdir()) if _is_case(path)]
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from None
    if not found:
        raise ModelError(
            f"{folder} holds no case: config.json, model.safetensors and {GOLDEN}, "
            f"or {TARGET}, {DRAFTER} and {GOLDEN}"
        )
    return found


def case_files(folder: Path) -> list[Path]:
    """The configurations, weights and stored outputs of a case."""
    models = [folder / TARGET, folder / DRAFTER] if _is_pair(folder) else [folder]
    return [file for model in models for file in (model / "config.json", *weight_files(model))] + [
        folder / GOLDEN
    ]


def _is_case(folder: Path) -> bool:
    return any((folder / part).exists() for part in ("config.json", GOLDEN)) or all(
        (folder / part / "config.json").exists() for part in (TARGET, DRAFTER)
    )


def _is_pair(folder: Path) -> bool:
    """Whether a case is of the layout with a target; a drafter alone has its config.json in the folder."""
    return not (folder / "config.json").exists() and any(
        (folder / part).exists() for part in (TARGET, DRAFTER)
    )
