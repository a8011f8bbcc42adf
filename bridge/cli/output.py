"""What several commands do: connect, follow a request, show how it ended, look at its workflow run.

Progress goes to standard error; standard output carries the outcome alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bridge import presets, settings
from bridge.bus.requests import RequestState, resolve_handle
from bridge.bus.results import Believed, ExpectedRequest, FetchedResult, believe
from bridge.cli import echo_json, show, show_error
from bridge.client.fetch import Judged, Lookup, Verified, judge, look_up, read_open_request
from bridge.client.remotes import Remote, open_cache, resolve_remote
from bridge.client.save import save
from bridge.client.watch import Update, watch
from bridge.errors import ApiConflict, ApiError, WaitTimeout
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo
from bridge.github import dispatch
from bridge.github.api import GitHub, repository_of
from bridge.protocol.result import Phase, Status
from bridge.protocol.sanitize import clean_line
from bridge.render import outcome
from bridge.render.evidence import as_rich, evidence_tables
from bridge.settings import Settings

_LINE_INTERVAL_S = 2.0  # between two progress lines where there is no terminal


@dataclass(frozen=True)
class Presentation:
    """How the end of a request is shown."""

    as_json: bool
    output: Path | None = None  # the folder to save the result in
    allow_unsigned: bool = False
    # The JSON line: keys of the command's own, to which what is shown is added, also when it is shown as text
    document: dict[str, Any] = field(default_factory=dict)
    expected: ExpectedRequest | None = None  # as this client submitted it; None: as it is on the remote


@dataclass(frozen=True)
class Connection:
    """The settings in force, a checkout in which nothing is left, and the bus."""

    config: Settings
    git: GitRepo
    bus: Remote

    def cache(self) -> GitCache:
        """The bare repository of this remote, for lists and the archive."""
        return open_cache(self.config.state_dir, self.bus, self.git)

    def look_up(self, handle: str) -> Lookup:
        """The request that a handle names, and its result if there is one."""
        return look_up(self.git, self.bus, handle, self.config.state_dir)

    def look_up_result(self, handle: str) -> tuple[str, FetchedResult]:
        """The nonce and the result of a request that has one."""
        found = self.look_up(handle)
        if found.answer is None:
            raise WaitTimeout(f"{found.nonce} has no result yet", f"kakeya_mac wait {found.nonce}")
        return found.nonce, found.answer


def connect(
    remote: str | None, *, signing_key: str | None = None, transport: str | None = None
) -> Connection:
    """Connect this folder's checkout to its bus; the arguments are the options given."""
    config = settings.load(remote=remote, signing_key=signing_key, transport=transport)
    git = GitRepo(Path.cwd())
    return Connection(config, git, resolve_remote(git, config.remote))


def follow(
    link: Connection,
    nonce: str,
    how: Presentation,
    *,
    wait_s: float,
    state: RequestState | None = None,
    watcher: dispatch.RunWatcher | None = None,
) -> int:
    """Watch a request until its result is here, show that, and return its exit code.

    After `wait_s` seconds this gives up, and the job goes on. `state` spares a look at the remote.
    """
    progress = _Progress(watcher)
    try:
        updates = watch(
            link.git,
            link.bus.address,
            nonce,
            deadline=time.monotonic() + wait_s,
            expected=how.expected,
            state=state,
            trusted=link.config.trusted_runners,
            sleep=progress.sleep,
        )
        fetched = progress.show(updates)
    except WaitTimeout as timeout:
        show_error(timeout)
        how.document.update(_run_json(watcher), status="waiting", nonce=nonce, exit_code=timeout.exit_code)
        if how.as_json:
            echo_json(how.document, untrusted=("runners", "preset"))
        return timeout.exit_code
    except KeyboardInterrupt:
        click.echo(f"the request goes on: kakeya_mac wait {nonce}", err=True)
        raise
    how.document.update(_run_json(watcher))
    return present(link.config, fetched, how)


def present(
    config: Settings,
    fetched: FetchedResult,
    how: Presentation,
    *,
    replay: Callable[[Believed], Verified] | None = None,
) -> int:
    """Check and judge a fetched result, and show it; returns the exit code of its status.

    `replay` replays the report of a result that passed; what it finds may change the exit code.
    """
    allow = how.allow_unsigned or config.allow_unsigned
    believed = believe(
        fetched, trusted=config.trusted_runners, expected=how.expected, allow_unsigned=allow, bound=False
    )
    judged = judge(believed, installed=presets.load_all(config.presets), allow_unsigned=allow)
    has_passed = judged.verdict.status is Status.PASSED
    verified = replay(believed) if replay is not None and has_passed else None
    how.document.update(outcome.outcome_json(judged))
    if how.output is not None:
        save(believed, fetched, how.output)
        how.document["output"] = str(how.output)
        if verified is not None:
            verified.save(how.output)
    if replay is not None:
        how.document["verification"] = verified and verified.as_json()
    if verified is not None and verified.exit_code:
        how.document["exit_code"] = verified.exit_code
    lines = _lines(judged, how.output, verified)
    code = show(how.as_json, how.document, lines, untrusted=(*outcome.FROM_BUS, "runners"), note=True)
    for line in outcome.unverified_lines(judged):
        click.echo(line, err=True)
    return code


