"""What one runner knows before any request comes: its name, id and key, its remote, and the owner's rules."""

from __future__ import annotations

import contextlib
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
from typing import TYPE_CHECKING

from bridge import signing
from bridge.bus.claims import DEFAULT_LEASE_S, RunnerIdentity
from bridge.errors import BridgeError, MachineError, PolicyError, SignatureError, describe
from bridge.evidence.redact import Secrets, secrets_of
from bridge.presets import Preset, load_all
from bridge.proc import write_atomic
from bridge.protocol.refs import audience_of, is_local
from bridge.runner.machine import Fact, machine_facts, secret_files, secrets_of_remote, tool_versions
from bridge.runner.models import Places
from bridge.runner.policy import FILE_NAME, Policy, load
from bridge.settings import check_owner
from bridge.signing import dsse
from bridge.signing.keyfiles import read_keys, read_revoked, stamps

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

log = logging.getLogger(__name__)

ATTESTATION_KEY = "attestation.pem"  # in the runner's own folder, next to its SSH key
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PUBLIC_HOSTS = ("github.com", "ghe.com", "gitlab.com", "bitbucket.org", "codeberg.org", "dev.azure.com")
# In the owner's folder: whom this machine believes, and presets next to the installed ones.
_KEY_LISTS = ("allowed_signers", "known_runners", "revoked_keys")
_PRESETS = "presets"


@dataclass(frozen=True)
class Timing:
    """How often a runner talks to its remote, in seconds: by the kind of remote, see `timing_of`."""

    heartbeat_s: float  # between renewals of a lease: each is a push
    lease_s: float  # silence after which others may take over
    cancel_s: float  # between looks whether the running job shall stop
    poll_s: float  # longest pause between looks at an idle queue
    fast_s: float | None  # pause between looks just after activity; None: as on an idle queue
    registration_s: float  # between renewals of the registration: each is a push


# A folder of this machine; a server of one's own; a public host, which wants at most 6 pushes a minute and
# 15 reads a second of a repository (docs.github.com, "Repository limits").
LOCAL = Timing(2.0, DEFAULT_LEASE_S, 2.0, 5.0, 0.02, 60.0)
OWN_SERVER = Timing(15.0, DEFAULT_LEASE_S, 2.0, 5.0, 0.1, 60.0)
PUBLIC_HOST = Timing(60.0, 300.0, 5.0, 5.0, None, 600.0)


class Rulebook:
    """The rules of one configuration folder, read again when its files change.

    A file that became wrong is a `fault` until it is right again. Take no request meanwhile: an older policy,
    or the default, might allow what the owner no longer wants. At first it is an error.
    """

    policy: Policy
    installed: Mapping[str, Preset]  # the presets as they are installed, by name
    presets: Mapping[str, Preset]  # the same within the bounds that the policy sets

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fault: BridgeError | None = None
        self.is_written = False  # the policy is in a file; otherwise it is the default
        self._stamps = self._stamp()
        self._read()

    def refresh(self) -> bool:
        """Read the files again if they changed; whether they did."""
        stamps = self._stamp()
        if stamps == self._stamps:
            return False
        self._stamps, self.fault = stamps, None
        try:
            self._read()
        except BridgeError as error:
            self.fault = error
        return True

    def summary(self) -> str:
        """Which presets are allowed, and which are not, in one line."""
        refused = [name for name, preset in self.presets.items() if not self.policy.allows(preset)]
        allowed = ", ".join(name for name in self.presets if name not in refused) or "none"
        return f"presets: {allowed}" + (f"; not allowed: {', '.join(refused)}" if refused else "")

    def _read(self) -> None:
        folder = self.folder
        for path in (folder, folder / _PRESETS, *self._preset_files()):
            if path.exists():
                check_owner(path, PolicyError)
            elif path.is_symlink():
                raise PolicyError(f"policy: {path} is a link to a file that does not exist")
        *listed, _ = (folder / name for name in _KEY_LISTS)
        for path in listed:
            read_keys(path)
        read_revoked(listed[0])
        policy = load(folder / FILE_NAME)
        # Asked after it was read: a file that vanishes meanwhile must not turn into the default policy.
        is_written = (folder / FILE_NAME).exists()
        if self.is_written and not is_written:
            remedy = "write it again, or start the runner again to serve with the default policy"
            raise PolicyError(f"the policy {folder / FILE_NAME} is gone", remedy)
        self.installed = load_all(folder / _PRESETS if (folder / _PRESETS).is_dir() else None)
        self.presets = policy.narrowed(self.installed)
        self.policy, self.is_written = policy, is_written

    def _stamp(self) -> tuple[tuple[object, ...], ...]:
        names = ("", FILE_NAME, _PRESETS, *_KEY_LISTS)
        return stamps(*(self.folder / name for name in names), *self._preset_files())

    def _preset_files(self) -> list[Path]:
        return sorted((self.folder / _PRESETS).glob("*.toml"))


