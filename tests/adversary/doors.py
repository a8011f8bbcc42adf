"""Who reads which kind of document: one way in each, and how it says no."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import (
    BridgeError,
    BusError,
    EvidenceError,
    ManifestError,
    PolicyError,
    PresetError,
    ResultError,
)
from bridge.evidence.gate import judge
from bridge.presets import load_all
from bridge.presets import read as read_preset
from bridge.protocol.manifest import parse, parse_cancel
from bridge.protocol.result import parse_result, parse_status
from bridge.protocol.runner_info import parse_info
from bridge.runner.policy import load
from tests.adversary import honest


@dataclass(frozen=True)
class Door:
    """A reader of hostile documents.

    Attributes:
        honest: A document that it takes.
        read: Gives what was read, or raises `refusal`.
        refusal: The one error it may raise.
    """

    honest: bytes
    read: Callable[[bytes], object]
    refusal: type[BridgeError]


def _claim(data: bytes) -> object:
    """As a runner reads it, which knows the request it belongs to."""
    status = parse_status(data)
    if status.nonce != honest.NONCE:
        raise ResultError("of another request")
    return status


def _preset(data: bytes) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guarded.toml"
        path.write_bytes(data)
        return read_preset(path)


def _policy(data: bytes) -> object:
    """As a runner reads it, which compares the presets with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.toml"
        path.write_bytes(data)
        path.chmod(0o600)
        policy = load(path)
    policy.narrowed(load_all())
    return policy


def _report(data: bytes) -> object:
    judgement = judge(data)
    if not judgement.accepted:
        raise EvidenceError("; ".join(f"{found.code}: {found.message}" for found in judgement.violations))
    return judgement.report


DOORS: dict[str, Door] = {
    "manifest": Door(honest.MANIFEST, parse, ManifestError),
    "claim": Door(honest.CLAIM, _claim, ResultError),
    "registration": Door(honest.REGISTRATION, parse_info, BusError),
    "cancel": Door(honest.CANCEL, parse_cancel, ManifestError),
    "preset": Door(honest.PRESET, _preset, PresetError),
    "policy": Door(honest.POLICY, _policy, PolicyError),
    "report": Door(honest.REPORT, _report, EvidenceError),
    "result": Door(b"", parse_result, ResultError),
}
