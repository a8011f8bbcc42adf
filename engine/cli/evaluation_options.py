"""Options that several evaluations share, and what they turn into."""

import hashlib
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import click

from engine.cli.options import F, group, option
from engine.cli.reports import state_folder
from engine.errors import ConfigurationError

CHAT = ("chat", "thinking", "channel_prefix", "system")


def max_tokens_option(default: int, help_text: str = "Tokens to generate a prompt.") -> Callable[[F], F]:
    """--max-tokens."""
    return option("--max-tokens", help_text, default)


def claim_option(help_text: str, *choices: str) -> Callable[[F], F]:
    """--claim, of auto, these and none."""
    return option("--claim", help_text, "auto", type=click.Choice(["auto", *choices, "none"]))


set_options = group(
    option(
        "--prompts",
        "code, chat, retrieval (or several, comma-separated), all, or a FILE.jsonl of prompts.",
        "all",
    ),
    option("--limit", "At most so many prompts of each kind.", 8),
    max_tokens_option(96),
    option("--seed", "Order of the prompts; 0 as in the file.", 0),
)
journal_options = group(
    option(
        "--journal",
        "Keep finished rows here until the report is written "
        "[default: REPORT.partial.jsonl, or a file in the state folder].",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
    ),
    option("--resume/--no-resume", "Go on with the journal of an interrupted run, or delete it.", True),
)
chat_options = group(
    click.option("--chat", is_flag=True, help="Send texts through the chat template, as a user's turn."),
    option(
        "--thinking",
        "Tell the chat template whether to reason; refused where it has no such switch.",
        "default",
        type=click.Choice(["default", "on", "off"]),
    ),
    option(
        "--channel-prefix",
        "Begin the model's turn with this, e.g. '<|channel|>final<|message|>'.",
        metavar="TEXT",
    ),
    option("--system", "Put a system turn before every conversation.", metavar="TEXT"),
)


def haystack_options(context: str, depths: str, per_depth: str) -> Callable[[F], F]:
    """--context, --depths and --per-depth with these help texts."""
    return group(
        option("--context", context, type=int, metavar="N"),
        option("--depths", depths, metavar="LIST"),
        option("--per-depth", per_depth, type=int, metavar="K"),
    )


def _seed(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """A whole number; None for ``nonce``, for which `seed_of` uses the request's."""
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
    """The seed of generated prompts: the given one, else from the request's nonce, so that no one can prepare
    for them before there is a request; 0 without one.
    """
    if given is not None:
        return given
    return 0 if request is None else int(hashlib.sha256(request.nonce.encode("ascii")).hexdigest()[:8], 16)


def take_journal(values: dict[str, Any], report: Path | None) -> Any:
    """`engine.evaluation.journal.Journal` from the values of `journal_options`, removed from ``values``."""
    from engine.evaluation.journal import Journal

    path, resume = values.pop("journal"), values.pop("resume")
    if path is None and report is not None:
        path = report.with_name(f"{report.name}.partial.jsonl")
    files = [("the journal", path), ("--report", report)]
    for option_name, name in (("--prompts", "prompts"), ("--speed-prompts", "speed_prompts")):
        if values.get(name) and Path(values[name]).is_file():
            files.append((option_name, Path(values[name])))
    for (one, first), (other, second) in combinations([each for each in files if each[1]], 2):
        is_linked = first.exists() and second.exists() and first.samefile(second)
        if is_linked or first.resolve() == second.resolve():  # writing one would destroy the other
            raise ConfigurationError(f"{one} {first} and {other} {second} are one file; give them two")
    return Journal(path, state_folder() / "journals", resume)


def take_chat(values: dict[str, Any]) -> Any:
    """`engine.generate.ChatSwitches` from the values of `chat_options`, removed from ``values``."""
    from engine.generate import ChatSwitches

    return ChatSwitches(**{name: values.pop(name) for name in CHAT})


def take_haystack(values: dict[str, Any]) -> Any:
    """`engine.evaluation.haystack.Haystack` from the values of `haystack_options`, removed from them."""
    from engine.evaluation.haystack import Haystack

    given = values.pop("depths")
    try:
        depths = None if given is None else tuple(float(depth) for depth in given.split(","))
    except ValueError:
        raise ConfigurationError(f"--depths {given!r} is not a list such as 0,0.5,1") from None
    return Haystack(values.pop("context"), depths, values.pop("per_depth"))
