"""Reads the policy file, strictly: an unknown key or a value of the wrong type is an error, no default."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge.errors import PolicyError
from bridge.protocol.sanitize import without_credentials
from bridge.runner.limits import Limits
from bridge.runner.policy.hours import HoursError, Span, read_span
from bridge.runner.policy.lines import Key, Lines
from bridge.runner.policy.permissions import check_private, check_unshared
from bridge.runner.policy.types import BRANCHES, ActionsRule, LfsRule, Policy, PresetRule
from bridge.runner.policy.values import Values
from bridge.runner.policy.variables import why_not
from bridge.signing.listed import NAME, NAME_WORDS
from bridge.toml import TomlError, parse
from bridge.toml import read as read_bytes

MAX_BYTES = 64 * 1024
LONGEST_S = 86_400
_MOST_REQUESTS = 100_000
_MIB = 1 << 20
_TIB = 1 << 40

# What each limit is measured in, and the least and the most of it: less than that and nothing starts.
_LIMITS: dict[str, tuple[str, str, int, int]] = {
    "memory": ("memory_bytes", "bytes", 64 * _MIB, 64 * _TIB),
    "disk": ("disk_bytes", "bytes", _MIB, 1024 * _TIB),
    "files": ("files", "files", 16, 100_000_000),
    "processes": ("processes", "processes", 4, 1_000_000),
    "output": ("output_bytes", "bytes", 1024, 64 * _MIB),
    "file_size": ("file_bytes", "bytes", 64 * 1024, 1024 * _TIB),
    "open_files": ("open_files", "descriptors", 64, 1_000_000),
}
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}/(?!\.{1,2}$)[A-Za-z0-9_.-]{1,100}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HOURS = "a list of hours"
_BOUNDS = ("minimum", "maximum", "enum", "pattern", "maxLength", "prefix", "suffix", "default")


def load(path: Path) -> Policy:
    """The policy in a file, or the safe default where there is none.

    Raises:
        PolicyError: Others may read or write the file, or write its folder, or it is not TOML, has an
            unknown key or a value of the wrong type.
    """
    try:
        data = read_bytes(path, MAX_BYTES, lambda status: check_private(path, status))
        check_unshared(path.parent, path.parent.stat())
    except FileNotFoundError:
        return Policy(path, lines=Lines(path))
    except TomlError as error:
        raise PolicyError(f"policy {path}: {error}") from None
    except OSError as error:
        raise PolicyError(f"cannot read the policy {path}: {error.strerror}") from None
    return read(path, data)


def read(path: Path, data: bytes) -> Policy:
    """The policy in a file's bytes.

    Args:
        path: The file, for messages.
        data: What is in it.

    Raises:
        PolicyError: They are no policy; the message names the line.
    """
    try:
        document = parse(data, MAX_BYTES)
    except TomlError as error:
        raise PolicyError(f"policy {path}: {error}") from None
    lines = Lines(path, data.decode("utf-8"))
    values = Values(lines)
    values.known((), document, tuple(_KEYS))
    found: dict[str, Any] = {key: _KEYS[key](values, (key,), value) for key, value in document.items()}
    if "outside_hours" in found:
        if "hours" not in found:
            raise values.fault(("outside_hours",), "says nothing without hours")
        found["refuses_outside_hours"] = found.pop("outside_hours") == "refuse"
    return Policy(source=path, lines=lines, **found)


def _allow_presets(values: Values, key: Key, value: object) -> frozenset[str]:
    return frozenset(values.texts(key, value, "a list of preset names"))


def _requesters(values: Values, key: Key, value: object) -> tuple[str, ...]:
    return values.texts(key, value, "a list of requesters' names or patterns")


def _refs(values: Values, key: Key, value: object) -> tuple[str, ...]:
    patterns = values.texts(key, value, "a list of patterns of branches", _no_branch)
    return tuple(pattern.removeprefix(BRANCHES) for pattern in patterns)


def _no_branch(pattern: str) -> str | None:
    if pattern.startswith("refs/") and not pattern.startswith(BRANCHES):
        return f"that is no branch, {BRANCHES}…"
    return None


def _environment(values: Values, key: Key, value: object) -> tuple[str, ...]:
    return values.texts(key, value, "a list of variables", why_not)


def _hours(values: Values, key: Key, value: object) -> tuple[Span, ...]:
    return tuple(read_span(text) for text in values.texts(key, value, _HOURS, _no_hours))


def _no_hours(text: str) -> str | None:
    try:
        read_span(text)
    except HoursError as error:
        return str(error)
    return None


def _outside(values: Values, key: Key, value: object) -> str:
    text = values.text(key, value, '"wait" or "refuse"')
    if text not in ("wait", "refuse"):
        raise values.fault(key, f'must be "wait" or "refuse", got {text!r}')
    return text


def _seconds(values: Values, key: Key, value: object) -> int:
    return values.number(key, value, "seconds", 1, LONGEST_S)


def _quotas(values: Values, key: Key, value: object) -> Mapping[str, int]:
    quotas = values.table(key, value, "a table of numbers of requests")
    for name in quotas:
        if NAME.fullmatch(name) is None:
            raise values.fault(key, f"{ascii(name)[:120]} is not a requester's name", NAME_WORDS)
    return {
        name: values.number((*key, name), limit, "requests", 0, _MOST_REQUESTS)
        for name, limit in quotas.items()
    }


def _models(values: Values, key: Key, value: object) -> Mapping[str, Path]:
    folders = {}
    for name, folder in values.table(key, value, "a table of folders").items():
        own = (*key, name)
        path = Path(values.text(own, folder, "a folder"))
        try:
            path = path.expanduser()
        except RuntimeError:
            raise values.fault(own, f"names a user who is not known here, {folder!r}") from None
        if not path.is_absolute():
            raise values.fault(own, f"must be an absolute path, got {folder!r}")
        folders[name] = path
    return folders


def _limits(values: Values, key: Key, value: object) -> Limits:
    table = values.table(key, value, "a table of limits")
    values.known(key, table, tuple(_LIMITS))
    found = {}
    for name, limit in table.items():
        field, unit, least, most = _LIMITS[name]
        if unit == "bytes":
            found[field] = values.size((*key, name), limit, least, most)
        else:
            found[field] = values.number((*key, name), limit, unit, least, most)
    return Limits(**found)


def _presets(values: Values, key: Key, value: object) -> Mapping[str, PresetRule]:
    table = values.table(key, value, "a table of presets")
    return {name: _rule(values, (*key, name), rule) for name, rule in table.items()}


def _rule(values: Values, key: Key, value: object) -> PresetRule:
    table = values.table(key, value, "a table of what is said of that preset")
    values.known(key, table, tuple(_RULE_KEYS))
    found: dict[str, Any] = {
        name: _RULE_KEYS[name](values, (*key, name), each) for name, each in table.items()
    }
    return PresetRule(**found)


def _params(values: Values, key: Key, value: object) -> Mapping[str, Mapping[str, object]]:
    table = values.table(key, value, "a table of parameters")
    for name, bounds in table.items():
        values.known((*key, name), values.table((*key, name), bounds, "a table of bounds"), _BOUNDS)
    return table


def _actions(values: Values, key: Key, value: object) -> ActionsRule:
    table = values.table(key, value, "a table of what is said of workflow runs")
    values.known(key, table, tuple(_ACTIONS_KEYS))
    found: dict[str, Any] = {
        name: _ACTIONS_KEYS[name](values, (*key, name), each) for name, each in table.items()
    }
    return ActionsRule(**found)


def _execute(values: Values, key: Key, value: object) -> str:
    text = values.text(key, value, '"here" or "daemon"')
    if text not in ("here", "daemon"):
        raise values.fault(key, f'must be "here" or "daemon", got {text!r}')
    return text


def _lfs(values: Values, key: Key, value: object) -> LfsRule:
    table = values.table(key, value, "a table of what is said of Git LFS")
    values.known(key, table, ("endpoint", "max"))
    found: dict[str, Any] = {}
    if "endpoint" in table:
        found["endpoint"] = _endpoint(values, (*key, "endpoint"), table["endpoint"])
    if "max" in table:
        found["max_bytes"] = values.size((*key, "max"), table["max"], 1, _TIB)
    return LfsRule(**found)


def _endpoint(values: Values, key: Key, value: object) -> str:
    text = values.text(key, value, "the address of a server of Git LFS")
    parts = urlsplit(text)
    if parts.scheme not in ("https", "http", "ssh", "file") or not parts.path:
        raise values.fault(key, "must begin with https://, http://, ssh:// or file:// and name a path")
    if parts.password is not None or (parts.username is not None and parts.scheme != "ssh"):
        raise values.fault(key, "must not hold credentials", "git's credential helper gives them")
    return text


def _repository(values: Values, key: Key, value: object) -> str:
    text = values.text(key, value, "owner/name of a repository")
    if _SLUG.fullmatch(text) is None:
        raise values.fault(key, f"must be written owner/name, got {ascii(text)[:120]}")
    return text


def _paths(values: Values, key: Key, value: object) -> tuple[str, ...]:
    return values.texts(key, value, "a list of paths of workflow files", _no_workflow)


def _no_workflow(path: str) -> str | None:
    is_one = path.startswith(".github/workflows/") and path.endswith((".yaml", ".yml"))
    return None if is_one else "it is no .github/workflows/*.yaml"


def _digests(values: Values, key: Key, value: object) -> tuple[str, ...]:
    return values.texts(key, value, "a list of SHA-256 digests", _no_digest)


def _no_digest(text: str) -> str | None:
    return None if _SHA256.fullmatch(text) else "it is no SHA-256 in 64 lower hex digits"


def _actors(values: Values, key: Key, value: object) -> tuple[str, ...]:
    return values.texts(key, value, "a list of names of accounts or patterns")


def _events(values: Values, key: Key, value: object) -> tuple[str, ...]:
    return values.texts(key, value, "a list of events", _no_event)


def _no_event(text: str) -> str | None:
    return None if text in ("push", "workflow_dispatch") else "mac-bridge.yaml starts on none but these"


def _address(values: Values, key: Key, value: object) -> str:
    text = values.text(key, value, "an address that git fetches from")
    if without_credentials(text) != text or text.startswith("-") or "::" in text:
        raise values.fault(key, "must be a plain address without credentials")
    return text


def _file(values: Values, key: Key, value: object) -> Path:
    path = Path(values.text(key, value, "a file")).expanduser()
    if not path.is_absolute():
        raise values.fault(key, f"must be an absolute path, got {str(path)!r}")
    return path


_Reader = Callable[[Values, Key, Any], object]
_RULE_KEYS: dict[str, _Reader] = {
    "timeout_s": _seconds,
    "network": Values.switch,
    "requesters": _requesters,
    "params": _params,
}
_ACTIONS_KEYS: dict[str, _Reader] = {
    "execute": _execute,
    "repository": _repository,
    "workflows": _paths,
    "workflow_sha256": _digests,
    "actors": _actors,
    "events": _events,
    "fetch": _address,
    "key": _file,
}
_KEYS: dict[str, _Reader] = {
    "allow_presets": _allow_presets,
    "allow_repo_code": Values.switch,
    "allow_requesters": _requesters,
    "allow_refs": _refs,
    "allow_workloads": _refs,
    "require_signature": Values.switch,
    "hours": _hours,
    "outside_hours": _outside,
    "max_timeout_s": _seconds,
    "max_queued_per_requester": lambda v, k, x: v.number(k, x, "requests", 1, _MOST_REQUESTS),
    "max_running_per_requester": lambda v, k, x: v.number(k, x, "requests", 0, _MOST_REQUESTS),
    "environment": _environment,
    "quotas": _quotas,
    "limits": _limits,
    "models": _models,
    "presets": _presets,
    "actions": _actions,
    "lfs": _lfs,
}
