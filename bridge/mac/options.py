"""What the owner asks of setup: flags, environment variables and the options of the last run."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bridge
from bridge.errors import BridgeError

PREFIX = "kakeya-mac"  # in the home folder
OPTIONS_FILE = "setup.json"  # in the prefix, as everything below
ENVIRONMENT = "env"  # a link to one of ENVIRONMENTS
ENVIRONMENTS = "envs"
ACTIONS_RUNNER = "actions-runner"
SERVICES = ("actions", "serve", "both", "none")
LABELS = ("self-hosted", "macOS", "ARM64", "kakeya-mac")
# Variables that name the owner's files and a runner's state, as the options file names them.
FOLDERS = {"config": "KAKEYA_CONFIG", "state": "KAKEYA_STATE"}
TOKEN_VARIABLE = "KAKEYA_RUNNER_TOKEN"  # noqa: S105 - a variable's name
RUNNER_VERSION = "2.338.0"
# actions-runner-osx-arm64 of that version, from its release notes.
RUNNER_SHA256 = "df4cebda25c86a886ed204e49fee63f5c2e7cec5f447b5c98440a826bbdf9df2"

_SYSTEM_PATH = "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_EXAMPLE = "https://github.com/OWNER/NAME"
_STORED = ("url", "remote", "name", "labels", "service", "runner_version", "runner_sha256", "tailnet")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_PAGE = re.compile(rf"https://[A-Za-z0-9.:-]+/{_NAME}(/{_NAME})?")
_CREDENTIALS = re.compile(r"https?://[^/?#\s]*@|://[^/?#@:\s]*:(?![0-9]+(?:[/?#]|$))\S*@", re.IGNORECASE)
_SSH = re.compile(r"(?:ssh://(?:[^@/]+@)?|[^@/:]+@)([^/:]+)(?::\d+/|[:/])(.+?)(?:\.git)?/?")
# macOS asks a person before a program may read these; a service cannot ask.
_GUARDED = ("Desktop", "Documents", "Downloads", "Library/Mobile Documents", "Pictures", "Movies", "Music")
_EPILOG = f"""examples:
  scripts/setup_mac.sh --dry-run --url https://github.com/me/workload      (on any machine)
  scripts/setup_mac.sh --url https://github.com/me/workload --sudo
  scripts/setup_mac.sh --service serve --remote git@example.org:me/workload.git --sudo
  kakeya_mac runner uninstall --sudo

Flags that are left out are those of the last run. KAKEYA_PYTHON names the Python that the environment is made
with, {TOKEN_VARIABLE} holds a registration token, KAKEYA_CONFIG and KAKEYA_STATE are remembered.

exit code: 0 ready, 1 something is missing (each with its fix), 2 wrong flags, 70 our own bug"""


class SetupUsage(BridgeError):
    """The flags of setup are wrong."""

    exit_code = 2


class SetupOptions:
    """What setup is to make, and where: the flags, else the options of the last run, else defaults.

    Raises:
        SetupUsage: A value is wrong: it names the flag, the value, and what to write instead.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        self.home, self.user = Path.home(), getpass.getuser()
        if flags.prefix == "":
            raise SetupUsage("--prefix is empty", f"leave it out for {self.home / PREFIX}")
        around = prefix_around(Path(sys.prefix)) or self.home / PREFIX
        self.prefix = (Path(flags.prefix).expanduser() if flags.prefix else around).resolve()
        before = read_stored(self.prefix)
        if flags.command == "setup" and flags.dry_run and not (before or flags.url or flags.remote):
            before = {"url": _EXAMPLE, "service": "both"}

        def value(name: str, default: Any = None) -> Any:
            given = getattr(flags, name)
            return given if given is not None else before.get(name) or default

        self.url: str | None = value("url") and value("url").rstrip("/").removesuffix(".git")
        self.remote: str | None = value("remote")
        # The git remote of the daemon; its host and path if it is an SSH address.
        page = _PAGE.fullmatch(self.url or "")
        self.bus = self.remote or (self.url if page and page[1] else None)
        ssh = _SSH.fullmatch(self.bus or "")
        self.ssh_remote = (ssh[1], ssh[2].strip("/")) if ssh else None
        self.service: str = value("service", "actions" if self.url else "serve" if self.remote else "none")
        self.is_actions = self.service in ("actions", "both")  # GitHub's runner is to run
        self.is_serving = self.service in ("serve", "both")  # our daemon is to run
        host = re.sub(r"[^A-Za-z0-9._-]+", "-", platform.node().partition(".")[0])
        self.name: str = value("name", host or "mac")
        labels = value("labels", LABELS)
        self.labels = list(filter(None, labels.split(",") if isinstance(labels, str) else labels))
        self.runner_version: str = value("runner_version", RUNNER_VERSION)
        self.runner_sha256: str = value("runner_sha256", RUNNER_SHA256)
        self.tailnet: bool = value("tailnet", False)
        self.sudo: bool = flags.sudo
        self.token_file: Path | None = flags.token_file
        self.token: str | None = flags.runner_token or os.environ.get(TOKEN_VARIABLE)
        # The owner's folders, for the programs that setup starts.
        kept = {variable: os.environ.get(variable) or before.get(name) for name, variable in FOLDERS.items()}
        self.folders = {name: str(Path(path).expanduser().absolute()) for name, path in kept.items() if path}

        self.source = Path(__file__).resolve().parents[2]  # the checkout that is installed
        self.environment = self.prefix / ENVIRONMENT
        self.program = self.environment / "bin" / "kakeya_mac"
        self.services_path = f"{self.environment / 'bin'}:{_SYSTEM_PATH}"
        self.actions_runner = self.prefix / ACTIONS_RUNNER
        self.deploy_key = self.prefix / "ssh" / "deploy_key"  # the daemon's, where the account has no key
        self.models = self.home / "kakeya-models"
        self.config_dir = bridge.config_dir({**os.environ, **self.folders})
        self.state_dir = bridge.state_dir({**os.environ, **self.folders})
        for message, remedy in _objections(self):
            raise SetupUsage(message, remedy)

    def stored(self) -> str:
        """The content of the options file."""
        values = {name: getattr(self, name) for name in _STORED}
        values |= {name: self.folders.get(variable) for name, variable in FOLDERS.items()}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _objections(options: SetupOptions) -> Iterator[tuple[str, str]]:
    """What is wrong, and what to write instead."""
    home, service, version = options.home, options.service, options.runner_version
    places = {home.resolve() / name: "macOS keeps services out of it" for name in _GUARDED}
    places[Path("/Volumes")] = "a volume may be missing at a restart"
    places[options.source] = "that is the checkout which is installed"
    for folder, why in places.items():
        # Compared without regard to case, as macOS's file system does.
        if Path(str(options.prefix).casefold()).is_relative_to(str(folder).casefold()):
            yield f"--prefix {options.prefix} is in {folder}: {why}", f"such as {home / PREFIX}"
    for flag, address in (("--url", options.url), ("--remote", options.remote)):
        if _CREDENTIALS.search(address or ""):
            message = f"{flag} holds credentials, which files and command lines would show"
            yield message, "leave them out; use a credential helper or an SSH key"
    if options.url is not None and not _PAGE.fullmatch(options.url):
        yield f"--url {options.url!r} is no repository or organisation", f"write {_EXAMPLE}"
    if options.is_actions and options.url is None:
        yield f"--service {service} needs --url", _EXAMPLE
    if options.is_serving and options.bus is None:
        yield f"--service {service} needs --remote", "the git remote that the daemon serves"
    if version != RUNNER_VERSION and options.runner_sha256 == RUNNER_SHA256:
        yield f"--runner-version {version} needs its --runner-sha256", "of its osx-arm64 archive"
    patterns = [("--prefix", str(options.prefix), r".+"), ("--name", options.name, _NAME)]
    patterns += [("--labels", label, _NAME) for label in options.labels or [""]]
    patterns += [("--service", service, "|".join(SERVICES)), ("--runner-version", version, r"\d+\.\d+\.\d+")]
    for flag, text, pattern in [*patterns, ("--runner-sha256", options.runner_sha256, "[0-9a-f]{64}")]:
        if not re.fullmatch(pattern, text):
            yield f"{flag}: {text!r} is malformed", f"it must match {pattern}"


