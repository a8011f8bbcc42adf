"""The owner's files as they are now: policy and presets, read again whenever they change.

A runner asks between jobs. What became wrong stops it from taking anything, until it is right again or a
restart says so, too: an older policy, or the default, might do what the owner no longer wants.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BridgeError, PolicyError
from bridge.presets import Preset, load_all
from bridge.runner.policy import permissions
from bridge.runner.policy.bounds import narrowed
from bridge.runner.policy.reading import load
from bridge.runner.policy.types import FILE_NAME, Policy
from bridge.signing.listed import read_keys
from bridge.signing.revoked import check_revoked

# A change within the grain of a file system's clock shows in no time stamp: what is so new is read again.
_FRESH_S = 2.0

_Seen = tuple[tuple[str, int, int, int, int, int], ...]


@dataclass(frozen=True)
class Rules:
    """What holds on this machine.

    Attributes:
        policy: What the owner allows.
        installed: The presets as they are installed, by name.
        presets: The same within the bounds that the policy sets.
        written: The policy is in a file; otherwise it is the default.
    """

    policy: Policy
    installed: Mapping[str, Preset]
    presets: Mapping[str, Preset]
    written: bool

    def summary(self) -> str:
        """Which presets are allowed, and which are not, in one line."""
        refused = [preset.name for preset in self.presets.values() if not self._allows(preset)]
        allowed = ", ".join(name for name in self.presets if name not in refused) or "none"
        return f"presets: {allowed}" + (f"; not allowed: {', '.join(refused)}" if refused else "")

    def _allows(self, preset: Preset) -> bool:
        try:
            self.policy.check(preset)
        except PolicyError:
            return False
        return True


def read_rules(folder: Path) -> Rules:
    """Policy and presets of a configuration folder; its lists of keys are looked at, too.

    Raises:
        PolicyError: The policy is wrong, or others may write something that decides.
        PresetError: A preset file of the owner is wrong.
        KeyListError: A list of keys is not understood: nobody's signature could be told.
    """
    for error in permissions.shared(folder, folder / FILE_NAME):
        raise error
    *listed, revoked = (folder / name for name in permissions.KEY_LISTS)
    for path in listed:
        read_keys(path)
    check_revoked(revoked)
    written = (folder / FILE_NAME).exists()
    policy = load(folder / FILE_NAME)
    presets = folder / permissions.PRESETS
    installed = load_all(presets if presets.is_dir() else None)
    return Rules(policy, installed, narrowed(policy, installed), written)


class Rulebook:
    """The rules of one configuration folder.

    Args:
        folder: Where the owner keeps ``policy.toml``, ``presets/`` and the lists of keys.
        now: Seconds since 1970, as files are stamped.

    Raises:
        PolicyError, PresetError, KeyListError: As `read_rules`.
    """

    def __init__(self, folder: Path, *, now: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._now = now
        self._seen: _Seen | None = self._look()
        self.rules = read_rules(folder)
        self.fault: BridgeError | None = None

    def refresh(self) -> bool:
        """Read again what changed; whether rules or fault are other ones than before.

        While `fault` is set, `rules` are those of before and must not be used to take anything.
        """
        seen = self._look()
        if seen is not None and seen == self._seen:
            return False
        self._seen = seen
        before, faulty = self.rules, self.fault
        try:
            self.rules, self.fault = self._following(read_rules(self.folder)), None
        except BridgeError as error:
            self.fault = error
            return faulty is None or faulty.message != error.message
        return faulty is not None or self.rules != before

    def _following(self, rules: Rules) -> Rules:
        """The rules, unless they are the default only because the file has gone."""
        if self.rules.written and not rules.written:
            raise PolicyError(
                f"the policy {rules.policy.source} is gone",
                "write it again, or start the runner again to serve with the default policy",
            )
        return rules

    def _look(self) -> _Seen | None:
        """What tells files from their later selves; None: they are too new to tell."""
        presets = self.folder / permissions.PRESETS
        names = [FILE_NAME, *permissions.KEY_LISTS]
        paths = [
            self.folder,
            presets,
            *sorted(presets.glob("*.toml")),
            *(self.folder / name for name in names),
        ]
        seen = []
        for path in paths:
            try:
                status = path.stat()
            except OSError:
                continue
            if self._now() - status.st_ctime < _FRESH_S:
                return None
            seen.append(
                (str(path), status.st_ino, status.st_ctime_ns, status.st_size, status.st_mode, status.st_uid)
            )
        return tuple(seen)
