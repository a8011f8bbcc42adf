"""The command ``kakeya_mac``: parse, call one function, render, return a code.

The group knows its commands by name and one line of help, and imports a command's module only when it is
called, so that ``--help`` answers at once. Errors become one line on stderr (one JSON line with ``--json``)
here and nowhere else.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from threading import Timer
from typing import Any, NoReturn

import click

from bridge import __version__
from bridge.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_TERMINATED, BridgeError

# command -> (module, one line of help), in the order a newcomer needs them
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("bridge.cli.demo", "Run the main job end to end on this machine, over a git remote of its own."),
    "doctor": ("bridge.cli.doctor", "Can this checkout use the bridge? What is missing, and how to fix it."),
    "presets": (
        "bridge.cli.presets",
        "The allowlist: each preset, its parameters, types, bounds and defaults.",
    ),
    "run": ("bridge.cli.run", "Submit a request; with --wait, follow it to its result."),
    "status": ("bridge.cli.status", "Where a request is."),
    "wait": ("bridge.cli.wait", "Follow a request to its result."),
    "logs": ("bridge.cli.logs", "What the job printed: live while it runs, complete afterwards."),
    "result": ("bridge.cli.result", "Fetch a result, check it, and show or save it."),
    "fetch": ("bridge.cli.fetch", "Save every published file of one or more requests."),
    "cancel": ("bridge.cli.cancel", "Ask for a request to be stopped, whether it waits or runs."),
    "again": ("bridge.cli.again", "Submit the same job again, as a new request."),
    "queue": ("bridge.cli.queue", "What waits, runs and ran, and on which Mac."),
    "history": ("bridge.cli.history", "ProgramResult requests, the archived ones too."),
    "prune": ("bridge.cli.prune", "Archive old results, then delete their branches."),
    "key": ("bridge.cli.key", "Which key signs your requests, and what to give to a Mac's owner."),
    "gate": ("bridge.cli.gate", "Judge evidence files."),
    "runners": ("bridge.cli.runners", "Which runners are there, what they offer, whose keys are trusted."),
    "runner": ("bridge.cli.runner", "On the Mac: serve requests."),
}


class LazyGroup(click.Group):
    """A click group that imports a command's module when the command is called, not for its help line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


EPILOG = """\b
Examples:
  kakeya_mac demo
  kakeya_mac run --preset throughput -p prompts=code --wait
  kakeya_mac result 20260301t120000z0123456789ab -o out/

Exit codes of a finished request: 0 passed, 1 failed, 2 refused, 3 evidence rejected, 4 the wait timed out,
5 cancelled or lost, 6 git or the network failed, 7 passed, but no trusted key signed it, 70 our own bug,
130 interrupted, 143 terminated."""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kakeya_mac")
def cli() -> None:
    """Run vetted jobs on an Apple Silicon Mac you cannot reach, over git, and trust the numbers.

    A request is a branch, a result is a commit. The client needs git and push rights, nothing else.
    """


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: the command ends like an interrupted one, tidily, with a code of its own."""


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``kakeya_mac``; exits with the code of the command."""
    arguments = sys.argv[1:] if argv is None else argv
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # a parent may have chosen to ignore it
            signal.signal(number, _terminate)
    sys.unraisablehook = _terminate_later
    sys.exit(run_edge(cli, arguments))


def run_edge(command: click.Command, arguments: list[str]) -> int:
    """Run `command` and turn whatever it raises into a message and an exit code."""
    try:
        code = command.main(arguments, prog_name="kakeya_mac", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        if "--json" in arguments:
            echo_json(_failure("UsageError", error.format_message(), None, error.exit_code))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as stop:  # click turns the one into the other
        terminated = isinstance(stop, Terminated) or isinstance(stop.__cause__, Terminated)
        click.echo("terminated" if terminated else "interrupted", err=True)
        return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
    except BridgeError as error:
        _show_error(error, as_json="--json" in arguments)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away (| head)
        return 0
    except Exception as error:  # the last line of defence: our bug must not look like the user's mistake
        _show_bug(error)
        return EXIT_BUG
    return code if isinstance(code, int) else 0


def echo_json(document: Mapping[str, Any], *, untrusted: Collection[str] = ()) -> None:
    """Print one JSON line, the last thing a command with ``--json`` says.

    Args:
        document: What to say.
        untrusted: Its keys below which text from the bus stands.
    """
    from bridge.render.terminal import document as mark

    click.echo(json.dumps(mark(document, untrusted), sort_keys=True))


def show(as_json: bool, document: Mapping[str, Any], lines: Iterable[str]) -> int:
    """Show what a command has to say, as one JSON line or as lines for people; returns exit code 0."""
    if as_json:
        echo_json({**document, "exit_code": 0})
    else:
        for line in lines:
            click.echo(line)
    return 0


def note_untrusted() -> None:
    """Say on standard error, where a program reads the output, that text of it came over the bus."""
    if not sys.stdout.isatty():
        from bridge.render.terminal import NOTICE

        click.echo(f"note: {NOTICE}", err=True)


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


def _terminate(_number: int, _frame: object) -> NoReturn:
    raise Terminated


def _terminate_later(lost: sys.UnraisableHookArgs) -> None:
    """Send a signal again that came while Python ran a `__del__`, which swallows whatever is raised in it."""
    if isinstance(lost.exc_value, Terminated):
        Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        sys.__unraisablehook__(lost)


def _show_error(error: BridgeError, *, as_json: bool) -> None:
    from bridge.protocol.sanitize import clean

    click.echo(f"error: {clean(error.message)}", err=True)
    if error.remedy:
        click.echo(f"  {clean(error.remedy)}", err=True)
    if as_json:
        document = _failure(type(error).__name__, error.message, error.remedy, error.exit_code)
        echo_json(document, untrusted=("message", "remedy"))


def _failure(name: str, message: str, remedy: str | None, code: int) -> dict[str, Any]:
    """The JSON line of a command that ended in an error."""
    return {"status": "error", "error": name, "message": message, "remedy": remedy, "exit_code": code}


def _show_bug(error: Exception) -> None:
    import traceback
    from datetime import UTC, datetime

    from bridge import settings
    from bridge.protocol.sanitize import without_credentials

    text = "".join(traceback.format_exception(error))
    where = settings.state_dir() / "crashes" / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.txt"
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(
            f"kakeya_mac {__version__}\n{without_credentials(' '.join(sys.argv))}\n\n{text}", encoding="utf-8"
        )
        kept = f"The details are in {where}; please attach that file to a report"
    except OSError:
        kept = f"{text}\nPlease attach this to a report"
    click.echo(f"internal error: {type(error).__name__}: {error}", err=True)
    click.echo(f"  This is a bug in kakeya-mac, not in your request. {kept} (see CONTRIBUTING.md).", err=True)
