"""What several commands do. Progress goes to standard error; standard output carries the outcome alone."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from bridge import presets, settings
from bridge.bus.registry import Registry
from bridge.bus.requests import RequestState
from bridge.bus.results import ExpectedRequest, FetchedResult
from bridge.cli import show, show_error, warn
from bridge.cli.completion import complete_handle
from bridge.cli.options import Function, json_option, remote_option
from bridge.client import fetch, history, remotes, runners, save, signing_key, watch
from bridge.client.recent import remember
from bridge.errors import EXIT_UNVERIFIED, ApiError, BridgeError, WaitTimeout
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo
from bridge.github import dispatch
from bridge.github.api import GitHub, repository_of
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Phase, Status
from bridge.protocol.sanitize import clean_line
from bridge.render import outcome
from bridge.render.evidence import as_rich, evidence_tables
from bridge.render.live import LiveView

# The registrations are a hint, so nothing waits long for them.
REGISTRY_TIMEOUT_S = 5.0
# A wait without a limit.
FOREVER_S = 365 * 86_400.0


@dataclass(frozen=True)
class Connection:
    """The settings in force, a checkout in which nothing is left, and the bus."""

    config: settings.Settings
    git: GitRepo
    bus: remotes.Remote

    def cache(self) -> GitCache:
        return remotes.open_cache(self.config.state_dir, self.bus, self.git)

    def look_up(self, handle: str) -> tuple[RequestState, FetchedResult | None]:
        state, answer = fetch.look_up(self.git, self.bus, handle, self.config.state_dir)
        remember(self.config.state_dir, [(state.nonce, state.preset)])
        return state, answer

    def look_up_result(self, handle: str) -> tuple[str, FetchedResult]:
        state, answer = self.look_up(handle)
        if answer is None:
            raise WaitTimeout(f"{state.nonce} has no result yet", f"kakeya_mac wait {state.nonce}")
        return state.nonce, answer

    def api(self) -> GitHub | None:
        """The API of the remote's repository; None: it is no GitHub repository, or there is no token."""
        with api_warnings():
            return dispatch.api_of(self.bus.address)
        return None

    def workflow_request(self, state: RequestState) -> dispatch.RequestRef | None:
        """A request as its workflow run names it; None: no workflow takes it."""
        with api_warnings():
            if repository_of(self.bus.address) is None:
                return None
            manifest = fetch.read_open_request(self.git, self.bus, state)
            if manifest is not None and manifest.transport == "actions":
                commit = state.inbox or (state.branch.commit if state.branch is not None else "")
                return dispatch.RequestRef(state.nonce, manifest.result_ref, commit)
        return None

    def find_run(self, state: RequestState) -> dispatch.FoundRun:
        """The workflow run of a request, as far as the API tells."""
        if (github := self.api()) is not None and (request := self.workflow_request(state)) is not None:
            with api_warnings():
                return dispatch.find_run(github, request)
        return dispatch.FoundRun(None)


@contextmanager
def api_warnings() -> Iterator[None]:
    """Turn failures of GitHub's API into warnings: it only informs."""
    try:
        yield
    except ApiError as error:
        show_error(error, label="warning: ")


def connect(config: settings.Settings) -> Connection:
    """Connect this folder's checkout to its bus; outside any checkout, this machine's cache of the remote."""
    git = GitRepo(Path.cwd())
    bus = remotes.resolve_remote(git, config.remote)
    if config.remote is not None and not git.is_repository():
        git = remotes.open_cache(config.state_dir, bus, git)
    return Connection(config, git, bus)


def bus_command(function: Function) -> Function:
    """``--remote`` and ``--json``; the command gets its bus as `link`.

    The options ``--signing-key`` and ``--allow-unsigned`` go into the settings of that.
    """

    @functools.wraps(function)
    def connected(**given: Any) -> Any:
        flags = {name: given.pop(name, None) for name in ("remote", "signing_key", "allow_unsigned")}
        return function(link=connect(settings.load(**flags)), **given)

    return remote_option(json_option(connected))


def request_command(function: Function) -> Function:
    """Like `bus_command`, for a command about one request, its argument `handle`."""
    return click.argument("handle", shell_complete=complete_handle)(bus_command(function))


@dataclass(frozen=True)
class Presentation:
    """How the end of a request is shown."""

    as_json: bool
    output: Path | None = None  # the folder to save the result in
    verify: int | None = None  # how many rows of its report are replayed here; None: it is not replayed
    # The JSON line: keys of the command's own, to which what is shown is added, also when it is shown as text
    document: dict[str, Any] = field(default_factory=dict)
    expected: ExpectedRequest | None = None  # as this client submitted it; None: as it is on the remote
    show_log: bool = False  # while it is followed, each line that the job prints, as far as heartbeats tell


@dataclass(frozen=True)
class OpenRequest:
    """What is known of an unfinished request besides its refs; only hints, so what fails leaves a None."""

    asked: Manifest | None = None
    registry: Registry | None = None  # the runners, where its transport has any
    typical_s: float | None = None  # how long its preset usually takes there


