"""What a command does for a request's workflow run while it waits: between two looks at git."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from bridge import presets
from bridge.bus.handles import state_of
from bridge.client.attendant import Attendant
from bridge.client.resend import Resender
from bridge.client.runs import Request, RunView, api_of, run_of
from bridge.client.standing import standing_request
from bridge.errors import ApiError, BridgeError, BusError
from bridge.github import repository_of
from bridge.protocol.result import Phase

if TYPE_CHECKING:
    from bridge.bus.git import Git
    from bridge.bus.handles import RequestState
    from bridge.client.remotes import Remote
    from bridge.client.watch import Update
    from bridge.github import GitHub
    from bridge.protocol.manifest import Manifest
    from bridge.settings import Settings

# So long after its job could have ended nothing need be heard of a request: a run says nothing to git.
_QUIET_S = 900.0
_LONGEST_S = 3 * 3600.0
_TICK_S = 1.0


class Attending:
    """Attends one request over GitHub Actions.

    Args:
        config: The client's settings.
        git: Any checkout.
        remote: The bus.
        manifest: What was asked.
        request: Its branch and commit.
        resend_after_s: How old it may be until it is pushed again, where there is no token that does; None: a
            quarter of an hour longer than its job may take.
    """

    def __init__(
        self,
        config: Settings,
        git: Git,
        remote: Remote,
        manifest: Manifest,
        request: Request,
        *,
        resend_after_s: float | None = None,
    ) -> None:
        github = usable_api(remote)
        self._git, self._remote, self._request = git, remote, request
        self._attendant = Attendant(request, github, is_wished_away=self._is_wished_away)
        quiet_s = _limit_s(config, manifest) + _QUIET_S if resend_after_s is None else resend_after_s
        self._resender = Resender(
            git,
            remote.address,
            request,
            quiet_s=quiet_s,
            age_s=max(0.0, (datetime.now(UTC) - manifest.created_at).total_seconds()),
        )
        self._is_taken = False

    @property
    def run(self) -> RunView | None:
        """The run at the last look."""
        return self._attendant.run

    def saw(self, update: Update) -> None:
        """Take in what git told."""
        self._is_taken = update.phase is not Phase.QUEUED

    def sleep(self, seconds: float, say: Callable[[str], None]) -> None:
        """Wait, and attend to the run meanwhile.

        Args:
            seconds: How long at least.
            say: Takes one line for people.
        """
        until = time.monotonic() + seconds
        while True:
            for line in self._attendant.look():
                say(line)
            if self._attendant.is_helpless:
                is_taken = self._is_taken or (self.run is not None and self.run.is_on_a_machine)
                for line in self._resender.look(is_taken=is_taken):
                    say(line)
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _TICK_S))

    def as_json(self) -> dict[str, Any]:
        """Keys of a command's JSON line."""
        return {"run": None if self.run is None else self.run.as_json()}

    def _is_wished_away(self) -> bool:
        try:
            state = state_of(self._git.ls_remote(self._remote.address), self._request.nonce)
        except BusError:
            return False
        return state.cancel is not None or state.branch is None


def attend(
    config: Settings, git: Git, remote: Remote, state: RequestState | None, *, resend_after_s: float | None
) -> Attending | None:
    """Attend to the run of a request that stands on the remote; None: no workflow takes it.

    Args:
        config: The client's settings.
        git: Any checkout.
        remote: The bus.
        state: Where the request stands; None: nothing is known of it.
        resend_after_s: See `Attending`.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    if state is None or (resend_after_s is None and not may_have_runs(remote)):
        return None
    found = standing_request(git, remote, state)
    if found is None or found[1].transport != "actions":
        return None
    request, manifest = found
    return Attending(config, git, remote, manifest, request, resend_after_s=resend_after_s)


def look_at_run(git: Git, remote: Remote, state: RequestState | None) -> RunView | None:
    """The run of a request that stands on the remote; None: none is known. What is wrong is a warning.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    github = usable_api(remote)
    found = None if github is None or state is None else standing_request(git, remote, state)
    if github is None or found is None or found[1].transport != "actions":
        return None
    try:
        return run_of(github, found[0])
    except ApiError as error:
        warn(error)
        return None


def may_have_runs(remote: Remote) -> bool:
    """Whether the remote is a repository of a GitHub server that is known here."""
    try:
        return repository_of(remote.address) is not None
    except ApiError as error:
        warn(error)
        return False


def warn(error: ApiError) -> None:
    """Say what the API did, on standard error; git goes on without it."""
    click.echo(f"warning: {error.message}", err=True)
    if error.remedy:
        click.echo(f"  {error.remedy}", err=True)


def usable_api(remote: Remote) -> GitHub | None:
    """The API of a remote's repository with a token; None: one is lacking. What is wrong is a warning."""
    try:
        return api_of(remote)
    except ApiError as error:
        warn(error)
        return None


def _limit_s(config: Settings, manifest: Manifest) -> float:
    """Seconds that its job may take."""
    if manifest.timeout_s is not None:
        return manifest.timeout_s
    try:
        return presets.get(manifest.preset, config.presets).timeout_s
    except BridgeError:  # a preset that only the machine knows
        return _LONGEST_S
