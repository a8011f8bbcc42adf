"""The rules of a machine: policy, presets and lists of keys, read again whenever their files change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.config_file import check_owner
from bridge.errors import BridgeError, PolicyError
from bridge.presets import Preset, load_all
from bridge.runner.policy import FILE_NAME, Policy, PolicyRefusal, load
from bridge.signing.keyfiles import check_revoked, read_keys, stamps

PRESETS = "presets"
# Lists of keys next to the policy: whom this machine believes.
KEY_LISTS = ("allowed_signers", "known_runners", "revoked_keys")


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
        refused = [name for name, preset in self.presets.items() if not self.allows(preset)]
        allowed = ", ".join(name for name in self.presets if name not in refused) or "none"
        return f"presets: {allowed}" + (f"; not allowed: {', '.join(refused)}" if refused else "")

    def allows(self, preset: Preset) -> bool:
        """Whether the policy allows a preset at all."""
        try:
            self.policy.check(preset)
        except PolicyRefusal:
            return False
        return True


def read_rules(folder: Path) -> Rules:
    """Policy and presets of a configuration folder; its lists of keys are read, too.

    Raises:
        PolicyError, PresetError, KeyListError: A file is wrong, or others may write one that decides.
    """
    for path in (folder, folder / PRESETS, *_preset_files(folder)):
        if path.exists():
            check_owner(path, path.stat(), PolicyError)
        elif path.is_symlink():
            raise PolicyError(f"policy: {path} is a link to a file that does not exist")
    *listed, revoked = (folder / name for name in KEY_LISTS)
    for path in listed:
        read_keys(path)
    check_revoked(revoked)
    policy = load(folder / FILE_NAME)
    installed = load_all(folder / PRESETS if (folder / PRESETS).is_dir() else None)
    return Rules(policy, installed, policy.narrowed(installed), (folder / FILE_NAME).exists())


class Rulebook:
    """The rules of one configuration folder, read again when its files change.

    A file that became wrong is a `fault` until it is right again. Take no request meanwhile: an older policy,
    or the default, might allow what the owner no longer wants.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamps = self._stamp()
        self.rules = read_rules(folder)
        self.fault: BridgeError | None = None

    def refresh(self) -> bool:
        """Read the files again if they changed; whether rules or fault are different from before."""
        stamps = self._stamp()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        before = (self.rules, self.fault and self.fault.message)
        try:
            rules = read_rules(self.folder)
            if self.rules.written and not rules.written:
                raise PolicyError(
                    f"the policy {self.folder / FILE_NAME} is gone",
                    "write it again, or start the runner again to serve with the default policy",
                )
            self.rules, self.fault = rules, None
        except BridgeError as error:
            self.fault = error
        return before != (self.rules, self.fault and self.fault.message)

    def _stamp(self) -> tuple[tuple[object, ...], ...]:
        names = (FILE_NAME, PRESETS, *KEY_LISTS)
        paths = [self.folder, *_preset_files(self.folder), *(self.folder / name for name in names)]
        return stamps(*paths)


def _preset_files(folder: Path) -> list[Path]:
    return sorted((folder / PRESETS).glob("*.toml"))
