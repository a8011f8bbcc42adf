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
from bridge.github.servers import server_of

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
_PAGE = re.compile(rf"https?://[A-Za-z0-9.:-]+/{_NAME}(/{_NAME})?")
_CREDENTIALS = re.compile(r"https?://[^/?#\s]*@|://[^/?#@:\s]*:(?![0-9]+(?:[/?#]|$))\S*@", re.IGNORECASE)
_EPILOG = f"""examples:
  scripts/setup_mac.sh --url https://github.com/me/workload --sudo
  kakeya_mac runner uninstall --sudo

Flags that are left out are those of the last run, and so are KAKEYA_CONFIG and KAKEYA_STATE.
KAKEYA_PYTHON names the Python that the environment is made with, {TOKEN_VARIABLE} holds a token of GitHub.

exit code: 0 ready, 1 something is missing (each with its fix), 2 wrong flags, 70 our own bug"""


class SetupUsage(BridgeError):
    """The flags of setup are wrong."""

    exit_code = 2


class SetupOptions:
    """What setup is to make, and where: the flags, else the options of the last run, else defaults."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.home, self.user = Path.home(), getpass.getuser()
        around = prefix_around(Path(sys.prefix)) or self.home / PREFIX
        self.prefix = (Path(flags.prefix).expanduser() if flags.prefix else around).resolve()
        before = read_stored(self.prefix)
        self.is_new = flags.command == "setup" and not before
        if flags.command == "setup" and flags.dry_run and not (before or flags.url or flags.remote):
            before = {"url": _EXAMPLE, "service": "both"}
        given = {**before, **{name: value for name, value in vars(flags).items() if value is not None}}
        self.url: str | None = given.get("url", "").rstrip("/").removesuffix(".git") or None
        self.remote: str | None = given.get("remote")
        page = _PAGE.fullmatch(self.url or "")
        self.bus = self.remote or (self.url if page and page[1] else None)  # the daemon's git remote
        self.server = server_of(self.url or self.remote or ".", {})
        by_address = "actions" if self.url and self.server.has_artifacts else "serve"
        self.service: str = given.get("service", by_address if self.url or self.remote else "none")
        self.is_actions = self.service in ("actions", "both")  # GitHub's runner is to run
        self.is_serving = self.service in ("serve", "both")  # our daemon is to run
        host = re.sub(r"[^A-Za-z0-9._-]+", "-", platform.node().partition(".")[0])
        self.name: str = given.get("name", host or "mac")
        self.labels = [str(label) for label in given.get("labels", LABELS) if label]
        self.runner_version: str = given.get("runner_version", RUNNER_VERSION)
        self.runner_sha256: str = given.get("runner_sha256", RUNNER_SHA256)
        self.tailnet: bool = given.get("tailnet", False)
        self.sudo: bool = flags.sudo
        self.token_file: Path | None = flags.token_file
        self.token: str = flags.runner_token or os.environ.get(TOKEN_VARIABLE) or ""
        # The owner's folders, for the programs that setup starts.
        kept = {variable: os.environ.get(variable) or before.get(name) for name, variable in FOLDERS.items()}
        self.folders = {name: str(Path(path).expanduser().absolute()) for name, path in kept.items() if path}

        self.source = Path(__file__).resolve().parents[2]  # the checkout that is installed
        self.environment = self.prefix / ENVIRONMENT
        self.program = self.environment / "bin" / "kakeya_mac"
        self.services_path = f"{self.environment / 'bin'}:{_SYSTEM_PATH}"
        self.actions_runner = self.prefix / ACTIONS_RUNNER
        self.models = self.home / "kakeya-models"
        self.config_dir = bridge.config_dir({**os.environ, **self.folders})
        self.state_dir = bridge.state_dir({**os.environ, **self.folders})
        for message, remedy in _objections(self):
            raise SetupUsage(message, remedy)

    def read_token(self) -> str:
        """The token that registers or removes GitHub's runner."""
        return (self.token_file.read_text(encoding="utf-8") if self.token_file else self.token).strip()

    def stored(self) -> str:
        """The content of the options file."""
        values = {name: getattr(self, name) for name in _STORED}
        values |= {name: self.folders.get(variable) for name, variable in FOLDERS.items()}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _objections(options: SetupOptions) -> Iterator[tuple[str, str]]:
    """What is wrong, and what to write instead."""
    for flag, address in (("--url", options.url), ("--remote", options.remote)):
        if _CREDENTIALS.search(address or ""):
            message = f"{flag} holds credentials, which files and command lines would show"
            yield message, "leave them out; use a credential helper or an SSH key"
    if options.is_actions and options.url is None:
        yield f"--service {options.service} needs --url", _EXAMPLE
    # macOS keeps services from the first; a volume may be missing at a start; a checkout is replaced.
    guarded = ("Desktop", "Documents", "Downloads", "Library/Mobile Documents")
    for folder in (*(options.home.resolve() / name for name in guarded), Path("/Volumes"), options.source):
        if options.is_new and options.prefix.is_relative_to(folder):
            yield f"--prefix {options.prefix} lies in {folder}", f"choose another, such as ~/{PREFIX}"
    if options.is_serving and options.bus is None:
        yield f"--service {options.service} needs --remote", "give the git remote that the daemon serves"
    for flag, text, pattern in (
        ("--url", options.url or _EXAMPLE, _PAGE.pattern),
        ("--name", options.name, _NAME),
        *(("--labels", label, _NAME) for label in options.labels or [""]),
    ):
        if not re.fullmatch(pattern, text):
            yield f"{flag}: {text!r} is malformed", f"it must match {pattern}"


