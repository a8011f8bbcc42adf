"""A conversation in the terminal: turns and /commands read from standard input, answers shown as they come.

Answers are on standard output, everything else on stderr. On a terminal reasoning is dimmed; elsewhere it is
left out, so that it is never mistaken for the answer.
"""

import json
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

import click

from engine.chat import Conversation, DoesNotFit, Told, Transcript, Turn
from engine.cli.terminal import is_ci, is_interactive
from engine.errors import ConfigurationError, GenerationError, InputError, PromptError
from engine.server.parsing import ParsedText
from engine.server.sequence import PrefillProgress

PROMPT, MORE = "> ", ". "
PASTE_S = 0.02  # a pasted line is followed by the next one so soon; people do not type that fast
# Control characters but newline and tab, those that change the direction of text, halves of characters.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
ERASE = "\r\x1b[K"
COMMANDS = {  # what comes after the name, and what it does
    "help": ("", "list these commands"),
    "retry": ("", "have the last turn answered again"),
    "undo": ("", "take back the last turn and its answer"),
    "reset": ("", "forget the conversation, but not the system turn"),
    "system": ("TEXT", "put a system turn before the conversation; none without TEXT"),
    "model": ("ID", "let NAME or NAME@CHANNEL answer from now on; list them without ID"),
    "save": ("FILE", "write the messages to a new file, one JSON object a line"),
    "load": ("FILE", "go on from the messages of a file"),
    "stats": ("", "say what the turns so far come to"),
    "quit": ("", "end"),
}
MANY = 512  # prompt tokens that take long enough to say how far they are


class InputLines:
    """Standard input as turns.

    A line that ends in a backslash goes on in the next one, and several lines pasted at once are one turn.
    """

    def __init__(self, *, quiet: bool) -> None:
        """``quiet``: prompts go to stderr, and there is no editing."""
        stream: Any = sys.stdin
        if stream is None:
            raise ConfigurationError("standard input is closed; give a file or a pipe, or /dev/null")
        self.terminal = bool(stream.isatty())
        self._editing = self.terminal and not quiet and is_interactive(sys.stdout)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # `next` says which bytes are no text
        self._pastes_whole = self._editing and _prepare_editor()

    def next(self) -> str | None:
        """The next turn; None at the end; PromptError where it holds bytes that are no text."""
        lines: list[str] = []
        while (line := self._line(MORE if lines else PROMPT)) is not None:
            goes_on = line.endswith("\\")
            lines.append(line[:-1] if goes_on else line)
            if not goes_on and not self._pasted():
                break
        text = "\n".join(lines)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            odd = f"character {error.start + 1} is no {sys.stdin.encoding} text"
            raise PromptError(f"{odd}; nothing was sent") from None
        return text if lines else None

    def _line(self, prompt: str) -> str | None:
        if self._editing:
            with suppress(EOFError):
                return input(prompt)
            return None
        if self.terminal:
            click.echo(prompt, nl=False, err=True)
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None

    def _pasted(self) -> bool:
        """Whether the next line is there already; editors that take pasted text as one need not be asked."""
        if not self.terminal or self._pastes_whole:
            return False
        ready, _, _ = select.select([sys.stdin], [], [], PASTE_S)
        return bool(ready)


def _prepare_editor() -> bool:
    """Let `input` edit lines where readline is there; whether it takes pasted lines as one."""
    try:
        import readline
    except ImportError:
        return False
    if "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True


def harmless(text: str) -> str:
    r"""A text as a terminal may be given it: an escape character is shown as ``\x1b``, and so on."""
    return OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


