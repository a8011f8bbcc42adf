"""Options that several evaluations share: sets, journal, chat template, made-up haystacks and their seed."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import click

from engine.cli.options import F, with_options
from engine.cli.reports import state_folder
from engine.errors import ConfigurationError


def set_options(command: F) -> F:
    """--prompts, --limit, --max-tokens and --seed, for evaluations over sets of prompts."""
    return with_options(
        command,
        click.option(
            "--prompts",
            default="all",
            show_default=True,
            help="code, chat, retrieval (or several, comma-separated), all, or a FILE.jsonl of prompts.",
        ),
        click.option(
            "--limit", type=int, default=8, show_default=True, help="At most so many prompts of each kind."
        ),
        click.option(
            "--max-tokens", type=int, default=96, show_default=True, help="Tokens to generate a prompt."
        ),
        click.option(
            "--seed", type=int, default=0, show_default=True, help="Order of the prompts; 0 as in the file."
        ),
    )


def journal_options(command: F) -> F:
    """--journal and --resume/--no-resume."""
    return with_options(
        command,
        click.option(
            "--journal",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Keep finished rows here until the report is written "
            "[default: REPORT.partial.jsonl, or a file in the state folder].",
        ),
        click.option(
            "--resume/--no-resume",
            default=True,
            show_default=True,
            help="Go on with the journal of an interrupted run, or delete it.",
        ),
    )


def chat_options(command: F) -> F:
    """--chat, --thinking, --channel-prefix and --system."""
    return with_options(
        command,
        click.option("--chat", is_flag=True, help="Send texts through the chat template, as a user's turn."),
        click.option(
            "--thinking",
            type=click.Choice(["default", "on", "off"]),
            default="default",
            show_default=True,
            help="Tell the chat template whether to reason; refused where it has no such switch.",
        ),
        click.option(
            "--channel-prefix",
            metavar="TEXT",
            help="Begin the model's turn with this, e.g. '<|channel|>final<|message|>'.",
        ),
        click.option("--system", metavar="TEXT", help="Put a system turn before every conversation."),
    )


def haystack_options(command: F) -> F:
    """--context, --depths and --per-depth; any of them makes prompts up."""
    return with_options(
        command,
        click.option(
            "--context", type=int, metavar="N", help="Make prompts of so many tokens up [default: 440]."
        ),
        click.option(
            "--depths",
            metavar="LIST",
            help="… with the needle at these shares of the haystack [default: 0,0.25,0.5,0.75,1].",
        ),
        click.option("--per-depth", type=int, metavar="K", help="… so many at each depth [default: 4]."),
    )


def _seed(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """A whole number; None for ``nonce``, for which `seed_of` takes the request's."""
    if value is None or value == "nonce":
        return None
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a valid integer; give one, or nonce") from None


def seed_option(what: str) -> Callable[[F], F]:
    """--seed of generated prompts."""
    return click.option(
        "--seed",
        callback=_seed,
        metavar="N",
        help=f"{what} [default: nonce, made from --request-nonce; 0 without a request].",
    )


def seed_of(given: int | None, request: Any) -> int:
    """The seed of generated prompts: the one given, else from the request's nonce, so that nobody could
    prepare for them before there was a request; 0 where there is none.
    """
    if given is not None:
        return given
    return 0 if request is None else int(hashlib.sha256(request.nonce.encode("ascii")).hexdigest()[:8], 16)


def take_journals(values: dict[str, Any], report: Path | None) -> Any:
    """`engine.evaluation.journal.Journals` from the values of `journal_options`, which are taken out.

    Raises:
        ConfigurationError: journal, report and prompts are not each a file of their own.
    """
    from engine.evaluation.journal import Journals

    path, resume = values.pop("journal"), values.pop("resume")
    if path is None and report is not None:
        path = report.with_name(f"{report.name}.partial.jsonl")
    files = {"the journal": path, "--report": report}
    for name in ("prompts", "speed_prompts"):
        if values.get(name) and Path(values[name]).is_file():
            files["--" + name.replace("_", "-")] = Path(values[name])
    _refuse_one_file(files)
    return Journals(path, state_folder() / "journals", resume)


def _refuse_one_file(files: dict[str, Path | None]) -> None:
    """Raise ConfigurationError where two names stand for one file: writing one would destroy the other."""
    for (one, first), (other, second) in combinations(files.items(), 2):
        if first is not None and second is not None and _is_one(first, second):
            raise ConfigurationError(f"{one} {first} and {other} {second} are one file; give them two")


def _is_one(first: Path, second: Path) -> bool:
    """Whether two paths lead to the same file, or would."""
    if first.resolve() == second.resolve():
        return True
    return first.exists() and second.exists() and first.samefile(second)


def take_chat(values: dict[str, Any]) -> Any:
    """`engine.evaluation.templates.ChatSwitches` from the values of `chat_options`, which are taken out."""
    from engine.evaluation.templates import ChatSwitches

    names = ("chat", "thinking", "channel_prefix", "system")
    return ChatSwitches(**{name: values.pop(name) for name in names})


def take_haystack(values: dict[str, Any]) -> Any:
    """`engine.evaluation.haystack.Haystack` from the values of `haystack_options`, which are taken out.

    Raises:
        ConfigurationError: the depths are not numbers.
    """
    from engine.evaluation.haystack import Haystack

    given = values.pop("depths")
    try:
        depths = None if given is None else tuple(float(depth) for depth in given.split(","))
    except ValueError:
        raise ConfigurationError(f"--depths {given!r} is not a list such as 0,0.5,1") from None
    return Haystack(values.pop("context"), depths, values.pop("per_depth"))


@contextmanager
def keeping(journals: Any) -> Iterator[None]:
    """Say where an interrupted measurement's rows are, and close the journal in any case."""
    try:
        yield
    except BaseException:
        if journals.opened is not None and journals.opened.close():
            click.echo(
                f"kakeya_engine: finished rows are kept in {journals.opened.path}; "
                "the same command goes on from there",
                err=True,
            )
        raise
