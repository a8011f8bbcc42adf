"""What this machine allows, decided by its owner in one TOML file.

Without a file the policy is the safe default: every installed preset, no code of a requester, no network, two
hours at most. `reading` makes a `Policy` of the file, `bounds` holds the presets to it, `lines` finds the
line that decided something. The keys and what they mean are in ``docs/operations.md``.
"""

from __future__ import annotations

from bridge.runner.policy.bounds import narrowed
from bridge.runner.policy.reading import MAX_BYTES, load, read
from bridge.runner.policy.rulebook import Rulebook, Rules, read_rules
from bridge.runner.policy.types import (
    DEFAULT_QUEUED,
    DEFAULT_TIMEOUT_S,
    FILE_NAME,
    UNSIGNED,
    ActionsRule,
    Policy,
    PolicyRefusal,
    PresetRule,
)

__all__ = [
    "DEFAULT_QUEUED",
    "DEFAULT_TIMEOUT_S",
    "FILE_NAME",
    "MAX_BYTES",
    "UNSIGNED",
    "ActionsRule",
    "Policy",
    "PolicyRefusal",
    "PresetRule",
    "Rulebook",
    "Rules",
    "load",
    "narrowed",
    "read",
    "read_rules",
]