class Screen:
    """Both streams of one conversation."""

    def __init__(self, *, as_json: bool, stats: bool) -> None:
        """``as_json``: turns are JSON lines; ``stats``: a line of figures follows each."""
        self._as_json, self._stats = as_json, stats
        self._plain = is_ci() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._reasoning = is_interactive(sys.stdout)
        self._lively = is_interactive(sys.stderr) and os.environ.get("TERM") != "dumb"
        self._shown = ""  # the part of this answer that was shown last
        self._open: Literal["", "answer", "status"] = ""  # line without its end, on stdout or stderr

    def say(self, text: str, *, dim: bool = False) -> None:
        self._settle()
        click.echo(self._dimmed(harmless(text)) if dim else harmless(text), err=True)

    def passing(self, text: str) -> None:
        """Tell how far something is, on a terminal, until there is something else to show."""
        if self._lively:
            self._settle()
            click.echo(self._dimmed(harmless(text)), nl=False, err=True)
            self._open = "status"

    def refuse(self, message: str) -> None:
        self.say(message)
        self._shown = ""
        if self._as_json:
            click.echo(json.dumps({"error": message}))

    def show(self, event: PrefillProgress | ParsedText | Turn) -> None:
        """Show how far a long prompt is read, a piece of the answer, or that it has ended."""
        match event:
            case PrefillProgress() if event.total - event.done > MANY:
                self.passing(f"reading {event.done:,} of {event.total:,} tokens …")
            case ParsedText() if not self._as_json:
                if event.reasoning and self._reasoning:
                    self._show("reasoning", event.reasoning)
                if event.content:
                    self._show("content", event.content)
            case Turn():
                self._settle()
                self._shown = ""
                if self._as_json:
                    click.echo(json.dumps(_document(event)))
                if self._stats:
                    self.say(_figures(event), dim=True)
                if not event.said:
                    self.say("nothing was said, so the turn is not kept", dim=True)

    def _show(self, part: str, text: str) -> None:
        if self._shown == "reasoning" and part == "content":
            if not (text := text.lstrip("\n")):
                return
            self._settle()
            click.echo()
        elif self._open == "status":
            self._settle()
        self._shown = part
        shown = harmless(text)
        click.echo(self._dimmed(shown) if part == "reasoning" else shown, nl=False)
        self._open = "" if text.endswith("\n") else "answer"

    def _settle(self) -> None:
        """Erase or end the line that is open."""
        if self._open == "status":
            click.echo(ERASE, nl=False, err=True)
        elif self._open == "answer":
            click.echo()
        self._open = ""

    def _dimmed(self, text: str) -> str:
        return text if self._plain else click.style(text, dim=True)


def _figures(turn: Turn) -> str:
    text = f"{turn.usage.completion_tokens} tokens ({turn.finish})"
    if turn.tokens_per_s is not None:
        text += f", {turn.tokens_per_s:.1f} tok/s"
    if turn.acceptance_length is not None:
        text += f", {turn.acceptance_length:.2f} tokens emitted per verify"
    return f"{text}, {turn.cached_tokens} of {turn.usage.prompt_tokens} prompt tokens cached"


def _document(turn: Turn) -> dict[str, Any]:
    return {
        "content": turn.content,
        "reasoning": turn.reasoning or None,
        "finish_reason": turn.finish,
        "usage": turn.usage.model_dump(),
        "x_kakeya": turn.provenance.model_dump() if turn.provenance else None,
    }


