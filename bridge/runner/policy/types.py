"""What the owner of a machine decided: one frozen value, asked by everything that takes a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import PolicyError
from bridge.presets import Preset
from bridge.runner.limits import Limits

FILE_NAME = "policy.toml"
DEFAULT_TIMEOUT_S = 7200
DEFAULT_QUEUED = 1000
# The name in [quotas] for all unsigned requests together.
UNSIGNED = "unsigned"


@dataclass(frozen=True)
class Policy:
    """The owner's decisions.

    Attributes:
        source: The file they come from (or would come from).
        allow_presets: Names that may run; None: all that are installed.
        allow_repo_code: Presets with ``engine = "workload"`` may run.
        require_signature: Only requests signed by a listed requester are taken.
        max_timeout_s: Upper bound of any job's time, in seconds.
        max_queued_per_requester: How many requests one requester may have waiting.
        max_running_per_requester: How many of one may be served at the same time, by any runner; 0: no limit.
        quotas: Another `max_queued_per_requester` for some, by name; see `UNSIGNED`.
        models: Folders of models by name.
        environment: Names of the runner's variables that jobs get beside the usual ones.
        limits: How much one job may take of the machine.
        network: Names of the presets that get the machine's network if they ask for it.
    """

    source: Path
    allow_presets: frozenset[str] | None = None
    allow_repo_code: bool = False
    require_signature: bool = False
    max_timeout_s: int = DEFAULT_TIMEOUT_S
    max_queued_per_requester: int = DEFAULT_QUEUED
    max_running_per_requester: int = 0
    quotas: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[str, Path] = field(default_factory=dict)
    environment: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    network: frozenset[str] = frozenset()

    def opens_network(self, preset: Preset) -> bool:
        """Whether a preset's jobs get the machine's network: it asks for it, and the owner allows it."""
        return preset.network and preset.name in self.network

    def check(self, preset: Preset) -> None:
        """Refuse a preset that the owner did not allow.

        Raises:
            PolicyError: Naming the line that refuses and the one that would allow.
        """
        if self.allow_presets is not None and preset.name not in self.allow_presets:
            raise PolicyError(
                f"this machine's policy does not allow the preset {preset.name}",
                f"its owner can add {preset.name!r} to allow_presets in {FILE_NAME} on that machine",
            )
        if preset.runs_repo_code and not self.allow_repo_code:
            raise PolicyError(
                f"the preset {preset.name} runs code of the requested commit, which this machine's policy"
                " does not allow",
                f"its owner can set allow_repo_code = true in {FILE_NAME} on that machine",
            )

    def timeout_s(self, preset: Preset, requested: int | None) -> int:
        """Seconds a job gets: the least of what preset, policy and request say."""
        return min(preset.timeout_s, self.max_timeout_s, requested or preset.timeout_s)

    def max_queued(self, requester: str | None) -> int:
        """How many requests may wait of who signed them; None: of all unsigned ones together."""
        name = UNSIGNED if requester is None else requester
        return self.quotas.get(name, self.max_queued_per_requester)
