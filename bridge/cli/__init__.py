"""The command ``kakeya_mac``: parse, call one function, print, return a code. Only this prints errors."""

from __future__ import annotations

import _thread
import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.shell_completion import CompletionItem

from bridge import __version__, state_dir
from bridge.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    BridgeError,
    MachineError,
    RequestRefused,
)
from bridge.proc import write_atomic
from bridge.protocol.sanitize import clean, without_credentials
from bridge.render import terminal

if TYPE_CHECKING:
    from rich.table import Table

# The module of each command is `bridge.cli.NAME`; in the order in which a newcomer needs them.
COMMANDS = {
    "demo": "Run the main job end to end on this machine, over a git remote of its own.",
    "doctor": "Can this checkout use the bridge? What is missing, and how to fix it.",
    "presets": "The allowlist: each preset, its parameters, types, bounds and defaults.",
    "run": "Submit a request; with --wait, follow it to its result.",
    "status": "Where a request is.",
    "wait": "Follow a request to its result.",
    "logs": "What the job printed: live while it runs, complete afterwards.",
    "result": "Fetch a result, check it, and show or save it.",
    "fetch": "Save every published file of one or more requests.",
    "attest": "Signed statements about a result, for verifiers that are not ours.",
    "cancel": "Ask for a request to be stopped, whether it waits or runs.",
    "again": "Submit the same job again, as a new request.",
    "queue": "What waits, runs and ran, and on which Mac.",
    "history": "Finished requests, the archived ones too.",
    "prune": "Archive old results, then delete their branches.",
    "key": "Which key signs your requests, and what to give to a Mac's owner.",
    "report": "One page for people: verdict, figures, charts; also as Markdown, also of several requests.",
    "compare": "Which of two finished requests was faster.",
    "gate": "Judge evidence files.",
    "mcp": "Serve an agent's tools over the Model Context Protocol.",
    "actions": "Write the workflow that asks a Mac about each pull request.",
    "skill": "Install the skill that tells an agent how to use this program.",
    "runners": "Which runners are there, what they offer, whose keys are trusted.",
    "runner": "On the Mac: serve requests.",
    "completion": "Complete commands, presets, parameters and handles in a shell.",
}


class LazyGroup(click.Group):
    """Imports a command's module when the command is called, so that ``--help`` answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"bridge.cli.{cmd_name}"), cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        names = [
            CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    commands={name: click.Command(name) for name in COMMANDS},  # what click suggests for a misspelt one
    epilog="""\b
Examples:
  kakeya_mac demo
  kakeya_mac run --preset throughput -p prompts=code --wait
  kakeya_mac result 20260301t120000z0123456789ab -o out/

Exit codes of a finished request: 0 passed, 1 failed, 3 evidence rejected, 4 the wait timed out,
5 cancelled or lost, 6 git or the network failed, 7 passed, but no trusted key signed it, 8 refused by the
Mac. Others: 2 a wrong command line, an unknown handle, or a request that cannot be made; 9 no live runner
would take it (--require-runner); 70 our own bug, 130 interrupted, 143 terminated.""",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="kakeya_mac")
def cli() -> None:
    """Run vetted jobs on an Apple Silicon Mac you cannot reach, over git, and trust the numbers.

    A request is a branch, a result is a commit. The client needs git and push rights, nothing else.

    Text from runners, requesters and results is data, never an instruction: anyone with push rights can write
    it. It is shown without terminal escapes; logs are fenced, and JSON lists its keys under `untrusted`.
    """


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: the command ends like an interrupted one, tidily, with a code of its own."""


_terminated_by: list[int] = []  # signals: a library may turn `Terminated` into an error of its own


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``kakeya_mac``; exits with the code of the command."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # a parent may have chosen to ignore it
            signal.signal(number, _terminate)
    sys.unraisablehook = _terminate_later
    if "_KAKEYA_MAC_COMPLETE" in os.environ:  # a shell asks; the module says how it is answered
        importlib.import_module("bridge.cli.completion")
    sys.exit(run_edge(cli, sys.argv[1:] if argv is None else argv))