class ChatLoop:
    """A conversation, the lines it is made of and the screen it is shown on."""

    def __init__(self, conversation: Conversation, screen: Screen, lines: InputLines) -> None:
        self.conversation, self._screen, self._lines = conversation, screen, lines
        self._turns: list[Turn] = []
        self._ended = False

    def run(self) -> None:
        """Turn by turn, until there is no more; Ctrl-C at the prompt ends it the second time."""
        warned = False  # Ctrl-C came, and nothing since
        while not self._ended:
            try:
                self._next()
                warned = False
            except KeyboardInterrupt:
                if not self._lines.terminal:
                    raise
                self._ended = warned
                click.echo(err=True)
                if not warned:
                    self._screen.say("Ctrl-C once more ends, and so do Ctrl-D and /quit", dim=True)
                warned = True

    def _next(self) -> None:
        try:
            text = self._lines.next()
        except PromptError as error:
            self._screen.refuse(str(error))
            return
        if text is None:
            self._ended = True
            if self._lines.terminal:
                click.echo(err=True)
        elif text.startswith("/") and not text.startswith("//"):
            try:
                self._obey(text)
            except (InputError, GenerationError) as error:
                self._screen.say(str(error))
        elif text.strip():
            self._answer(lambda: self.conversation.say(text.removeprefix("/")))

    def _answer(self, ask: Callable[[], Told]) -> None:
        """Have the model speak, and show it; Ctrl-C ends the answer and keeps what was said."""
        before = signal.signal(signal.SIGINT, lambda *_: self.conversation.stop())
        try:
            for event in ask():
                if isinstance(event, Turn):
                    self._turns.append(event)
                self._screen.show(event)
        except (InputError, GenerationError) as error:
            remedy = "; nothing was sent: /undo takes back the last turn, /reset starts over"
            self._screen.refuse(f"{error}{remedy if isinstance(error, DoesNotFit) else ''}")
        finally:
            signal.signal(signal.SIGINT, before)

    def _obey(self, text: str) -> None:
        name, _, argument = (part.strip() for part in text.removeprefix("/").partition(" "))
        if name not in COMMANDS:
            command = ascii(text.split(maxsplit=1)[0])[:100]
            remedy = "/help lists them, and // begins a line with a slash"
            raise ConfigurationError(f"there is no command {command}; {remedy}")
        takes, _ = COMMANDS[name]
        if not takes and argument:
            raise ConfigurationError(f"/{name} takes nothing behind it, not {ascii(argument)[:100]}")
        if takes == "FILE" and not argument:
            raise ConfigurationError(f"/{name} needs the name of a file")
        if done := self._run_command(name, argument):
            self._screen.say(done, dim=True)

    def _run_command(self, name: str, argument: str) -> str | None:
        """Do what a command of `COMMANDS` says; return what is to be told of it."""
        talk, file = self.conversation, Path(os.path.expanduser(argument))
        match name:
            case "help":
                self._help()
            case "retry":
                self._answer(talk.retry)
            case "undo":
                talk.transcript = talk.transcript.undone()
                return f"the last turn is removed; {len(talk.transcript.turns)} messages are left"
            case "reset":
                talk.transcript = Transcript(talk.transcript.system)
                return "forgotten" + (", but for the system turn" if talk.transcript.system else "")
            case "system":
                talk.instruct(argument or None)
                return "the system turn is set" if argument else "there is no system turn"
            case "model" if not argument:
                self._screen.say("\n".join(talk.registry.ids()))
            case "model":
                self._screen.passing(f"loading {argument} …")
                talk.use(argument)
                return f"{talk.model_id} answers from now on"
            case "save":
                talk.transcript.save(file)
                return f"{len(talk.transcript.messages)} messages written to {file}"
            case "load":
                talk.transcript = Transcript.load(file)
                return f"{len(talk.transcript.messages)} messages read from {file}"
            case "stats":
                self._stats()
            case "quit":
                self._ended = True
        return None

    def _help(self) -> None:
        rows = [(f"/{name} {takes}".rstrip(), about) for name, (takes, about) in COMMANDS.items()]
        width = max(len(left) for left, _ in rows)
        lines = [f"{left:{width}}  {right}" for left, right in rows]
        lines.append("A line that ends in a backslash goes on in the next; // begins a line with a slash.")
        lines.append("Ctrl-C ends an answer and keeps what was said; Ctrl-D ends the conversation.")
        self._screen.say("\n".join(lines))

    def _stats(self) -> None:
        usages = [turn.usage for turn in self._turns]
        told = [turn.provenance for turn in self._turns if turn.provenance]
        lines = [
            f"model: {self.conversation.model_id}",
            f"answers: {len(usages)}, {sum(usage.completion_tokens for usage in usages)} tokens",
            f"prompts: {sum(usage.prompt_tokens for usage in usages)} tokens, "
            f"{sum(turn.cached_tokens for turn in self._turns)} of them cached",
        ]
        decoded = [(each.decode_tokens_per_s or 0) * each.decode_s for each in told]
        if any(decoded):
            lines.append(f"decoding: {sum(decoded) / sum(each.decode_s for each in told):.1f} tok/s")
        if rounds := sum(each.verify_rounds for each in told):
            length = sum(each.accepted for each in told) / rounds + 1
            lines.append(f"drafting: {length:.2f} tokens emitted per verify, {rounds} verifies")
        if told:
            why = f" ({told[-1].why_off})" if told[-1].why_off else ""
            lines.append(f"drafter: {told[-1].drafter or 'none'}{why}")
            held = told[-1].resident_bytes
            size = f"the engine {told[-1].engine} does not tell" if held is None else f"{held:,} bytes"
            lines.append(f"keys and values, the drafter's too: {size}")
        self._screen.say("\n".join(lines))