def prefix_around(environment: Path) -> Path | None:
    """The prefix that an environment (link or folder) belongs to; None if setup did not make it."""
    is_link = environment.name == ENVIRONMENT
    prefix = environment.parent if is_link else environment.parent.parent
    is_ours = is_link or environment.parent.name == ENVIRONMENTS
    return prefix if is_ours and (prefix / OPTIONS_FILE).is_file() else None


def read_stored(prefix: Path) -> dict[str, Any]:
    """The options of the last run; empty if there was none.

    Raises:
        SetupUsage: The file is damaged. To ignore it would take services away.
    """
    path = prefix / OPTIONS_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        known = {name: value for name, value in found.items() if name in _STORED or name in FOLDERS}
        if all(_is_storable(name, value) for name, value in known.items()):
            return known
    remedy = "remove it, and give --url, --remote, --service and the others again"
    raise SetupUsage(f"{path} is damaged, so the options of the last run are unknown", remedy)


def _is_storable(name: str, value: Any) -> bool:
    if name == "labels":
        return isinstance(value, list) and all(isinstance(label, str) for label in value)
    return isinstance(value, bool if name == "tailnet" else str | None)


def parser() -> argparse.ArgumentParser:
    """The command line. The earlier system's --repo-url, --with-tailscale and --runner-token are accepted."""
    made = argparse.ArgumentParser(
        prog="kakeya_mac runner",
        description="Set a Mac up as a runner, check one, or take it down again.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("command", nargs="?", choices=("setup", "check", "uninstall"), default="setup", help="default: setup")
    add("--url", "--repo-url", metavar="URL", help="repository or organisation whose workflows run here")
    add("--remote", metavar="URL", help="git remote that the daemon serves (default: --url)")
    add("--service", choices=SERVICES, help="what launchd keeps running (default: actions with --url)")
    add("--prefix", metavar="DIR", help=f"folder for everything (default: ~/{PREFIX})")
    add("--name", metavar="NAME", help="the runner's name (default: the host's)")
    add("--labels", metavar="A,B", help=f"labels that workflows ask for (default: {','.join(LABELS)})")
    add("--token-file", type=Path, metavar="FILE", help="holds a registration token of GitHub")
    add("--runner-token", metavar="TOKEN", help="such a token, but other accounts can read command lines")
    add("--runner-version", metavar="V", help=f"GitHub's runner, first installed (default: {RUNNER_VERSION})")
    add("--runner-sha256", metavar="HEX", help="digest of its osx-arm64 archive")
    add("--sudo", action="store_true", help="do what needs an administrator, with sudo")
    tailnet = "set up SSH over a tailnet (tailscale)"
    add("--tailnet", "--with-tailscale", action="store_const", const=True, help=tailnet)
    add("--dry-run", action="store_true", help="print everything that would be done, and do nothing")
    add("--json", action="store_true", help="one JSON line at the end; everything else goes to stderr")
    return made
