"""What this machine allows, decided by its owner in one TOML file and read once.

Without a file the policy is the safe default: every installed preset, no code of a requester, no signature
needed, two hours at most. The file:

    allow_presets = ["probe", "throughput"]   # names; left out: every installed preset
    allow_repo_code = false                   # may presets run code of the requested commit?
    require_signature = false                 # only requesters listed in allowed_signers
    max_timeout_s = 7200                      # no job runs longer
    max_queued_per_requester = 1000           # what one requester has waiting beyond this is refused
    max_running_per_requester = 0             # of one requester at the same time, on all Macs; 0: no limit

    [quotas]                                  # another max_queued for one requester; 0: nothing is taken
    "ci@example.org" = 5000                   # as this machine names who signed a request
    unsigned = 20                             # all unsigned requests together

    [models]                                  # where ${model:NAME} lies on this machine
    gemma-4-26b-a4b = "/Users/me/models/gemma"

No key opens the network: no preset can ask for it yet.
"""

from __future__ import annotations

from bridge.runner.policy.reading import MAX_BYTES, load
from bridge.runner.policy.types import DEFAULT_QUEUED, DEFAULT_TIMEOUT_S, FILE_NAME, UNSIGNED, Policy

__all__ = ["DEFAULT_QUEUED", "DEFAULT_TIMEOUT_S", "FILE_NAME", "MAX_BYTES", "UNSIGNED", "Policy", "load"]
