"""What several commands show: a request followed on the terminal, and a judged result at the end.

Progress goes to standard error; standard output carries the outcome alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge.cli import echo_json, note_untrusted
from bridge.errors import WaitTimeout
from bridge.protocol.result import Phase, Status
from bridge.protocol.sanitize import clean_line

if TYPE_CHECKING:
    from bridge.bus.results import Believed, ExpectedRequest, FetchedResult
    from bridge.bus.state import RequestState
    from bridge.client.fetch import Judged
    from bridge.client.remotes import Remote
    from bridge.client.verify import Verified
    from bridge.client.watch import Update
    from bridge.git.repo import GitRepo
    from bridge.github.dispatch import RunWatcher
    from bridge.settings import Settings

_LINE_INTERVAL_S = 2.0  # between two progress lines where there is no terminal


@dataclass(frozen=True)
class Presentation:
    """How the end of a request is shown.

    Attributes:
        as_json: One JSON line instead of text.
        output: Folder to save the result in.
        allow_unsigned: Show what no trusted runner signed, and let it pass.
        extra: More keys for the JSON line.
        expected: The request as this client submitted it; None: as it is on the remote.
        outcome: Is given the JSON document, also when text is shown.
    """

    as_json: bool
    output: Path | None = None
    allow_unsigned: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    expected: ExpectedRequest | None = None
    outcome: Callable[[dict[str, Any]], object] = dict


def follow(
    settings: Settings,
    git: GitRepo,
    remote: Remote,
    nonce: str,
    how: Presentation,
    *,
    wait_s: float,
    state: RequestState | None = None,
    watcher: RunWatcher | None = None,
) -> int:
    """Watch a request until its result is here, show that, and return its exit code.

    Args:
        settings: Whose trusted runners count.
        git: Any checkout; nothing is left in it.
        remote: The bus.
        nonce: The request.
        how: How its end is shown.
        wait_s: Seconds until this gives up; the job goes on.
        state: Its refs, where they were listed just now.
        watcher: Reports its workflow run; None: it has none.

    Raises:
        ResultError: What was published cannot be believed.
        BusError: The remote never answered, or the request is gone.
    """
    from bridge.client.watch import watch

    progress = _Progress(watcher)

    def run_json() -> dict[str, Any]:
        return {} if watcher is None else {"run": None if watcher.run is None else watcher.run.as_json()}

    try:
        updates = watch(
            git,
            remote.address,
            nonce,
            deadline=time.monotonic() + wait_s,
            expected=how.expected,
            state=state,
            trusted=settings.trusted_runners,
            sleep=progress.sleep,
        )
        fetched = progress.show(updates)
    except WaitTimeout as timeout:
        click.echo(f"error: {timeout.message}", err=True)
        click.echo(f"  {timeout.remedy}", err=True)
        ended = {"status": "waiting", "nonce": nonce, "exit_code": timeout.exit_code}
        document = {**how.extra, **run_json(), **ended}
        how.outcome(document)
        if how.as_json:
            echo_json(document, untrusted=("runners", "preset"))
        return timeout.exit_code
    except KeyboardInterrupt:
        click.echo(f"the request goes on: kakeya_mac wait {nonce}", err=True)
        raise
    return present(settings, fetched, replace(how, extra={**how.extra, **run_json()}))


def present(
    settings: Settings,
    fetched: FetchedResult,
    how: Presentation,
    *,
    replay: Callable[[Believed], Verified] | None = None,
) -> int:
    """Check and judge a fetched result, and show it; returns the exit code of its status.

    Args:
        settings: The client's.
        fetched: The result.
        how: How it is shown.
        replay: Replays the report of a result that passed; what it finds may change the exit code.

    Raises:
        ResultError: It cannot be believed.
    """
    from bridge import presets
    from bridge.bus.results import believe
    from bridge.client.fetch import judge
    from bridge.client.save import save
    from bridge.render.outcome import FROM_BUS, outcome_json, unverified_lines

    allow_unsigned = how.allow_unsigned or settings.allow_unsigned
    trusted, installed = settings.trusted_runners, presets.load_all(settings.presets)
    believed = believe(
        fetched, trusted=trusted, expected=how.expected, allow_unsigned=allow_unsigned, bound=False
    )
    judged = judge(believed, installed=installed, allow_unsigned=allow_unsigned)
    has_passed = judged.verdict.status is Status.PASSED
    verified = replay(believed) if replay is not None and has_passed else None
    code = verified.exit_code if verified is not None and verified.exit_code else judged.exit_code
    document = {**how.extra, **outcome_json(judged)}
    how.outcome(document)
    if how.output is not None:
        save(believed, fetched, how.output)
        document["output"] = str(how.output)
        if verified is not None:
            verified.save(how.output)
    if replay is not None:
        document |= {"verification": verified and verified.as_json(), "exit_code": code}
    if how.as_json:
        echo_json(document, untrusted=(*FROM_BUS, "runners"))
    else:
        _show(judged, how.output, verified)
    for line in unverified_lines(judged):
        click.echo(line, err=True)
    return code


def connect(
    remote: str | None, *, signing_key: str | None = None, transport: str | None = None
) -> tuple[Settings, GitRepo, Remote]:
    """The settings in force, the checkout here, and the bus; the arguments are the options given.

    Raises:
        SettingsError: A setting is wrong.
        NoRemote: There is no remote to talk to.
    """
    from bridge import settings
    from bridge.client.remotes import resolve_remote
    from bridge.git.repo import GitRepo

    config = settings.load(remote=remote, signing_key=signing_key, transport=transport)
    git = GitRepo(Path.cwd())
    return config, git, resolve_remote(git, config.remote)


def warn(sentences: list[str]) -> None:
    """Print warnings on standard error."""
    for sentence in sentences:
        click.echo(f"warning: {sentence}", err=True)


def _show(judged: Judged, output: Path | None, verified: Verified | None) -> None:
    from bridge.render.evidence import as_rich, evidence_tables
    from bridge.render.outcome import outcome_lines, verification_lines
    from bridge.render.terminal import console

    out = console()
    for judgement in judged.judgements.values():
        for table in evidence_tables(judgement):
            out.print(as_rich(table))
    for line in outcome_lines(judged):
        click.echo(line)
    if output is not None:
        click.echo(f"  saved    {output}")
    note_untrusted()
    for line in () if verified is None else verification_lines(verified.record):
        click.echo(line)


class _Progress:
    """Shows updates on standard error: in place on a terminal, else as occasional lines."""

    def __init__(self, watcher: RunWatcher | None) -> None:
        self._watcher = watcher
        self._say: Callable[[str], None] = lambda line: click.echo(line, err=True)
        self._phases: set[Phase] = set()
        self._shown: tuple[Phase | None, str, float] = (None, "", 0.0)

    def show(self, updates: Iterator[Update]) -> FetchedResult:
        """Show every update; returns what the last one brought."""
        fetched = self._show_in_place(updates) if sys.stderr.isatty() else self._show_lines(updates)
        if fetched is None:
            raise WaitTimeout("the watch ended without a result", "try again")
        return fetched

    def sleep(self, seconds: float) -> None:
        """Wait between two looks, and report on the workflow run meanwhile."""
        for line in () if self._watcher is None else self._watcher.poll():
            self._say(clean_line(line))
        time.sleep(seconds)

    def _show_lines(self, updates: Iterator[Update]) -> FetchedResult | None:
        fetched = None
        for update in updates:
            phase, last, time_s = self._shown
            line, now = _line(update), time.monotonic()
            is_soon = update.phase == phase and now - time_s < _LINE_INTERVAL_S
            if line != last and (update.notice or not is_soon):
                self._say(line)
                self._shown = (update.phase, line, now)
            fetched = update.result
        return fetched

    def _show_in_place(self, updates: Iterator[Update]) -> FetchedResult | None:
        from rich.console import Console
        from rich.markup import escape

        console, fetched = Console(stderr=True), None
        self._say = lambda line: console.print(line, highlight=False, markup=False)
        with console.status("submitted") as status:
            for update in updates:
                line = _line(update)
                if update.phase not in self._phases:
                    self._phases.add(update.phase)
                    self._say(line)
                status.update(escape(line))
                fetched = update.result
        return fetched


def _line(update: Update) -> str:
    from bridge.render.outcome import done_line, status_line

    if update.notice:
        return f"{update.phase} (no answer from the remote: {clean_line(update.notice)})"
    if update.phase is Phase.DONE:
        return done_line(update.result)
    return status_line(update.status, update.phase, update.ahead, claim=update.claim)
