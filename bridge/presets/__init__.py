"""Presets: the jobs a machine may be asked for. `preset` reads them, `values` holds their parameters, `argv`
what runs. The format is ``docs/schema/preset.json``. A Mac's owner may add presets of the same format.
"""

from bridge.presets.argv import show, switches
from bridge.presets.preset import (
    ModelNeed,
    Preset,
    Promise,
    Requires,
    argv,
    evidence_name,
    find,
    get,
    left_out,
    load_all,
    parse_cli,
    read,
    validate,
)
from bridge.presets.values import Parameter, check_value

__all__ = [
    "ModelNeed",
    "Parameter",
    "Preset",
    "Promise",
    "Requires",
    "argv",
    "check_value",
    "evidence_name",
    "find",
    "get",
    "left_out",
    "load_all",
    "parse_cli",
    "read",
    "show",
    "switches",
    "validate",
]
