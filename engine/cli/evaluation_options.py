"""Options that several evaluations share, what they turn into, and the call that all evaluations are."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import click

from engine.cli.options import F, engine_options, group, option, report_options, take_engine, take_request
from engine.cli.reports import state_folder, store
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


common_options = group(chat_options, journal_options, engine_options, report_options)


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


def take_haystack(values: dict[str, Any]) -> Any:
    """`engine.evaluation.haystack.Haystack` from the values of `haystack_options`, removed from them."""
    from engine.evaluation.haystack import Haystack

    given = values.pop("depths")
    try:
        depths = None if given is None else tuple(float(depth) for depth in given.split(","))
    except ValueError:
        raise ConfigurationError(f"--depths {given!r} is not a list such as 0,0.5,1") from None
    return Haystack(values.pop("context"), depths, values.pop("per_depth"))


class EvaluationCall:
    """What every evaluation takes from its options, removed from ``values``."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.as_json, self.report_path = values.pop("as_json"), values.pop("report_path")
        self.request, self.options = take_request(values), take_engine(values)
        from engine.device import prepare
        from engine.generate import ChatSwitches

        self.chat = ChatSwitches(**{name: values.pop(name) for name in CHAT})
        self.journal = take_journal(values, self.report_path)
        self.runtime = prepare()

    def run(
        self,
        measure: Callable[..., Any],
        tables: Sequence[Callable[[dict[str, Any]], None]],
        more: Mapping[str, Callable[[dict[str, Any]], Any]] | None = None,
    ) -> None:
        """Measure, write the report, delete the journal, show tables, end with the JSON line.

        ``measure`` gets the keywords that all evaluations have; ``more`` adds to the JSON line.
        """
        from engine.cli.progress import shown_progress
        from engine.cli.tables import figures

        try:
            with shown_progress() as progress:
                report = measure(progress=progress, request=self.request, journal=self.journal)
            stored, document = store(report, self.report_path), report.document
            self.journal.remove()
            added = {name: figure(document) for name, figure in (more or {}).items()}
            line = figures(document) | added | {"report": str(stored)}
            for table in () if self.as_json else tables:
                table(document)
            click.echo(json.dumps(line))
        except BaseException:
            if self.journal.close():
                click.echo(
                    f"kakeya_engine: finished rows are kept in {self.journal.path}; "
                    "the same command goes on from there",
                    err=True,
                )
            raise

    def run_set(self, measure: Callable[..., Any], switches: Any, *shown: Any) -> None:
        """The same for an evaluation over a set of prompts."""
        from engine.config import open_engine
        from engine.evaluation.prompts import load_prompts

        switches.check()
        prompts = load_prompts(switches.prompts, switches.limit, switches.seed)

        def measured(**context: Any) -> Any:
            return measure(open_engine(self.options), prompts, switches, self.runtime, **context)

        self.run(measured, *shown)
