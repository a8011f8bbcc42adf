"""What one runner knows before any request comes: its name, id and key, its remote, and what is allowed."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bridge import signing
from bridge.bus.claims import DEFAULT_LEASE_S, RunnerIdentity
from bridge.errors import MachineError, SignatureError, describe
from bridge.evidence.redact import Secrets, secrets_of
from bridge.presets import Preset
from bridge.proc import write_atomic
from bridge.protocol.refs import audience_of, is_local
from bridge.runner.machine import Fact, machine_facts, secret_files, secrets_of_remote, tool_versions
from bridge.runner.models import Places
from bridge.runner.policy import Policy
from bridge.runner.rulebook import Rulebook

log = logging.getLogger(__name__)

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PUBLIC_HOSTS = ("github.com", "ghe.com", "gitlab.com", "bitbucket.org", "codeberg.org", "dev.azure.com")


@dataclass(frozen=True)
class Timing:
    """How often a runner talks to its remote, in seconds.

    Attributes:
        heartbeat_s: Between renewals of a lease: each is a push.
        lease_s: Silence after which others may take over.
        cancel_s: Between looks whether the running job shall stop.
        poll_s: Longest pause between looks at an idle queue.
        fast_s: Pause between looks just after activity; None: as on an idle queue.
        registration_s: Between renewals of the registration: each is a push.
    """

    heartbeat_s: float
    lease_s: float
    cancel_s: float
    poll_s: float
    fast_s: float | None
    registration_s: float


# A folder of this machine; a server of one's own; a public host, which wants at most 6 pushes a minute and
# 15 reads a second of a repository (docs.github.com, "Repository limits").
LOCAL = Timing(2.0, DEFAULT_LEASE_S, 2.0, 5.0, 0.02, 60.0)
OWN_SERVER = Timing(15.0, DEFAULT_LEASE_S, 2.0, 5.0, 0.1, 60.0)
PUBLIC_HOST = Timing(60.0, 300.0, 5.0, 5.0, None, 600.0)


@dataclass(frozen=True)
class RunnerConfig:
    """A runner's fixed facts.

    Attributes:
        identity: Its name, the random id it made on first use, and one of this process.
        remote: Address of the bus.
        audience: The one spelling of it, which manifests must name.
        folder: Its own state.
        lock: The machine's lock, in the folder of all runners' state: one job at a time of all of them.
        rulebook: What the owner allows, read again between jobs.
        config_dir: Where the owner keeps the policy, presets and lists of keys.
        key: Private key that signs results and claims; None: OpenSSH is missing, they go out unsigned.
        machine: Facts of the machine.
        tools: Versions of the libraries that a job uses.
        timing: How often it talks to the remote.
        home: The user's home.
        environment: The runner's environment; jobs get only an allowlist of it.
    """

    identity: RunnerIdentity
    remote: str
    audience: str
    folder: Path
    lock: Path
    rulebook: Rulebook
    config_dir: Path
    key: Path | None
    machine: Mapping[str, Fact]
    tools: Mapping[str, str]
    timing: Timing
    home: Path = field(default_factory=Path.home)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def allowed_signers(self) -> Path:
        """Keys of the requesters this machine knows."""
        return self.config_dir / "allowed_signers"

    @property
    def known_runners(self) -> Path:
        """Keys of the other machines' runners whose claims and registrations count here."""
        return self.config_dir / "known_runners"

    @property
    def revoked_keys(self) -> Path:
        """Keys that count no longer, whatever `allowed_signers` says."""
        return self.config_dir / "revoked_keys"

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
    def jobs(self) -> Path:
        """Where each job has its private folders."""
        return self.folder / "jobs"

    @property
    def kernel_cache(self) -> Path:
        """Kernels that mlx compiled for earlier jobs of the installed engine."""
        return self.folder / "kernel-cache"

    @property
    def temporary(self) -> Path:
        """For what the runner itself writes for a moment; emptied at its start, after a kill."""
        return self.folder / "tmp"

    @property
    def private(self) -> tuple[Path, ...]:
        """State, keys and configuration of this machine's runners, which no job may read."""
        return (self.lock.parent, self.config_dir)

    @property
    def tag(self) -> str:
        """What tells this remote from others in names of files."""
        return hashlib.sha256(self.audience.encode()).hexdigest()[:12]

    @property
    def public_key(self) -> str | None:
        """The line a client trusts, ``ssh-ed25519 …``; None: results are unsigned."""
        return None if self.key is None else signing.public_key(self.key).read_text().strip()

    def secrets(self) -> Secrets:
        """What may not be published from this machine, as it is now: a changed password counts at once.

        The sandbox keeps jobs from most of it. Redaction is what remains where there is none, or where a
        preset names a variable. Values of the variables that the policy passes to jobs are cut from logs and
        may appear in evidence: they may be folders that a report rightly names.
        """
        values = secret_files(self.home, self.config_dir, self.key)
        values |= secrets_of_remote(self.remote) | secrets_of(self.environment)
        passed = self.policy.environment
        mild = {name: self.environment[name] for name in passed if name in self.environment}
        return Secrets({**mild, **values}, mild=mild.keys() - values.keys())

    def facts(self) -> dict[str, Fact]:
        """Facts of the machine, with the labels that the owner gave it."""
        labels = self.policy.labels
        return {**self.machine, **({"labels": ",".join(labels)} if labels else {})}

    def model_places(self, *, workload: Path | None) -> Places:
        """Where this machine may hold models; `workload`: the workspace, for presets that run its code."""
        return Places(
            configured=self.policy.models,
            environment=self.environment,
            home=self.home,
            metal=bool(self.machine["metal"]),
            workload=workload,
        )

    def own_fingerprints(self) -> set[str]:
        """Fingerprints of the keys of this machine's runners: they have one owner and one folder."""
        keys = self.folder.parent.glob("*/id_ed25519.pub")
        return {signing.fingerprint(path.read_text(encoding="utf-8")) for path in keys}

    def sign(self, data: bytes, namespace: str = signing.RESULT_NAMESPACE) -> bytes | None:
        """A detached signature, by default of a result; None without a key, or on failure."""
        try:
            return None if self.key is None else signing.sign(self.key, namespace, data)
        except (SignatureError, MachineError) as error:
            # An unsigned heartbeat is better than none, and the next one may be signed again.
            level = logging.ERROR if namespace == signing.RESULT_NAMESPACE else logging.DEBUG
            said = "the result is unsigned, clients that trust this runner refuse it: %s"
            log.log(level, said if level == logging.ERROR else "cannot sign: %s", describe(error))
            return None

    def sign_claim(self, data: bytes) -> bytes | None:
        """A detached signature of a claim or a heartbeat; None as with `sign`."""
        return self.sign(data, signing.CLAIM_NAMESPACE)