def read_hints(link: Connection, state: RequestState) -> OpenRequest:
    """Read what an unfinished request asks, and which runners are there."""
    asked = registry = typical_s = None
    with contextlib.suppress(BridgeError):
        asked = fetch.read_open_request(link.git, link.bus, state)
        if asked is None or asked.transport == "embedded":  # no daemon registers for the other
            registry = runners.read_runners(link.config, link.git, link.bus, timeout_s=REGISTRY_TIMEOUT_S)
            typical_s = runners.typical_duration_s(registry.live(datetime.now(UTC)), state.preset)
    return OpenRequest(asked, registry, typical_s)


def open_document(
    config: settings.Settings, nonce: str, preset: str | None, update: watch.Update, known: OpenRequest
) -> dict[str, Any]:
    """What the JSON line tells of an unfinished request."""
    measured = presets.measures_commit(preset, presets.load_all(config.presets))
    asked, typical_s, now = known.asked, known.typical_s, datetime.now(UTC)
    return outcome.open_json(nonce, preset, update, now, asked=asked, typical_s=typical_s, measured=measured)


def follow(
    link: Connection,
    nonce: str,
    how: Presentation,
    *,
    wait_s: float,
    state: RequestState | None = None,
    request: dispatch.RequestRef | None = None,
    known: OpenRequest | None = None,
) -> int:
    """Watch a request until its result is here, show that, and return its exit code.

    After `wait_s` seconds this gives up, and the job goes on. `state` spares a look at the remote, `request`
    is what a workflow takes, `known` what the JSON line of a wait that gave up tells.
    """
    update = watch_request(link, nonce, how, wait_s=wait_s, state=state, request=request)
    if update.result is not None:
        return present(link, update.result, how)
    preset = None if state is None else state.preset
    document = open_document(link.config, nonce, preset, update, known or OpenRequest())
    how.document.update(document | {"status": "waiting", "phase": update.phase})
    how.document["exit_code"] = WaitTimeout.exit_code
    return show(how.as_json, how.document, untrusted=(*outcome.FROM_BUS, "runners"))


def watch_request(
    link: Connection,
    nonce: str,
    how: Presentation,
    *,
    wait_s: float,
    state: RequestState | None = None,
    request: dispatch.RequestRef | None = None,
) -> watch.Update:
    """Show how a request goes until it has its result, or `wait_s` is over; the last update."""
    watcher = None if request is None else dispatch.RunWatcher(link.api(), request)

    def sleep(seconds: float) -> None:
        for line in () if watcher is None else watcher.poll():
            click.echo(clean_line(line), err=True)
        time.sleep(seconds)

    update = watch.Update(Phase.QUEUED)
    try:
        with LiveView(requested_at=history.requested_at(nonce), log=how.show_log) as view:
            for update in watch.watch(
                link.git,
                link.bus.address,
                nonce,
                deadline=time.monotonic() + wait_s,
                expected=how.expected,
                state=state,
                trusted=link.config.trusted_runners,
                sleep=sleep,
            ):
                view.show(update)
    except WaitTimeout as timeout:
        if watcher is not None and watcher.problem is not None:  # which was said
            timeout.message, timeout.remedy = f"{nonce} gets no result", f"kakeya_mac cancel {nonce}"
        show_error(timeout)
    except KeyboardInterrupt:
        click.echo(f"the request goes on: kakeya_mac wait {nonce}", err=True)
        raise
    if watcher is not None:
        how.document["run"] = watcher.run and watcher.run.as_json()
        how.document["run_problem"] = None if update.result is not None else watcher.problem
    return update


def present(link: Connection, fetched: FetchedResult, how: Presentation) -> int:
    """Check, judge and show a fetched result, and replay and save it where asked; returns the exit code."""
    config = link.config
    installed = presets.load_all(config.presets)
    judged = fetch.judge_answer(config, fetched, installed=installed, expected=how.expected)
    believed = judged.believed
    how.document.update(outcome.outcome_json(judged))
    lines: list[str | Table] = []
    for judgement in judged.judgements.values():
        lines += map(as_rich, evidence_tables(judgement))
    lines += outcome.outcome_lines(judged)
    verified = None
    if how.verify is not None:
        if judged.verdict.status is Status.PASSED:
            signer = signing_key.choose(config, link.git)
            verified = fetch.verify(believed, how.verify, signer, output=sys.stderr.fileno())
            warn(signer.warnings)
            how.document["exit_code"] = verified.exit_code or judged.exit_code
        how.document["verification"] = verified and verified.as_json()
    if how.output is not None:
        save.save(believed, fetched, how.output)
        how.document["output"] = str(how.output)
        lines.append(f"  saved    {how.output}")
    if verified is not None:
        lines += outcome.verification_lines(verified.record)
        if how.output is not None:
            verified.save(how.output)
    code = show(how.as_json, how.document, lines, untrusted=(*outcome.FROM_BUS, "runners"), note=True)
    if judged.exit_code == EXIT_UNVERIFIED:
        known = clean_line(believed.sentence)
        click.echo(f"passed, but no trusted key signed it: {known} (exit code {EXIT_UNVERIFIED})", err=True)
        remedy = "pin its key: kakeya_mac runners trust --first; or accept it: --allow-unsigned"
        click.echo(f"  {remedy}", err=True)
    return code
