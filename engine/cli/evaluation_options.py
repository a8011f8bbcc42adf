"""Options that several evaluations share, what they turn into, and the call that all evaluations are."""

import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import click

from engine.cli import options as common
from engine.cli.options import FILE, F, flag, group, option
from engine.cli.reports import state_folder, store
from engine.errors import ConfigurationError
from evidence_format.text import text_digest

THINKING = click.Choice(["default", "on", "off"])
Document = dict[str, Any]
Table = Callable[[Document], None]


def claim_option(help_text: str, *choices: str) -> Callable[[F], F]:
    return option("--claim", help_text, "auto", type=click.Choice(["auto", *choices, "none"]))


set_options = group(
    option(
        "--prompts",
        "code, chat, retrieval, maths, edits (or several: code,chat), all (the first 3), or a FILE.jsonl.",
        "all",
    ),
    option("--limit", "At most so many prompts of each kind.", 8),
    option("--max-tokens", "Tokens to generate a prompt.", 96),
    option("--seed", "Order of the prompts; 0 as in the file.", 0),
)
chat_options = group(
    flag("--chat", "Send texts through the chat template, as a user's turn."),
    option("--thinking", "Tell the chat template whether to reason.", "default", type=THINKING),
)
server_options = group(set_options, common.folder_options, chat_options)
turn_options = group(
    chat_options,
    option("--channel-prefix", "Begin the model's turn with this, e.g. '<|channel|>final<|message|>'."),
    option("--system", "Put a system turn before every conversation."),
    option("--journal", "Keep finished rows here [default: by --report, else in state folder].", type=FILE),
    option("--resume/--no-resume", "Go on with the journal of an interrupted run, or delete it.", True),
)
common_options = group(turn_options, common.engine_options, common.report_options)


def haystack_options(context: str, depths: str, per_depth: str) -> Callable[[F], F]:
    return group(
        option("--context", context, type=int, metavar="N"),
        option("--depths", depths, metavar="LIST", callback=_depths),
        option("--per-depth", per_depth, type=int, metavar="K"),
    )


