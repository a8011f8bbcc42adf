"""What one runner knows before any request comes: who it is, which remote it serves, what is allowed here."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge import signing
from bridge.bus.claims import DEFAULT_LEASE_S, Identity
from bridge.errors import MachineError, SignatureError, described
from bridge.presets import Preset
from bridge.protocol.refs import audience_of, is_local
from bridge.runner import facts, keys
from bridge.runner.kernels import Kernels
from bridge.runner.policy import Policy, Rulebook

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
BEAT_LOCAL_S = 2.0
BEAT_REMOTE_S = 15.0
LOOK_LOCAL_S = 0.5
LOOK_REMOTE_S = 1.5


@dataclass(frozen=True)
class Station:
    """A runner's fixed facts.

    Attributes:
        identity: Its name, the random id it made on first use, and one of this process.
        remote: Address of the bus.
        audience: The one spelling of it, which manifests must name.
        folder: Its own state: key, mirror, spool, jobs.
        lock: The machine's lock, in the folder of all runners' state: one job at a time of all of them.
        rulebook: What the owner allows, read again between jobs.
        allowed_signers: Keys of the requesters this machine knows.
        key: Private key that signs results and claims; None: OpenSSH is missing, they go out unsigned.
        machine: Facts of the machine.
        tools: Versions of what a job stands on.
        kernels: Compiled kernels that jobs get copies of.
        beat_s: Seconds between heartbeats.
        look_s: Seconds between two looks whether the running job is to stop.
        lease_s: Seconds of silence after which others may take over.
        transports: Which requests its daemon takes, by how they are to be carried.
        home: The user's home.
        environment: The runner's environment; jobs get only an allowlist of it.
    """

    identity: Identity
    remote: str
    audience: str
    folder: Path
    lock: Path
    rulebook: Rulebook
    allowed_signers: Path
    key: Path | None
    machine: Mapping[str, facts.Fact]
    tools: Mapping[str, str]
    kernels: Kernels
    beat_s: float
    look_s: float
    lease_s: float = DEFAULT_LEASE_S
    transports: frozenset[str] = frozenset({"embedded"})
    home: Path = field(default_factory=Path.home)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def known_runners(self) -> Path:
        """Keys of the other machines' runners whose claims and cards count here."""
        return self.allowed_signers.with_name("known_runners")

    @property
    def policy(self) -> Policy:
        """What the owner allows."""
        return self.rulebook.rules.policy

    @property
    def installed(self) -> Mapping[str, Preset]:
        """The presets as they are installed, by name."""
        return self.rulebook.rules.installed

    @property
    def presets(self) -> Mapping[str, Preset]:
        """The same within the bounds that the policy sets."""
        return self.rulebook.rules.presets

    @property
    def revoked_keys(self) -> Path:
        """Keys that count no longer, whatever `allowed_signers` says."""
        return self.allowed_signers.with_name("revoked_keys")

    @property
    def jobs(self) -> Path:
        """Where each job has its private folders."""
        return self.folder / "jobs"

    @property
    def temporary(self) -> Path:
        """For what the runner itself writes for a moment; emptied at its start, after a kill."""
        return self.folder / "tmp"

    @property
    def private(self) -> tuple[Path, Path]:
        """Everything of this machine's runners that no job may reach, except its own folders."""
        return (self.lock.parent, self.allowed_signers.parent)

    @property
    def tag(self) -> str:
        """What tells this remote from others in names of files."""
        return hashlib.sha256(self.audience.encode()).hexdigest()[:12]

    @property
    def public_key(self) -> str | None:
        """The line a client trusts, ``ssh-ed25519 …``; None: results are unsigned."""
        return None if self.key is None else signing.public_key(self.key).read_text().strip()

    def sign(self, data: bytes, say: Callable[[str], None]) -> bytes | None:
        """A detached signature of a result's bytes; None without a key, or where that fails, which is said.

        Args:
            data: The exact bytes.
            say: Takes one line for the owner.
        """
        try:
            return None if self.key is None else signing.sign(self.key, signing.RESULT_NAMESPACE, data)
        except (SignatureError, MachineError) as error:
            say(f"the result is unsigned, and clients that trust this runner refuse it: {described(error)}")
            return None

    def sign_claim(self, data: bytes) -> bytes | None:
        """A detached signature of a claim or a heartbeat; None without a key, or where that fails.

        An unsigned heartbeat is better than none: the next one may be signed again.
        """
        try:
            return None if self.key is None else signing.sign(self.key, signing.CLAIM_NAMESPACE, data)
        except (SignatureError, MachineError):
            return None