@dataclass(frozen=True)
class RunnerConfig:
    """A runner's fixed facts."""

    identity: RunnerIdentity  # its name, the random id it made on first use, and one of this process
    remote: str  # address of the bus
    audience: str  # the one spelling of it, which manifests must name
    folder: Path  # its own state
    lock: Path  # the machine's, in the folder of all runners' state: one job at a time of all of them
    rulebook: Rulebook  # what the owner allows, read again between jobs
    config_dir: Path  # where the owner keeps the policy, presets and lists of keys
    allowed_signers: Path  # keys of the requesters this machine knows
    revoked_keys: Path  # keys that count no longer, whatever other lists say
    jobs: Path  # where each job has its private folders
    kernel_cache: Path  # kernels that mlx compiled for earlier jobs of the installed engine
    temporary: Path  # for what the runner itself writes for a moment; emptied at its start
    key: Path | None  # private key that signs results and claims; None: there is no OpenSSH, they go unsigned
    machine: Mapping[str, Fact]
    tools: Mapping[str, str]  # versions of the libraries that a job uses
    timing: Timing
    home: Path = field(default_factory=Path.home)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def policy(self) -> Policy:
        """What the owner allows."""
        return self.rulebook.policy

    @property
    def presets(self) -> Mapping[str, Preset]:
        """The installed presets within the bounds that the policy sets, by name."""
        return self.rulebook.presets

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

        Values of the variables that the policy passes to jobs are cut from logs and may appear in evidence:
        they may be folders that a report rightly names.
        """
        keys = {"the runner's attestation key": self.folder / ATTESTATION_KEY}
        keys |= {} if self.key is None else {"the runner's key": self.key}
        values = secret_files(self.home, self.config_dir, keys)
        values |= secrets_of_remote(self.remote) | secrets_of(self.environment)
        passed = self.policy.environment
        mild = {name: self.environment[name] for name in passed if name in self.environment}
        return Secrets({**mild, **values}, mild=mild.keys() - values.keys())

    def facts(self) -> dict[str, Fact]:
        """Facts of the machine, with the labels that the owner gave it."""
        labels = self.policy.labels
        return {**self.machine, **({"labels": ",".join(labels)} if labels else {})}

    def model_places(self, *, workload: Path | None = None) -> Places:
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
        found = set()
        for path in self.folder.parent.glob("*/id_ed25519.pub"):
            with contextlib.suppress(SignatureError):  # another runner's damaged file is not our fault
                found.add(signing.read_key(str(path)).fingerprint)
        return found

    def sign(self, data: bytes, namespace: str = signing.RESULT_NAMESPACE) -> bytes | None:
        """A detached signature, by default of a result; None without a key, or on failure."""
        try:
            return None if self.key is None else signing.sign(self.key, namespace, data)
        except (SignatureError, MachineError) as error:
            # An unsigned heartbeat is better than none, and the next one may be signed again.
            log.error("cannot sign, so clients that trust this runner will refuse it: %s", describe(error))
            return None

    def attestation_key(self) -> CryptoSigner | None:
        """What signs attestations; None: the policy does not ask for them, or the key is not usable."""
        try:
            return self.require_attestation_key() if self.policy.attestations else None
        except MachineError as error:
            # A result without attestations is better than none.
            log.error("results are published without attestations: %s", error.message)
            return None

    def require_attestation_key(self) -> CryptoSigner:
        """The key that signs attestations; a `MachineError` says why there is none."""
        if (key := dsse.load_key(self.folder / ATTESTATION_KEY)) is None:
            name = self.identity.name
            raise MachineError(
                f"the runner {name} has no attestation key, and {FILE_NAME} says attestations = true",
                f"make it: kakeya_mac runner key --attestation --make --name {name}",
            )
        return key

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
    """Set up or find again the runner `name` on this machine; `beat_s` and `lease_s`: see `Timing`."""
    folder = state_dir / "runner" / checked_name(name)
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


def survey_config(remote: str, *, state_dir: Path, config_dir: Path) -> RunnerConfig:
    """A configuration to ask what its machine would do: nothing is made on the disk, and it cannot serve."""
    return _config(RunnerIdentity("survey", "0" * 16, "0" * 16), remote, state_dir, config_dir)


def _config(identity: RunnerIdentity, remote: str, state_dir: Path, config_dir: Path) -> RunnerConfig:
    folder = state_dir / "runner" / identity.name
    return RunnerConfig(
        identity=identity,
        remote=remote,
        audience=audience_of(remote),
        folder=folder,
        lock=state_dir / "machine.lock",
        rulebook=Rulebook(config_dir),
        config_dir=config_dir,
        allowed_signers=config_dir / "allowed_signers",
        revoked_keys=config_dir / "revoked_keys",
        jobs=folder / "jobs",
        kernel_cache=folder / "kernel-cache",
        temporary=folder / "tmp",
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
        remedy = "use letters, digits and . _ - , at most 64, no blank"
        raise MachineError(f"{name!r} is not a runner name", remedy)
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


def attestation_key_path(state_dir: Path, name: str) -> Path:
    """Where the private key lies that signs a runner's attestations."""
    return key_path(state_dir, name).with_name(ATTESTATION_KEY)


def renew_key(state_dir: Path, name: str) -> Path:
    """Put a new key in the place of a runner's old one, which stays until the new one exists."""
    path = key_path(state_dir, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".key-") as folder:
            fresh = signing.ensure_key(Path(folder) / path.name, f"kakeya-mac runner {name}")
            signing.public_key(path).unlink(missing_ok=True)  # one that is missing is made again
            os.replace(fresh, path)
            os.replace(signing.public_key(fresh), signing.public_key(path))
    except OSError as error:
        raise MachineError(f"cannot write the key {path}: {error.strerror or error}") from None
    return path


def _id(path: Path) -> str:
    """The runner's id: 16 hex digits, made once. A damaged file is replaced."""
    if path.exists() and re.fullmatch(r"[0-9a-f]{16}", text := path.read_text(errors="replace").strip()):
        return text
    text = secrets.token_hex(8)
    write_atomic(path, f"{text}\n".encode())
    return text