def _depths(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Any:
    try:
        return None if text is None else tuple(float(depth) for depth in text.split(","))
    except ValueError:
        raise ConfigurationError(f"--depths {text!r} is not a list such as 0,0.5,1") from None


def seed_option(what: str) -> Callable[[F], F]:
    text = f"{what} [default: nonce, made from --request-nonce; 0 without a request]."
    return option("--seed", text, metavar="N", callback=_seed)


def _seed(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """A whole number; None for ``nonce``, for which `seed_of` uses the request's."""
    try:
        return None if value is None or value == "nonce" else int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a valid integer; give one, or nonce") from None


def seed_of(given: int | None, request: Any) -> int:
    """The seed of generated prompts; the nonce's, so that no one can prepare for them before the request."""
    if given is not None or request is None:
        return given or 0
    return int(text_digest(request.nonce)[:8], 16)


def take_journal(values: dict[str, Any], report: Path | None) -> Any:
    from engine.evaluation.journal import Journal

    path, resume = values.pop("journal"), values.pop("resume")
    if path is None and report is not None:
        path = report.with_name(f"{report.name}.partial.jsonl")
    files = [("the journal", path), ("--report", report)]
    for name in ("prompts", "speed_prompts"):
        if values.get(name) and Path(values[name]).is_file():
            files.append((f"--{name.replace('_', '-')}", Path(values[name])))
    for (one, first), (other, second) in combinations([each for each in files if each[1]], 2):
        is_linked = first.exists() and second.exists() and first.samefile(second)
        if is_linked or first.resolve() == second.resolve():  # writing one would destroy the other
            raise ConfigurationError(f"{one} {first} and {other} {second} are one file; give them two")
    return Journal(path, state_folder() / "journals", resume)


def take_haystack(values: dict[str, Any]) -> Any:
    from engine.evaluation.haystack import Haystack

    return Haystack(*(values.pop(name) for name in ("context", "depths", "per_depth")))


class EvaluationCall:
    """What every evaluation takes from its options, removed from ``values``."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.as_json, self._report_path = values.pop("as_json"), values.pop("report_path")
        self.request, self._runtime = common.take_request(values), common.prepare()
        from engine.config import Options
        from engine.generate import ChatSwitches

        common.settle_speculation(values)
        self.options = common.take(Options, values)
        chat = ("chat", "thinking", "channel_prefix", "system")
        self.chat = ChatSwitches(*(values.pop(name) for name in chat))
        self._journal = take_journal(values, self._report_path)

    def run(self, measure: Callable[..., Any], table: Table, **more: Callable[[Document], Any]) -> None:
        """Measure, write the report, delete the journal, and `conclude`.

        ``measure`` gets the runtime and the keywords that all evaluations have.
        """
        document, stored = self.measure(measure)
        conclude(document, stored, None if self.as_json else table, **more)

    def named(self, name: str) -> "EvaluationCall":
        """The same call, its report and journal with a name of their own behind those given."""

        def suffixed(path: Path | None) -> Path | None:
            return path and path.with_name(f"{path.stem}-{name}{path.suffix}")

        other = copy(self)
        other._report_path = suffixed(self._report_path)
        other._journal = replace(self._journal, path=suffixed(self._journal.path))
        return other

    def measure(self, measure: Callable[..., Any]) -> tuple[Document, Path]:
        """Measure, write the report and delete the journal; return the report and where it is."""
        from engine.cli.progress import shown_progress

        journal = self._journal
        try:
            with shown_progress() as progress:
                report = measure(self._runtime, progress=progress, request=self.request, journal=journal)
            stored = store(report, self._report_path)
            journal.remove()
            if resumed := report.configuration["resumed"]:
                total = len(report.order)
                click.echo(f"resumed: {resumed} of {total} rows were measured before", err=True)
        except BaseException:
            if journal.close():
                kept = f"finished rows are kept in {journal.path}; the same command goes on from there"
                click.echo(f"kakeya_engine: {kept}", err=True)
            raise
        return report.document, stored

    def open_engine(self, context: int | None = None) -> Any:
        """`engine.config.open_engine`; what is compared with has native caches, which must fit, too."""
        from engine.config import open_engine
        from engine.memory import require_memory
        from engine.target.loading import SHIPPED_TARGET

        options = self.options
        if options.kv != "native":
            about: dict[str, Any] = {"dtype": options.dtype, "quantize": options.quantize}
            require_memory(options.model or SHIPPED_TARGET, context=context, **about)
        return open_engine(options, context)

    def run_set(self, measure: Callable[..., Any], switches: Any, table: Table, **more: Any) -> None:
        from engine.evaluation.prompts import load_prompts

        switches.check()
        prompts = load_prompts(switches.prompts, switches.limit, switches.seed)
        longest = max((prompt.characters for prompt in prompts), default=0)
        wanted = longest // common.CHARACTERS_A_TOKEN + switches.max_tokens
        self.run(partial(measure, self.open_engine(wanted), prompts, switches), table, **more)


def conclude(
    document: Document, stored: Path, table: Table | None, **more: Callable[[Document], Any]
) -> None:
    """Show a stored report's table, what the gate will say, and the JSON line, to which ``more`` adds."""
    if table is not None:
        table(document)
    click.echo(json.dumps(concluded(document, stored, shown=table is not None, **more)))


def concluded(
    document: Document, stored: Path, *, shown: bool, **more: Callable[[Document], Any]
) -> Document:
    """The JSON line of a stored report, to which ``more`` adds; what the gate will say is ``shown``."""
    from engine.cli.tables import figures, print_line

    added = {name: figure(document) for name, figure in more.items()}
    broken = gate_violations(stored)
    if shown:
        print_line("the gate will accept this report" if not broken else "the gate will reject this report:")
        for each in broken:
            print_line(f"  {each['code']}: {each['message']}")
    gate = {"accepted": not broken, "violations": broken}
    return figures(document) | added | {"gate": gate, "report": str(stored)}


def gate_violations(stored: Path) -> list[dict[str, str]]:
    """What the gate, whose rules these are, will say of a report: of each rule the first message."""
    from evidence_format.figures import Case
    from evidence_format.parse import parse
    from evidence_format.rules import RULES

    case = Case(parse(stored.read_bytes()))
    messages = {code: next(rule.check(case), None) for code, rule in RULES.items()}
    return [{"code": code, "message": message} for code, message in messages.items() if message]