def open_station(
    name: str,
    remote: str,
    *,
    state_dir: Path,
    config_dir: Path,
    beat_s: float | None = None,
    lease_s: float = DEFAULT_LEASE_S,
) -> Station:
    """Set up or find again the runner `name` on this machine: its folder, id and key, the owner's policy.

    Args:
        name: Of the runner, as results show it.
        remote: Address of the bus.
        state_dir: Where this machine keeps runners' state.
        config_dir: Where the owner keeps ``policy.toml``, ``presets/`` and ``allowed_signers``.
        beat_s: Seconds between heartbeats; None: 2 on a local remote, else 15.
        lease_s: Seconds of silence after which others may take over.

    Raises:
        MachineError: The name is not usable, or the folder cannot be made.
        PolicyError: The policy file is wrong, or others may write what it stands on.
        PresetError: A preset file of the owner is wrong.
    """
    checked_name(name)
    folder = state_dir / "runner" / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        identity = Identity(name, _id(folder / "id"), secrets.token_hex(8))
    except OSError as error:
        raise MachineError(f"cannot keep state in {folder}: {error.strerror}") from None
    rulebook = Rulebook(config_dir)
    key = keys.ensure(state_dir, name) if signing.available() else None
    tools = facts.tools()
    return Station(
        identity=identity,
        remote=remote,
        audience=audience_of(remote),
        folder=folder,
        lock=state_dir / "machine.lock",
        rulebook=rulebook,
        allowed_signers=config_dir / "allowed_signers",
        key=key,
        machine=facts.machine(),
        tools=tools,
        kernels=Kernels(folder / "kernels", tools=tools, ours=os.environ),
        beat_s=beat_s or (BEAT_LOCAL_S if is_local(remote) else BEAT_REMOTE_S),
        look_s=LOOK_LOCAL_S if is_local(remote) else LOOK_REMOTE_S,
        lease_s=lease_s,
    )


def survey_station(remote: str, *, state_dir: Path, config_dir: Path, audience: str | None = None) -> Station:
    """A station to ask what its machine would do: nothing is made on the disk, and it can serve nothing.

    Args:
        remote: Address of the bus.
        state_dir: Where this machine keeps runners' state.
        config_dir: Where the owner keeps ``policy.toml``, ``presets/`` and ``allowed_signers``.
        audience: What requests must name; None: the remote.

    Raises:
        PolicyError, PresetError: As `open_station`.
    """
    folder = state_dir / "runner" / "survey"
    tools = facts.tools()
    return Station(
        identity=Identity("survey", "0" * 16, "0" * 16),
        remote=remote,
        audience=audience_of(remote) if audience is None else audience,
        folder=folder,
        lock=state_dir / "machine.lock",
        rulebook=Rulebook(config_dir),
        allowed_signers=config_dir / "allowed_signers",
        key=folder / "id_ed25519" if signing.available() else None,
        machine=facts.machine(),
        tools=tools,
        kernels=Kernels(folder / "kernels", tools=tools, ours=os.environ),
        beat_s=BEAT_REMOTE_S,
        look_s=LOOK_REMOTE_S,
    )


def checked_name(name: str) -> str:
    """A runner's name, as it was given.

    Raises:
        MachineError: It is not usable.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise MachineError(
            f"{name!r} is not a runner name", "use letters, digits and . _ - , at most 64, no blank"
        )
    return name


def host_name() -> str:
    """The host's name as a runner's name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", platform.node().split(".")[0]).strip("-._")
    return name[:64] or "runner"


def _id(path: Path) -> str:
    """The runner's id: 16 hex digits, made once. A damaged file is replaced."""
    if path.exists() and re.fullmatch(r"[0-9a-f]{16}", text := path.read_text().strip()):
        return text
    text = secrets.token_hex(8)
    temporary = path.with_suffix(".new")
    temporary.write_text(text + "\n")
    temporary.replace(path)
    return text
