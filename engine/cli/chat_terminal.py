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
from io import TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar, Literal

import click

from engine.chat import Conversation, DoesNotFit, Told, Transcript, Turn
from engine.errors import ConfigurationError, GenerationError, InputError, PromptError
from engine.server.parsing import ParsedText
from engine.server.sequence import PrefillProgress

PROMPT, MORE = "> ", ". "
PASTE_S = 0.02  # a pasted line is followed by the next one so soon; people do not type that fast
# Control characters but newline and tab, those that change the direction of text, halves of characters.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
ERASE = "\r\x1b[K"
MANY = 512  # prompt tokens that take long enough to say how far they are


class InputLines:
    """Standard input as turns.

    A line that ends in a backslash goes on in the next one, and several lines pasted at once are one turn.
    """

    def __init__(self, *, quiet: bool) -> None:
        """Look at what standard input is; ``quiet``: prompts go to stderr, and there is no editing."""
        stream: Any = sys.stdin
        if stream is None:
            raise ConfigurationError("standard input is closed; give a file or a pipe, or /dev/null")
        self.terminal = bool(stream.isatty())
        self._editing = self.terminal and not quiet and sys.stdout.isatty()
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
            raise PromptError(
                f"character {error.start + 1} is no {sys.stdin.encoding} text; nothing was sent"
            ) from None
        return text if lines else None

    def _line(self, prompt: str) -> str | None:
        if self._editing:
            try:
                return input(prompt)
            except EOFError:
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
        self._plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._reasoning = sys.stdout.isatty()
        self._lively = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""  # the part of this answer that was shown last
        self._open: Literal["", "answer", "status"] = ""  # line without its end, on stdout or stderr

    def say(self, text: str, *, dim: bool = False) -> None:
        """Tell something that is not the answer."""
        self._settle()
        click.echo(self._dimmed(harmless(text)) if dim else harmless(text), err=True)

    def passing(self, text: str) -> None:
        """Tell how far something is, on a terminal, until there is something else to show."""
        if self._lively:
            self._settle()
            click.echo(self._dimmed(harmless(text)), nl=False, err=True)
            self._open = "status"

    def refuse(self, message: str) -> None:
        """Tell why there was no answer."""
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
    usage = turn.usage
    parts = [f"{usage.completion_tokens} tokens ({turn.finish})"]
    if turn.tokens_per_s is not None:
        parts.append(f"{turn.tokens_per_s:.1f} tok/s")
    if turn.acceptance_length is not None:
        parts.append(f"{turn.acceptance_length:.2f} tokens emitted per verify")
    parts.append(f"{turn.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    return ", ".join(parts)


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
            remedy = "; nothing was sent: /undo takes back the last turn, /reset begins anew"
            self._screen.refuse(f"{error}{remedy if isinstance(error, DoesNotFit) else ''}")
        finally:
            signal.signal(signal.SIGINT, before)

    def _obey(self, text: str) -> None:
        name, _, argument = (part.strip() for part in text.removeprefix("/").partition(" "))
        takes, _, run = self._COMMANDS.get(name, ("", "", None))
        if run is None:
            raise ConfigurationError(
                f"there is no command {ascii(text.split(maxsplit=1)[0])[:100]}; /help lists them, and // "
                "begins a line with a slash"
            )
        if not takes and argument:
            raise ConfigurationError(f"/{name} takes nothing behind it, not {ascii(argument)[:100]}")
        if takes == "FILE" and not argument:
            raise ConfigurationError(f"/{name} needs the name of a file")
        run(self, argument)

    def _help(self, _: str) -> None:
        rows = [(f"/{name} {takes}".rstrip(), about) for name, (takes, about, _) in self._COMMANDS.items()]
        width = max(len(left) for left, _ in rows)
        lines = [f"{left:{width}}  {right}" for left, right in rows]
        lines.append("A line that ends in a backslash goes on in the next; // begins a line with a slash.")
        lines.append("Ctrl-C ends an answer and keeps what was said; Ctrl-D ends the conversation.")
        self._screen.say("\n".join(lines))

    def _retry(self, _: str) -> None:
        self._answer(self.conversation.retry)

    def _undo(self, _: str) -> None:
        left = self.conversation.transcript = self.conversation.transcript.undone()
        self._screen.say(f"the last turn is taken back; {len(left.turns)} messages are left", dim=True)

    def _reset(self, _: str) -> None:
        system = self.conversation.transcript.system
        self.conversation.transcript = Transcript(system)
        self._screen.say("forgotten" + (", but for the system turn" if system else ""), dim=True)

    def _system(self, text: str) -> None:
        self.conversation.instruct(text or None)
        self._screen.say("the system turn is set" if text else "there is no system turn", dim=True)

    def _model(self, model_id: str) -> None:
        if model_id:
            self._screen.passing(f"loading {model_id} …")
            self.conversation.use(model_id)
            self._screen.say(f"{self.conversation.model_id} answers from now on", dim=True)
        else:
            self._screen.say("\n".join(self.conversation.registry.ids()))

    def _save(self, name: str) -> None:
        file, transcript = Path(os.path.expanduser(name)), self.conversation.transcript
        transcript.save(file)
        self._screen.say(f"{len(transcript.messages)} messages written to {file}", dim=True)

    def _load(self, name: str) -> None:
        file = Path(os.path.expanduser(name))
        read = self.conversation.transcript = Transcript.load(file)
        self._screen.say(f"{len(read.messages)} messages read from {file}", dim=True)

    def _stats(self, _: str) -> None:
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

    def _quit(self, _: str) -> None:
        self._ended = True

    _COMMANDS: ClassVar[dict[str, tuple[str, str, Callable[["ChatLoop", str], None]]]] = {
        "help": ("", "list these commands", _help),
        "retry": ("", "have the last turn answered again", _retry),
        "undo": ("", "take back the last turn and its answer", _undo),
        "reset": ("", "forget the conversation, but not the system turn", _reset),
        "system": ("TEXT", "put a system turn before the conversation; none without TEXT", _system),
        "model": ("ID", "let NAME or NAME@CHANNEL answer from now on; list them without ID", _model),
        "save": ("FILE", "write the messages to a new file, one JSON object a line", _save),
        "load": ("FILE", "go on from the messages of a file", _load),
        "stats": ("", "say what the turns so far come to", _stats),
        "quit": ("", "end", _quit),
    }
