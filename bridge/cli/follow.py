"""Follow a request on the terminal: phases as they come, progress in place, the outcome at the end.

Progress goes to standard error; standard output carries the outcome alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge.bus.git import Git
from bridge.bus.results import Asked, Believed, FetchedResult, believe
from bridge.cli import echo_json, note_untrusted
from bridge.client.remotes import Remote
from bridge.client.watch import Update, watch
from bridge.errors import WaitTimeout
from bridge.protocol.result import Phase, Status
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import (
    FROM_BUS,
    done_line,
    outcome_json,
    outcome_lines,
    status_line,
    verification_lines,
)
from bridge.settings import Settings

if TYPE_CHECKING:
    from bridge.cli.attending import Attending
    from bridge.client.judged import Judged
    from bridge.client.verified import Verified

# Seconds to wait, by how many older requests wait, too; None: not known.
Expectation = Callable[[int | None], float | None]
_Screen = tuple[Callable[[Update], None], Callable[[str], None]]

_QUIET_S = 2.0  # between two progress lines where there is no terminal


def follow(
    settings: Settings,
    git: Git,
    remote: Remote,
    nonce: str,
    *,
    wait_s: float,
    as_json: bool,
    asked: Asked | None = None,
    output: Path | None = None,
    extra: dict[str, Any] | None = None,
    outcome: Callable[[dict[str, Any]], object] | None = None,
    allow_unsigned: bool = False,
    expect: Expectation = lambda _: None,
    attending: Attending | None = None,
) -> int:
    """Watch `nonce` until its result is home, show it, and return its exit code.

    Args:
        settings: Whose trusted runners count.
        git: Any checkout; nothing is left in it.
        remote: The bus.
        nonce: The request.
        wait_s: Seconds until this gives up; the job goes on.
        as_json: End with one JSON line instead of text.
        asked: The request as this client submitted it; None: as it stands on the remote.
        output: Folder to save the result in.
        extra: More keys for the JSON line.
        outcome: Is given the JSON document, also when text is shown.
        allow_unsigned: Show what no trusted runner signed all the same, and let it pass.
        expect: Seconds to wait beside so many older requests; None: not known.
        attending: Attends to its workflow run; None: it has none.

    Raises:
        ResultError: What was published cannot be believed.
        BusError: The remote never answered, or the request is gone.
    """
    try:
        fetched = _watched(
            git,
            remote,
            nonce,
            time.monotonic() + wait_s,
            asked=asked,
            expect=expect,
            trusted=settings.trusted_runners,
            attending=attending,
        )
    except WaitTimeout as timeout:
        click.echo(f"error: {timeout.message}", err=True)
        click.echo(f"  {timeout.remedy}", err=True)
        document = {
            **(extra or {}),
            **_run_json(attending),
            "status": "waiting",
            "nonce": nonce,
            "exit_code": timeout.exit_code,
        }
        if outcome is not None:
            outcome(document)
        if as_json:
            echo_json(document, untrusted=("runners", "preset"))
        return timeout.exit_code
    except KeyboardInterrupt:
        click.echo(f"the request goes on: kakeya_mac wait {nonce}", err=True)
        raise
    allow_unsigned = allow_unsigned or settings.allow_unsigned
    believed = believe(
        fetched, trusted=settings.trusted_runners, asked=asked, allow_unsigned=allow_unsigned, bound=False
    )
    extra = {**(extra or {}), **_run_json(attending)}
    return present(
        settings,
        believed,
        fetched,
        as_json=as_json,
        output=output,
        extra=extra,
        outcome=outcome,
        allow_unsigned=allow_unsigned,
    )


def _run_json(attending: Attending | None) -> dict[str, Any]:
    return {} if attending is None else attending.as_json()


def present(
    settings: Settings,
    believed: Believed,
    fetched: FetchedResult,
    *,
    as_json: bool,
    output: Path | None,
    extra: dict[str, Any] | None = None,
    outcome: Callable[[dict[str, Any]], object] | None = None,
    allow_unsigned: bool = False,
    replay: Callable[[Believed], Verified] | None = None,
) -> int:
    """Judge a believed result, show it (and with `output` save it); returns the exit code of its status.

    Args:
        settings: The client's.
        believed: The result.
        fetched: Where its bytes are.
        as_json: One JSON line instead of text.
        output: Folder to save the result in.
        extra: More keys for the JSON line.
        outcome: Is given the JSON document, also when text is shown.
        allow_unsigned: Whether a pass counts that no trusted key signed.
        replay: Replays the report of a result that passed; what it finds may change the exit code.
    """
    from bridge import presets
    from bridge.client.judged import judge
    from bridge.client.save import save
    from bridge.render.outcome import unverified_lines

    judged = judge(
        believed,
        installed=presets.load_all(settings.presets),
        allow_unsigned=allow_unsigned or settings.allow_unsigned,
    )
    passed = judged.verdict.status is Status.PASSED
    verified = replay(believed) if replay is not None and passed else None
    code = verified.exit_code if verified is not None and verified.exit_code else judged.exit_code
    if outcome is not None:
        outcome(outcome_json(judged))
    if output is not None:
        save(believed, fetched, output)
        if verified is not None:
            verified.save(output)
    if as_json:
        saved = {} if output is None else {"output": str(output)}
        replayed = (
            {} if replay is None else {"verification": verified and verified.as_json(), "exit_code": code}
        )
        document = {**(extra or {}), **outcome_json(judged), **saved, **replayed}
        echo_json(document, untrusted=(*FROM_BUS, "runners"))
    else:
        _show(judged, output)
        for line in () if verified is None else verification_lines(verified.record):
            click.echo(line)
    for line in unverified_lines(judged):
        click.echo(line, err=True)
    return code


def _watched(
    git: Git,
    remote: Remote,
    nonce: str,
    deadline: float,
    *,
    asked: Asked | None,
    expect: Expectation,
    trusted: Path,
    attending: Attending | None,
) -> FetchedResult:
    """What was published in the end; every change is shown on the way."""
    fetched: FetchedResult | None = None
    with _progress(expect) as (show, say):

        def sleep(seconds: float) -> None:
            if attending is None:
                time.sleep(seconds)
            else:
                attending.sleep(seconds, say)

        for update in watch(
            git, remote.address, nonce, deadline=deadline, asked=asked, trusted=trusted, sleep=sleep
        ):
            show(update)
            if attending is not None:
                attending.saw(update)
            fetched = update.result
    if fetched is None:
        raise WaitTimeout(f"{nonce}: the watch ended without a result", f"kakeya_mac wait {nonce}")
    return fetched


def _show(judged: Judged, output: Path | None) -> None:
    from bridge.render.tables import console
    from bridge.render.terminal import evidence_tables

    out = console()
    for judgement in judged.judgements.values():
        for table in evidence_tables(judgement):
            out.print(table)
    for line in outcome_lines(judged):
        click.echo(line)
    if output is not None:
        click.echo(f"  saved    {output}")
    note_untrusted()


@contextmanager
def _progress(expect: Expectation) -> Iterator[_Screen]:
    """Two functions, one shows an update: in place on a terminal, as occasional lines elsewhere; and one a
    line.
    """
    if sys.stderr.isatty():
        with _live(expect) as screen:
            yield screen
        return
    last_phase, last_line, last_time = None, "", 0.0

    def show_line(update: Update) -> None:
        nonlocal last_phase, last_line, last_time
        line = _line(update, expect)
        now = time.monotonic()
        soon = update.phase == last_phase and now - last_time < _QUIET_S
        if line == last_line or (soon and not update.notice):
            return
        click.echo(line, err=True)
        last_phase, last_line, last_time = update.phase, line, now

    yield show_line, lambda line: click.echo(clean_line(line), err=True)


@contextmanager
def _live(expect: Expectation) -> Iterator[_Screen]:
    from rich.console import Console

    console = Console(stderr=True)
    seen: list[Phase] = []
    with console.status("submitted") as status:

        def show_live(update: Update) -> None:
            if update.phase not in seen:
                seen.append(update.phase)
                console.print(_line(update, expect), highlight=False, markup=False)
            status.update(_escaped(_line(update, expect)))

        yield (
            show_live,
            lambda line: console.print(clean_line(line), highlight=False, markup=False),
        )


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _line(update: Update, expect: Expectation) -> str:
    if update.notice:
        return f"{update.phase} (no answer from the remote: {clean_line(update.notice)})"
    if update.phase is Phase.DONE:
        return done_line(update.result)
    expected_s = expect(update.ahead) if update.phase is Phase.QUEUED else None
    return status_line(update.status, update.phase, update.ahead, expected_s, claim=update.claim)
