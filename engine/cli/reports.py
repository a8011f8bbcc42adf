"""Where an evidence report goes: the file that was asked for, or a new one among the last reports.

Reports without a given file are in ``reports`` of the state folder (``KAKEYA_STATE``, else the platform's
usual place); the newest `KEPT` stay.
"""

import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

KEPT = 200


def store(report: Any, given: Path | None) -> Path:
    """Write an `evidence_format.model.Report` whole or not at all, and return its path."""
    from engine.evaluation.report import write_document

    if given is not None:
        write_document(given, report.document)
        return given
    folder = state_folder() / "reports"
    stamp = f"{datetime.now(UTC):%Y%m%dt%H%M%S%fz}"
    path = folder / f"{stamp}-{report.kind}-{os.getpid()}.json"
    write_document(path, report.document)
    for old in sorted(folder.glob("*.json"))[:-KEPT]:
        with suppress(OSError):  # another process may have been quicker
            old.unlink()
    return path


def state_folder() -> Path:
    if given := os.environ.get("KAKEYA_STATE"):
        return Path(given).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "kakeya-mac"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kakeya-mac"
