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

import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.bus.untrusted import unsafe_character
from bridge.errors import PolicyError
from bridge.presets import Preset
from bridge.runner.limits import Limits

FILE_NAME = "policy.toml"
MAX_BYTES = 64 * 1024
DEFAULT_TIMEOUT_S = 7200
DEFAULT_QUEUED = 1000
# The name in [quotas] for all unsigned requests together.
UNSIGNED = "unsigned"
_KEYS = (
    "allow_presets",
    "allow_repo_code",
    "require_signature",
    "max_timeout_s",
    "max_queued_per_requester",
    "max_running_per_requester",
    "quotas",
    "models",
)
_MOST_REQUESTS = 100_000


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


def load(path: Path) -> Policy:
    """The policy in a file, or the safe default where there is none.

    Raises:
        PolicyError: Others may write the file or its folder, or it is not TOML, has an unknown key or a
            value of the wrong type.
    """
    try:
        with path.open("rb") as handle:
            _check_owner(path, os.fstat(handle.fileno()))
            _check_owner(path.parent, path.parent.stat())
            data = handle.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Policy(path)
    except OSError as error:
        raise PolicyError(f"cannot read the policy {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise PolicyError(f"policy {path}: more than {MAX_BYTES} bytes")
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(f"policy {path}: not TOML ({error})") from None
    return _build(path, document)


def _build(path: Path, document: dict[str, Any]) -> Policy:
    for key in document:
        if key not in _KEYS:
            raise PolicyError(f"policy {path}: unknown key {key!r}", f"known keys: {', '.join(_KEYS)}")
    allowed = document.get("allow_presets")
    if allowed is not None:
        _require(path, "allow_presets", allowed, list, "a list of preset names")
        for name in allowed:
            _require(path, "allow_presets", name, str, "a list of preset names")
    models = document.get("models", {})
    _require(path, "models", models, dict, "a table of folders")
    for name, folder in models.items():
        _require(path, f"models.{name}", folder, str, "a folder")
        if not Path(folder).expanduser().is_absolute():
            raise PolicyError(f"policy {path}: models.{name} must be an absolute path, got {folder!r}")
    timeout = document.get("max_timeout_s", DEFAULT_TIMEOUT_S)
    _require(path, "max_timeout_s", timeout, int, "whole seconds")
    if not 1 <= timeout <= 86_400:
        raise PolicyError(f"policy {path}: max_timeout_s must be 1 to 86400 seconds, got {timeout}")
    queued = document.get("max_queued_per_requester", DEFAULT_QUEUED)
    _require_count(path, "max_queued_per_requester", queued, least=1)
    running = document.get("max_running_per_requester", 0)
    _require_count(path, "max_running_per_requester", running, least=0)
    quotas = document.get("quotas", {})
    _require(path, "quotas", quotas, dict, "a table of numbers of requests")
    for name, limit in quotas.items():
        if not name.strip() or unsafe_character(name) is not None:
            raise PolicyError(f"policy {path}: quotas: {name!r} is not a requester's name")
        _require_count(path, f"quotas.{name}", limit, least=0)
    switches = {key: document.get(key, False) for key in ("allow_repo_code", "require_signature")}
    for key, value in switches.items():
        _require(path, key, value, bool, "true or false")
    return Policy(
        source=path,
        allow_presets=None if allowed is None else frozenset(allowed),
        max_timeout_s=timeout,
        max_queued_per_requester=queued,
        max_running_per_requester=running,
        quotas=quotas,
        models={name: Path(folder).expanduser() for name, folder in models.items()},
        **switches,
    )


def _require(path: Path, key: str, value: object, kind: type, what: str) -> None:
    # Types are compared, not instances: true is no number of seconds.
    if type(value) is not kind:
        raise PolicyError(f"policy {path}: {key} must be {what}, got {value!r}")


def _require_count(path: Path, key: str, value: object, *, least: int) -> None:
    _require(path, key, value, int, "a number of requests")
    if isinstance(value, int) and not least <= value <= _MOST_REQUESTS:
        raise PolicyError(f"policy {path}: {key} must be {least} to {_MOST_REQUESTS} requests, got {value}")


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.getuid(), 0):
        raise PolicyError(f"policy: {path} belongs to user {status.st_uid}, not to the runner's")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PolicyError(f"policy: {path} can be written by others", f"chmod go-w {path}")