def _lines(judged: Judged, output: Path | None, verified: Verified | None) -> Iterator[str | Table]:
    for judgement in judged.judgements.values():
        yield from map(as_rich, evidence_tables(judgement))
    yield from outcome.outcome_lines(judged)
    if output is not None:
        yield f"  saved    {output}"
    if verified is not None:
        yield from outcome.verification_lines(verified.record)


class _Progress:
    """Shows updates on standard error: in place on a terminal, else as occasional lines."""

    def __init__(self, watcher: dispatch.RunWatcher | None) -> None:
        self._watcher = watcher
        self._terminal = Console(stderr=True) if sys.stderr.isatty() else None
        self._phase: Phase | None = None
        self._last, self._last_s = "", 0.0

    def show(self, updates: Iterator[Update]) -> FetchedResult:
        """Show every update; returns what the last one brought."""
        with self._terminal.status("submitted") if self._terminal else nullcontext() as status:
            for update in updates:
                line = _update_line(update)
                if status is not None:
                    status.update(escape(line))
                if self._is_due(update, line):
                    self._say(line)
                    self._phase, self._last, self._last_s = update.phase, line, time.monotonic()
                if update.result is not None:
                    return update.result
        raise WaitTimeout("the watch ended without a result", "try again")

    def sleep(self, seconds: float) -> None:
        """Wait between two looks, and report on the workflow run meanwhile."""
        for line in () if self._watcher is None else self._watcher.poll():
            self._say(clean_line(line))
        time.sleep(seconds)

    def _is_due(self, update: Update, line: str) -> bool:
        """Each phase has a line; where there is no terminal, so has what else is new, but not too often."""
        if update.phase != self._phase:
            return True
        is_late = time.monotonic() - self._last_s >= _LINE_INTERVAL_S
        return self._terminal is None and line != self._last and (is_late or update.notice is not None)

    def _say(self, line: str) -> None:
        if self._terminal is None:
            click.echo(line, err=True)
        else:
            self._terminal.print(line, highlight=False, markup=False)


def _update_line(update: Update) -> str:
    if update.notice:
        return f"{update.phase} (no answer from the remote: {clean_line(update.notice)})"
    if update.phase is Phase.DONE:
        return outcome.done_line(update.result)
    return outcome.status_line(update.status, update.phase, update.ahead, claim=update.claim)


def _run_json(watcher: dispatch.RunWatcher | None) -> dict[str, Any]:
    return {} if watcher is None else {"run": watcher.run and watcher.run.as_json()}


@contextmanager
def api_warnings() -> Iterator[None]:
    """Turn failures of GitHub's API into warnings: it only informs."""
    try:
        yield
    except ApiError as error:
        show_error(error, label="warning: ")


def api_or_none(remote: Remote) -> GitHub | None:
    """The API of the remote's repository; None: it is no GitHub repository, or there is no token."""
    with api_warnings():
        return dispatch.api_of(remote.address)
    return None


def find_run(link: Connection, state: RequestState) -> dispatch.RunView | None:
    """The workflow run of a request; None: none is known."""
    github = api_or_none(link.bus)
    request = None if github is None else _actions_request(link, state)
    if github is not None and request is not None:
        with api_warnings():
            return dispatch.find_run(github, request)
    return None


def stop_run(link: Connection, nonce: str) -> dispatch.RunView | None:
    """Stop the workflow run, too, if a machine has it; one that waits reads the cancel request later."""
    github = api_or_none(link.bus)
    run = None if github is None else find_run(link, resolve_handle(link.git, link.bus.address, nonce))
    if run is not None and github is not None and run.is_on_a_machine:
        with api_warnings():
            try:
                github.cancel(run.id)
            except ApiConflict:  # it has ended meanwhile
                return run
            click.echo(f"its run was stopped, too: {run.url}", err=True)
    return run


def watch_run(link: Connection, state: RequestState) -> dispatch.RunWatcher | None:
    """A watcher of the workflow run of a request; None: the request has none."""
    repository = None
    with api_warnings():
        repository = repository_of(link.bus.address)
    request = None if repository is None else _actions_request(link, state)
    return None if request is None else dispatch.RunWatcher(api_or_none(link.bus), request)


def _actions_request(link: Connection, state: RequestState) -> dispatch.RequestRef | None:
    """The request as its workflow run names it; None: no workflow takes it."""
    manifest = read_open_request(link.git, link.bus, state)
    if manifest is None or manifest.transport != "actions":
        return None
    commit = state.inbox or (state.branch.commit if state.branch is not None else "")
    return dispatch.RequestRef(state.nonce, manifest.result_ref, commit)
