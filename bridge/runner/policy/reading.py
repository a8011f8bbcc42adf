"""Reads the policy file, strictly: an unknown key or a value of the wrong type is an error, no default."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from bridge.bus.untrusted import unsafe_character
from bridge.errors import PolicyError
from bridge.runner.policy.permissions import check_owner
from bridge.runner.policy.types import DEFAULT_QUEUED, DEFAULT_TIMEOUT_S, Policy

MAX_BYTES = 64 * 1024
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


def load(path: Path) -> Policy:
    """The policy in a file, or the safe default where there is none.

    Raises:
        PolicyError: Others may write the file or its folder, or it is not TOML, has an unknown key or a
            value of the wrong type.
    """
    try:
        with path.open("rb") as handle:
            check_owner(path, os.fstat(handle.fileno()))
            check_owner(path.parent, path.parent.stat())
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
