"""What the owner asks of setup: read from flags and the environment, checked once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from bridge import settings
from bridge.errors import BridgeError
from bridge.mac import names

SERVICES = ("actions", "serve", "both", "none")
# Kept from one run to the next.
REMEMBERED = (
    *("url", "remote", "name", "labels", "service", "runner_version", "runner_sha256", "tailnet"),
    *("config", "state"),
)
# Variables that say where the owner's files and a runner's state lie, as `REMEMBERED` names them.
FOLDERS = {"config": "KAKEYA_CONFIG", "state": "KAKEYA_STATE"}
LABELS = ("self-hosted", "macOS", "ARM64", "kakeya-mac")
RUNNER_VERSION = "2.338.0"
# actions-runner-osx-arm64 of that version, as its release notes say.
RUNNER_SHA256 = "df4cebda25c86a886ed204e49fee63f5c2e7cec5f447b5c98440a826bbdf9df2"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# macOS asks a person before a program may read these; a service has nobody to ask.
_CREDENTIALS = re.compile(r"https?://[^/?#\s]*@|://[^/?#@:\s]*:(?![0-9]+(?:[/?#]|$))\S*@", re.IGNORECASE)
_GUARDED = ("Desktop", "Documents", "Downloads", "Library/Mobile Documents", "Pictures", "Movies", "Music")


class SetupUsage(BridgeError):
    """What was asked of setup cannot be meant."""

    exit_code = 2


@dataclass(frozen=True)
class Options:
    """What setup is to make.

    Attributes:
        home: Of the account that will run jobs.
        user: Its name.
        prefix: Folder for everything that setup makes.
        url: Repository or organisation whose workflows run here; None: none.
        remote: Bus of the daemon; None: the repository.
        name: The runner's name.
        labels: What workflows ask for.
        service: Which services launchd keeps: one of `SERVICES`.
        token_file: Holds a registration token; None: none.
        runner_version: Of GitHub's runner.
        runner_sha256: Of its archive.
        sudo: Whether what needs an administrator may be done.
        tailnet: Whether people reach this Mac by tailnet SSH.
        source: The checkout that is installed.
        environ: The variables of this process.
    """

    home: Path
    user: str
    prefix: Path
    url: str | None
    remote: str | None
    name: str
    labels: tuple[str, ...]
    service: str
    source: Path
    token_file: Path | None = None
    runner_version: str = RUNNER_VERSION
    runner_sha256: str = RUNNER_SHA256
    sudo: bool = False
    tailnet: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            SetupUsage: It names the flag, its value, and what to write instead.
        """
        self._check_prefix()
        self._check_names()
        for flag, address in (("--url", self.url), ("--remote", self.remote)):
            if address is not None and _CREDENTIALS.search(address):
                raise SetupUsage(
                    f"{flag} holds credentials, which would lie in files and stand in command lines",
                    "give it without; git takes them from a credential helper, or use an SSH key",
                )
        if self.url is not None and self.slug is None:
            raise SetupUsage(
                f"--url {self.url!r} is no repository or organisation",
                "write https://github.com/OWNER/NAME or https://github.com/ORGANISATION",
            )
        if self.is_actions and self.url is None:
            raise SetupUsage(f"--service {self.service} needs --url", "https://github.com/OWNER/NAME")
        if self.is_serving and self.bus is None:
            raise SetupUsage(
                f"--service {self.service} needs --remote", "the git remote that carries the bus"
            )
        if not _VERSION.fullmatch(self.runner_version) or not _SHA256.fullmatch(self.runner_sha256):
            raise SetupUsage("--runner-version and --runner-sha256 are a version and its archive's SHA-256")
        if self.runner_version != RUNNER_VERSION and self.runner_sha256 == RUNNER_SHA256:
            raise SetupUsage(f"--runner-version {self.runner_version} needs its --runner-sha256")

    def _check_prefix(self) -> None:
        prefix, instead = self.prefix, f"choose another place, such as {self.home / names.PREFIX}"
        if not prefix.is_absolute() or any(c in str(prefix) for c in "\n\0"):
            raise SetupUsage(f"--prefix {str(prefix)!r} is no absolute path")
        for folder in _GUARDED:
            if _lies_in(prefix, self.home.resolve() / folder):
                raise SetupUsage(
                    f"--prefix {prefix} lies in {folder}, which macOS keeps from services", instead
                )
        if _lies_in(prefix, Path("/Volumes")):
            raise SetupUsage(
                f"--prefix {prefix} lies on a volume that need not be there when a service starts", instead
            )
        if _lies_in(prefix, self.source):
            raise SetupUsage(f"--prefix {prefix} is the checkout that is installed, or lies in it", instead)
        if self.is_actions and not re.fullmatch(names.UNQUOTED, str(prefix)):
            raise SetupUsage(
                f"--prefix {str(prefix)!r}: of such a path GitHub's runner would never start the hook",
                "letters, digits and . _ - /, because it goes unquoted through a shell",
            )

    def _check_names(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SetupUsage(
                f"--name {self.name!r} is no runner name", "letters, digits and . _ -, at most 64"
            )
        if self.service not in SERVICES:
            raise SetupUsage(f"--service {self.service!r} is none of {', '.join(SERVICES)}")
        if not self.labels:
            raise SetupUsage("--labels names no label", f"such as {','.join(LABELS)}")
        for label in self.labels:
            if not _NAME.fullmatch(label):
                raise SetupUsage(f"--labels: {label!r} is no label", "letters, digits and . _ -")

    @property
    def is_actions(self) -> bool:
        """Whether GitHub's runner is to be kept running."""
        return self.service in ("actions", "both")

    @property
    def is_serving(self) -> bool:
        """Whether our daemon is."""
        return self.service in ("serve", "both")

    @property
    def slug(self) -> str | None:
        """``owner/name`` or the organisation of `url`; None: it is neither."""
        parts = urlsplit(self.url or "")
        words = parts.path.strip("/").removesuffix(".git").split("/")
        is_plain = parts.scheme == "https" and bool(parts.hostname) and "@" not in parts.netloc
        if not is_plain or len(words) > 2 or not all(_NAME.fullmatch(word) for word in words):
            return None
        return "/".join(words)

    @property
    def bus(self) -> str | None:
        """Remote of the daemon."""
        return self.remote or self.page

    @property
    def page(self) -> str | None:
        """The repository's page; None: `url` is an organisation's, or there is none."""
        return self.url if self.slug is not None and "/" in self.slug else None

    @property
    def config(self) -> str | None:
        """Folder of the owner's files, where it is not the usual one."""
        return self.environ.get(FOLDERS["config"]) or None

    @property
    def state(self) -> str | None:
        """Folder of runners' state, likewise."""
        return self.environ.get(FOLDERS["state"]) or None

    @property
    def folders(self) -> dict[str, str]:
        """Variables that say so, for the programs that are started."""
        given = {FOLDERS["config"]: self.config, FOLDERS["state"]: self.state}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def environment(self) -> Path:
        """The pinned environment: a link to it."""
        return self.prefix / names.ENVIRONMENT

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.environment / "bin" / "python"

    @property
    def program(self) -> Path:
        """Its ``kakeya_mac``."""
        return self.environment / "bin" / "kakeya_mac"

    @property
    def actions_runner(self) -> Path:
        """Folder of GitHub's runner."""
        return self.prefix / names.ACTIONS_RUNNER

    @property
    def hook(self) -> Path:
        """The file that it calls before each job."""
        return self.prefix / names.HOOK / "job-started.sh"

    @property
    def deploy_key(self) -> Path:
        """Private key with which the hook reads the repository."""
        return self.prefix / names.HOOK / "deploy_key"

    @property
    def fetch(self) -> str | None:
        """Address from which it does; None: `url` names no repository."""
        return None if self.page is None else f"git@{urlsplit(self.page).hostname}:{self.slug}.git"

    @property
    def models(self) -> Path:
        """Where models of this account lie."""
        return self.home / names.MODELS

    @property
    def policy(self) -> Path:
        """The owner's policy."""
        return settings.config_dir(self.environ) / "policy.toml"

    @property
    def services_path(self) -> str:
        """PATH of services: the pinned environment first."""
        system = "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return f"{self.environment / 'bin'}:{system}"


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it, on a file system to which case is no matter."""
    parts, others = (tuple(part.casefold() for part in each.parts) for each in (path, folder))
    return parts[: len(others)] == others
