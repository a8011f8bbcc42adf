"""Is the interpreter still the one that the machine was set up with? Asked before each job."""

from __future__ import annotations

from bridge import interpreter
from bridge.errors import MachineError

REMEDY = "its owner looks at it with `kakeya_mac runner check` and settles it with `kakeya_mac runner setup`"


def objection() -> str | None:
    """Why nothing may run in this environment; None: it is as recorded, or nothing was recorded."""
    try:
        recorded = interpreter.read(interpreter.record_path())
        found = [] if recorded is None else interpreter.differences(recorded, interpreter.observe())
    except MachineError as error:
        return error.message
    if not found:
        return None
    return f"this machine's environment has changed since it was set up: {'; '.join(found)}"
