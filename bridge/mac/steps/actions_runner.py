"""GitHub's runner: a pinned archive, registered for one repository or organisation, with the hook set.

It updates itself, as GitHub demands of runners; the digest holds for what is installed first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge.errors import MachineError
from bridge.mac import names
from bridge.mac.action import Action, Compare, Folder, Remove, Run, Write
from bridge.mac.options import Options
from bridge.mac.step import Look, State, answer, succeeds
from bridge.mac.steps.services import is_due

_RELEASES = "https://github.com/actions/runner/releases/download"
# GitHub's runner reads its flags from variables of this beginning, too, so no token is in a command line.
_TOKEN = "ACTIONS_RUNNER_INPUT_TOKEN"  # noqa: S105 - a variable's name
OURS = "KAKEYA_RUNNER_TOKEN"
_LOGIN = f"give one in {OURS} or --token-file; or does gh's login administer it?"


@dataclass(frozen=True)
class ActionsRunner:
    """The runner in the prefix."""

    options: Options
    name: str = "actions runner"
    stops: bool = False

    @property
    def _folder(self) -> Path:
        return self.options.actions_runner

    @property
    def _archive(self) -> Path:
        name = f"actions-runner-osx-arm64-{self.options.runner_version}.tar.gz"
        return self.options.prefix / "downloads" / name

    @property
    def _settings(self) -> tuple[Write, Write]:
        """What the runner reads when it starts: its variables, and the PATH of jobs."""
        variables = f"LANG=en_US.UTF-8\n{names.HOOK_VARIABLE}={self.options.hook}\n"
        return (
            Write(self._folder / ".env", variables),
            Write(self._folder / ".path", f"{self.options.services_path}\n"),
        )

    def look(self) -> Look:
        """Whether it is registered as it should be, and calls the hook."""
        where = str(self._folder / ".runner")
        known = self._registered()
        if known is None:
            if (why := self._lacks_token()) is not None:
                return Look(State.MISSING, where, "not registered, and there is no token to do it with", why)
            return Look(State.TODO, where, "not registered")
        url, name = str(known.get("gitHubUrl", "")).rstrip("/"), known.get("agentName")
        if url != (self.options.url or "").rstrip("/") or name != self.options.name:
            fix = "kakeya_mac runner uninstall, then setup again"
            return Look(State.MISSING, where, f"registered as {name} for {url}", fix)
        if (others := self._other_labels()) is not None:
            fix = "kakeya_mac runner uninstall, then setup again"
            return Look(State.MISSING, str(self._labels.path), f"registered with the labels {others}", fix)
        if not all(file.is_there for file in self._settings):
            return Look(State.TODO, str(self._folder / ".env"), "the hook or the PATH of jobs is not set")
        return Look(State.DONE, where, f"registered as {name} for {url}")

    def actions(self) -> tuple[Action, ...]:
        """Download, compare, unpack, register, and only then set: registering writes the PATH of now."""
        set_up = (is_due(self.options, names.ACTIONS_LABEL), *self._settings)
        if self._registered() is not None:
            return set_up
        options = self.options
        url = f"{_RELEASES}/v{options.runner_version}/{self._archive.name}"
        named = ("--name", options.name, "--labels", ",".join(options.labels), "--work", "_work", "--replace")
        config = (str(self._folder / "config.sh"), "--unattended", "--url", options.url or "", *named)
        return (
            Folder(self._archive.parent),
            Run(("curl", "-fsSL", "--proto", "=https", "--retry", "3", "-o", str(self._archive), url)),
            Compare(self._archive, options.runner_sha256),
            Folder(self._folder, 0o700),
            Run(("tar", "-xzf", str(self._archive), "-C", str(self._folder))),
            Run(
                config,
                cwd=self._folder,
                secrets={_TOKEN: lambda: self._token("registration-token", options.slug or "", _LOGIN)},
            ),
            self._labels,
            *set_up,
        )

    def taken_back(self) -> tuple[Action, ...]:
        """Take the registration back, and only then remove it."""
        gone: tuple[Action, ...] = (Remove(self._folder), Remove(self._archive.parent))
        known = self._registered()
        if known is None:
            return gone
        page = str(known.get("gitHubUrl", "")).rstrip("/")
        config = (str(self._folder / "config.sh"), "remove")
        remedy = (
            f"give a token of {page}/settings/actions/runners (Remove) in {OURS} or --token-file, or log in"
            f" with gh; or remove the runner on that page, and then delete {self._folder}"
        )
        slug = urlsplit(page).path.strip("/")
        secrets = {_TOKEN: lambda: self._token("remove-token", slug, remedy)}
        return (Run(config, cwd=self._folder, secrets=secrets, remedy=remedy), *gone)

    @property
    def _labels(self) -> Write:
        """What it was registered with, which GitHub's runner does not keep."""
        return Write(self._folder / "registered-labels", ",".join(self.options.labels) + "\n")

    def _other_labels(self) -> str | None:
        """The labels of the registration, where others are asked for; None: the same, or not known."""
        try:
            found = self._labels.path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        asked = {label.lower() for label in self.options.labels}
        return None if {label.lower() for label in found.split(",")} == asked else found

    def _registered(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self._folder / ".runner").read_text(encoding="utf-8-sig"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and (self._folder / "config.sh").exists() else None

    def _lacks_token(self) -> str | None:
        options = self.options
        if options.token_file is not None or options.environ.get(OURS) or succeeds("gh", "auth", "status"):
            return None
        return (
            f"take one from {options.url}/settings/actions/runners/new and give it in {OURS} or --token-file;"
            " or log in with gh"
        )

    def _token(self, kind: str, slug: str, remedy: str) -> str:
        """A token that is good for an hour, from a file, a variable, or gh."""
        options = self.options
        if options.token_file is not None:
            try:
                return options.token_file.read_text().strip()
            except OSError as error:
                raise MachineError(f"cannot read {options.token_file}: {error.strerror}", remedy) from None
        if given := options.environ.get(OURS):
            return given.strip()
        path = f"repos/{slug}" if "/" in slug else f"orgs/{slug}"
        host = urlsplit(options.url or "").hostname or ""
        place = f"{path}/actions/runners/{kind}"
        said = answer("gh", "api", "--hostname", host, "-X", "POST", place, "--jq", ".token")
        if not said:
            raise MachineError(f"there is no {kind} for {slug}", remedy)
        return said