def prefix_around(environment: Path) -> Path | None:
    """The prefix that an environment (link or folder) belongs to; None if setup did not make it."""
    places = (path for path in environment.parents if (path / ENVIRONMENTS).is_dir())
    return next((path for path in places if (path / OPTIONS_FILE).is_file()), None)


def read_stored(prefix: Path) -> dict[str, Any]:
    """The options of the last run; empty if there was none, an error if the file is damaged."""
    path = prefix / OPTIONS_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: found[name] for name in (*_STORED, *FOLDERS) if found.get(name) is not None}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError):
        message = f"{path} is damaged, so the options of the last run are unknown"
        fix = "remove it, and give --url, --remote, --service and the others again"
        raise SetupUsage(message, fix) from None


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
    add("--url", "--repo-url", metavar="URL", help="repository or organisation that this Mac is for")
    add("--remote", metavar="URL", help="git remote that the daemon serves (default: --url)")
    kept = "what launchd keeps running: GitHub's runner (actions), our daemon (serve), both, or none"
    default = "actions for a --url of github.com or ghe.com, else serve"
    add("--service", choices=SERVICES, help=f"{kept} (default: {default})")
    add("--prefix", metavar="DIR", help=f"folder for everything (default: ~/{PREFIX})")
    add("--name", metavar="NAME", help="the runner's name (default: the host's)")
    labels = f"labels that workflows ask for (default: {','.join(LABELS)})"
    add("--labels", metavar="A,B", type=lambda text: text.split(","), help=labels)
    add("--token-file", type=Path, metavar="FILE", help="holds a registration token of GitHub")
    add("--runner-token", metavar="TOKEN", help="such a token, but other accounts can read command lines")
    add("--runner-version", metavar="V", help=f"GitHub's runner, first installed (default: {RUNNER_VERSION})")
    add("--runner-sha256", metavar="HEX", help="digest of its osx-arm64 archive")
    add("--sudo", action="store_true", help="do what needs an administrator, with sudo")
    add("--tailnet", "--with-tailscale", action="store_const", const=True, help="SSH over tailscale")
    add("--dry-run", action="store_true", help="print everything that would be done, and do nothing")
    add("--json", action="store_true", help="one JSON line at the end; everything else goes to stderr")
    return made