def run_edge(command: click.Command, arguments: list[str]) -> int:
    """Run `command` and turn whatever it raises into a message and an exit code."""
    failure: tuple[str, str, str | None, int]
    try:
        code = command.main(arguments, prog_name="kakeya_mac", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, click.Abort) as stop:  # click turns the one into the other
        terminated = isinstance(stop, Terminated) or isinstance(stop.__cause__, Terminated)
        return _stopped(terminated)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away (| head)
        return 0
    except click.ClickException as error:
        error.show()
        failure = ("UsageError", error.format_message(), None, error.exit_code)
    except BridgeError as error:
        show_error(error)
        failure = (type(error).__name__, error.message, error.remedy, error.exit_code)
    except Exception as error:  # the last line of defence: our bug must not look like the user's mistake
        if _terminated_by:
            return _stopped(True)
        _show_bug(error)
        return EXIT_BUG
    document = dict(zip(("error", "message", "remedy", "exit_code"), failure, strict=True))
    untrusted = () if failure[0] == "UsageError" else ("message", "remedy")
    return show("--json" in arguments, document | {"status": "error"}, untrusted=untrusted)


def show(
    as_json: bool,
    document: Mapping[str, Any],
    lines: Iterable[str | Table] = (),
    *,
    untrusted: Collection[str] = (),
    note: bool = False,
) -> int:
    """Print what a command found, as one JSON line or for people; returns the document's ``exit_code``.

    `untrusted` names the keys whose values come from the bus; with `note` people are told so, the first time
    on this machine. A request's ``nonce`` is its ``handle``, too.
    """
    if as_json:
        named = {"handle": document["nonce"]} if "nonce" in document else {}
        click.echo(json.dumps(terminal.document({**named, **document}, untrusted), sort_keys=True))
    else:
        for line in lines:
            if isinstance(line, str):
                click.echo(line)
            else:
                terminal.console().print(line)
        if note:
            _tell_once()
    return int(document.get("exit_code", 0))


def _tell_once() -> None:
    """Say what texts of others are worth, once on this machine."""
    told = state_dir() / "notice-shown"
    if not told.exists():
        click.echo(f"note: {terminal.NOTICE} (said once on this machine; see kakeya_mac --help)", err=True)
        with contextlib.suppress(OSError):  # then it is said again
            told.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            told.touch()


def warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        click.echo(f"warning: {sentence}", err=True)


def show_error(error: BridgeError, *, label: str = "error: ") -> None:
    click.echo(f"{label}{clean(error.message)}", err=True)
    if error.remedy:
        click.echo(f"  {clean(error.remedy)}", err=True)


def write_text(path: Path, text: str) -> None:
    """Write a file that a command was asked for, in place of one there."""
    try:
        write_atomic(path, text.encode(), mode=0o644)
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror or error}") from None


def write_project_file(path: Path, text: str, *, force: bool, remedy: str) -> None:
    """Write a file into a project; one that differs is overwritten with `force` alone."""
    try:
        if path.exists() and path.read_bytes() != text.encode() and not force:
            raise RequestRefused(f"{path} exists and differs", "compare them, or add --force")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode(), mode=0o644)
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}", remedy) from None


@contextlib.contextmanager
def on_signals(heed: Callable[[], object]) -> Iterator[None]:
    """Call a function at SIGTERM and SIGINT, in a thread: the interrupted code may hold a lock it needs."""

    def handle(_number: int, _frame: object) -> None:
        _thread.start_new_thread(heed, ())

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(terminated: bool) -> int:
    click.echo("terminated" if terminated else "interrupted", err=True)
    return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED


def _terminate(number: int, _frame: object) -> NoReturn:
    _terminated_by.append(number)
    raise Terminated


def _terminate_later(lost: sys.UnraisableHookArgs) -> None:
    """Send a signal again that came while Python ran a `__del__`, which swallows whatever is raised in it."""
    if isinstance(lost.exc_value, Terminated):
        Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        sys.__unraisablehook__(lost)


def _show_bug(error: Exception) -> None:
    text = "".join(traceback.format_exception(error))
    where = state_dir() / "crashes" / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.txt"
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        command = without_credentials(" ".join(sys.argv))
        where.write_text(f"kakeya_mac {__version__}\n{command}\n\n{text}", encoding="utf-8")
    except OSError:
        click.echo(text, err=True)
    click.echo(f"internal error: {type(error).__name__}: {error}", err=True)
    click.echo(f"  a bug in kakeya-mac; report it with {where} (see CONTRIBUTING.md)", err=True)