def open_config(
    name: str,
    remote: str,
    *,
    state_dir: Path,
    config_dir: Path,
    beat_s: float | None = None,
    lease_s: float | None = None,
) -> RunnerConfig:
    """Set up or find again the runner `name` on this machine: its folder, id and key, the owner's policy.

    Args:
        name: Of the runner, as results show it.
        remote: Address of the bus.
        state_dir: Where this machine keeps runners' state.
        config_dir: Where the owner keeps the policy, presets and lists of keys.
        beat_s: Seconds between heartbeats; None: by the kind of remote.
        lease_s: Seconds of silence after which others may take over; None: likewise.

    Raises:
        MachineError: The name is not usable, or the folder cannot be made.
        PolicyError: The policy file is wrong, or others may write a file that decides.
        PresetError: A preset file of the owner is wrong.
    """
    checked_name(name)
    folder = state_dir / "runner" / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        identity = RunnerIdentity(name, _id(folder / "id"), secrets.token_hex(8))
    except OSError as error:
        raise MachineError(f"cannot keep state in {folder}: {error.strerror}") from None
    config = _config(identity, remote, state_dir, config_dir)
    if config.key is not None:
        ensure_key(state_dir, name)
    timing = config.timing
    beat_s, lease_s = beat_s or timing.heartbeat_s, lease_s or timing.lease_s
    return replace(config, timing=replace(timing, heartbeat_s=beat_s, lease_s=lease_s))


def survey_config(
    remote: str, *, state_dir: Path, config_dir: Path, audience: str | None = None
) -> RunnerConfig:
    """A configuration to ask what its machine would do: nothing is made on the disk, and it cannot serve.

    `audience` is what requests must name; None: the remote.

    Raises:
        PolicyError, PresetError: As `open_config`.
    """
    config = _config(RunnerIdentity("survey", "0" * 16, "0" * 16), remote, state_dir, config_dir)
    return config if audience is None else replace(config, audience=audience)


def _config(identity: RunnerIdentity, remote: str, state_dir: Path, config_dir: Path) -> RunnerConfig:
    return RunnerConfig(
        identity=identity,
        remote=remote,
        audience=audience_of(remote),
        folder=state_dir / "runner" / identity.name,
        lock=state_dir / "machine.lock",
        rulebook=Rulebook(config_dir),
        config_dir=config_dir,
        key=key_path(state_dir, identity.name) if signing.available() else None,
        machine=machine_facts(),
        tools=tool_versions(),
        timing=timing_of(remote),
    )


def timing_of(remote: str) -> Timing:
    """How often a runner talks to a remote of this kind."""
    if is_local(remote):
        return LOCAL
    host = audience_of(remote).partition("/")[0].partition(":")[0]
    is_public = any(host == public or host.endswith(f".{public}") for public in PUBLIC_HOSTS)
    return PUBLIC_HOST if is_public else OWN_SERVER


def checked_name(name: str) -> str:
    """A runner's name as it was given, unless it is unusable (`MachineError`)."""
    if not NAME_PATTERN.fullmatch(name):
        raise MachineError(
            f"{name!r} is not a runner name", "use letters, digits and . _ - , at most 64, no blank"
        )
    return name


def host_name() -> str:
    """The host's name as a runner's name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", platform.node().split(".")[0]).strip("-._")
    return name[:64] or "runner"


def key_path(state_dir: Path, name: str) -> Path:
    """Where the private key of a runner lies."""
    return state_dir / "runner" / name / "id_ed25519"


def ensure_key(state_dir: Path, name: str) -> Path:
    """The private key of a runner, made on first use."""
    return signing.ensure_key(key_path(state_dir, name), f"kakeya-mac runner {name}")


def renew_key(state_dir: Path, name: str) -> Path:
    """Put a new key in the place of a runner's old one, which is gone then."""
    path = key_path(state_dir, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".key-") as folder:
            fresh = signing.ensure_key(Path(folder) / path.name, f"kakeya-mac runner {name}")
            os.replace(signing.public_key(fresh), signing.public_key(path))
            os.replace(fresh, path)
    except OSError as error:
        raise MachineError(f"cannot write the key {path}: {error.strerror or error}") from None
    return path


def _id(path: Path) -> str:
    """The runner's id: 16 hex digits, made once. A damaged file is replaced."""
    if path.exists() and re.fullmatch(r"[0-9a-f]{16}", text := path.read_text().strip()):
        return text
    text = secrets.token_hex(8)
    write_atomic(path, f"{text}\n".encode())
    return text
